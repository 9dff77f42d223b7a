"""Compensated sums, whose order does not matter."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_dp.core import trees
from fedjax_dp.core.backend import backend
from fedjax_dp.core.trees import PyTree

_FEW = 85


class Sum(NamedTuple):
    """A running sum of floats, in two parts."""

    high: jax.Array  # The sum, rounded.
    low: jax.Array  # What the rounding lost.


class _Paired(NamedTuple):
    """A running sum whose two parts are one array of complex numbers.

    XLA's CPU compiler adds to it in one pass, in place; for two results it takes four passes.
    """

    pairs: jax.Array

    @property
    def high(self) -> jax.Array:
        return jax.lax.real(self.pairs)

    @property
    def low(self) -> jax.Array:
        return jax.lax.imag(self.pairs)


def add(total: PyTree, part: PyTree) -> PyTree:
    """Adds a tree of arrays to a tree of running sums; integers are added as they are.

    Each addition errs by about 2^-47 of the sum so far, whatever the order.

    Source: Knuth 1997, section 4.2.2, theorem B; Dekker 1971, section 5.
    """
    return jax.tree.map(_add, total, part, is_leaf=_is_sum)


def zeros_like(tree: PyTree) -> PyTree:
    """Builds running sums of zeros, plain zeros if a leaf is not a float."""

    def zeros(x):
        if x.dtype == jnp.float32 and backend() == "cpu":
            return _Paired(jnp.zeros(x.shape, jnp.complex64))
        none = jnp.zeros(x.shape, x.dtype)
        return Sum(none, none) if jnp.issubdtype(x.dtype, jnp.floating) else none

    return jax.tree.map(zeros, tree)


def over_first_axis(tree: PyTree) -> PyTree:
    """Sums arrays over their first axis, into a `Sum` if they are floats.

    Up to 85 numbers are added plainly, which errs by at most 8.7e-4 of the largest of them in all,
    with one of them and without it together (2^-24 · 85 · 169), in any order; longer sums are made
    of such blocks, with compensation between them.
    """
    return jax.tree.map(_over_first_axis, tree)


def merge(a: PyTree, b: PyTree) -> PyTree:
    """Adds two trees of running sums."""

    def both(x, y):
        if not _is_sum(x):
            return x + y
        return _held_as(x, _renormalized(*_two_sum(x.high, y.high), x.low + y.low))

    return jax.tree.map(both, a, b, is_leaf=_is_sum)


def over_devices(total: PyTree, axis: str) -> PyTree:
    """Adds the running sums of the devices of a mesh axis, in the same order on each."""
    everywhere = jax.lax.all_gather(jax.tree.map(_apart, total, is_leaf=_is_sum), axis)
    first, *others = (trees.take(everywhere, i) for i in range(jax.lax.axis_size(axis)))
    for other in others:
        first = merge(first, other)
    return first


def value(total: PyTree) -> PyTree:
    """Reads running sums, rounded once."""
    return jax.tree.map(lambda x: x.high + x.low if _is_sum(x) else x, total, is_leaf=_is_sum)


def parts(total: PyTree) -> tuple[PyTree, PyTree]:
    """Splits a tree of running sums into their rounded values and what rounding lost."""
    high = jax.tree.map(lambda x: x.high, total, is_leaf=_is_sum)
    return high, jax.tree.map(lambda x: x.low, total, is_leaf=_is_sum)


def _is_sum(x: PyTree) -> bool:
    return isinstance(x, Sum | _Paired)


def _apart(x: PyTree) -> PyTree:
    """Holds the parts of a running sum in two arrays."""
    return Sum(x.high, x.low) if _is_sum(x) else x


def _held_as(total: PyTree, new: Sum) -> PyTree:
    """Holds a running sum in the same way as the one before."""
    return _Paired(jax.lax.complex(*new)) if isinstance(total, _Paired) else new


def _add(total, x):
    if not _is_sum(total):
        return total + x
    return _held_as(total, _renormalized(*_two_sum(total.high, x), total.low))


def _renormalized(high: jax.Array, lost: jax.Array, low: jax.Array) -> Sum:
    """Splits a sum and its much smaller error into two parts again."""
    low = lost + low
    total = high + low
    return Sum(total, low - (total - high))


def _two_sum(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Adds two numbers; the rounding error of the addition is returned too."""
    high = a + b
    of_b = high - a
    return high, (a - (high - of_b)) + (b - of_b)


def _halved(x: jax.Array) -> jax.Array:
    """Sums over the first axis, half onto half: many times faster on a CPU than XLA's reduction.

    Elsewhere each half would be written to memory, and a reduction reads what it sums once.
    """
    if backend() != "cpu":
        return jnp.sum(x, axis=0)
    odd = []
    while len(x) > 1:
        half = len(x) // 2
        odd.append(x[2 * half :])
        x = x[:half] + x[half : 2 * half]
    return sum((one[0] for one in odd if len(one)), x[0])


def _block(count: int) -> int:
    """Chooses how many of so many numbers are added plainly, at most 85.

    Outside of CPUs blocks that leave no number over are preferred: others would be copied.
    """
    if backend() == "cpu":
        return _FEW
    even = max((size for size in range(1, _FEW + 1) if count % size == 0), default=1)
    return even if 2 * even > _FEW or count <= _FEW else _FEW


def _blocks(x: jax.Array) -> jax.Array:
    """Sums a few numbers at a time, plainly."""
    few = _block(len(x))
    if backend() == "tpu":
        # One pass for all of them, where one axis of a reshaped array takes three times as long.
        return jnp.stack([jnp.sum(x[i : i + few], axis=0) for i in range(0, len(x), few)])
    whole = len(x) // few * few
    parts = [] if whole == 0 else [_halved(x[:whole].reshape(few, -1, *x.shape[1:]))]
    if whole < len(x):
        parts.append(_halved(x[whole:, None]))
    return jnp.concatenate(parts)


def _over_first_axis(x):
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return jnp.sum(x, axis=0)
    blocks = _blocks(x)
    total = Sum(blocks, jnp.zeros_like(blocks))
    while len(total.high) > 1:
        half = len(total.high) // 2
        left, right, rest = (
            jax.tree.map(lambda a, part=part: a[part], total)
            for part in (slice(half), slice(half, 2 * half), slice(2 * half, None))
        )
        pairs = _renormalized(*_two_sum(left.high, right.high), left.low + right.low)
        total = jax.tree.map(lambda *parts: jnp.concatenate(parts), pairs, rest)
    return jax.tree.map(lambda a: a[0], total)
