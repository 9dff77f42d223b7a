"""Convolution with a 3 × 3 kernel by Winograd's minimal filtering, F(2 × 2, 3 × 3).

Four neighbouring outputs take 16 multiplications for every pair of features instead of 36 (Lavin
and Gray 2016, "Fast Algorithms for Convolutional Neural Networks", section 4.1). The transforms
only add and halve, so that the result is as exact as that of the direct sum.
"""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from fedjax_dp.models.lowering.materialize import materialize
from fedjax_dp.models.lowering.patches import Window

NAME = "winograd_convolution"
WINDOW = Window((3, 3), (1, 1), (1, 1))
# Multiplications of the direct sum for each one here: four outputs of nine each, in sixteen.
DIRECT_OPERATIONS = 36 / 16

_Grid = list[list[jax.Array]]

_INPUT = ((1, 0, -1, 0), (0, 1, 1, 0), (0, -1, 1, 0), (0, 1, 0, -1))
_OUTPUT = ((1, 1, 1, 0), (0, 1, -1, -1))


def is_faster(x: jax.Array, w: jax.Array) -> bool:
    """Tells whether tiles beat patches on a CPU.

    The transforms cost as much for few features as for many, and those of the kernel as much for
    few positions as for many: there they outweigh the multiplications that they save. On other
    backends sixteen products in place of one have not been found to pay.

    Args:
      x: `[batch, height, width, inputs]`, padded already; under `vmap`, of one instance.
      w: `[3, 3, inputs, outputs]`.

    Returns:
      Whether to call `convolve`.
    """
    inputs, outputs = w.shape[-2:]
    batch, height, width, _ = x.shape
    num_positions = batch * (height - 2) * (width - 2)
    return (
        jax.default_backend() == "cpu"
        and min(inputs, outputs) >= 32
        and min(height, width) >= 4
        and num_positions**2 >= inputs * outputs
    )


def convolve(
    x: jax.Array, w: jax.Array, dot: Callable[[jax.Array, jax.Array], jax.Array]
) -> jax.Array:
    """Convolves with stride 1 by sixteen matrix products on transformed tiles.

    In a trace it is one call by the name of `NAME`, so that whoever reads the trace finds the
    convolution and not its parts.

    Args:
      x: `[batch, height, width, inputs]`, padded already.
      w: `[3, 3, inputs, outputs]`.
      dot: multiplies `[..., inputs]` by a matrix `[inputs, outputs]`.

    Returns:
      `[batch, height - 2, width - 2, outputs]`.
    """

    def winograd_convolution(x: jax.Array, w: jax.Array) -> jax.Array:
        return _convolve(x, w, dot)

    return jax.jit(winograd_convolution)(x, w)


def _convolve(
    x: jax.Array, w: jax.Array, dot: Callable[[jax.Array, jax.Array], jax.Array]
) -> jax.Array:
    batch, height, width, inputs = x.shape
    rows, columns = (height - 1) // 2, (width - 1) // 2
    x = jnp.pad(x, ((0, 0), (0, height % 2), (0, width % 2), (0, 0)))
    pairs = x.reshape(batch, rows + 1, 2, columns + 1, 2, inputs)
    tiles = [
        [pairs[:, i // 2 :][:, :rows, i % 2, j // 2 :][:, :, :columns, j % 2] for j in range(4)]
        for i in range(4)
    ]
    products = [
        [dot(tile, matrix) for tile, matrix in zip(*lines, strict=True)]
        for lines in zip(_transform(_INPUT, tiles), _transform_kernel(w), strict=True)
    ]
    blocks = [jnp.stack(line, axis=3) for line in _transform(_OUTPUT, products)]
    out = jnp.stack(blocks, axis=2).reshape(batch, 2 * rows, 2 * columns, -1)
    return materialize(out[:, : height - 2, : width - 2])


def _transform_kernel(w: jax.Array) -> _Grid:
    """Interpolates a kernel of 3 × 3 matrices to one of 4 × 4.

    It is taken apart by splits: unlike that of indexing, their gradient is a single copy.
    """
    for axis in (1, 0):
        first, middle, last = lax.split(w, (1, 1, 1), axis)
        ends, half = (first + last) / 2, middle / 2
        w = jnp.concatenate([first, ends + half, ends - half, last], axis)
    ones = (1, 1, 1, 1)
    return [
        [matrix.reshape(matrix.shape[2:]) for matrix in lax.split(line, ones, 1)]
        for line in lax.split(w, ones, 0)
    ]


def _transform(signs: Sequence[Sequence[int]], grid: _Grid) -> _Grid:
    """Multiplies a matrix of arrays by a matrix of signs from the left, by its transpose after."""
    for _ in range(2):
        columns = list(zip(*grid, strict=True))
        grid = [[_add(line, column) for line in signs] for column in columns]
    return grid


def _add(signs: Sequence[int], arrays: Sequence[jax.Array]) -> jax.Array:
    plus = [array for sign, array in zip(signs, arrays, strict=True) if sign > 0]
    minus = [array for sign, array in zip(signs, arrays, strict=True) if sign < 0]
    return functools.reduce(jnp.subtract, minus, functools.reduce(jnp.add, plus))
