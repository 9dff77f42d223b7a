"""The mean of updates with their number, for clients that compute with their part of the mean."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_dp.core import trees
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.ranges import Index
from fedjax_dp.core.trees import PyTree
from fedjax_dp.server.base import Summed, stateless, update_and_weight


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
