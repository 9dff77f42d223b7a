"""The AFL mean: client weights ascend along the losses, within the simplex."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_dp.core import ranges, trees
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.ranges import Count, NonNegative
from fedjax_dp.core.trees import PyTree
from fedjax_dp.server.base import Stacked

# Limit on loss times step size, which prevents overflow.
_LARGEST_MOVE = 1e30


class UpdateWithLoss(NamedTuple):
    """An update, and its client's loss before training.

    Attributes:
      delta: the update.
      loss: exact mean loss at the received model, float32.
    """

    delta: PyTree
    loss: jax.Array


@checked
def onto_simplex(y: jax.Array) -> jax.Array:
    """Projects a point onto the simplex.

    Args:
      y: `[n]`, finite.

    Returns:
      `[n]`, at least 0, summing to 1, in the order of y.

    Source: Duchi and others 2008, figure 1.
    """
    # Entries 1 or more below the largest become 0; clamping them first keeps the sums exact.
    y = jnp.maximum(y - jnp.max(y), -1.0)
    ordered = jnp.sort(y)[::-1]
    gaps = (1 - jnp.cumsum(ordered)) / jnp.arange(1, len(y) + 1).astype(y.dtype)
    last = jnp.sum(ordered + gaps > 0) - 1
    return jnp.maximum(y + gaps[last], 0.0)


@checked
def agnostic_mean(num_clients: Count, step_size: NonNegative = 0.1) -> Stacked:
    """Averages updates by weights after an ascent step on the clients' losses.

    The new `λ ← Proj(λ + γ f)`, over all clients, weighs the updates of the same round, so no
    update can be added before all losses are known. An absent client counts with loss 0 and is left
    out of the mean, whose weights are scaled to sum to one.

    Args:
      num_clients: the population, at least 1.
      step_size: γ, at least 0; 0 is the plain mean.

    Returns:
      The aggregator of `UpdateWithLoss`; its state is λ, `[num_clients]`. Its info holds `weights`,
      the weight of each client in the mean, `[num_clients]`.

    Raises:
      ValueError: for a number out of its range.
    """
    numbers, own = {"step_size": step_size}, {"step_size": NonNegative}
    ranges.check(numbers, own)

    def contribute(state, numbers, update: UpdateWithLoss, sender):
        return jax.tree.map(trees.at_least_float32, update), sender.weight

    def combine(weights, numbers, stack, close):
        (delta, loss), size = stack
        counts = close.contributes & (size > 0)
        at = jnp.where(counts, close.roster.clients, num_clients)
        losses = jnp.zeros(num_clients).at[at].set(loss, mode="drop")
        moves = jnp.clip(numbers["step_size"] * losses, -_LARGEST_MOVE, _LARGEST_MOVE)
        # Equal moves change nothing; subtracting the largest preserves precision if moves are
        # large.
        climbed = onto_simplex(weights + (moves - jnp.max(moves)))
        weights = jnp.where(jnp.any(counts), climbed, weights)
        share = jnp.where(counts, weights[close.roster.clients], 0.0)
        share = share * trees.reciprocal(jnp.sum(share))
        mean = jax.tree.map(
            lambda d: jnp.tensordot(share, d, axes=1, precision=jax.lax.Precision.HIGHEST), delta
        )
        shown = jnp.zeros(num_clients).at[at].set(share, mode="drop")
        return weights, mean, {"weights": shown}

    def init(structure):
        return jnp.full(num_clients, 1.0 / num_clients, jnp.float32)

    return Stacked(init, contribute, combine, numbers=numbers, ranges=own)
