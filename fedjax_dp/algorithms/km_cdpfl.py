"""KM-CDPFL: clients are reclustered in every round, by k-means on their noisy updates."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_dp.algorithms.base import (
    ClientOutput,
    FederatedAlgorithm,
    Numbers,
    training_of,
    views_of_clusters,
)
from fedjax_dp.clients.base import LocalTrainer
from fedjax_dp.core import trees
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.messages import Known
from fedjax_dp.core.ranges import Count
from fedjax_dp.core.trees import PyTree
from fedjax_dp.models.base import Model
from fedjax_dp.server.base import Stacked, stateless
from fedjax_dp.server.clustering import by_client, kmeans, means_of, similarity_of
from fedjax_dp.server.mean import ModelChoice


class ServerState(NamedTuple):
    """The models of all clusters, `[models, ...]`, and each client's last cluster, `[clients]`."""

    models: PyTree
    clusters: jax.Array


class RoundOfClusters(NamedTuple):
    """New clusters: mean updates, shares of old models, and clients' clusters, -1 if absent."""

    delta: PyTree
    origin: jax.Array
    clusters: jax.Array


@checked
def km_cdpfl(
    model: Model,
    trainer: LocalTrainer,
    *,
    num_clients: Count,
    num_models: Count,
    num_restarts: Count = 10,
) -> FederatedAlgorithm:
    """Declares myopic clustering: a round's updates determine which clients share the next model.

    The new model of a cluster is the mean of its clients' models at the end of the round. A new
    cluster replaces the old one with the nearest model, so that the identity of clusters is
    preserved as far as possible; an old cluster that none replaces retains its model.

    Guarantee: that of the trainer; clustering private updates is post-processing.

    Args:
      model: the model to train.
      trainer: local training; a private one makes this KM-CDPFL.
      num_clients: the population, at least 1.
      num_models: number of clusters (M), at least 1.
      num_restarts: restarts of k-means, at least 1.

    Returns:
      The algorithm; all models start equal and clients use the model of their last cluster.

    Source: KM-CDPFL of Malekmohammadi and others 2024 (RC-DPFL); the identity of clusters is ours.
    """

    def init(key):
        start = model.init(key)
        models = jax.tree.map(lambda p: jnp.broadcast_to(p, (num_models, *p.shape)), start)
        return ServerState(models, jnp.zeros(num_clients, jnp.int32))

    def broadcast(server, client):
        cluster = server.clusters[client.index]
        return ModelChoice(cluster, trees.take(server.models, cluster))

    def client(message, own, client, hyper, key):
        result = trainer.train(message.delta, client, hyper.local, key)
        weight = (result.weight > 0).astype(jnp.float32)
        return ClientOutput(
            ModelChoice(Known(message.model), result.delta), weight, own, result.metrics
        )

    def contribute(state, numbers, update, sender):
        return update, sender.weight

    def combine(state, numbers, stack, close):
        (update, weight), clients = stack, close.roster.clients
        is_real = close.contributes & (weight > 0)
        seen = by_client(similarity_of(update.delta, is_real), clients, num_clients)
        partition = kmeans(
            close.private_key, seen.scatter, seen.is_seen, num_models, num_restarts=num_restarts
        )
        cluster, weight = partition.assignment[clients], is_real.astype(jnp.float32)
        delta, count = means_of(update.delta, cluster, weight, num_models)
        trained = jax.nn.one_hot(update.model, num_models)
        origin, _ = means_of(trained, cluster, weight, num_models)
        clusters = jnp.where(seen.is_seen, partition.assignment, -1)
        return state, RoundOfClusters(delta, origin, clusters), {"weight_per_model": count}

    def server_step(server, aggregate: RoundOfClusters, hyper, round, key):
        def moved(p, d):
            start = jnp.tensordot(aggregate.origin, p.astype(jnp.float32), 1)
            return start + d

        new = jax.tree.map(moved, server.models, aggregate.delta)
        is_taken = jnp.sum(aggregate.origin, axis=1) > 0
        nearest = _nearest_places(_distances(new, server.models), is_taken)
        target = jnp.where(is_taken, nearest, num_models)
        models = jax.tree.map(
            lambda p, n: p.at[target].set(n.astype(p.dtype), mode="drop"), server.models, new
        )
        clusters = jnp.where(
            aggregate.clusters >= 0, nearest[aggregate.clusters], server.clusters
        ).astype(jnp.int32)
        return ServerState(models, clusters), {}

    return FederatedAlgorithm(
        name="km_cdpfl",
        init=init,
        broadcast=broadcast,
        client=client,
        aggregator=Stacked(stateless, contribute, combine),
        server_step=server_step,
        training=training_of(trainer),
        numbers=Numbers(num_clients=num_clients),
        views=views_of_clusters(lambda server, own, client: server.clusters[client.index]),
    )


def _distances(a: PyTree, b: PyTree) -> jax.Array:
    """Computes squared distances between two stacks of models, `[models, models]`."""
    total = jnp.float32(0)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        x, y = (v.reshape(v.shape[0], -1).astype(jnp.float32) for v in (x, y))
        total = total + jax.lax.map(lambda row, y=y: jnp.sum(jnp.square(row - y), axis=1), x)
    return total


def _nearest_places(distances: jax.Array, is_taken: jax.Array) -> jax.Array:
    """Matches new clusters to old ones, `[models]`, one to one, the closest pair first."""
    num_models = distances.shape[0]

    def take(_, carry):
        left, nearest = carry
        new, old = jnp.divmod(jnp.argmin(left), num_models)
        left = left.at[new, :].set(jnp.inf).at[:, old].set(jnp.inf)
        return left, nearest.at[new].set(old.astype(jnp.int32))

    left = jnp.where(is_taken[:, None], distances, jnp.inf)
    nearest = jnp.zeros(num_models, jnp.int32)
    return jax.lax.fori_loop(0, jnp.sum(is_taken), take, (left, nearest))[1]
