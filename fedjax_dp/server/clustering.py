"""Clusters of clients: a mean for each cluster's model, similarities of clients, k-means."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from chex import PRNGKey

from fedjax_dp.core import checks, trees
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.keys import fold
from fedjax_dp.core.ranges import Count
from fedjax_dp.core.trees import PyTree
from fedjax_dp.server.base import Stacked, stateless
from fedjax_dp.server.mean import ModelChoice

FEATURES = ("centred", "authors")
# Of one restart of k-means.
_MAX_ITERATIONS = 50


class Similarity(NamedTuple):
    """Inner products of the clients' updates, which determine their principal components.

    Attributes:
      scatter: of the updates that the components are found from, `[clients, clients]`.
      cross: of the updates that are projected, rows, with those, columns, `[clients, clients]`.
      is_seen: the clients whose updates are included, `[clients]`, bool; other rows and columns are
        0.
    """

    scatter: jax.Array
    cross: jax.Array
    is_seen: jax.Array


class ClusterAggregate(NamedTuple):
    """The aggregate of a clustered algorithm.

    Attributes:
      mean: the mean update of each model's clients, `[models, ...]`; zero for a model that no
        client trained.
      similarity: of the round's updates.
    """

    mean: PyTree
    similarity: Similarity


def no_similarity(num_clients: int) -> Similarity:
    """Returns the similarity of a round without clients."""
    zeros = jnp.zeros((num_clients, num_clients), jnp.float32)
    return Similarity(zeros, zeros, jnp.zeros(num_clients, bool))


@checked
def similarity_of(deltas: PyTree, is_real: jax.Array, *, features: str = "centred") -> Similarity:
    """Computes the inner products of updates, so that updates need not be stored.

    "centred" subtracts the mean update. "authors" repeats the published code: components are found
    from updates whose every coordinate is centred and divided by its standard deviation, but the
    unmodified updates are projected.

    Args:
      deltas: `[slots, ...]`.
      is_real: which slots hold an update, `[slots]`, bool.
      features: "centred" or "authors".

    Returns:
      The similarity by slot.

    Source: the code of Malekmohammadi and others 2025 (R-DPCFL), corrected: it finds components of
    standardised updates and projects others on them.
    """
    count = jnp.maximum(jnp.sum(is_real), 1).astype(jnp.float32)
    num_slots = is_real.shape[0]
    scatter = cross = jnp.zeros((num_slots, num_slots), jnp.float32)
    for leaf in jax.tree.leaves(deltas):
        flat = trees.at_least_float32(leaf).reshape(num_slots, -1)
        flat = jnp.where(is_real[:, None], flat, 0.0)
        centred = jnp.where(is_real[:, None], flat - jnp.sum(flat, axis=0) / count, 0.0)
        if features == "authors":
            stddev = jnp.sqrt(jnp.sum(jnp.square(centred), axis=0) / count)
            scaled = centred / jnp.where(stddev > 0, stddev, 1.0)
            scatter = scatter + _inner(scaled, scaled)
            cross = cross + _inner(flat, scaled)
        else:
            scatter = scatter + _inner(centred, centred)
    if features == "centred":
        cross = scatter
    return Similarity(scatter, cross, is_real)


def by_client(similarity: Similarity, clients: jax.Array, num_clients: int) -> Similarity:
    """Reorders a similarity from slots to clients, `[clients, clients]`."""
    ids = jnp.where(similarity.is_seen, clients, num_clients)
    there = (ids[:, None], ids[None, :])
    empty = no_similarity(num_clients)
    return Similarity(
        empty.scatter.at[there].set(similarity.scatter, mode="drop"),
        empty.cross.at[there].set(similarity.cross, mode="drop"),
        empty.is_seen.at[ids].set(True, mode="drop"),
    )


def _inner(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.dot(a, b.T, precision=jax.lax.Precision.HIGHEST)


def mean_per_cluster(num_models: int, num_clients: int, *, features: str = "centred") -> Stacked:
    """Averages, for each server model, the updates of its clients, and compares all updates.

    Args:
      num_models: the number of server models, at least 1.
      num_clients: the population, at least 1.
      features: as for `similarity_of`.

    Returns:
      The aggregator of `ModelChoice` updates; its aggregate is a `ClusterAggregate`. Clients of
      weight 0 are ignored.
    """
    checks.whole("num_models", num_models)
    checks.whole("num_clients", num_clients)
    checks.one_of("features", features, FEATURES)

    def contribute(state, numbers, update: ModelChoice, sender):
        return update, sender.weight

    def combine(state, numbers, stack, close):
        update, weight = stack
        is_real = close.contributes & (weight > 0)
        counted = weight * is_real.astype(weight.dtype)
        mean, per_model = means_of(update.delta, update.model, counted, num_models)
        by_slot = similarity_of(update.delta, is_real, features=features)
        similarity = by_client(by_slot, close.roster.clients, num_clients)
        return state, ClusterAggregate(mean, similarity), {"weight_per_model": per_model}

    return Stacked(stateless, contribute, combine)


def means_of(
    deltas: PyTree, cluster: jax.Array, weight: jax.Array, num_clusters: int
) -> tuple[PyTree, jax.Array]:
    """Averages stacked updates by cluster; returns `[clusters, ...]` and each cluster's weight."""
    share = jax.nn.one_hot(cluster, num_clusters) * weight[:, None]
    total = jnp.sum(share, axis=0)
    share = share / jnp.where(total > 0, total, 1.0)

    def mean(leaf):
        flat = trees.at_least_float32(leaf).reshape(leaf.shape[0], -1)
        flat = jnp.where(weight[:, None] > 0, flat, 0.0)
        summed = jnp.dot(share.T, flat, precision=jax.lax.Precision.HIGHEST)
        return summed.reshape(num_clusters, *leaf.shape[1:])

    return jax.tree.map(mean, deltas), total


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
        nearest = jnp.take_along_axis(distances_to(weights), assignment[:, None], axis=1)[:, 0]
        return Clusters(assignment, jnp.sum(jnp.where(is_real, nearest, 0.0)))

    restarts = jax.vmap(lambda r: one_restart(fold(key, r)))(jnp.arange(num_restarts))
    best = jnp.argmin(restarts.inertia)
    assignment = jnp.where(is_real, restarts.assignment[best], 0)
    return Clusters(assignment, restarts.inertia[best])
