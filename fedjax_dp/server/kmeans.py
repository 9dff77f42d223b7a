"""k-means of clients inside a compiled round, from the inner products of their updates."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from chex import PRNGKey

from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.keys import fold
from fedjax_dp.core.ranges import Count

_MAX_ITERATIONS = 50


class Clusters(NamedTuple):
    """A partition of points.

    Attributes:
      assignment: the cluster of each point, `[points]`, int32.
      inertia: summed squared distances of the points to the centres of their clusters.
    """

    assignment: jax.Array
    inertia: jax.Array


@checked
def kmeans(
    key: PRNGKey,
    gram: jax.Array,
    is_real: jax.Array,
    num_clusters: Count,
    *,
    num_restarts: Count = 10,
) -> Clusters:
    """Partitions points by k-means++ and Lloyd's iterations, and keeps the best restart.

    Centres are means of points, so that every distance is a sum of inner products: the cost follows
    the number of points and not their dimension.

    Args:
      key: used for the seeds only.
      gram: inner products, `[points, points]`.
      is_real: which of them are points, `[points]`, bool.
      num_clusters: at least 1.
      num_restarts: number of restarts, at least 1.

    Returns:
      The partition; points that are not real belong to cluster 0. With fewer points than clusters
      some clusters stay empty.

    Source: Arthur and Vassilvitskii 2007; Lloyd 1982.
    """
    squares = jnp.diagonal(gram)

    def distances_to(weights):
        """Squared distances to weighted means, `[points, clusters]`."""
        centre_squares = jnp.sum(weights * (gram @ weights), axis=0)
        between = squares[:, None] - 2 * gram @ weights + centre_squares[None, :]
        return jnp.maximum(between, 0.0)

    def first_centres(key):
        def add(c, chosen):
            nearest = jnp.min(
                jnp.where(jnp.arange(num_clusters) < c, distances_to(chosen), jnp.inf), axis=1
            )
            chance = jnp.where(is_real, jnp.where(c == 0, 1.0, nearest), 0.0)
            # If all points are at centres, any point will do.
            chance = jnp.where(jnp.sum(chance) > 0, chance, is_real.astype(jnp.float32))
            point = jax.random.categorical(fold(key, c), jnp.log(chance))
            return chosen.at[:, c].set(jax.nn.one_hot(point, len(squares)))

        empty = jnp.zeros((len(squares), num_clusters), jnp.float32)
        return jax.lax.fori_loop(0, num_clusters, add, empty)

    def weights_of(assignment, before):
        members = jax.nn.one_hot(assignment, num_clusters) * is_real[:, None].astype(jnp.float32)
        count = jnp.sum(members, axis=0)
        # A cluster that lost its points keeps its centre.
        return jnp.where(count > 0, members / jnp.maximum(count, 1), before)

    def assigned(weights):
        return jnp.argmin(distances_to(weights), axis=1).astype(jnp.int32)

    def one_restart(key):
        weights = first_centres(key)

        def step(carry):
            i, assignment, weights, _ = carry
            weights = weights_of(assignment, weights)
            after = assigned(weights)
            return i + 1, after, weights, jnp.any((after != assignment) & is_real)

        carry = (jnp.int32(0), assigned(weights), weights, jnp.bool_(True))
        _, assignment, weights, _ = jax.lax.while_loop(
            lambda c: (c[0] < _MAX_ITERATIONS) & c[3], step, carry
        )
        own = jnp.take_along_axis(distances_to(weights), assignment[:, None], axis=1)[:, 0]
        return Clusters(assignment, jnp.sum(jnp.where(is_real, own, 0.0)))

    restarts = jax.vmap(lambda r: one_restart(fold(key, r)))(jnp.arange(num_restarts))
    best = jnp.argmin(restarts.inertia)
    assignment = jnp.where(is_real, restarts.assignment[best], 0)
    return Clusters(assignment, restarts.inertia[best])
