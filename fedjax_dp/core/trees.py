"""Arithmetic on pytrees of arrays, with sums and norms in float32 or better."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

PyTree = Any
# Of float32, shared out among fewer than 2^31 clients.
_LARGEST_SUMMAND = 2.0**96


def at_least_float32(x: jax.Array) -> jax.Array:
    """Widens floats below single precision to float32 and leaves all else alone.

    Args:
      x: an array of any shape and type.

    Returns:
      The array, in float32 where it was a narrower float.
    """
    if jnp.issubdtype(x.dtype, jnp.floating) and jnp.finfo(x.dtype).bits < 32:
        return x.astype(jnp.float32)
    return x


def add(a: PyTree, b: PyTree) -> PyTree:
    """Adds two trees leaf by leaf.

    Args:
      a: a tree of arrays.
      b: a tree of the same structure.

    Returns:
      The tree of sums.
    """
    return jax.tree.map(jnp.add, a, b)


def subtract(a: PyTree, b: PyTree) -> PyTree:
    """Subtracts one tree from another leaf by leaf.

    Args:
      a: a tree of arrays.
      b: a tree of the same structure, subtracted.

    Returns:
      The tree of differences.
    """
    return jax.tree.map(jnp.subtract, a, b)


def scale(tree: PyTree, factor: jax.typing.ArrayLike) -> PyTree:
    """Multiplies every leaf by one number, keeping each leaf's type.

    Args:
      tree: a tree of arrays.
      factor: a scalar, static or traced.

    Returns:
      The scaled tree.
    """
    return jax.tree.map(lambda x: (x * factor).astype(x.dtype), tree)


def reciprocal(x: jax.typing.ArrayLike) -> jax.Array:
    """Divides one by numbers; by none that is not above 0, where it gives 0.

    Args:
      x: at least 0, of any shape.

    Returns:
      1/x, and 0 where x is 0.
    """
    x = jnp.asarray(x)
    return jnp.where(x > 0, 1.0 / jnp.where(x > 0, x, 1.0), 0.0)


def zeros_like(tree: PyTree) -> PyTree:
    """Builds a tree of zeros.

    Args:
      tree: a tree of arrays.

    Returns:
      Zeros of the same shapes and types.
    """
    return jax.tree.map(jnp.zeros_like, tree)


def where(condition: jax.Array, a: PyTree, b: PyTree) -> PyTree:
    """Chooses one of two trees by a scalar condition.

    Args:
      condition: a boolean scalar.
      a: taken where the condition holds.
      b: taken where it does not.

    Returns:
      The chosen tree.
    """
    return jax.tree.map(lambda x, y: jnp.where(condition, x, y), a, b)


def l2_norm(tree: PyTree) -> jax.Array:
    """Computes the Euclidean norm over all leaves, summed in float32 or better.

    Args:
      tree: a tree of float arrays.

    Returns:
      A scalar; 0 for a tree without leaves. Squares are summed as `total` sums.
    """
    return jnp.sqrt(_total(jax.tree.map(jnp.square, _flat(tree))))


def l1_norm(tree: PyTree) -> jax.Array:
    """Computes the sum of absolute values over all leaves, in float32 or better.

    Args:
      tree: a tree of float arrays.

    Returns:
      A scalar; 0 for a tree without leaves. Absolute values are summed as `total` sums.
    """
    return _total(jax.tree.map(jnp.abs, _flat(tree)))


def total(tree: PyTree) -> jax.Array:
    """Sums all entries of all leaves, in float32 or better.

    Each leaf is summed along one flat axis, and leaves are added in pairs. XLA's CPU compiler
    breaks such a sum into a tree of short chains, but adds up several short axes in one chain as
    long as their product, which loses every summand below half a unit in the last place of what
    has been added so far.

    Args:
      tree: a tree of arrays.

    Returns:
      A scalar; 0 for a tree without leaves. For summands of one sign its relative error is at most
      2.5e-4, that of chains of 4,096.
    """
    return _total(_flat(tree))


def _total(tree: PyTree) -> jax.Array:
    """Sums the entries of flat leaves; a barrier here would store what is summed."""
    sums = [jnp.sum(x) for x in jax.tree.leaves(tree)]
    while len(sums) > 1:
        pairs = zip(sums[::2], sums[1::2], strict=False)
        sums = [a + b for a, b in pairs] + sums[len(sums) // 2 * 2 :]
    return sums[0] if sums else jnp.float32(0)


def _flat(tree: PyTree) -> PyTree:
    """Gives every leaf one axis, in float32 or better."""

    def flat(x: jax.Array) -> jax.Array:
        # Without the barrier the compiler would sum over the original axes after all, also over
        # those of an array that was flattened earlier in the program.
        return jax.lax.optimization_barrier(at_least_float32(jnp.asarray(x)).reshape(-1))

    return jax.tree.map(flat, tree)


def is_finite(tree: PyTree) -> jax.Array:
    """Checks whether every entry of every float leaf is finite.

    Args:
      tree: a tree of arrays.

    Returns:
      A boolean scalar.
    """
    flags = [
        jnp.all(jnp.isfinite(x))
        for x in jax.tree.leaves(tree)
        if jnp.issubdtype(x.dtype, jnp.inexact)
    ]
    return jnp.all(jnp.stack(flags)) if flags else jnp.bool_(True)


def can_be_summed(tree: PyTree) -> jax.Array:
    """Checks whether the sum of such a tree over any population is finite.

    Args:
      tree: a tree of arrays.

    Returns:
      A boolean scalar: whether no entry of a float leaf is NaN or above 2^96, which fewer than 2^31
      of them do not bring above what float32 holds.
    """
    flags = [
        jnp.all(jnp.abs(at_least_float32(x)) <= _LARGEST_SUMMAND)
        for x in jax.tree.leaves(tree)
        if jnp.issubdtype(x.dtype, jnp.inexact)
    ]
    return jnp.all(jnp.stack(flags)) if flags else jnp.bool_(True)


def num_parameters(tree: PyTree) -> int:
    """Counts the entries of all leaves.

    Args:
      tree: a tree of arrays or of `jax.ShapeDtypeStruct`.

    Returns:
      The number of scalars.
    """
    return int(sum(np.prod(x.shape, dtype=np.int64) for x in jax.tree.leaves(tree)))


def num_bytes(tree: PyTree) -> int:
    """Counts the bytes of all leaves.

    Args:
      tree: a pytree of arrays, or of their shapes.

    Returns:
      The total, exact for any size.
    """
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def cast_like(tree: PyTree, like: PyTree) -> PyTree:
    """Gives a tree the types of another, such as a state those that it had before a step.

    Args:
      tree: a tree of arrays.
      like: a tree of the same structure.

    Returns:
      The tree, each array in the type of its counterpart.
    """
    return jax.tree.map(lambda x, old: jnp.asarray(x, jnp.result_type(old)), tree, like)


def take(tree: PyTree, index: jax.typing.ArrayLike) -> PyTree:
    """Reads rows of every leaf.

    Args:
      tree: a tree whose leaves share their first axis.
      index: an integer or an array of integers.

    Returns:
      The rows, `[*index.shape, ...]` at every leaf.
    """
    return jax.tree.map(lambda x: x[index], tree)


def paths(tree: PyTree) -> list[str]:
    """Names the leaves by the keys that lead to them.

    Args:
      tree: any tree.

    Returns:
      For each leaf its keys, joined by "/", such as "params/Dense_0/kernel"; empty for a tree that
      is one leaf.
    """
    found = jax.tree_util.tree_leaves_with_path(tree)
    return [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in found]
