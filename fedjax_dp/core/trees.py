"""Arithmetic on pytrees of arrays, with sums and norms in float32 or better."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_dp.core.promotion import promoted

PyTree = Any
# Of float32, shared out among fewer than 2^31 clients.
_LARGEST_SUMMAND = 2.0**96


def at_least_float32(x: jax.Array) -> jax.Array:
    """Widens floats below single precision to float32 and leaves the rest unchanged."""
    if jnp.issubdtype(x.dtype, jnp.floating) and jnp.finfo(x.dtype).bits < 32:
        return x.astype(jnp.float32)
    return x


def add(a: PyTree, b: PyTree) -> PyTree:
    """Adds two trees leaf by leaf."""
    return jax.tree.map(jnp.add, a, b)


def subtract(a: PyTree, b: PyTree) -> PyTree:
    """Subtracts one tree from another leaf by leaf."""
    return jax.tree.map(jnp.subtract, a, b)


def scale(tree: PyTree, factor: jax.typing.ArrayLike) -> PyTree:
    """Multiplies every leaf by one number, keeping each leaf's type."""

    def one(x):
        a, b = promoted(x, factor)
        return (a * b).astype(x.dtype)

    return jax.tree.map(one, tree)


def ratio(a: Any, b: Any) -> Any:
    """Divides one number by another of any type."""
    a, b = promoted(a, b)
    return a / b


def reciprocal(x: jax.typing.ArrayLike) -> jax.Array:
    """Returns 1/x if x > 0, else 0."""
    x = jnp.asarray(x)
    x = x if jnp.issubdtype(x.dtype, jnp.inexact) else x.astype(jnp.float32)
    return jnp.where(x > 0, 1.0 / jnp.where(x > 0, x, 1.0), 0.0)


def zeros_like(tree: PyTree) -> PyTree:
    """Builds a tree of zeros."""
    return jax.tree.map(jnp.zeros_like, tree)


def where(condition: jax.Array, a: PyTree, b: PyTree) -> PyTree:
    """Chooses one of two trees by a boolean scalar."""
    return jax.tree.map(lambda x, y: jnp.where(condition, x, y), a, b)


def l2_norm(tree: PyTree) -> jax.Array:
    """Computes the Euclidean norm over all leaves, in float32 or better, 0 for no leaves."""
    return jnp.sqrt(_total(jax.tree.map(jnp.square, _flat(tree))))


def l1_norm(tree: PyTree) -> jax.Array:
    """Computes the sum of absolute values, in float32 or better, 0 for no leaves."""
    return _total(jax.tree.map(jnp.abs, _flat(tree)))


def total(tree: PyTree) -> jax.Array:
    """Sums all entries of all leaves, in float32 or better, 0 for no leaves.

    Each leaf is summed along one flat axis, and leaves are added in pairs. XLA's CPU compiler
    breaks such a sum into a tree of short chains, but adds up several short axes in one chain as
    long as their product, which loses every summand below half a unit in the last place of what
    has been added so far. For summands of one sign the relative error is at most 2.5e-4, that of
    chains of 4,096.
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
    """Flattens every leaf to one axis, in float32 or better."""

    def flat(x: jax.Array) -> jax.Array:
        # Without the barrier the compiler would sum over the original axes after all, also over
        # those of an array that was flattened earlier in the program.
        return jax.lax.optimization_barrier(at_least_float32(jnp.asarray(x)).reshape(-1))

    return jax.tree.map(flat, tree)


def is_finite(tree: PyTree) -> jax.Array:
    """Checks whether every entry of every float leaf is finite."""
    return _all_floats(jnp.isfinite, tree)


def can_be_summed(tree: PyTree) -> jax.Array:
    """Checks that no float is NaN or above 2^96, so that sums over 2^31 clients are finite."""
    return _all_floats(lambda x: jnp.abs(x) <= _LARGEST_SUMMAND, tree)


def _all_floats(holds: Callable[[jax.Array], jax.Array], tree: PyTree) -> jax.Array:
    """Checks all floats of a tree, leaves of one size in one pass.

    Leaves are flat, since XLA's CPU compiler vectorises no check along a short last axis.
    """
    floats = [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.inexact)]
    flags: dict[int, jax.Array] = {}
    for x in _flat(floats):
        flags[x.size] = flags.get(x.size, True) & holds(x)
    return jnp.all(jnp.stack([jnp.all(x) for x in flags.values()])) if flags else jnp.bool_(True)


def num_parameters(tree: PyTree) -> int:
    """Counts the entries of all leaves."""
    return int(sum(np.prod(x.shape, dtype=np.int64) for x in jax.tree.leaves(tree)))


def num_bytes(tree: PyTree) -> int:
    """Counts the bytes of all leaves."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def cast_like(tree: PyTree, like: PyTree) -> PyTree:
    """Casts a tree to the types of another of the same structure."""
    return jax.tree.map(lambda x, old: jnp.asarray(x, jnp.result_type(old)), tree, like)


def take(tree: PyTree, index: jax.typing.ArrayLike) -> PyTree:
    """Indexes the first axis of every leaf."""
    return jax.tree.map(lambda x: x[index], tree)


def paths(tree: PyTree) -> list[str]:
    """Names the leaves by their keys, such as "params/Dense_0/kernel"."""
    found = jax.tree_util.tree_leaves_with_path(tree)
    return [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in found]
