"""Means that need all updates of a cohort at once: agnostic, and projected."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from fedjax_dp.core import checks, ranges, trees
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.ranges import Count, NonNegative
from fedjax_dp.core.trees import PyTree
from fedjax_dp.server.base import Stacked, stateless

# Limit on loss times step size, which prevents overflow.
_LARGEST_MOVE = 1e30
_EXACT = jax.lax.Precision.HIGHEST
# Directions of a smaller share of the variance are rounding, not a subspace.
_SMALLEST_SHARE = 1e-6
# Deviations of so many units in the last place of a mean are rounding.
_ROUNDING = 8


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
    numbers, limits = {"step_size": step_size}, {"step_size": NonNegative}
    ranges.check(numbers, limits)

    def contribute(state, numbers, update: UpdateWithLoss, sender):
        return jax.tree.map(trees.at_least_float32, update), sender.weight

    def combine(weights, numbers, stack, close):
        (delta, loss), size = stack
        counts = close.contributes & (size > 0)
        rows = jnp.where(counts, close.roster.clients, num_clients)
        losses = jnp.zeros(num_clients).at[rows].set(loss, mode="drop")
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
        shown = jnp.zeros(num_clients).at[rows].set(share, mode="drop")
        return weights, mean, {"weights": shown}

    def init(structure):
        return jnp.full(num_clients, 1.0 / num_clients, jnp.float32)

    return Stacked(init, contribute, combine, numbers=numbers, ranges=limits)


@checked
def projected_mean(
    is_public: ArrayLike, *, num_components: Count = 1, is_standardized: bool = True
) -> Stacked:
    """Averages updates by given weights after projecting those of private clients.

    The subspace is spanned by the leading principal components of the public clients' updates of
    the round. A projection into it is a combination of those updates, and so is the aggregate: its
    coefficients come from products of updates, O(p n²), and no projected update is formed.

    Args:
      is_public: whether each client is public, `[num_clients]`.
      num_components: k, dimensions of the subspace, at least 1; fewer if fewer than k + 1 public
        clients take part.
      is_standardized: divide coordinates by their standard deviation over the public clients before
        the components are computed, besides subtracting the mean.

    Returns:
      The aggregator. With fewer than two public clients in a round there is no subspace, and
      updates are averaged without projection. Its info holds `weights` before the projection and
      `combination`, the coefficients of the updates after it, `[num_clients]`.

    Raises:
      ValueError: naming the argument, the rule and the value.

    Source: Liu and others 2021 (PFA); Malekmohammadi 2025, section 3.6, for the standardisation.
    """
    public_host = np.asarray(is_public)
    fits = public_host.ndim == 1 and public_host.dtype == bool and len(public_host) > 0
    checks.require(fits, "is_public", "hold a bool for each client", is_public)
    num_clients = len(public_host)

    def contribute(state, numbers, update, sender):
        return jax.tree.map(trees.at_least_float32, update), sender.weight

    def combine(state, numbers, stack, close):
        (update, weight), clients = stack, close.roster.clients
        counts = close.contributes & (weight > 0)
        weight = jnp.where(counts, weight, 0.0)
        weight = weight * trees.reciprocal(jnp.sum(weight))
        public = counts & jnp.asarray(public_host)[clients]
        num_public = jnp.sum(public)
        share = jnp.where(public, 1 / jnp.maximum(num_public, 1), 0.0)

        def products(updates):
            rows = updates.reshape(updates.shape[0], -1)
            mean = jnp.tensordot(share, rows, axes=1, precision=_EXACT)
            centred = rows - mean
            variance = jnp.tensordot(share, jnp.square(centred), axes=1, precision=_EXACT)
            # Rounding residue of equal coordinates is not a direction.
            rounding = _ROUNDING * jnp.finfo(rows.dtype).eps * jnp.abs(mean)
            is_spread = variance > jnp.square(rounding)
            divisor = jnp.sqrt(variance) if is_standardized else 1.0
            centred = jnp.where(is_spread, centred / jnp.where(is_spread, divisor, 1.0), 0.0)
            return jnp.matmul(
                centred * public[:, None].astype(rows.dtype), centred.T, precision=_EXACT
            )

        # Products of each public update with every update, as PCA sees them.
        gram = sum(jax.tree.leaves(jax.tree.map(products, update)))
        eigenvalues, vectors = jnp.linalg.eigh(gram * public.astype(jnp.float32))
        kept = eigenvalues > _SMALLEST_SHARE * jnp.maximum(eigenvalues[-1], 0.0)
        kept &= jnp.arange(len(kept)) >= len(kept) - num_components
        inverse = jnp.where(kept, 1.0 / jnp.where(kept, eigenvalues, 1.0), 0.0)
        private_weight = jnp.where(public, 0.0, weight)
        projected = jnp.matmul(gram, private_weight, precision=_EXACT)
        projected = jnp.matmul(vectors.T, projected, precision=_EXACT) * inverse
        projected = jnp.where(public, jnp.matmul(vectors, projected, precision=_EXACT), 0.0)
        # Each private update adds the mean of the public ones; its part in the subspace adds no
        # mean, since the components of centred updates are orthogonal to a constant.
        combination = jnp.where(public, weight + projected + jnp.sum(private_weight) * share, 0.0)
        combination = jnp.where(num_public >= 2, combination, weight)
        aggregate = jax.tree.map(
            lambda d: jnp.tensordot(combination, d, axes=1, precision=_EXACT), update
        )
        rows = jnp.where(counts, clients, num_clients)
        by_client = jnp.zeros(num_clients, weight.dtype).at[rows]
        info = {
            "weights": by_client.set(weight, mode="drop"),
            "combination": by_client.set(combination, mode="drop"),
        }
        return state, aggregate, info

    return Stacked(stateless, contribute, combine)
