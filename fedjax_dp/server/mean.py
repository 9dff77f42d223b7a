"""Means and sums of updates, streamed: weighted, uniform, by model, by part."""

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_dp.core import checks, trees
from fedjax_dp.core.trees import PyTree
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
