"""Sums of outer products, one for each example, and their norms."""

import jax
import jax.numpy as jnp
from jax import lax

from fedjax_dp.core import trees

# On a CPU a matrix that is formed costs, for each of its entries, as much as this many
# multiplications: it is written and read twice.
_COST_OF_AN_ENTRY = 200
# The shift that keeps a Cholesky factor well defined, in units of the trace; well above the
# rounding of its Gram matrix.
_SHIFT = 1e-5
# Added to norms in units of the product of the factors' norms: more than their rounding errors.
_MARGIN = 2e-7


def is_formed(num_rows: int, inputs: int, outputs: int) -> bool:
    """Tells whether forming the matrices is the cheaper way to their norms.

    Args:
      num_rows: outer products that each matrix sums.
      inputs: entries of the left vectors.
      outputs: entries of the right vectors.

    Returns:
      Whether to call `matrices` instead of `norms`.
    """
    if num_rows == 1:
        return False
    narrow, wide = sorted((inputs, outputs))
    # Counted for `norms`: small products and the factorisation run at a fraction of the full speed.
    without = num_rows**2 * (6 * wide + 40 * narrow)
    is_cheaper = without < _COST_OF_AN_ENTRY * inputs * outputs
    return jax.default_backend() != "cpu" or not is_cheaper


def matrices(rows: jax.Array, columns: jax.Array) -> jax.Array:
    """Sums the outer products of each example.

    Args:
      rows: `[examples, num_rows, inputs]`.
      columns: `[examples, num_rows, outputs]`.

    Returns:
      `[examples, inputs, outputs]`, or `[examples, outputs, inputs]` where there are fewer outputs.
    """
    left, right = sorted((rows, columns), key=lambda a: a.shape[2])
    # Transposed ahead of the product, behind a barrier: a batch of products that contract their
    # first dimensions runs at half of the speed or less.
    left = lax.optimization_barrier(jnp.swapaxes(left, 1, 2))
    return jnp.einsum("bit,bto->bio", left, right)


def total(rows: jax.Array, columns: jax.Array) -> jax.Array:
    """Sums the outer products of all examples.

    Args:
      rows: `[examples, num_rows, inputs]`.
      columns: `[examples, num_rows, outputs]`.

    Returns:
      `[inputs, outputs]`.
    """
    return jnp.einsum("bti,bto->io", rows, columns)


def norms(rows: jax.Array, columns: jax.Array) -> jax.Array:
    """Computes the Frobenius norm of each example's sum of outer products without forming it.

    With `columns = L Q`, where `L` is square and the rows of `Q` are nearly orthonormal, the sum is
    `(Lᵀ rows)ᵀ Q`, whose norm can be read off two Gram matrices without cancellation. The Gram
    matrices of the factors themselves would give it too, but where rows cancel they lose half of
    the digits, and a norm that comes out too small lets a record through unclipped.

    Args:
      rows: `[examples, num_rows, inputs]`.
      columns: `[examples, num_rows, outputs]`.

    Returns:
      `[examples]`, float32, too large rather than too small by a few roundings of the product of
      the factors' norms. Not finite where a factor is not.

    Source: shifted Cholesky QR, Fukaya and others 2020.
    """
    rows, row_norms = _normalized(rows)
    columns, column_norms = _normalized(columns)
    scale = row_norms * column_norms
    if rows.shape[1] == 1:
        return scale
    narrow, wide = sorted((rows, columns), key=lambda a: a.shape[2])
    factor, inverse = _cholesky(_gram(narrow) + _SHIFT * jnp.eye(rows.shape[1]))
    # Multiplying by the inverse is faster than solving; the second step makes up for its rounding.
    first = inverse @ narrow
    orthogonal = first + inverse @ (narrow - factor @ first)
    rest = jnp.swapaxes(factor, 1, 2) @ wide
    squares = jnp.sum(_gram(orthogonal) * _gram(rest), (1, 2))
    return scale * (jnp.sqrt(jnp.maximum(squares, 0)) + _MARGIN)


def _cholesky(matrices: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Factors small positive definite matrices; returns the lower factors and their inverses.

    Written as elimination, since calls of the linear algebra library block the threads of the CPU
    backend, inside a loop for good.
    """
    size = matrices.shape[-1]
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


def _normalized(a: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Divides each example by its norm, which is given beside it."""
    wide = trees.at_least_float32(a)
    norm = jax.vmap(trees.l2_norm)(wide)
    divisor = jnp.where((norm > 0) & jnp.isfinite(norm), norm, 1)
    return wide / divisor[:, None, None], norm
