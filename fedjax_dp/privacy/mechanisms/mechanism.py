"""Mechanisms: clipping, its sensitivity, the noise made from it, and the event, in one value."""

import math
from collections.abc import Callable
from typing import Annotated, NamedTuple

import dp_accounting as dpa
import jax
import jax.numpy as jnp
from annotated_types import Le
from chex import PRNGKey

from fedjax_dp.core import checks, ranges, trees
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.ranges import HalfFraction, NonNegativeNumbers, Norms, ZeroOrAtLeast
from fedjax_dp.core.trees import PyTree
from fedjax_dp.privacy import sensitivities
from fedjax_dp.privacy.events import DpEvent, concrete
from fedjax_dp.privacy.mechanisms import clipping, noise
from fedjax_dp.privacy.mechanisms.clipping import LatticeNorms
from fedjax_dp.privacy.sensitivities import Scalar, Sensitivity

# 1/ε of one entry that staircase noise hides.
SMALLEST_STAIRCASE_MULTIPLIER = 1 / noise.LARGEST_STAIRCASE_EPSILON
LARGEST_STAIRCASE_MULTIPLIER = 1 / noise.SMALLEST_STAIRCASE_EPSILON
StaircaseMultiplier = Annotated[
    float, ZeroOrAtLeast(SMALLEST_STAIRCASE_MULTIPLIER), Le(LARGEST_STAIRCASE_MULTIPLIER)
]


class Mechanism(NamedTuple):
    """A release of a sum of clipped contributions; what runs and what is accounted are one value.

    Attributes:
      name: the mechanism's name in reports.
      clip: `(tree) → (clipped, norm)` of one unit's contribution; the norm is not private.
      sensitivity: of the sum of clipped contributions, under a stated relation.
      noise_stddev: standard deviation of the noise per entry, in units of the sum.
      add_noise: `(key, total) → noised total`; the key is used once, the noise is added once.
      event: `() → DpEvent` of one release from a given set of units; sampling comes on top
        (`Sampler.event`). Raises ValueError if its numbers are traced.
      clips_by_leaf_norms: whether `clip` scales each leaf by a number that depends on the L2 norms
        of the leaves alone, so that it can be applied to the norms without the leaves.
      clips_whole: whether `clip` scales the tree by one number, 1 within the bound in L2 norm.
    """

    name: str
    clip: Callable[[PyTree], tuple[PyTree, jax.Array]]
    sensitivity: Sensitivity
    noise_stddev: Scalar
    add_noise: Callable[[PRNGKey, PyTree], PyTree]
    event: Callable[[], DpEvent]
    clips_by_leaf_norms: bool = False
    clips_whole: bool = False


@checked
def gaussian(
    clip_norm: Norms,
    noise_multiplier: NonNegativeNumbers,
    *,
    method: str = "global",
    relation: str = "add_remove",
    max_weight: NonNegativeNumbers = 1.0,
) -> Mechanism:
    """Builds the Gaussian mechanism on a weighted sum of clipped contributions.

    Guarantee: the noise has standard deviation `noise_multiplier · clip_norm · max_weight`; its ε
    depends on the relation, which the ledger takes into account.

    Args:
      clip_norm: bound on the L2 norm of one contribution, above 0, or inf; may be traced.
      noise_multiplier: standard deviation over the largest contribution, at least 0; may be
        traced.
      method: "global" or "per_layer" clipping.
      relation: "add_remove", "zero_out" or "replace_one".
      max_weight: the largest weight of a clipped contribution, at least 0.

    Returns:
      The mechanism.
    """
    checks.one_of("method", method, clipping.METHODS)
    clip = clipping.METHODS[method]
    sensitivity = sensitivities.sensitivity_of_sum(clip_norm, relation, max_weight=max_weight)
    stddev = sensitivities.noise_stddev(sensitivity, noise_multiplier)
    return Mechanism(
        name="gaussian",
        clip=lambda tree: clip(tree, clip_norm),
        sensitivity=sensitivity,
        noise_stddev=stddev,
        add_noise=lambda key, total: noise.add_gaussian(key, total, stddev),
        event=lambda: dpa.GaussianDpEvent(concrete("noise_multiplier", noise_multiplier)),
        clips_by_leaf_norms=True,
        clips_whole=method == "global",
    )


@checked
def laplace(
    clip_norm: Norms,
    noise_multiplier: NonNegativeNumbers,
    *,
    relation: str = "add_remove",
    max_weight: NonNegativeNumbers = 1.0,
) -> Mechanism:
    """Builds the Laplace mechanism on a weighted sum of contributions clipped in L1 norm.

    Guarantee: one release is ε-DP with `ε = 1/noise_multiplier` under add/remove, and twice
    that under replace-one. The bound holds in L1 and, since no vector is longer in L2, in L2.

    Args:
      clip_norm: bound on the L1 norm of one contribution, above 0, or inf; may be traced.
      noise_multiplier: Laplace scale (not standard deviation) over the largest contribution, at
        least 0; may be traced.
      relation: "add_remove", "zero_out" or "replace_one".
      max_weight: the largest weight of a clipped contribution, at least 0.

    Returns:
      The mechanism.

    Source: Dwork, McSherry, Nissim, Smith 2006.
    """
    sensitivity = sensitivities.sensitivity_of_sum(clip_norm, relation, max_weight=max_weight)
    scale = sensitivities.noise_stddev(sensitivity, noise_multiplier)
    return Mechanism(
        name="laplace",
        clip=lambda tree: clipping.clip_by_l1_norm(tree, clip_norm),
        sensitivity=sensitivity,
        noise_stddev=jnp.sqrt(2.0) * scale,
        add_noise=lambda key, total: noise.add_laplace(key, total, scale),
        event=lambda: dpa.LaplaceDpEvent(concrete("noise_multiplier", noise_multiplier)),
    )


@checked
def staircase(
    clip_norm: LatticeNorms,
    noise_multiplier: NonNegativeNumbers,
    *,
    num_entries: int,
    relation: str = "add_remove",
) -> Mechanism:
    """Builds the staircase mechanism on a sum of contributions whose entries are bounded.

    It beats Laplace noise on single numbers with a large ε. A vector costs as much as all its
    entries together, so it suits models of few parameters.

    Guarantee: one release is ε-DP with `ε = num_entries/noise_multiplier` under add/remove, and
    twice that under replace-one. Entries are rounded to a lattice, on which sums are exact
    (`clipping.clip_entries_to_lattice`) as long as every partial sum stays within 2^24 units of it,
    or the sum is made by `core.sums`, as rounds make it; sums are cut off 2,048 bounds or more from
    zero.

    Args:
      clip_norm: bound on the absolute value of every entry, above 2^-100, or inf; may be traced.
      noise_multiplier: 1/ε of one entry, from 1/16 to 65,536, or 0, which adds no noise; may be
        traced. Any other traced value releases zeros.
      num_entries: the number of entries of one contribution, at least 1.
      relation: "add_remove", "zero_out" or "replace_one".

    Returns:
      The mechanism.

    Source: Geng, Kairouz, Oh, Viswanath 2015.
    """

    if not checks.is_traced(noise_multiplier):
        ranges.check(
            {"noise_multiplier": noise_multiplier}, {"noise_multiplier": StaircaseMultiplier}
        )

    return _by_entries(
        "staircase",
        clip_norm,
        noise_multiplier,
        num_entries,
        relation,
        noise.add_staircase,
        noise.staircase_stddev,
        lambda z: noise.StaircaseDpEvent(z, num_entries),
    )


@checked
def bounded_laplace(
    clip_norm: LatticeNorms,
    noise_multiplier: NonNegativeNumbers,
    *,
    num_entries: int,
    entry_delta: HalfFraction,
    relation: str = "add_remove",
) -> Mechanism:
    """Builds the bounded Laplace mechanism on a sum of contributions whose entries are bounded.

    No release is farther from the exact sum than `noise.bounded_laplace_range`. The price of
    a vector is that of its entries together, so that it is for models of few parameters.

    Guarantee: one entry of one release is (1/noise_multiplier, entry_delta)-DP under add/remove;
    its entries add up, and replace-one costs as much as two units in a row. Entries are rounded and
    sums are cut off as in `staircase`, under the same condition on partial sums.

    Args:
      clip_norm: bound on the absolute value of every entry, above 2^-100, or inf; may be traced.
      noise_multiplier: 1/ε of one entry, at least 0; may be traced; 0 adds no noise.
      num_entries: the number of entries of one contribution, at least 1.
      entry_delta: δ of one entry, in (0, 1/2).
      relation: "add_remove", "zero_out" or "replace_one".

    Returns:
      The mechanism.

    Source: Geng, Ding, Guo, Kumar 2020.
    """

    def noise_of(key: PRNGKey, total: PyTree, epsilon: jax.Array, step: jax.Array) -> PyTree:
        return noise.add_bounded_laplace(key, total, epsilon, entry_delta, step)

    return _by_entries(
        "bounded_laplace",
        clip_norm,
        noise_multiplier,
        num_entries,
        relation,
        noise_of,
        lambda epsilon: noise.bounded_laplace_stddev(epsilon, entry_delta),
        lambda z: noise.BoundedLaplaceDpEvent(z, num_entries, entry_delta),
    )


def _by_entries(
    name: str,
    clip_norm: Norms,
    noise_multiplier: NonNegativeNumbers,
    num_entries: int,
    relation: str,
    noise_of: Callable[..., PyTree],
    stddev_of: Callable[[jax.Array], jax.Array],
    event_of: Callable[[float], DpEvent],
) -> Mechanism:
    """Builds a mechanism that noises every entry separately; ε of one is 1/multiplier."""
    checks.whole("num_entries", num_entries)
    bound = clip_norm * math.sqrt(num_entries)
    sensitivity = sensitivities.sensitivity_of_sum(bound, relation)
    multiplier = jnp.asarray(noise_multiplier, jnp.float32)
    epsilon = 1 / jnp.where(multiplier > 0, multiplier, 1)

    def add_noise(key: PRNGKey, total: PyTree) -> PyTree:
        rule = f"be {num_entries}, the number of entries that is accounted for"
        count = trees.num_parameters(total)
        checks.require(count == num_entries, "number of entries in the sum", rule, count)
        # The largest move of an entry under add/remove.
        step = jnp.asarray(clip_norm, jnp.float32)
        noised = noise_of(key, clipping.within_exact_sums(total, step), epsilon, step)
        # A traced multiplier that is not valid releases zeros, as for other noise.
        is_valid = jnp.isfinite(multiplier) & (multiplier >= 0)
        return jax.tree.map(
            lambda a, b: jnp.where(multiplier == 0, a, jnp.where(is_valid, b, 0)), total, noised
        )

    return Mechanism(
        name=name,
        clip=lambda tree: clipping.clip_entries_to_lattice(tree, clip_norm),
        sensitivity=sensitivity,
        noise_stddev=jnp.where(multiplier > 0, clip_norm * stddev_of(epsilon), 0.0),
        add_noise=add_noise,
        event=lambda: event_of(concrete("noise_multiplier", noise_multiplier)),
    )
