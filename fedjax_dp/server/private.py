"""Private means: clipped updates, one noise on their sum, a public divisor."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_dp.core import checks, trees
from fedjax_dp.core.keys import fold
from fedjax_dp.core.trees import PyTree
from fedjax_dp.privacy import mechanisms
from fedjax_dp.privacy.adaptive_clipping import AdaptiveClipping, update_noise_multiplier
from fedjax_dp.privacy.distributed import make_central_plan
from fedjax_dp.privacy.mechanisms import Mechanism
from fedjax_dp.server.base import Aggregator
from fedjax_dp.server.distributed import discrete_mean


class PrivateState(NamedTuple):
    """The numbers of a private mean; traced, so that a sweep does not recompile.

    Attributes:
      clip_norm: bound on the norm of one client's update.
      noise_multiplier: noise scale over the largest contribution.
    """

    clip_norm: jax.Array
    noise_multiplier: jax.Array


def private_mean(
    make_mechanism: Callable[[Any, Any], Mechanism],
    clip_norm: float,
    noise_multiplier: float,
    expected_cohort_size: float,
) -> Aggregator:
    """Clips each update, sums, adds the mechanism's noise once, divides by a public constant.

    Guarantee: unit of privacy is one client; clip, sensitivity, noise and event come from the same
    mechanism. All clients weigh the same. An empty cohort releases noise.

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
    checks.positive("clip_norm", clip_norm)
    checks.non_negative("noise_multiplier", noise_multiplier)
    checks.positive("expected_cohort_size", expected_cohort_size)

    def init(params):
        del params
        return PrivateState(jnp.float32(clip_norm), jnp.float32(noise_multiplier))

    def contribute(state, update, weight):
        del weight
        bounded, norm = make_mechanism(*state).clip(jax.tree.map(trees.at_least_float32, update))
        return bounded, (norm > state.clip_norm).astype(jnp.float32)

    def combine(state, total, key):
        summed, num_clipped = total
        mechanism = make_mechanism(*state)
        mean = trees.scale(mechanism.add_noise(key, summed), 1.0 / expected_cohort_size)
        info = {
            "num_clipped": num_clipped,
            "noise_stddev": mechanism.noise_stddev / expected_cohort_size,
        }
        return state, mean, info

    return Aggregator(
        init,
        contribute,
        combine,
        sensitivity=lambda state: make_mechanism(*state).sensitivity,
        event=lambda state: make_mechanism(*state).event(),
    )


def gaussian_mean(
    clip_norm: float,
    noise_multiplier: float,
    expected_cohort_size: float,
    *,
    per_layer: bool = False,
) -> Aggregator:
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

    Source: McMahan and others 2018, algorithm 1; `user_level_dp` section 2.
    """
    method = "per_layer" if per_layer else "global"
    gaussian = partial(mechanisms.gaussian, method=method)
    return private_mean(gaussian, clip_norm, noise_multiplier, expected_cohort_size)


def by_realised_count(mean: Aggregator, expected_cohort_size: float) -> Aggregator:
    """Divides by how many clients took part instead of by a public constant.

    Guarantee: none, and the aggregator claims none: the number that took part, and with it the
    scale of the noise, depends on who is in the population. It is for comparison with papers that
    divide so. A round without anybody is skipped.

    Args:
      mean: a private mean, such as `gaussian_mean` builds.
      expected_cohort_size: the public divisor that it was built with, above 0.

    Returns:
      The aggregator, without event and sensitivity.

    Source: Cheng and others 2022, algorithm 1; `user_level_dp` section 2.
    """
    checks.positive("expected_cohort_size", expected_cohort_size)

    def combine(state, total, key):
        contributions, count = total
        state, aggregate, info = mean.combine(state, contributions, key)
        factor = jnp.where(count > 0, expected_cohort_size / jnp.maximum(count, 1.0), 0.0)
        info = info | {"noise_stddev": info["noise_stddev"] * factor}
        return state, trees.scale(aggregate, factor), info

    return mean._replace(
        contribute=lambda state, update, weight: (
            mean.contribute(state, update, weight),
            jnp.float32(1),
        ),
        combine=combine,
        sensitivity=None,
        event=None,
        adds_noise=True,
    )


def laplace_mean(
    clip_norm: float, noise_multiplier: float, expected_cohort_size: float
) -> Aggregator:
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
) -> Aggregator:
    """Builds the private mean with staircase noise on updates whose entries are cut off.

    Guarantee: unit of privacy is one client; one release on a given cohort is pure
    `num_parameters/noise_multiplier`-DP under add/remove: for models of few parameters.

    Args:
      structure: shapes of an update.
      clip_norm: bound on the absolute value of every entry of one client's update, above 0.
      noise_multiplier: 1/ε of one entry, at least 0.
      expected_cohort_size: the public divisor, above 0.

    Returns:
      The aggregator.
    """
    staircase = partial(mechanisms.staircase, num_entries=trees.num_parameters(structure))
    return private_mean(staircase, clip_norm, noise_multiplier, expected_cohort_size)


def bounded_laplace_mean(
    structure: PyTree,
    clip_norm: float,
    noise_multiplier: float,
    expected_cohort_size: float,
    entry_delta: float,
) -> Aggregator:
    """Builds the private mean with bounded Laplace noise on updates whose entries are cut off.

    Guarantee: unit of privacy is one client; one release on a given cohort composes
    (1/noise_multiplier, entry_delta)-DP under add/remove over all parameters: for models of few.

    Args:
      structure: shapes of an update.
      clip_norm: bound on the absolute value of every entry of one client's update, above 0.
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
    return private_mean(bounded_laplace, clip_norm, noise_multiplier, expected_cohort_size)


def central_discrete_mean(
    structure: PyTree,
    clip_norm: float,
    noise_multiplier: float,
    expected_cohort_size: float,
    *,
    tolerance: float = 0.01,
) -> Aggregator:
    """Builds the private mean with discrete Gaussian noise that a trusted server adds.

    Every clipped update is rounded to a public lattice on its own, the integers are summed exactly,
    and the noise is drawn by integer arithmetic: nothing that is released depends on how a floating
    point operation rounds, but for what is done to one client's update alone.

    Guarantee: unit of privacy is one client. Rounded updates have an L2 norm of at most `clip_norm`
    and what rounding adds, which is checked for each of them; that bound is the sensitivity under
    add/remove and stands in the event.

    Args:
      structure: the updates, as arrays or shapes.
      clip_norm: bound on the L2 norm of one client's update before it is rounded, above 0.
      noise_multiplier: noise standard deviation over `clip_norm`, at least 0.
      expected_cohort_size: the public divisor, above 0.
      tolerance: by what share rounding may lengthen an update, in (0, 1].

    Returns:
      The aggregator.

    Raises:
      ValueError: for a number out of its range.

    Source: Canonne, Kamath, Steinke 2020, theorem 14; Kairouz, Liu, Steinke 2021, definition 21.
    """
    size = trees.num_parameters(structure)
    plan = make_central_plan(size, clip_norm, noise_multiplier, tolerance=tolerance)
    return discrete_mean(structure, plan, expected_cohort_size)


def adaptive_gaussian_mean(
    rule: AdaptiveClipping, noise_multiplier: float, *, per_layer: bool = False
) -> Aggregator:
    """Builds the Gaussian mean whose clip norm follows a private quantile of the update norms.

    Guarantee: unit of privacy is one client. A round releases the noised sum and the noised count
    of unclipped updates; both together cost one Gaussian release of `noise_multiplier`, which is
    what the event says. The updates bear the larger multiplier that this leaves.

    Args:
      rule: how the clip norm follows; its `expected_count` is the public divisor.
      noise_multiplier: of a whole round, above 0.
      per_layer: clip layer by layer instead of over the whole update.

    Returns:
      The aggregator; its state holds the clip norm of the next round.

    Raises:
      ValueError: if the count alone would cost more than the round may.

    Source: Andrew, Thakkar, McMahan, Ramaswamy 2021, algorithm 1.
    """
    exact = update_noise_multiplier(noise_multiplier, rule.count_stddev)
    # The state holds float32: rounded up, so that the event read off it is never the dearer one.
    multiplier = float(np.nextafter(np.float32(exact), np.float32(np.inf)))
    mean = gaussian_mean(
        rule.initial_clip_norm, multiplier, rule.expected_count, per_layer=per_layer
    )

    def contribute(state, update, weight):
        bounded, num_clipped = mean.contribute(state, update, weight)
        norm = jnp.where(num_clipped > 0, jnp.inf, 0.0)
        return bounded, num_clipped, rule.contribution(norm, state.clip_norm)

    def combine(state, total, key):
        summed, num_clipped, count = total
        state, aggregate, info = mean.combine(state, (summed, num_clipped), fold(key, 0))
        clip_norm, unclipped = rule.step(fold(key, 1), state.clip_norm, count)
        info |= {"clip_norm": state.clip_norm, "noised_unclipped_share": unclipped}
        return state._replace(clip_norm=clip_norm), aggregate, info

    def of_round(state):
        return (float(state.noise_multiplier) ** -2 + (2 * rule.count_stddev) ** -2) ** -0.5

    return mean._replace(
        contribute=contribute,
        combine=combine,
        event=lambda state: mechanisms.gaussian(1.0, of_round(state)).event(),
    )
