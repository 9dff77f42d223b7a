"""Sums that keep what their roundings lose, so that their order does not matter."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_dp.core.trees import PyTree


class Sum(NamedTuple):
    """A running sum of floats, in two parts.

    Attributes:
      high: the sum as plain additions give it.
      low: what those additions rounded away, added up.
    """

    high: jax.Array
    low: jax.Array


def add(total: PyTree, part: PyTree) -> PyTree:
    """Adds a tree of arrays to a tree of running sums.

    Integers are added as they are: those of a lattice wrap around and lose nothing.

    Args:
      total: a tree whose leaves are `Sum`s where those of `part` are floats.
      part: a tree of arrays.

    Returns:
      The tree of running sums. What it holds is exact to 2^-48 of the sum of absolute values for
      each number that was added, whatever their order.

    Source: Knuth, "The Art of Computer Programming", volume 2, section 4.2.2, theorem B; Ogita,
    Rump, Oishi 2005, algorithm 4.1.
    """
    return jax.tree.map(_add, total, part, is_leaf=_is_sum)


def zeros_like(tree: PyTree) -> PyTree:
    """Opens running sums.

    Args:
      tree: a tree of arrays or of their shapes.

    Returns:
      A tree of `Sum`s of zeros, or of zeros where there are no floats.
    """

    def zeros(x):
        none = jnp.zeros(x.shape, x.dtype)
        return Sum(none, none) if jnp.issubdtype(x.dtype, jnp.floating) else none

    return jax.tree.map(zeros, tree)


def over_first_axis(tree: PyTree) -> PyTree:
    """Sums arrays over their first axis.

    Args:
      tree: a tree of arrays, each `[numbers, ...]`, at least one number.

    Returns:
      A tree of `Sum`s, or of arrays where there are no floats.
    """
    return jax.tree.map(_over_first_axis, tree)


def merge(a: PyTree, b: PyTree) -> PyTree:
    """Adds two trees of running sums.

    Args:
      a: a tree of running sums.
      b: a tree of the same structure.

    Returns:
      Their sum.
    """

    def both(x, y):
        if not _is_sum(x):
            return x + y
        total = _add(x, y.high)
        return Sum(total.high, total.low + y.low)

    return jax.tree.map(both, a, b, is_leaf=_is_sum)


def value(total: PyTree) -> PyTree:
    """Reads running sums, rounded once.

    Args:
      total: a tree of running sums.

    Returns:
      A tree of arrays.
    """
    return jax.tree.map(lambda x: x.high + x.low if _is_sum(x) else x, total, is_leaf=_is_sum)


def _is_sum(x: PyTree) -> bool:
    return isinstance(x, Sum)


def _add(total, x):
    if not _is_sum(total):
        return total + x
    high, lost = _two_sum(total.high, x)
    return Sum(high, total.low + lost)


def _two_sum(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Adds two numbers; what the addition rounds away is a float too."""
    high = a + b
    of_b = high - a
    return high, (a - (high - of_b)) + (b - of_b)


def _over_first_axis(x):
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return jnp.sum(x, axis=0)
    low = jnp.zeros_like(x)
    while len(x) > 1:
        half = len(x) // 2
        high, lost = _two_sum(x[:half], x[half : 2 * half])
        low = jnp.concatenate([low[:half] + low[half : 2 * half] + lost, low[2 * half :]])
        x = jnp.concatenate([high, x[2 * half :]])
    return Sum(x[0], low[0])
