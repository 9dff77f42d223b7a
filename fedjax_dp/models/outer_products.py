"""Sums of outer products, one for each example, and bounds on their norms."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from fedjax_dp.core import products, sums, trees
from fedjax_dp.core.backend import backend, facts
from fedjax_dp.core.choices import choices
from fedjax_dp.core.materialize import materialize

# On a CPU a matrix that is formed costs, for each of its entries, as much as this many
# multiplications: it is written and read twice.
_COST_OF_AN_ENTRY = 200
# The shift that keeps a Cholesky factor well defined, in units of the trace; well above the
# rounding of its Gram matrix.
_SHIFT = 1e-5
# Inverses of Cholesky factors stay below 1/√shift, times √num_rows, unless their Gram matrix was
# too far from positive definite.
_LARGEST_INVERSE = 1e5
# How far the order of a sum may move it, in units of the bound on one example.
_LARGEST_ERROR = 8.7e-4
# Squares of float32 numbers below this vanish.
_SMALLEST_SEEN = 2.0**-63


def is_formed(num_rows: int, inputs: int, outputs: int) -> bool:
    """Decides whether to form the matrices (`matrices`) instead of their factors (`factors`)."""
    if num_rows == 1:
        return False
    # Gram matrices have no bound for split products.
    if block_size(num_rows) == 0 or products.arithmetic().products == "split":
        return True
    narrow, wide = sorted((inputs, outputs))
    factored = choices(facts()).factored
    if factored == "fewer_bytes":
        return _is_less_moved(num_rows, narrow, wide)
    # Counted for `norms`: small products and the factorisation run at a fraction of the full speed.
    without = num_rows**2 * (6 * wide + 40 * narrow)
    is_cheaper = without < _COST_OF_AN_ENTRY * inputs * outputs
    return not (factored == "fewer_operations" and is_cheaper)


def _is_less_moved(num_rows: int, narrow: int, wide: int) -> bool:
    """Whether forming matrices moves fewer numbers than factors do, for each example.

    An accelerator waits for its memory: a matrix is written, and read for its norm and its sum.
    Factors are normalised, factored and multiplied, which takes ten passes over the rows; an
    elimination writes `num_rows` small matrices, and blocks of a sum are added with compensation.
    """
    formed = 3 * narrow * wide
    rows = 10 * num_rows * (narrow + wide)
    blocks = 6 * narrow * wide / block_size(num_rows)
    return formed <= rows + 6 * num_rows**3 + blocks


def matrices(rows: jax.Array, columns: jax.Array) -> jax.Array:
    """Sums each example's outer products, `[examples, inputs, outputs]`, the smaller axis first."""
    left, right = sorted((rows, columns), key=lambda a: a.shape[2])
    # Transposed ahead of the product, behind a barrier: a batch of products that contract their
    # first dimensions runs at half of the speed or less.
    left = lax.optimization_barrier(jnp.swapaxes(left, 1, 2))
    return jnp.einsum("bit,bto->bio", left, right)


def total(rows: jax.Array, columns: jax.Array) -> jax.Array:
    """Sums the outer products of all examples, `[inputs, outputs]`, a block of examples at a time.

    Where the outer products of an example nearly keep its bound on their own (`Factors`), the order
    in which a block is summed moves the result by at most 1e-3 of that bound. The sum of the blocks
    is rounded once.
    """
    num_examples, num_rows = rows.shape[:2]
    size = max(1, block_size(num_rows))

    def block(first):
        here = slice(first, first + size)
        return products.outer_products(rows[here], columns[here])

    if num_examples <= size:
        return block(0)
    blocks = [block(first) for first in range(0, num_examples, size)]
    running = sums.zeros_like(blocks[0])
    for one in blocks:
        running = sums.add(running, one)
    return sums.value(running)


def block_size(num_rows: int) -> int:
    """Counts the examples whose outer products may be summed as one product; 0 for none.

    The largest g with `v g T √T (2 g − 1) + p √T` of at most 8.7e-4, where v and p bound the error
    of products (`core.products.Rounding`; 2^-24 and 0 if they are exact). Summing n products in any
    order errs by at most n v of the sum of their absolute values, here g examples of T rows and √T
    bounds each, T being `num_rows`; with one of them left out, by those of g − 1. The products of
    the one that is left out are longer by at most p of their lengths.
    """
    size, (addition, product) = 0, products.rounding()
    room = _LARGEST_ERROR - product * math.sqrt(num_rows)
    while addition * (size + 1) * num_rows**1.5 * (2 * size + 1) <= room:
        size += 1
    return size


class Factors(NamedTuple):
    """Sums of outer products by factors that do not cancel, `scale · rowsᵀ columns` each."""

    rows: jax.Array  # [examples, num_rows, inputs], float32 or better
    columns: jax.Array  # [examples, num_rows, outputs], float32 or better
    scale: jax.Array  # [examples]
    # [examples]: bounds the Frobenius norm of each sum, and, over √num_rows, the sum of the norms
    # of its outer products
    norms: jax.Array


def factors(rows: jax.Array, columns: jax.Array) -> Factors:
    """Writes each example's sum of outer products as one of nearly orthogonal ones.

    With `columns = L Q`, where `L` is square and the rows of `Q` are nearly orthonormal, the sum is
    `(Lᵀ rows)ᵀ Q`: its outer products do not cancel, so that no order of summation exceeds their
    norm, which is read off two Gram matrices. Untransformed, rows may cancel in one order and not
    in another, which loses half of the digits of such a norm.

    Guarantee: the norms are those of the returned factors, for any finite floats, and never too
    small: the possible error of the Gram matrices is added (a few 1e-4 for ordinary data). Not
    finite if a factor is not, or if a product of norms is beyond float32.

    Source: shifted Cholesky QR, Fukaya and others 2020.
    """
    num_rows = rows.shape[1]
    if num_rows == 1:
        rows, row_norms = _finite(materialize(trees.at_least_float32(rows)))
        columns, column_norms = _finite(materialize(trees.at_least_float32(columns)))
        return Factors(rows, columns, jnp.ones_like(row_norms), row_norms * column_norms)
    (rows, row_norms), (columns, column_norms) = _normalized(rows), _normalized(columns)
    is_swapped = rows.shape[2] < columns.shape[2]
    narrow, wide = (rows, columns) if is_swapped else (columns, rows)
    factor, inverse = _cholesky(_gram(narrow) + _SHIFT * jnp.eye(num_rows))
    is_sound = jnp.all(jnp.abs(inverse) <= _LARGEST_INVERSE, axis=(1, 2))
    factor, inverse = (jnp.where(is_sound[:, None, None], a, 0) for a in (factor, inverse))
    # Multiplying by the inverse is faster than solving; the second step makes up for its rounding.
    first = inverse @ narrow
    orthogonal = materialize(first + inverse @ (narrow - factor @ first))
    rest = materialize(jnp.swapaxes(factor, 1, 2) @ wide)
    squares, separate = _squared_norms(orthogonal, rest)
    norms = jnp.maximum(jnp.sqrt(squares), separate / math.sqrt(num_rows)) + unseen(num_rows)
    norms = jnp.where(is_sound, norms, jnp.inf)
    scale = row_norms * column_norms
    pair = (orthogonal, rest) if is_swapped else (rest, orthogonal)
    return Factors(*pair, scale, scale * norms)


def _squared_norms(left: jax.Array, right: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Bounds the squared norm of each `leftᵀ right`, and sums the norms of its outer products.

    An entry of a Gram matrix of n columns errs by at most n roundings of the product of two
    lengths, which the other Gram matrix multiplies.
    """
    grams = _gram(left), _gram(right)
    lengths = [jnp.sqrt(jnp.diagonal(gram, axis1=1, axis2=2)) for gram in grams]
    pairs = [length[:, :, None] * length[:, None, :] for length in lengths]

    def over_rows(matrix):
        # Two chains of T additions; without the barrier they may become one of T².
        return jnp.sum(lax.optimization_barrier(jnp.sum(matrix, 2)), 1)

    rounding = _rounding(left.dtype)
    chains = left.shape[2] * rounding, right.shape[2] * rounding
    terms = grams[0] * grams[1]
    error = (
        chains[0] * pairs[0] * jnp.abs(grams[1])
        + chains[1] * pairs[1] * jnp.abs(grams[0])
        + 3 * chains[0] * chains[1] * pairs[0] * pairs[1]
        + 2 * left.shape[1] * rounding * jnp.abs(terms)
    )
    squares = over_rows(terms) + over_rows(error)
    return jnp.maximum(squares, 0), jnp.sum(lengths[0] * lengths[1], 1)


def _rounding(dtype: Any) -> float:
    """Bounds the relative error of one operation; float64 is for comparisons with references."""
    finer = float(jnp.finfo(dtype).eps) / float(jnp.finfo(jnp.float32).eps)
    return products.EXACT.per_addition * finer


def unseen(size: int) -> float:
    """Bounds the norm of `size` numbers whose squares all vanish in float32."""
    return _SMALLEST_SEEN * math.sqrt(size)


def _cholesky(matrices: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Factors small positive definite matrices; returns the lower factors and their inverses.

    Written as elimination, since calls of the linear algebra library block the threads of the CPU
    backend, inside a loop forever. A GPU would start several kernels for each step of it, and calls
    the library.
    """
    size = matrices.shape[-1]
    if backend() == "gpu":
        factors = lax.linalg.cholesky(matrices, symmetrize_input=False)
        eye = jnp.broadcast_to(jnp.eye(size, dtype=matrices.dtype), matrices.shape)
        return factors, lax.linalg.triangular_solve(factors, eye, left_side=True, lower=True)
    index = jnp.arange(size)

    def eliminate(k, carry):
        rest, unit, inverse = carry
        pivot_row = lax.dynamic_index_in_dim(rest, k, 1, keepdims=False)
        pivot = lax.dynamic_index_in_dim(pivot_row, k, 1)
        column = jnp.where(index > k, pivot_row / pivot, 0)
        inverse_row = lax.dynamic_index_in_dim(inverse, k, 1, keepdims=False)
        rest = rest - column[:, :, None] * pivot_row[:, None, :]
        inverse = inverse - column[:, :, None] * inverse_row[:, None, :]
        unit = jnp.where(index == k, column[:, :, None], unit)
        return rest, unit, inverse

    eye = jnp.broadcast_to(jnp.eye(size, dtype=matrices.dtype), matrices.shape)
    start = matrices, jnp.zeros_like(matrices), eye
    rest, unit, inverse = lax.fori_loop(0, size, eliminate, start)
    scale = jnp.sqrt(jnp.diagonal(rest, axis1=1, axis2=2))
    return (unit + eye) * scale[:, None, :], inverse / scale[:, :, None]


def _gram(a: jax.Array) -> jax.Array:
    return jnp.einsum("bsi,bti->bst", a, a)


def _finite(a: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Bounds the norm of each example, and zeroes those whose norm is not finite."""
    norms = jax.vmap(trees.l2_norm)(a) + unseen(a[0].size)
    return jnp.where(jnp.isfinite(norms)[:, None, None], a, 0), norms


def _normalized(a: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Divides each example by its given norm, without leaving float32."""
    wide = trees.at_least_float32(a)
    limits = jnp.finfo(wide.dtype)
    peak = jnp.clip(jnp.max(jnp.abs(wide), axis=(1, 2)), limits.tiny, limits.max)
    # XLA's CPU backend may ignore NaN in a maximum; norms do not.
    divisor = jnp.maximum(jax.vmap(trees.l2_norm)(wide / peak[:, None, None]), 1)
    norms = peak * divisor
    shaped = (peak[:, None, None], divisor[:, None, None])
    unit = jnp.where(jnp.isfinite(norms)[:, None, None], wide / shaped[0] / shaped[1], 0)
    return materialize(unit), norms
