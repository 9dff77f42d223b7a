"""Convolution with a 3 × 3 kernel by Winograd's minimal filtering of tiles of 2 × 2 and 4 × 4.

A tile of 4 × 4 outputs takes 36 multiplications for every pair of features instead of 144, and one
of 2 × 2 takes 16 instead of 36 (Lavin and Gray 2016, "Fast Algorithms for Convolutional Neural
Networks", section 4). Both multiply polynomials by way of their values at a few points (Toom and
Cook). Small tiles use 0, 1 and -1, whose transforms only add and halve: they are as exact as the
direct sum. Large tiles round more, the less the closer the points lie to 1: in float32 an output is
off by about 1e-6 of the outputs' size, half of what the points 0, ±1 and ±2 of the paper give.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fedjax_dp.models.lowering.materialize import materialize
from fedjax_dp.models.lowering.patches import Window

WINDOW = Window((3, 3), (1, 1), (1, 1))

# From so many outputs in both dimensions on, tiles are large: below, they only compile longer.
_FEWEST_FOR_LARGE = 20

_Grid = list[list[jax.Array]]
_Matrix = tuple[tuple[float, ...], ...]


class _Tiles(NamedTuple):
    """The matrices of a size of tiles, in one dimension.

    Attributes:
      size: outputs of a tile, `m`.
      inputs: from the `m + 2` entries that a tile reads to as many values.
      kernel: from 3 entries of the kernel to `m + 2` values.
      outputs: from the products of the values to `m` outputs.
    """

    size: int
    inputs: _Matrix
    kernel: _Matrix
    outputs: _Matrix

    @property
    def name(self) -> str:
        """How a convolution by these tiles is called in a trace."""
        return f"winograd_convolution_{self.size}"

    @property
    def direct_operations(self) -> float:
        """Multiplications of the direct sum for each one here."""
        return (3 * self.size / (self.size + 2)) ** 2


def _tiles(points: Sequence[float]) -> _Tiles:
    """Builds the matrices from the points at which polynomials are multiplied, besides infinity."""
    size = len(points) - 1
    others = [[q for q in points if q != p] for p in points]
    inputs = [np.polynomial.polynomial.polyfromroots(rest) for rest in (*others, points)]
    kernel = [
        np.power(p, range(3)) / np.prod(np.subtract(p, rest))
        for p, rest in zip(points, others, strict=True)
    ]
    outputs = np.transpose([np.power(float(p), range(size)) for p in points])
    at_infinity = np.eye(size)[:, -1:]
    return _Tiles(
        size,
        _matrix([np.pad(row, (0, size + 2 - len(row))) for row in inputs]),
        _matrix([*kernel, (0, 0, 1)]),
        _matrix(np.concatenate([outputs, at_infinity], axis=1)),
    )


def _matrix(rows: Iterable[Any]) -> _Matrix:
    return tuple(tuple(float(entry) for entry in row) for row in rows)


_SMALL = _tiles((0.0, 1.0, -1.0))
_LARGE = _tiles((0.0, 0.75, -0.75, 1.5, -1.5))

DIRECT_OPERATIONS = {tiles.name: tiles.direct_operations for tiles in (_SMALL, _LARGE)}
"""The names of such convolutions in a trace, with how many multiplications each one stands for."""


def is_faster(x: jax.Array, w: jax.Array) -> bool:
    """Tells whether tiles beat patches on a CPU.

    The transforms cost as much for few features as for many, and those of the kernel as much for
    few positions as for many: there they outweigh the multiplications that they save. On other
    backends many products in place of one have not been found to pay.

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
    """Convolves with stride 1 by matrix products on transformed tiles.

    In a trace it is one call by a name of `DIRECT_OPERATIONS`, so that whoever reads the trace
    finds the convolution and not its parts.

    Args:
      x: `[batch, height, width, inputs]`, padded already.
      w: `[3, 3, inputs, outputs]`.
      dot: multiplies `[..., inputs]` by a matrix `[inputs, outputs]`.

    Returns:
      `[batch, height - 2, width - 2, outputs]`.
    """
    tiles = _LARGE if min(x.shape[1:3]) - 2 >= _FEWEST_FOR_LARGE else _SMALL

    def winograd_convolution(x: jax.Array, w: jax.Array) -> jax.Array:
        return _convolve(tiles, x, w, dot)

    winograd_convolution.__name__ = tiles.name
    return jax.jit(winograd_convolution)(x, w)


def _convolve(
    tiles: _Tiles, x: jax.Array, w: jax.Array, dot: Callable[[jax.Array, jax.Array], jax.Array]
) -> jax.Array:
    size, (batch, height, width, inputs) = tiles.size, x.shape
    rows, columns = -(-(height - 2) // size), -(-(width - 2) // size)
    high, wide = (rows + 1) * size, (columns + 1) * size
    x = jnp.pad(x, ((0, 0), (0, high - height), (0, wide - width), (0, 0)))
    # Dimension by dimension, with what lies between them computed once: the gradient of the input
    # then adds up few padded arrays at a time.
    x = x.reshape(batch, rows + 1, size, wide, inputs)
    taps = [x[:, r // size :][:, :rows, r % size] for r in range(size + 2)]
    products: _Grid = []
    for line, matrices in zip(
        map(materialize, _combine(tiles.inputs, taps)), _transform_kernel(tiles, w), strict=True
    ):
        x = line.reshape(batch, rows, columns + 1, size, inputs)
        taps = [x[:, :, c // size :][:, :, :columns, c % size] for c in range(size + 2)]
        values = _combine(tiles.inputs, taps)
        products.append([dot(*pair) for pair in zip(values, matrices, strict=True)])
    down = [_combine(tiles.outputs, list(column)) for column in zip(*products, strict=True)]
    blocks = [
        jnp.stack(_combine(tiles.outputs, list(line)), axis=3) for line in zip(*down, strict=True)
    ]
    out = jnp.stack(blocks, axis=2).reshape(batch, size * rows, size * columns, -1)
    return materialize(out[:, : height - 2, : width - 2])


def _transform_kernel(tiles: _Tiles, w: jax.Array) -> _Grid:
    """Takes the values of a kernel of 3 × 3 matrices, one for each of a tile's.

    It is taken apart by splits: unlike that of indexing, their gradient is a single copy.
    """
    for axis in (1, 0):
        taps = lax.split(w, (1, 1, 1), axis)
        w = jnp.concatenate(_combine(tiles.kernel, taps), axis)
    ones = (1,) * (tiles.size + 2)
    return [
        [matrix.reshape(matrix.shape[2:]) for matrix in lax.split(line, ones, 1)]
        for line in lax.split(w, ones, 0)
    ]


def _combine(matrix: _Matrix, arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """Multiplies a matrix by a vector of arrays, leaving out zeros and ones."""

    def combined(row: Sequence[float]) -> jax.Array:
        terms = [(c, array) for c, array in zip(row, arrays, strict=True) if c]
        terms.sort(key=lambda term: term[0] < 0)
        (first, array), *rest = terms
        start = array if first == 1 else array * first
        return functools.reduce(_add, rest, start)

    return [combined(row) for row in matrix]


def _add(total: jax.Array, term: tuple[float, jax.Array]) -> jax.Array:
    factor, array = term
    scaled = array if abs(factor) == 1 else array * abs(factor)
    return total + scaled if factor > 0 else total - scaled
