"""Means and sums of updates, streamed: plain, by model, by part, clipped and noised."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import dp_accounting
import jax
import jax.numpy as jnp

from fedjax_dp.core import checks, trees
from fedjax_dp.core.trees import PyTree
from fedjax_dp.privacy import clipping, noise
from fedjax_dp.server.base import Aggregator, stateless


def weighted_mean() -> Aggregator:
    """Averages updates by client weight; without any weight the aggregate is zero.

    Returns:
      The aggregator. It bounds nothing, so that noise behind it is refused.

    Source: McMahan and others 2017, algorithm 1.
    """

    def contribute(state, update, weight):
        return trees.scale(jax.tree.map(trees.at_least_float32, update), weight), weight

    def combine(state, total, key):
        summed, weight = total
        share = jnp.where(weight > 0, 1.0 / jnp.where(weight > 0, weight, 1.0), 0.0)
        return state, trees.scale(summed, share), {"total_weight": weight}

    return Aggregator(stateless, contribute, combine)


def uniform_mean() -> Aggregator:
    """Averages updates with equal weights, whatever the clients' sizes.

    Returns:
      The aggregator.
    """
    mean = weighted_mean()
    return mean._replace(
        contribute=lambda state, update, weight: mean.contribute(state, update, jnp.float32(1))
    )


def scaled_sum(divisor: float) -> Aggregator:
    """Adds updates and divides by a constant that does not depend on the cohort.

    Args:
      divisor: the constant, above 0, such as the number of clients in the population.

    Returns:
      The aggregator.
    """
    checks.positive("divisor", divisor)
    return Aggregator(
        stateless,
        lambda state, update, weight: jax.tree.map(trees.at_least_float32, update),
        lambda state, total, key: (state, trees.scale(total, 1.0 / divisor), {}),
    )


def per_part(parts: Mapping[str, Aggregator]) -> Aggregator:
    """Aggregates the entries of a dict update, each in its own way.

    Args:
      parts: for each key of the update its aggregator; all of them summed and without privacy
        claims.

    Returns:
      The aggregator; its aggregate has the same keys.

    Raises:
      ValueError: if a part is stacked or adds noise, since one claim cannot cover a mixture.
    """
    for name, part in parts.items():
        checks.require(
            not part.is_stacked and part.event is None,
            f"parts[{name!r}]",
            "be summed and add no noise",
            part,
        )

    def combine(state, total, key):
        done = {name: part.combine(state[name], total[name], key) for name, part in parts.items()}
        info = {f"{name}_{k}": v for name, (_, _, i) in done.items() for k, v in i.items()}
        return {n: d[0] for n, d in done.items()}, {n: d[1] for n, d in done.items()}, info

    return Aggregator(
        lambda params: {name: part.init(params) for name, part in parts.items()},
        lambda state, update, weight: {
            name: part.contribute(state[name], update[name], weight) for name, part in parts.items()
        },
        combine,
    )


class ModelChoice(NamedTuple):
    """An update to one of several server models.

    Attributes:
      model: which model the client trained, int32.
      delta: its update.
    """

    model: jax.Array
    delta: PyTree


def mean_per_model(num_models: int, *, is_weighted: bool = True) -> Aggregator:
    """Averages, for each server model, the updates of the clients that chose it.

    Args:
      num_models: how many server models there are, at least 1.
      is_weighted: weight clients by their number of examples instead of equally.

    Returns:
      The aggregator of `ModelChoice` updates; its aggregate is `[models, ...]`, zero for a model
      that nobody chose.
    """
    checks.whole("num_models", num_models)

    def contribute(state, update: ModelChoice, weight):
        share = jax.nn.one_hot(update.model, num_models) * (weight if is_weighted else 1.0)
        spread = jax.tree.map(
            lambda d: share.reshape(-1, *[1] * d.ndim) * trees.at_least_float32(d), update.delta
        )
        return spread, share

    def combine(state, total, key):
        summed, weight = total
        inverse = jnp.where(weight > 0, 1.0 / jnp.where(weight > 0, weight, 1.0), 0.0)
        mean = jax.tree.map(lambda s: s * inverse.reshape(-1, *[1] * (s.ndim - 1)), summed)
        return state, mean, {"weight_per_model": weight}

    return Aggregator(stateless, contribute, combine)


class GaussianState(NamedTuple):
    """The numbers of a private mean; traced, so that a sweep does not recompile.

    Attributes:
      clip_norm: bound on the L2 norm of one client's update.
      noise_multiplier: noise standard deviation over the sensitivity of the sum.
    """

    clip_norm: jax.Array
    noise_multiplier: jax.Array


def gaussian_mean(
    clip_norm: float,
    noise_multiplier: float,
    expected_cohort_size: float,
    *,
    per_layer: bool = False,
) -> Aggregator:
    """Clips each update, sums, adds Gaussian noise once, divides by the expected cohort size.

    Guarantee: unit of privacy is one client; under add/remove the sum has L2 sensitivity
    `clip_norm`, whatever the cohort; the noise has standard deviation
    `noise_multiplier * clip_norm`. All clients weigh the same. An empty cohort releases noise.

    Args:
      clip_norm: bound on the L2 norm of one client's update, above 0.
      noise_multiplier: noise standard deviation over `clip_norm`, at least 0.
      expected_cohort_size: the public divisor, above 0.
      per_layer: clip layer by layer instead of over the whole update.

    Returns:
      The aggregator.

    Source: McMahan and others 2018, algorithm 1; `user_level_dp` section 2.
    """
    checks.positive("clip_norm", clip_norm)
    checks.non_negative("noise_multiplier", noise_multiplier)
    checks.positive("expected_cohort_size", expected_cohort_size)
    clip = clipping.clip_per_layer if per_layer else clipping.clip_by_global_norm

    def init(params):
        del params
        return GaussianState(jnp.float32(clip_norm), jnp.float32(noise_multiplier))

    def contribute(state, update, weight):
        del weight
        bounded, norm = clip(jax.tree.map(trees.at_least_float32, update), state.clip_norm)
        return bounded, (norm > state.clip_norm).astype(jnp.float32)

    def combine(state, total, key):
        summed, num_clipped = total
        stddev = state.noise_multiplier * sensitivity(state)
        noised = noise.add_gaussian(key, summed, stddev)
        info = {
            "num_clipped": num_clipped,
            "noise_stddev": stddev / expected_cohort_size,
        }
        return state, trees.scale(noised, 1.0 / expected_cohort_size), info

    def sensitivity(state) -> Any:
        return state.clip_norm

    def event(state):
        return dp_accounting.GaussianDpEvent(float(state.noise_multiplier))

    return Aggregator(init, contribute, combine, sensitivity=sensitivity, event=event)
