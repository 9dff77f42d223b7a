"""Arithmetic on pytrees of arrays, with sums and norms in float32 or better, and casts."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_dp.core.backend import backend

PyTree = Any
# Of float32, shared out among fewer than 2^31 clients.
_LARGEST_SUMMAND = 2.0**96
# Of additions of float32 numbers one after another, in one step of a sum and in all of them.
_LONGEST_STEP, _LONGEST_CHAIN = 2_048, 4_096
_LENGTH_OF_ROW = 1_024


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

    On a CPU each leaf is summed along one flat axis, and leaves are added in pairs. XLA's CPU
    compiler breaks such a sum into a tree of short chains, but adds up several short axes in one
    chain as long as their product, which loses every summand below half a unit in the last place of
    what has been added so far. Elsewhere flattening would copy a leaf into another layout, and its
    axes are summed as they are, in steps that together are no chain longer than 4,096 in any order.
    For summands of one sign the relative error is at most 2.5e-4, that of chains of 4,096.
    """
    return _total(_flat(tree))


def _total(tree: PyTree) -> jax.Array:
    """Sums the entries of leaves that `_flat` has prepared."""
    # A barrier here would store what is summed.
    one = jnp.sum if backend() == "cpu" else partial(_in_steps, jnp.sum)
    sums = [one(x) for x in jax.tree.leaves(tree)]
    while len(sums) > 1:
        pairs = zip(sums[::2], sums[1::2], strict=False)
        sums = [a + b for a, b in pairs] + sums[len(sums) // 2 * 2 :]
    return sums[0] if sums else jnp.float32(0)


def _in_steps(
    reduce: Callable[..., jax.Array], x: jax.Array, longest: int = _LONGEST_CHAIN
) -> jax.Array:
    """Reduces all entries, some axes at a time, so that the chains of all steps have a bound."""
    steps = _steps(x.shape)
    if sum(length for length, _ in steps) > longest:
        # Rows of one length, three times at most: 1,024^3 entries are as many as an index counts.
        x = x.reshape(-1)
        x = jnp.pad(x, (0, -x.size % _LENGTH_OF_ROW)).reshape(-1, _LENGTH_OF_ROW)
        rows = jax.lax.optimization_barrier(reduce(x, 1))
        return _in_steps(reduce, rows, longest - _LENGTH_OF_ROW)
    for i, (_, num_axes) in enumerate(steps):
        x = reduce(x, tuple(range(x.ndim - num_axes, x.ndim)))
        # Otherwise the compiler would make one reduction of them again.
        x = x if i + 1 == len(steps) else jax.lax.optimization_barrier(x)
    return x


def _steps(shape: tuple[int, ...]) -> list[tuple[int, int]]:
    """Groups axes from the last to the first; returns the numbers of entries and of axes of each.

    A group has few entries, unless it is one long axis.
    """
    groups: list[tuple[int, int]] = []
    for size in reversed(shape):
        length, num_axes = groups[-1] if groups else (1, 0)
        if groups and length * size <= _LONGEST_STEP:
            groups[-1] = (length * size, num_axes + 1)
        else:
            groups.append((size, 1))
    return groups


def _flat(tree: PyTree) -> PyTree:
    """Flattens every leaf to one axis on a CPU, in float32 or better; elsewhere its axes stay."""

    def flat(x: jax.Array) -> jax.Array:
        if backend() != "cpu":
            return at_least_float32(jnp.asarray(x))
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

    They are flat on a CPU, since its compiler vectorises no check along a short last axis.
    """
    floats = [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.inexact)]
    if backend() != "cpu":
        # Counted in the steps of a norm, with which the compiler then computes them in one pass.
        failed = [
            _in_steps(jnp.sum, jnp.where(holds(at_least_float32(x)), 0.0, 1.0)) for x in floats
        ]
        return jnp.max(jnp.stack(failed)) == 0 if failed else jnp.bool_(True)
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
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves]


def library_promotion() -> Any:
    """Standard promotion, inside a `with`, for libraries such as Optax that count on it."""
    return jax.numpy_dtype_promotion("standard")


def promoted(*values: Any) -> tuple[Any, ...]:
    """Casts to the type of JAX's standard promotion; host values alone are left to NumPy."""
    if not any(isinstance(value, jax.Array) for value in values):
        return values
    with library_promotion():
        dtype = jnp.result_type(*values)
    return tuple(jnp.asarray(value, dtype) for value in values)
