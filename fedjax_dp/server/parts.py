"""Updates of several parts under one private mean: scales of parts, or shares of the bound."""

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_dp.core import checks, ranges, trees
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.ranges import Positive, Probability
from fedjax_dp.core.trees import PyTree
from fedjax_dp.privacy.claims import ClientClaim
from fedjax_dp.privacy.mechanisms.clipping import clip_by_global_norm
from fedjax_dp.server.base import Summed

# Squares of shares such as 0.6 and 0.8 add up to 1 up to rounding only.
_ROUNDING = 1e-6


@checked
def by_parts(
    mean: Summed,
    *,
    scales: Mapping[str, Positive] | None = None,
    shares: Mapping[str, Probability] | None = None,
) -> Summed:
    """Weighs the parts of an update against each other within the bound of one private mean.

    Without it a private mean clips an update that is a dict, such as that of SCAFFOLD, as one
    vector. With `scales` a client multiplies each part by a public number before that, and the
    server divides the noised part by it: a part with a larger scale takes more of the bound and has
    less noise. With `shares` each part is clipped by itself to its share of the bound, so that a
    long part does not shorten the others.

    Guarantee: that of the mean, whose clip bounds what a client sends in both forms. Parts are one
    vector, released once: squares of shares add up to 1, and dividing by scales is post-processing.

    Args:
      mean: a private mean.
      scales: by part, above 0; 1 for parts that are left out.
      shares: by part, in (0, 1], for every part of the update, with squares that add up to 1. For a
        mean that clips whole updates in L2 norm to a number of the run, such as `gaussian_mean`.

    Returns:
      The aggregator. With scales the `noise_stddev` in its info is the root mean square over all
      entries; with shares `num_clipped` counts clients of which some part was clipped.

    Raises:
      ValueError: for both or neither, a number out of its range, shares whose squares do not add up
        to 1 or with a mean that clips otherwise, or, when an update is first traced, parts that it
        does not have.
    """
    rule = "be given, or shares, and not both"
    checks.require((scales is None) != (shares is None), "scales", rule, (scales, shares))
    if shares is not None:
        return _within_shares(mean, shares)
    assert scales is not None
    ranges.check(scales, dict.fromkeys(scales, Positive), "scales.")

    def scaled(update: PyTree, power: int) -> PyTree:
        check_parts(scales, update, "scales", needs_all=False)
        widened = jax.tree.map(trees.at_least_float32, dict(update))
        factors = {part: scales.get(part, 1.0) ** power for part in widened}
        return {part: trees.scale(value, factors[part]) for part, value in widened.items()}

    def contribute(state, numbers, update, sender):
        return mean.contribute(state, numbers, scaled(update, 1), sender)

    def combine(state, numbers, total, close):
        state, aggregate, info = mean.combine(state, numbers, total, close)
        if "noise_stddev" in info:
            sizes = {part: trees.num_parameters(value) for part, value in aggregate.items()}
            squares = sum(size / scales.get(part, 1.0) ** 2 for part, size in sizes.items())
            stddev = info["noise_stddev"] * math.sqrt(squares / sum(sizes.values()))
            info = {**info, "noise_stddev": stddev}
        return state, scaled(aggregate, -1), info

    return mean._replace(contribute=contribute, combine=combine, claim=_in_parts(mean))


def _within_shares(mean: Summed, shares: Mapping[str, float]) -> Summed:
    """Clips each part to its share of the bound; what is left for the mean is the sum."""
    ranges.check(shares, dict.fromkeys(shares, Probability), "shares.")
    check_shares(shares, "shares")
    claim = mean.claim
    clips_whole = isinstance(claim, ClientClaim) and claim.clips_whole and mean.encode is None
    rule = "be left out for a mean that does not clip whole updates in L2 norm to a fixed bound"
    checks.require(clips_whole and "clip_norm" in mean.numbers, "shares", rule, dict(shares))

    def contribute(state, numbers, update, sender):
        check_parts(shares, update, "shares", needs_all=True)
        bounds = {part: share * numbers["clip_norm"] for part, share in shares.items()}
        pairs = {part: clip_by_global_norm(update[part], bound) for part, bound in bounds.items()}
        is_long = [norm > bounds[part] for part, (_, norm) in pairs.items()]
        is_finite = jnp.all(jnp.isfinite(jnp.stack([norm for _, norm in pairs.values()])))
        clipped = {part: value for part, (value, _) in pairs.items()}
        # One part that is not finite leaves nothing of the others.
        clipped = trees.where(is_finite, clipped, trees.zeros_like(clipped))
        num_clipped = jnp.any(jnp.stack(is_long)).astype(jnp.float32)
        return mean.contribute(state, numbers, clipped, sender), num_clipped

    def combine(state, numbers, total, close):
        contributions, num_clipped = total
        state, aggregate, info = mean.combine(state, numbers, contributions, close)
        return state, aggregate, {**info, "num_clipped": num_clipped}

    return mean._replace(contribute=contribute, combine=combine, claim=_in_parts(mean))


def _in_parts(mean: Summed) -> Any:
    """The claim of a mean of which an update is no longer scaled by one number."""
    claim = mean.claim
    rule = "bound updates and add noise, as gaussian_mean does"
    checks.require(claim is not None, "mean", rule, "one that does not")
    return claim._replace(clips_whole=False) if isinstance(claim, ClientClaim) else claim


def check_parts(
    named: Collection[str], update: Any, argument: str, *, needs_all: bool, of: str = "an update"
) -> None:
    """Requires names of parts that an update has."""
    rule = f"be left out for {of} of one part"
    checks.require(isinstance(update, Mapping), argument, rule, sorted(named))
    rule = f"name parts of {of}: {', '.join(update)}"
    checks.require(set(named) <= set(update), argument, rule, sorted(named))
    rule = f"name every part of {of}: {', '.join(update)}"
    checks.require(not needs_all or set(named) == set(update), argument, rule, sorted(named))


def check_shares(shares: Mapping[str, float], argument: str) -> None:
    """Requires shares of an L2 norm that together are all of it."""
    square = math.fsum(share**2 for share in shares.values())
    rule = "have squares that add up to 1"
    checks.require(abs(square - 1) <= _ROUNDING, argument, rule, dict(shares))


@checked
def public_divisor(mean: Summed, argument: str = "private_mean") -> Callable[[Any], Any]:
    """Finds the number by which a private mean divides its noised sum.

    Multiplied by it and divided by the population, a mean over a cohort is that cohort's part of a
    mean over the population. It takes the place of the number of clients that took part, which is
    not public.

    Args:
      mean: a private mean.
      argument: what an algorithm calls it, for an error.

    Returns:
      `(numbers) -> divisor`, of the numbers of the aggregator.

    Raises:
      ValueError: for a mean that claims no privacy, or does not divide by a public number.
    """
    divisor = mean.claim.divisor if isinstance(mean.claim, ClientClaim) else None
    rule = "be a private mean that divides by a public number, such as gaussian_mean"
    checks.require(divisor is not None, argument, rule, "one that does not")
    assert divisor is not None
    return divisor
