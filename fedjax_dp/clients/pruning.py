"""Magnitude pruning: removes an exact number of a client's weights, ties by index."""

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp

from fedjax_dp.core import checks, masks, trees
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.ranges import DecayNumbers
from fedjax_dp.core.trees import PyTree
from fedjax_dp.models import kinds
from fedjax_dp.models.base import Model
from fedjax_dp.models.kinds import Home, Where

Scope = Literal["tensor", "global"]
# Of a float's magnitude, and of the positions in an array.
_BITS = 31
_LARGEST = 2**_BITS - 1

_Arrays: TypeAlias = Sequence[jax.Array]


def weights_of(model: Model, where: Where | None = None, home: Home | None = None) -> PyTree:
    """Returns the shapes of the weights that may be pruned, None for all others."""
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    if where is not None and not callable(where):
        paths = trees.paths(shapes)
        kinds.require_matches("prunable", kinds.patterns(where), paths, "weights of the model")
    flags = kinds.marked(shapes, (lambda path, leaf: leaf.ndim >= 2) if where is None else where)
    leaves, structure = jax.tree.flatten(shapes)
    chosen = jax.tree.leaves(flags)
    of_norm = jax.tree.leaves(kinds.batch_norm(shapes, model.buffer_keys))
    is_own = (False,) * len(leaves) if home is None else home.is_own
    prunable = [
        leaf if flag and leaf.size and not norm and not own else None
        for leaf, flag, norm, own in zip(leaves, chosen, of_norm, is_own, strict=True)
    ]
    rule = f"name weights of {model.name} that may be pruned"
    checks.require(any(x is not None for x in prunable), "prunable", rule, where)
    return jax.tree.unflatten(structure, prunable)


@checked
def pruned_share(mask: PyTree) -> jax.Array:
    """Computes the share of weights that a mask has pruned.

    Args:
      mask: bool, with None for what is never pruned.

    Returns:
      A float32 scalar in [0, 1].
    """
    size = sum(m.size for m in jax.tree.leaves(mask))
    return (size - masks.num_alive(mask)).astype(jnp.float32) / size


@checked
def prune(
    mask: PyTree,
    params: PyTree,
    rate: DecayNumbers,
    target: DecayNumbers | None = None,
    *,
    scope: Scope = "tensor",
) -> PyTree:
    """Prunes the weights of smallest magnitude among those that are alive.

    Exactly `floor(rate * alive)` of them are removed, the first of equal ones; fewer if that
    would prune more than `floor(target * size)` in all, or the last weight of a tensor. A mask
    never grows. Rates and targets are taken in millionths, the nearest, so that 0.13 of 900 is 117
    as on paper, whatever the float that stands for 0.13.

    Args:
      mask: bool, with None for what is never pruned; fewer than 2^30 entries.
      params: the parameters, of which the masked ones are read.
      rate: share of the weights alive, in [0, 1); may be traced.
      target: largest share of all weights to prune, in [0, 1); no limit if None.
      scope: "tensor" compares weights within each array, "global" all of them with one another.

    Returns:
      The mask.

    Raises:
      ValueError: for a mask that is not of bools in the shapes of `params`, or has none.

    Source: Li and others 2021 (LotteryFL), algorithm 1.
    """
    _require_mask(mask, params)
    kept, structure = jax.tree.flatten(mask)
    masked = jax.tree.map(lambda m, x: None if m is None else x, mask, params, is_leaf=_is_none)
    sizes = [_magnitude(x) for x in jax.tree.leaves(masked)]
    if scope == "tensor":
        return jax.tree.unflatten(structure, _without(kept, sizes, kept, rate, target))
    # The largest weight of each tensor stays, so that none is cut off.
    free = [m & ~_is_largest(m, x) for m, x in zip(kept, sizes, strict=True)]
    [left] = _without([_flat(kept)], [_flat(sizes)], [_flat(free)], rate, target)
    ends = [0]
    for m in kept:
        ends.append(ends[-1] + m.size)
    parts = [left[a:b].reshape(m.shape) for a, b, m in zip(ends[:-1], ends[1:], kept, strict=True)]
    return jax.tree.unflatten(structure, parts)


def _require_mask(mask: PyTree, params: PyTree) -> None:
    flags, known = _by_path(mask), _by_path(params)
    rule = "have the paths of params, with None for what is never pruned"
    checks.require(flags.keys() == known.keys(), "mask", rule, list(flags))
    pairs = [(path, m, known[path]) for path, m in flags.items() if m is not None]
    checks.require(len(pairs) > 0, "mask", "hold an array", mask)
    for path, m, x in pairs:
        expected = None if x is None else f"bool{list(jnp.shape(x))}"
        actual = f"{jnp.result_type(m)}{list(jnp.shape(m))}"
        checks.require(actual == expected, "mask", f"be {expected} at {path}", actual)


def _by_path(tree: PyTree) -> dict[str, Any]:
    """Lists leaves by their paths; None, which replaces frozen leaves, counts as one."""
    leaves = jax.tree.leaves(tree, is_leaf=_is_none)
    paths = trees.paths(jax.tree.map(lambda x: 0 if x is None else x, tree, is_leaf=_is_none))
    return dict(zip(paths, leaves, strict=True))


def _without(mask: _Arrays, magnitude: _Arrays, free: _Arrays, rate: Any, target: Any) -> _Arrays:
    """Prunes within each array, only entries that may be pruned."""
    alive = _counts(mask)
    count = _share_of(alive, rate)
    if target is not None:
        sizes = jnp.array([m.size for m in mask], jnp.int32)
        count = jnp.minimum(count, _share_of(sizes, target) - (sizes - alive))
    count = jnp.clip(count, 0, jnp.minimum(_counts(free), alive - 1))
    pruned = _smallest(free, magnitude, count)
    return [m & ~p for m, p in zip(mask, pruned, strict=True)]


def _share_of(count: jax.Array, share: Any) -> jax.Array:
    """Computes `floor(share * count)` exactly, of millionths, in integers below 2^31."""
    millionths = jnp.round(jnp.asarray(share, jnp.float32) * 1e6).astype(jnp.int32)
    (high, low), (thousands, rest) = jnp.divmod(millionths, 1000), jnp.divmod(count, 1000)
    middle = high * rest + low * thousands + low * rest // 1000
    return high * thousands + middle // 1000


def _smallest(among: _Arrays, keys: _Arrays, count: jax.Array) -> _Arrays:
    """Marks the `count` entries of smallest key in each array, ties by position.

    Bisection is faster than a sort, and one loop for all arrays starts the fewest operations.
    """
    limit = _limits(among, keys, count, _BITS)
    marks = list(zip(among, keys, limit, strict=True))
    below = [m & (key < end) for m, key, end in marks]
    ties = [m & (key == end) for m, key, end in marks]
    positions = [jnp.arange(key.size, dtype=jnp.int32).reshape(key.shape) for key in keys]
    missing = count - _counts(below)
    # As a rule all ties are missing, and no position has to be found.
    is_parted = jnp.any((missing > 0) & (missing < _counts(ties)))
    last = _limits(ties, positions, missing, jnp.where(is_parted, _BITS, 0))
    parts = zip(below, ties, positions, last, missing > 0, strict=True)
    return [b | (t & (position <= end) & some) for b, t, position, end, some in parts]


def _limits(among: _Arrays, keys: _Arrays, count: jax.Array, halvings: Any) -> jax.Array:
    """Finds for each array the smallest number that `count` of its keys, from 0, do not exceed."""
    # No number that is tried is the largest of all.
    keys = [jnp.where(m, key, _LARGEST) for m, key in zip(among, keys, strict=True)]

    def halve(_, ends):
        low, high = ends
        middle = low + (high - low) // 2
        below = _counts([key <= end for key, end in zip(keys, middle, strict=True)])
        return jnp.where(below < count, middle + 1, low), jnp.where(below < count, high, middle)

    ends = jnp.zeros_like(count), jnp.full_like(count, _LARGEST)
    return jax.lax.fori_loop(0, halvings, halve, ends)[1]


def _counts(flags: _Arrays) -> jax.Array:
    """Counts the entries that are set in each array."""
    return jnp.stack([masks.count(flag) for flag in flags])


def _magnitude(x: jax.Array) -> jax.Array:
    """Maps magnitudes to integers of the same order: the bits of a float without its sign."""
    return jax.lax.bitcast_convert_type(jnp.abs(x.astype(jnp.float32)), jnp.int32)


def _is_largest(mask: jax.Array, magnitude: jax.Array) -> jax.Array:
    """Marks one largest entry among those alive."""
    largest = jnp.argmax(jnp.where(mask, magnitude, -1))
    return jnp.arange(mask.size).reshape(mask.shape) == largest


def _is_none(x: Any) -> bool:
    return x is None


def _flat(arrays: Any) -> jax.Array:
    parts = [x.ravel() for x in arrays]
    return jnp.concatenate(parts) if parts else jnp.zeros(0, bool)
