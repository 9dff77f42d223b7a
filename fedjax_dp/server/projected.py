"""The mean of PFA: noisy updates are projected onto the subspace of the clean ones."""

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from fedjax_dp.core import checks, trees
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.ranges import Count
from fedjax_dp.server.base import Stacked, stateless

_EXACT = jax.lax.Precision.HIGHEST
# Directions of a smaller share of the variance are rounding, not a subspace.
_SMALLEST_SHARE = 1e-6
_ROUNDING = 8


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
    checks.require(
        public_host.ndim == 1 and public_host.dtype == bool and len(public_host) > 0,
        "is_public",
        "hold a bool for each client",
        is_public,
    )
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
        at = jnp.where(counts, clients, num_clients)
        by_client = jnp.zeros(num_clients, weight.dtype).at[at]
        info = {
            "weights": by_client.set(weight, mode="drop"),
            "combination": by_client.set(combination, mode="drop"),
        }
        return state, aggregate, info

    return Stacked(stateless, contribute, combine)
