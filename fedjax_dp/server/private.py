"""Private means: clipped updates, noise of the server or of clients, a public divisor."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from scipy import stats

from fedjax_dp.core import checks, ranges, trees
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.keys import fold
from fedjax_dp.core.messages import Coded
from fedjax_dp.core.ranges import Count, HalfFraction, NonNegative, Positive
from fedjax_dp.core.trees import PyTree
from fedjax_dp.privacy import mechanisms
from fedjax_dp.privacy.accounting.calibration import rounded_up
from fedjax_dp.privacy.claims import ClientClaim, UnclaimedNoise
from fedjax_dp.privacy.events import concrete
from fedjax_dp.privacy.mechanisms import distributed
from fedjax_dp.privacy.mechanisms.clipping import (
    AdaptiveClipping,
    LatticeNorm,
    update_noise_multiplier,
)
from fedjax_dp.privacy.mechanisms.distributed import make_central_plan
from fedjax_dp.privacy.mechanisms.mechanism import Mechanism, StaircaseMultiplier
from fedjax_dp.privacy.mechanisms.noise import BandedNoise
from fedjax_dp.privacy.sensitivities import sensitivity_of_sum
from fedjax_dp.server.base import Diagnostic, Summed, stateless, update_alone

# The numbers of a private mean.
RANGES = {"clip_norm": Positive, "noise_multiplier": NonNegative, "expected_cohort_size": Positive}
# Probability that a Poisson cohort has more clients than shares of noise; such a round is lost.
_LOST_ROUNDS = 1e-4


@checked
def private_mean(
    make_mechanism: Callable[[Any, Any], Mechanism],
    clip_norm: float,
    noise_multiplier: float,
    expected_cohort_size: float,
) -> Summed:
    """Clips each update, sums, adds the mechanism's noise once, divides by a public constant.

    Guarantee: unit of privacy is one client; clip, sensitivity, noise and event come from the same
    mechanism. All clients have equal weight. An empty cohort releases noise.

    Args:
      make_mechanism: `(clip_norm, noise_multiplier) -> Mechanism`, of possibly traced numbers.
      clip_norm: bound on the norm of one client's update, above 0.
      noise_multiplier: noise scale over the largest contribution, at least 0.
      expected_cohort_size: the public divisor, above 0.

    Returns:
      The aggregator.

    Raises:
      ValueError: for a number out of its range.
    """
    start = {
        "clip_norm": clip_norm,
        "noise_multiplier": noise_multiplier,
        "expected_cohort_size": expected_cohort_size,
    }
    ranges.check(start, RANGES)

    def mechanism_of(numbers):
        return make_mechanism(numbers["clip_norm"], numbers["noise_multiplier"])

    def contribute(state, numbers, update, sender):
        widened = jax.tree.map(trees.at_least_float32, update)
        bounded, norm = mechanism_of(numbers).clip(widened)
        return bounded, (norm > numbers["clip_norm"]).astype(jnp.float32)

    def combine(state, numbers, total, close):
        summed, num_clipped = total
        mechanism, divisor = mechanism_of(numbers), numbers["expected_cohort_size"]
        mean = trees.scale(mechanism.add_noise(close.private_key, summed), 1.0 / divisor)
        info = {"num_clipped": num_clipped, "noise_stddev": mechanism.noise_stddev / divisor}
        return state, mean, info

    claim = ClientClaim(
        sensitivity=lambda state, numbers: mechanism_of(numbers).sensitivity,
        event=lambda numbers: mechanism_of(numbers).event(),
        divisor=lambda numbers: numbers["expected_cohort_size"],
        clips_whole=mechanism_of(start).clips_whole,
    )
    return Summed(
        stateless,
        contribute,
        combine,
        numbers=start,
        ranges=RANGES,
        claim=claim,
        message=update_alone,
    )


@checked
def gaussian_mean(
    clip_norm: float,
    noise_multiplier: float,
    expected_cohort_size: float,
    *,
    per_layer: bool = False,
) -> Summed:
    """Builds the private mean with Gaussian noise.

    Guarantee: unit of privacy is one client; under add/remove the sum has L2 sensitivity
    `clip_norm`, and the noise has standard deviation `noise_multiplier * clip_norm`.

    Args:
      clip_norm: bound on the L2 norm of one client's update, above 0.
      noise_multiplier: noise standard deviation over `clip_norm`, at least 0.
      expected_cohort_size: the public divisor, above 0.
      per_layer: clip layer by layer instead of over the whole update.

    Returns:
      The aggregator.

    Source: McMahan and others 2018, algorithm 1.
    """
    method = "per_layer" if per_layer else "global"
    gaussian = partial(mechanisms.gaussian, method=method)
    return private_mean(gaussian, clip_norm, noise_multiplier, expected_cohort_size)


@checked
def by_realised_count(mean: Summed) -> Summed:
    """Divides by the realised cohort size instead of a public constant.

    Guarantee: none, and the aggregator claims none: the realised size, and with it the scale of the
    noise, depends on the population. It is for comparison with papers that divide this way. A round
    without clients is skipped.

    Args:
      mean: a private mean, such as `gaussian_mean` builds.

    Returns:
      The aggregator, whose noise claims nothing.

    Source: Cheng and others 2022, algorithm 1.
    """

    def contribute(state, numbers, update, sender):
        return mean.contribute(state, numbers, update, sender), jnp.float32(1)

    def combine(state, numbers, total, close):
        contributions, count = total
        state, aggregate, info = mean.combine(state, numbers, contributions, close)
        factor = numbers["expected_cohort_size"] * trees.reciprocal(count)
        info = info | {"noise_stddev": info["noise_stddev"] * factor}
        return state, trees.scale(aggregate, factor), info

    reason = "the noise is scaled by the realised cohort size, which depends on the population"
    return mean._replace(contribute=contribute, combine=combine, claim=UnclaimedNoise(reason))


@checked
def laplace_mean(clip_norm: float, noise_multiplier: float, expected_cohort_size: float) -> Summed:
    """Builds the private mean with Laplace noise on updates clipped in L1 norm.

    Guarantee: unit of privacy is one client; one release on a given cohort is pure
    `1/noise_multiplier`-DP under add/remove.

    Args:
      clip_norm: bound on the L1 norm of one client's update, above 0.
      noise_multiplier: Laplace scale over `clip_norm`, at least 0.
      expected_cohort_size: the public divisor, above 0.

    Returns:
      The aggregator.
    """
    return private_mean(mechanisms.laplace, clip_norm, noise_multiplier, expected_cohort_size)


def staircase_mean(
    structure: PyTree, clip_norm: float, noise_multiplier: float, expected_cohort_size: float
) -> Summed:
    """Builds the private mean with staircase noise on updates whose entries are clipped.

    Guarantee: unit of privacy is one client; one release on a given cohort is pure
    `num_parameters/noise_multiplier`-DP under add/remove: for models of few parameters. Entries are
    rounded to multiples of about `clip_norm / 4096`, so that sums are exact, and sums are clipped
    at 2,048 clip norms or more from zero.

    Args:
      structure: shapes of an update.
      clip_norm: bound on the absolute value of every entry of one client's update, above 2^-100.
      noise_multiplier: 1/ε of one entry, from 1/16 to 65,536, or 0 for no noise.
      expected_cohort_size: the public divisor, above 0.

    Returns:
      The aggregator.

    Raises:
      ValueError: for a number out of its range.
    """
    staircase = partial(mechanisms.staircase, num_entries=trees.num_parameters(structure))
    mean = private_mean(staircase, clip_norm, noise_multiplier, expected_cohort_size)
    limits = {**RANGES, "clip_norm": LatticeNorm, "noise_multiplier": StaircaseMultiplier}
    ranges.check(mean.numbers, limits)
    return mean._replace(ranges=limits)


@checked
def bounded_laplace_mean(
    structure: PyTree,
    clip_norm: float,
    noise_multiplier: float,
    expected_cohort_size: float,
    entry_delta: HalfFraction,
) -> Summed:
    """Builds the private mean with bounded Laplace noise on updates whose entries are clipped.

    Guarantee: unit of privacy is one client; one release on a given cohort composes
    (1/noise_multiplier, entry_delta)-DP under add/remove over all parameters: for models of few
    parameters. Entries are rounded and sums are clipped as in `staircase_mean`.

    Args:
      structure: shapes of an update.
      clip_norm: bound on the absolute value of every entry of one client's update, above 2^-100.
      noise_multiplier: 1/ε of one entry, at least 0.
      expected_cohort_size: the public divisor, above 0.
      entry_delta: δ of one entry of one release, in (0, 1/2).

    Returns:
      The aggregator.
    """
    bounded_laplace = partial(
        mechanisms.bounded_laplace,
        num_entries=trees.num_parameters(structure),
        entry_delta=entry_delta,
    )
    mean = private_mean(bounded_laplace, clip_norm, noise_multiplier, expected_cohort_size)
    return mean._replace(ranges={**RANGES, "clip_norm": LatticeNorm})


@checked
def central_discrete_mean(
    structure: PyTree,
    clip_norm: float,
    noise_multiplier: float,
    expected_cohort_size: float,
    *,
    tolerance: float = 0.01,
) -> Summed:
    """Builds the private mean with discrete Gaussian noise that a trusted server adds.

    Every clipped update is rounded to a public lattice by itself, the integers are summed exactly,
    and the noise is drawn by integer arithmetic: no floating-point rounding affects the release,
    except in what is done to one client's update alone.

    Guarantee: unit of privacy is one client. Rounded updates have an L2 norm of at most `clip_norm`
    plus what rounding may add, which is checked for each of them; that bound is the sensitivity
    under add/remove and is part of the event.

    Args:
      structure: the updates, as arrays or shapes.
      clip_norm: bound on the L2 norm of one client's update before it is rounded, above 0.
      noise_multiplier: noise standard deviation over `clip_norm`, at least 0.
      expected_cohort_size: the public divisor, above 0.
      tolerance: the share by which rounding may lengthen an update, in (0, 1].

    Returns:
      The aggregator.

    Raises:
      ValueError: for a number out of its range.

    Source: Canonne, Kamath, Steinke 2020, theorem 14; Kairouz, Liu, Steinke 2021, definition 21.
    """
    size = trees.num_parameters(structure)
    plan = make_central_plan(size, clip_norm, noise_multiplier, tolerance=tolerance)
    return discrete_mean(structure, plan, expected_cohort_size)


@checked
def adaptive_gaussian_mean(
    rule: AdaptiveClipping, noise_multiplier: float, *, per_layer: bool = False
) -> Summed:
    """Builds the Gaussian mean whose clip norm follows a private quantile of the update norms.

    Guarantee: unit of privacy is one client. A round releases the noised sum and the noised count
    of unclipped updates; both together cost one Gaussian release of `noise_multiplier`, as the
    event states. The noise of the updates has the larger multiplier that this leaves.

    Args:
      rule: how the clip norm adapts; its `expected_cohort_size` is the public divisor.
      noise_multiplier: of a whole round, above 0.
      per_layer: clip layer by layer instead of over the whole update.

    Returns:
      The aggregator; its state holds the clip norm of the next round.

    Raises:
      ValueError: if the count alone would cost more than the round may.

    Source: Andrew, Thakkar, McMahan, Ramaswamy 2021, algorithm 1.
    """
    exact = update_noise_multiplier(noise_multiplier, rule.count_stddev)
    # The state holds float32: rounding up never increases the cost of the event that is read from
    # it.
    multiplier = float(rounded_up(exact))
    mean = gaussian_mean(
        rule.initial_clip_norm, multiplier, rule.expected_cohort_size, per_layer=per_layer
    )

    # The clip norm adapts over rounds, so it is state, not a number of the run.
    def with_clip(clip_norm, numbers):
        return {**numbers, "clip_norm": clip_norm}

    def contribute(clip_norm, numbers, update, sender):
        numbers = with_clip(clip_norm, numbers)
        bounded, num_clipped = mean.contribute((), numbers, update, sender)
        norm = jnp.where(num_clipped > 0, jnp.inf, 0.0)
        return bounded, num_clipped, rule.contribution(norm, clip_norm)

    def combine(clip_norm, numbers, total, close):
        summed, num_clipped, count = total
        of_mean = close.replace(private_key=fold(close.private_key, 0))
        _, aggregate, info = mean.combine(
            (), with_clip(clip_norm, numbers), (summed, num_clipped), of_mean
        )
        following, unclipped = rule.step(fold(close.private_key, 1), clip_norm, count)
        info |= {"clip_norm": clip_norm, "noised_unclipped_share": unclipped}
        return following, aggregate, info

    def of_round(numbers):
        multiplier = concrete("noise_multiplier", numbers["noise_multiplier"])
        return (multiplier**-2 + (2 * rule.count_stddev) ** -2) ** -0.5

    assert isinstance(mean.claim, ClientClaim)
    of_mean = mean.claim
    claim = ClientClaim(
        sensitivity=lambda clip_norm, numbers: of_mean.sensitivity(
            (), with_clip(clip_norm, numbers)
        ),
        event=lambda numbers: mechanisms.gaussian(1.0, of_round(numbers)).event(),
        divisor=of_mean.divisor,
        clips_whole=of_mean.clips_whole,
    )
    return mean._replace(
        init=lambda structure: jnp.float32(rule.initial_clip_norm),
        contribute=contribute,
        combine=combine,
        # Besides its update, a client reports whether it was within the bound.
        message=lambda update, weight: (update, Coded(jnp.zeros((), bool), 1)),
        broadcast=lambda clip_norm: clip_norm,
        numbers={k: v for k, v in mean.numbers.items() if k != "clip_norm"},
        ranges={k: v for k, v in RANGES.items() if k != "clip_norm"},
        claim=claim,
    )


@checked
def correlated_gaussian_mean(
    banded: BandedNoise,
    clip_norm: float,
    noise_multiplier: float,
    expected_cohort_size: float,
    *,
    per_layer: bool = False,
) -> Summed:
    """Builds the Gaussian mean with banded correlated noise, for cohorts that are not sampled.

    Guarantee: unit of privacy is one client. A client's participations are at least as many rounds
    apart as there are bands, so that they get independent columns of noise and each costs one
    Gaussian release of `noise_multiplier`; the engine refuses participations that are closer
    together.

    Args:
      banded: from `privacy.banded_noise`.
      clip_norm: bound on the L2 norm of one client's update, above 0.
      noise_multiplier: noise standard deviation over `clip_norm`, at least 0.
      expected_cohort_size: the public divisor, above 0.
      per_layer: clip layer by layer instead of over the whole update.

    Returns:
      The aggregator; its state holds a copy of the model for each band except one.

    Source: Kairouz and others 2021 (DP-FTRL); Choquette-Choo and others 2023, theorem 2.
    """
    gaussian = partial(mechanisms.gaussian, method="per_layer" if per_layer else "global")
    mean = private_mean(gaussian, clip_norm, noise_multiplier, expected_cohort_size)

    def combine(state, numbers, total, close):
        summed, num_clipped = total
        stddev = numbers["clip_norm"] * numbers["noise_multiplier"]
        divisor = numbers["expected_cohort_size"]
        state, noised = banded.add_noise(close.private_key, state, summed, stddev)
        info = {"num_clipped": num_clipped, "noise_stddev": stddev / divisor}
        return state, trees.scale(noised, 1.0 / divisor), info

    assert isinstance(mean.claim, ClientClaim)
    claim = mean.claim._replace(min_separation=len(banded.coefficients))
    return mean._replace(init=banded.init, combine=combine, claim=claim)


@checked
def num_shares(num_clients: Count, cohort_size: Positive) -> int:
    """Computes the fewest shares of noise that 1 cohort in 10,000 exceeds.

    Args:
      num_clients: the population.
      cohort_size: the expected cohort, above 0.

    Returns:
      The number, at least 2.

    Raises:
      ValueError: for a number out of its range.
    """
    largest = stats.binom.isf(_LOST_ROUNDS, num_clients, min(1.0, cohort_size / num_clients))
    return max(2, int(largest))


@checked
def discrete_mean(
    structure: PyTree, plan: distributed.Plan, expected_cohort_size: float, *, varies: bool = False
) -> Summed:
    """Builds the mean of DDGauss: rotate, round, noise at the client, sum modulo 2^B.

    Every client adds one share of noise. Nothing that it sends depends on the cohort, whose size it
    does not learn. If cohorts vary, the server adds the missing shares. It does not decode a round
    with more clients than shares but releases noise alone, since excess noise would reveal the
    size.

    Guarantee: unit of privacy is one client, which may send zeros instead of its update; the event
    is that of the plan, with `plan.num_shares` shares of noise in every release. If cohorts vary,
    there are exactly that many, so that the noise distribution does not depend on the cohort, as
    amplification by sampling requires; it also requires that the cohort and its size stay hidden
    from all untrusted parties, clients included. The server is trusted to add the missing shares,
    and knows the size. Secure aggregation is simulated by the exact modular sum: messages are in
    the highest B bits of words, so that the sum of words depends on the sum modulo 2^B alone. The
    count of clipped updates is exact, for the experimenter, and no claim covers it. A client whose
    update is not finite sends zeros with its noise. With `plan.colluders` above 0 the event also
    holds against an honest but curious server and that many clients, who may subtract the shares
    that they know, provided that messages are masked, see `server.secure.masked`. A plan with one
    share is noise that a trusted server adds, for cohorts of any size.

    Args:
      structure: the parameters, as arrays or shapes.
      plan: from `privacy.make_plan`, for this number of parameters.
      expected_cohort_size: the public divisor; unless cohorts vary, an integer of at least
        `plan.shares_in_sum` where each client adds a share.
      varies: whether cohorts vary, as under Poisson sampling, and the server adds the shares that
        are missing; the plan then has at least two, see `num_shares`. False where messages are
        masked: a sum of too few clients is lost.

    Returns:
      The aggregator; its info holds the bits that a client sends for each parameter, whether the
      round was lost and, unless messages are masked, `num_clipped`.

    Raises:
      ValueError: if fewer clients take part than shares of noise are accounted.

    Source: Kairouz, Liu, Steinke 2021, algorithms 1 and 2.
    """
    if plan.num_shares == 1:
        checks.positive("expected_cohort_size", expected_cohort_size)
        checks.require(not varies, "varies", "be false if the server adds all noise", varies)
    elif varies:
        checks.positive("expected_cohort_size", expected_cohort_size)
        checks.whole("plan.num_shares", plan.num_shares, at_least=2)
        rule = "be 0 if cohorts vary, since the server knows the shares that it adds"
        checks.require(plan.colluders == 0, "plan.colluders", rule, plan.colluders)
    else:
        checks.whole("expected_cohort_size", expected_cohort_size)
        rule = f"be at most the cohort of {expected_cohort_size} clients"
        fits = plan.shares_in_sum <= expected_cohort_size
        shares = "plan.shares_in_sum" if plan.colluders else "plan.num_shares"
        checks.require(fits, shares, rule, plan.shares_in_sum)
    mechanism = distributed.discrete_mechanism(structure, plan)
    size = trees.num_parameters(structure)
    # In the highest bits, sums of words lose what overflows 2^B, which no event covers.
    shift = 32 - plan.bits

    def contribute(state, numbers, update, sender):
        return jax.tree.map(trees.at_least_float32, update)

    def encode(state, numbers, contribution, sender):
        was_clipped = (trees.l2_norm(contribution) > plan.clip_norm).astype(jnp.float32)
        message = mechanism.encode(sender.public_key, sender.key, contribution)
        return message << shift, Diagnostic(was_clipped), jnp.int32(1)

    def filled(key, messages, count):
        is_lost = count > plan.num_shares
        messages = jnp.where(is_lost, jnp.zeros_like(messages), messages)
        missing = plan.num_shares - jnp.where(is_lost, 0, count)
        return mechanism.add_shares(key, messages, missing), is_lost

    def combine(state, numbers, total, close):
        words, clipped, count = total
        messages = words >> shift
        if varies:
            noised, is_lost = filled(close.private_key, messages, count)
        else:
            noised, is_lost = mechanism.add_noise(close.private_key, messages), False
        summed = mechanism.decode(close.public_key, noised)
        info = {
            "bits_per_parameter": jnp.float32(plan.bits * plan.dimension / size),
            "noise_stddev": jnp.float32(plan.noise_stddev / expected_cohort_size),
            "num_lost": jnp.int32(is_lost),
        }
        if clipped is not None:
            info["num_clipped"] = clipped.value
        return state, trees.scale(summed, 1.0 / expected_cohort_size), info

    claim = ClientClaim(
        sensitivity=lambda state, numbers: sensitivity_of_sum(plan.l2_norm * plan.granularity),
        event=lambda numbers: mechanism.event(),
        min_participants=plan.shares_in_sum if plan.num_shares > 1 and not varies else 0,
        divisor=lambda numbers: expected_cohort_size,
    )

    def message(update, weight):
        return Coded(jnp.zeros(plan.dimension, jnp.uint32), plan.bits)

    return Summed(stateless, contribute, combine, encode=encode, claim=claim, message=message)
