"""Means and sums of updates, streamed: weighted, uniform, by model, by part, counted, sparse."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_dp.core import checks, masks, ranges, trees
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.masks import Sparse
from fedjax_dp.core.ranges import Count, Index, Positive
from fedjax_dp.core.trees import PyTree
from fedjax_dp.server.base import Summed, stateless, update_alone, update_and_weight


def weighted_mean() -> Summed:
    """Averages updates by client weight; the aggregate is zero if all weights are.

    Returns:
      The aggregator. It bounds no update, so noise on the aggregate is refused.

    Source: McMahan and others 2017, algorithm 1.
    """

    def contribute(state, numbers, update, sender):
        widened = jax.tree.map(trees.at_least_float32, update)
        return trees.scale(widened, sender.weight), sender.weight

    def combine(state, numbers, total, close):
        summed, weight = total
        return state, trees.scale(summed, trees.reciprocal(weight)), {"total_weight": weight}

    return Summed(stateless, contribute, combine)


def uniform_mean() -> Summed:
    """Averages updates with equal weights, regardless of client sizes.

    A client without examples counts in the divisor: it sends an update of zeros.

    Returns:
      The aggregator.
    """
    mean = weighted_mean()

    def contribute(state, numbers, update, sender):
        return mean.contribute(state, numbers, update, sender.replace(weight=jnp.float32(1)))

    return mean._replace(contribute=contribute, message=update_alone)


@checked
def scaled_sum(divisor: Positive) -> Summed:
    """Adds updates and divides by a constant that does not depend on the cohort.

    Args:
      divisor: the constant, above 0, such as the number of clients in the population.

    Returns:
      The aggregator.
    """
    numbers, limits = {"divisor": divisor}, {"divisor": Positive}
    ranges.check(numbers, limits)

    def contribute(state, numbers, update, sender):
        return jax.tree.map(trees.at_least_float32, update)

    def combine(state, numbers, total, close):
        return state, trees.scale(total, 1.0 / numbers["divisor"]), {}

    return Summed(
        stateless, contribute, combine, numbers=numbers, ranges=limits, message=update_alone
    )


@checked
def per_part(parts: Mapping[str, Summed]) -> Summed:
    """Aggregates the entries of a dict update, each by its own aggregator.

    Args:
      parts: the aggregator for each key of the update, all summed and without privacy claims.

    Returns:
      The aggregator; its aggregate has the same keys.

    Raises:
      ValueError: if a part is stacked or adds noise, since one claim cannot cover a mixture.
    """
    for name, part in parts.items():
        is_summed, kind = isinstance(part, Summed), type(part).__name__
        checks.require(is_summed, f"parts[{name!r}]", "be a Summed aggregator", kind)
        rule = "add no noise and encode nothing: one aggregator of the whole dict, such as "
        rule += "gaussian_mean, clips all parts together"
        done = "noise" if part.claim is not None else "an encoding"
        is_plain = part.claim is None and part.encode is None
        checks.require(is_plain, f"parts[{name!r}]", rule, done)

    def init(structure):
        return {name: part.init(structure[name]) for name, part in parts.items()}

    def contribute(state, numbers, update, sender):
        return {
            name: part.contribute(state[name], numbers[name], update[name], sender)
            for name, part in parts.items()
        }

    def combine(state, numbers, total, close):
        done = {
            name: part.combine(state[name], numbers[name], total[name], close)
            for name, part in parts.items()
        }
        info = {f"{name}_{k}": v for name, (_, _, i) in done.items() for k, v in i.items()}
        return {n: d[0] for n, d in done.items()}, {n: d[1] for n, d in done.items()}, info

    numbers = {name: part.numbers for name, part in parts.items()}
    limits = {name: part.ranges for name, part in parts.items()}

    def broadcast(state):
        return {name: part.broadcast(state[name]) for name, part in parts.items()}

    # One weight is sent for all parts that read it.
    is_weighed = any(part.message is update_and_weight for part in parts.values())
    message = update_and_weight if is_weighed else update_alone
    return Summed(
        init,
        contribute,
        combine,
        numbers=numbers,
        ranges=limits,
        broadcast=broadcast,
        message=message,
    )


class ModelChoice(NamedTuple):
    """An update to one of several server models.

    Attributes:
      model: the index of the model that the client trained, int32.
      delta: its update.
    """

    model: Any
    delta: PyTree


def spread(delta: PyTree, shares: jax.Array) -> PyTree:
    """Multiplies a delta by the share of each model, to leaves `[models, ...]` in float32."""
    return jax.tree.map(
        lambda d: shares.reshape(-1, *[1] * d.ndim) * trees.at_least_float32(d), delta
    )


def by_model(stack: PyTree, factors: jax.Array) -> PyTree:
    """Multiplies leaves `[models, ...]` by a factor for each model."""
    return jax.tree.map(lambda s: s * factors.reshape(-1, *[1] * (s.ndim - 1)), stack)


@checked
def mean_per_model(num_models: Count, *, is_weighted: bool = True) -> Summed:
    """Averages, for each server model, the updates of the clients that chose it.

    Args:
      num_models: the number of server models, at least 1.
      is_weighted: weight clients by their number of examples instead of equally.

    Returns:
      The aggregator of `ModelChoice` updates; its aggregate is `[models, ...]`, zero for a model
      that no client chose.
    """

    def contribute(state, numbers, update: ModelChoice, sender):
        share = jax.nn.one_hot(update.model, num_models) * (sender.weight if is_weighted else 1.0)
        return spread(update.delta, share), share

    def combine(state, numbers, total, close):
        summed, weight = total
        return state, by_model(summed, trees.reciprocal(weight)), {"weight_per_model": weight}

    message = update_and_weight if is_weighted else update_alone
    return Summed(stateless, contribute, combine, message=message)


class CountedMean(NamedTuple):
    """A mean of updates.

    Attributes:
      mean: the mean; zeros if there is no update.
      num_averaged: the number of updates in it, float32.
    """

    mean: PyTree
    num_averaged: jax.Array


@checked
def counted_mean(*, required: Index = 0) -> Summed:
    """Divides the sum of all updates by the number of clients of weights above 0.

    A client of weight 0 sends zeros, or its share of noise, which the sum then has whole.

    Args:
      required: how many updates a round needs, such as those whose noise comes in shares; with
        fewer it is lost, and its mean is that of no update.

    Returns:
      The aggregator, whose aggregate is a `CountedMean`.
    """

    def contribute(state, numbers, update, sender):
        widened = jax.tree.map(trees.at_least_float32, update)
        return widened, (sender.weight > 0).astype(jnp.float32)

    def combine(state, numbers, total, close):
        summed, count = total
        is_lost = count < required
        count = jnp.where(is_lost, 0.0, count)
        mean = trees.scale(summed, trees.reciprocal(count))
        info = {"num_averaged": count, "is_lost": is_lost.astype(jnp.float32)}
        return state, CountedMean(mean, count), info

    return Summed(stateless, contribute, combine, message=update_and_weight)


@checked
def sparse_mean(*, is_masked: bool = True) -> Summed:
    """Averages sparse updates, with equal weights for all clients of weight above 0.

    Sums and counts are streamed, so that a cohort is never stacked.

    Args:
      is_masked: divide each coordinate by the number of clients that keep it, as LotteryFL does;
        else by the number of all contributing clients, which shrinks weights that some have pruned:
        the plain mean of FedLTN's listing.

    Returns:
      The aggregator of `Sparse` updates, which refuses all others. Its aggregate is `Sparse` too;
      the mask marks the coordinates that some client keeps, and all others are 0. It bounds no
      update, so noise on the aggregate is refused.

    Source: Li and others 2021 (LotteryFL), equation 4.
    """

    def contribute(state, numbers, update: Sparse, sender):
        rule = "be Sparse for a sparse mean, as tickets are"
        checks.require(isinstance(update, Sparse), "updates", rule, type(update).__name__)
        joins = sender.weight > 0
        values = masks.applied(update.mask, jax.tree.map(trees.at_least_float32, update.values))
        kept = jax.tree.map(lambda m: (m & joins).astype(jnp.int32), update.mask)
        return trees.scale(values, joins), kept, joins.astype(jnp.int32)

    def combine(state, numbers, total, close):
        summed, kept, count = total

        def counted(n, x):
            return jax.tree.map(lambda y: jnp.broadcast_to(count, y.shape), x) if n is None else n

        kept = jax.tree.map(counted, kept, summed, is_leaf=lambda n: n is None)
        divisors = kept if is_masked else jax.tree.map(lambda n: jnp.where(n > 0, count, 0), kept)
        mean = jax.tree.map(lambda x, n: x * trees.reciprocal(n.astype(x.dtype)), summed, divisors)
        return state, Sparse(mean, jax.tree.map(lambda n: n > 0, kept)), {}

    return Summed(stateless, contribute, combine)
