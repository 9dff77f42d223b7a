"""Convolution with a 3 × 3 kernel by Winograd's minimal filtering of tiles.

A tile of m × m outputs takes (m + 2)² multiplications for every pair of features, the direct sum
9m² (Lavin and Gray 2016, "Fast Algorithms for Convolutional Neural Networks", section 4). Larger
tiles save more and round more. Forwards they are 2 × 2, and their transforms only add and
halve: larger rounding errors would switch more of the rectifiers that follow. Gradients do not
switch any, are linear in the cotangent, and use tiles of 4 × 4.
"""

import functools
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from fedjax_dp.core.backend import facts
from fedjax_dp.core.choices import choices
from fedjax_dp.core.materialize import materialize, materialize_equal
from fedjax_dp.models.lowering import bilinear
from fedjax_dp.models.lowering.bilinear import Padding
from fedjax_dp.models.lowering.patches import Window, slices

NAME = "winograd_convolution"
KERNEL = (3, 3)

_Matrix = tuple[tuple[float, ...], ...]
_Grid = list[list[jax.Array]]


class _Tiles(NamedTuple):
    """Minimal filtering F(m × m, 3 × 3): `of_output · [(of_kernel · g) ∘ (of_input · d)]`.

    The same in both dimensions, d the input, g the kernel; gradients use the same matrices.
    """

    of_input: _Matrix  # [m + 2, m + 2]
    of_kernel: _Matrix  # [m + 2, 3]
    of_output: _Matrix  # [m, m + 2]

    @property
    def size(self) -> int:
        """The number m of outputs in a dimension."""
        return len(self.of_output)


def _tiles(*points: float) -> _Tiles:
    """Multiplies polynomials by their values at m + 1 points and at infinity, transposed."""
    exact_points = [Fraction(point) for point in points]
    others = [[q for q in exact_points if q != p] for p in exact_points]
    scales = [math.prod(p - q for q in rest) for p, rest in zip(exact_points, others, strict=True)]
    of_kernel = [
        [p**k / scale for k in range(3)] for p, scale in zip(exact_points, scales, strict=True)
    ]
    of_input = [[*_expand(rest), Fraction(0)] for rest in others]
    last = len(exact_points) - 2
    of_output = [[*(p**k for p in exact_points), Fraction(k == last)] for k in range(last + 1)]
    at_infinity = [Fraction(0), Fraction(0), Fraction(1)]
    exact = [*of_input, _expand(exact_points)], [*of_kernel, at_infinity], of_output
    return _Tiles(*(tuple(tuple(map(float, row)) for row in matrix) for matrix in exact))


def _expand(roots: Sequence[Fraction]) -> list[Fraction]:
    """Returns the coefficients of the polynomial with these roots, the constant one first."""
    coefficients = [Fraction(1)]
    for root in roots:
        shifted = [Fraction(0), *coefficients]
        scaled = [*(root * c for c in coefficients), Fraction(0)]
        coefficients = [a - b for a, b in zip(shifted, scaled, strict=True)]
    return coefficients


_SMALL = _tiles(0, 1, -1)
# Of the points tried these round least: gradients 2 to 4 times as much as direct sums.
_LARGE = _tiles(0, 5 / 8, -5 / 8, 3 / 2, -3 / 2)


def is_faster(x: jax.Array, w: jax.Array, padding: Sequence[tuple[int, int]]) -> bool:
    """Decides whether tiles beat patches on a CPU, for arrays of float32 or float64.

    The transforms cost as much for few features as for many, and those of the kernel as much for
    few positions as for many: there they outweigh the multiplications that they save. On other
    backends sixteen products in place of one have not been found to pay.
    """
    inputs, outputs = w.shape[-2:]
    height, width = _sizes(x, padding)
    num_positions = x.shape[0] * height * width
    return (
        choices(facts()).has_caches
        and min(inputs, outputs) >= 32
        and min(height, width) >= 2
        and num_positions**2 >= inputs * outputs
    )


def convolve(x: jax.Array, w: jax.Array, padding: Sequence[tuple[int, int]]) -> jax.Array:
    """Convolves with stride 1 by matrix products on transformed tiles."""
    # The input is read by many transforms, forwards and for the gradient of the kernel: each would
    # compute it again, a normalisation and a rectifier included.
    x = materialize(x)
    return _convolve_p.bind(x, w, padding=tuple(map(tuple, padding)), is_adjoint=False)


def share_of_direct(x: Any, w: Any, *, padding: Padding, is_adjoint: bool) -> float:
    """Counts the multiplications for each one of the direct sum, within tiles only."""
    size = _tiles_for(x.shape[0], _sizes(x, padding), w, is_adjoint).size
    return (size + 2) ** 2 / (9 * size**2)


def _convolve(x: jax.Array, w: jax.Array, *, padding: Padding, is_adjoint: bool) -> jax.Array:
    """Convolves, or applies the transpose of the convolution with that kernel."""
    sizes = _sizes(x, padding)
    tiles = _tiles_for(x.shape[0], sizes, w, is_adjoint)
    inputs = _transform_input(x, padding, sizes, tiles)
    taps = jnp.flip(w, (0, 1)) if is_adjoint else w
    kernels = _sandwich(tiles.of_kernel, [[taps[i, j] for j in range(3)] for i in range(3)])
    contracted = (((3,), (1 if is_adjoint else 0,)), ((), ()))
    products = [
        [lax.dot_general(a, b, contracted) for a, b in zip(*lines, strict=True)]
        for lines in zip(inputs, kernels, strict=True)
    ]
    blocks = [jnp.stack(line, axis=3) for line in _sandwich(tiles.of_output, products)]
    out = jnp.stack(blocks, axis=2)
    batch, rows, height, columns, width, outputs = out.shape
    out = out.reshape(batch, rows * height, columns * width, outputs)
    return materialize(out[:, : sizes[0], : sizes[1]])


def _gradient_of_input(
    cotangent: jax.Array, x: Any, w: jax.Array, *, padding: Padding, is_adjoint: bool
) -> jax.Array:
    del x
    return _convolve_p.bind(
        cotangent, w, padding=_adjoint_padding(padding), is_adjoint=not is_adjoint
    )


def _gradient_of_kernel(
    cotangent: jax.Array, x: jax.Array, w: Any, *, padding: Padding, is_adjoint: bool
) -> jax.Array:
    if is_adjoint:
        x, cotangent, padding = cotangent, x, _adjoint_padding(padding)
    # The overlapping tiles are those of the cotangent, which the gradient of the input reads too.
    batch, *sizes, _ = x.shape
    tiles = _tiles_for(batch, sizes, w, is_adjoint=True)
    cotangents = _transform_input(cotangent, _adjoint_padding(padding), sizes, tiles)
    to_whole_tiles = tuple((0, -n % tiles.size) for n in sizes)
    apart = Window((tiles.size,) * 2, (tiles.size,) * 2, (1, 1))
    inputs = _transform(_transpose(tiles.of_output), x, to_whole_tiles, apart)
    products = [
        [_contract_rows(a, b) for a, b in zip(*lines, strict=True)]
        for lines in zip(inputs, cotangents, strict=True)
    ]
    taps = [jnp.stack(line) for line in _sandwich(_transpose(tiles.of_kernel), products)]
    return jnp.flip(jnp.stack(taps), (0, 1))


def _contract_rows(x: jax.Array, y: jax.Array) -> jax.Array:
    x, y = (a.reshape(math.prod(a.shape[:-1]), a.shape[-1]) for a in (x, y))
    return lax.dot_general(x, y, (((0,), (0,)), ((), ())))


def _shape(x: Any, w: Any, *, padding: Padding, is_adjoint: bool) -> tuple[int, ...]:
    return (x.shape[0], *_sizes(x, padding), w.shape[2 if is_adjoint else 3])


def _sizes(x: Any, padding: Sequence[tuple[int, int]]) -> list[int]:
    return [max(n + sum(ends) - 2, 0) for n, ends in zip(x.shape[1:3], padding, strict=True)]


def _adjoint_padding(padding: Padding) -> Padding:
    return tuple((2 - low, 2 - high) for low, high in padding)


def _tiles_for(batch: int, sizes: Sequence[int], w: Any, is_adjoint: bool) -> _Tiles:
    """Chooses tiles: large ones backwards, if they are enough to outweigh their kernels."""
    num_tiles = batch * math.prod(-(-n // _LARGE.size) for n in sizes)
    return _LARGE if is_adjoint and num_tiles**2 >= w.shape[2] * w.shape[3] else _SMALL


def _transform_input(x: jax.Array, padding: Padding, sizes: Sequence[int], tiles: _Tiles) -> _Grid:
    """Transforms the tiles that outputs read, each to `[batch, rows, columns, features]`."""
    to_whole_tiles = [-n % tiles.size for n in sizes]
    pairs = zip(padding, to_whole_tiles, strict=True)
    ends = tuple((low, high + more) for (low, high), more in pairs)
    overlapping = Window((tiles.size + 2,) * 2, (tiles.size,) * 2, (1, 1))
    return _transform(tiles.of_input, x, ends, overlapping)


def _transform(matrix: _Matrix, x: jax.Array, ends: Padding, window: Window) -> _Grid:
    """Multiplies every tile by a matrix from the left and by its transpose from the right."""
    padded = bilinear.pad(x, ends)
    lines = [_combine(row, slices(padded, window, 0)) for row in matrix]
    if len(matrix) > len(_SMALL.of_input):
        # Entries of large tiles are sums of many: what they share is computed once, and once for
        # both gradients of a convolution, which read the same tiles of the cotangent.
        lines = [materialize_equal(line, x) for line in lines]
    return [[_combine(row, slices(line, window, 1)) for row in matrix] for line in lines]


def _sandwich(matrix: _Matrix, grid: _Grid) -> _Grid:
    """Multiplies a grid of arrays by a matrix from the left and by its transpose from the right."""
    half = _combined(matrix, grid)
    if len(grid) > len(_SMALL.of_input):
        # As in `_transform`; otherwise each output would be summed from all products of its tile.
        half = [[materialize(entry) for entry in line] for line in half]
    return _combined(matrix, half)


def _combined(matrix: _Matrix, grid: _Grid) -> _Grid:
    """Multiplies a grid of arrays by a matrix from the left and transposes the result."""
    return [[_combine(row, column) for row in matrix] for column in zip(*grid, strict=True)]


def _combine(coefficients: Sequence[float], arrays: Sequence[jax.Array]) -> jax.Array:
    pairs = [(c, array) for c, array in zip(coefficients, arrays, strict=True) if c != 0]
    return functools.reduce(jnp.add, [a if c == 1 else c * a for c, a in pairs])


def _transpose(matrix: _Matrix) -> _Matrix:
    return tuple(zip(*matrix, strict=True))


_convolve_p = bilinear.define(NAME, _shape, _convolve, _gradient_of_input, _gradient_of_kernel)
