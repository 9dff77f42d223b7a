"""A model for each cluster of clients: IFCA, F-CDPFL, O-DPCFL and KM-CDPFL."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_dp.algorithms.base import (
    ClientOutput,
    ClientState,
    FederatedAlgorithm,
    Numbers,
    Stages,
    Views,
    claim_of,
    training_of,
)
from fedjax_dp.algorithms.r_dpcfl import (
    NOT_COVERED,
    SelectionRule,
    numbers_of,
    rounds_of_training,
    trained_model,
)
from fedjax_dp.clients.base import LocalTrainer
from fedjax_dp.clients.selection import (
    RANGES,
    make_choice,
    mean_loss,
    only_chosen,
    trained_and_chosen,
)
from fedjax_dp.core import checks, trees
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.keys import Purpose, fold
from fedjax_dp.core.messages import Choices, Known
from fedjax_dp.core.ranges import Count, Index, Positive
from fedjax_dp.core.trees import PyTree
from fedjax_dp.models.base import Model
from fedjax_dp.privacy.claims import RecordClaim
from fedjax_dp.server.base import Stacked, stateless
from fedjax_dp.server.clustering import by_client, kmeans, means_of, similarity_of
from fedjax_dp.server.mean import ModelChoice, mean_per_model


class ServerState(NamedTuple):
    """The models of all clusters, `[models, ...]`."""

    models: PyTree


@checked
def ifca(
    model: Model,
    trainer: LocalTrainer,
    *,
    num_models: Count,
    is_weighted: bool = True,
    server_learning_rate: Positive = 1.0,
) -> FederatedAlgorithm:
    """Declares IFCA with averaging of models.

    Every client computes its training loss under each server model, trains the best one and sends
    its delta to that model's mean. The choice reads the client's data without noise, which a
    private trainer would not cover, so private trainers are refused.

    Args:
      model: the model to train.
      trainer: local training, not a private one.
      num_models: number of clusters, at least 1.
      is_weighted: weight clients by their number of examples within a cluster.
      server_learning_rate: the server's step size.

    Returns:
      The algorithm; a client's state is the index of the model that it last trained.

    Raises:
      ValueError: for a private trainer.

    Source: Ghosh and others 2020 (IFCA), algorithm 1, option II.
    """
    checks.require(
        not trainer.is_private,
        "trainer",
        "be non-private, since the choice of a model by exact loss leaks; a private choice needs "
        "the exponential mechanism",
        trainer.is_private,
    )

    def init(key):
        return ServerState(jax.vmap(model.init)(jax.random.split(key, num_models)))

    def choose(models, client):
        losses = jax.lax.map(lambda params: mean_loss(model, params, client), models)
        return jnp.argmin(losses).astype(jnp.int32)

    def client(message, own, client, hyper, key):
        choice = choose(message, client)
        result = trainer.train(trees.take(message, choice), client, hyper.local, key)
        update = ModelChoice(choice, result.delta)
        return ClientOutput(update, result.weight, choice, result.metrics)

    def server_step(server, aggregate, hyper, round, key):
        step = trees.scale(aggregate, hyper.algorithm["server_learning_rate"])
        return ServerState(optax.apply_updates(server.models, step)), {}

    return FederatedAlgorithm(
        name="ifca",
        init=init,
        broadcast=lambda server, client: server.models,
        client=client,
        aggregator=mean_per_model(num_models, is_weighted=is_weighted),
        server_step=server_step,
        training=training_of(trainer),
        views=Views(
            personal=lambda server, own, client: trees.take(
                server.models, choose(server.models, client)
            )
        ),
        client_state=ClientState(init=lambda server: jnp.int32(0)),
    ).with_numbers(
        {"server_learning_rate": server_learning_rate}, {"server_learning_rate": Positive}
    )


_SELECT, _FROZEN, _LAST = 0, 1, 2


@checked
def f_cdpfl(
    model: Model,
    trainer: LocalTrainer,
    *,
    num_rounds: Count,
    num_models: Count,
    selection_rule: SelectionRule = SelectionRule(),
    is_weighted: bool = False,
    is_identical_start: bool = False,
    ends_with_choice: bool = False,
) -> FederatedAlgorithm:
    """Declares IFCA under record-level privacy.

    Clients choose among the server's models by their own training data, train the chosen one by
    DP-SGD, and each model moves by the mean of its clients' updates. Private choices are made in
    the first rounds only, after which each client's model is fixed; exact ones in every round.

    Guarantee: unit of privacy is one record of one client; training and private choices are
    composed jointly. With `selection="exact"` the choices are not covered, and the declaration says
    so.

    Args:
      model: the model to train.
      trainer: a private trainer.
      num_rounds: rounds of the whole run (E), at least 1.
      num_models: number of clusters (M), at least 1.
      selection_rule: how clients choose among the models.
      is_weighted: weight clients by their number of examples within a cluster.
      is_identical_start: start from one model for all clusters, so that the first choices are
        random.
      ends_with_choice: make the last round a choice alone, as for `r_dpcfl`, so that a client has
        the model that fits its data best after training, and not the one that it last trained.

    Returns:
      The algorithm; a client's state is the index of the model that it last trained or chose.

    Raises:
      ValueError: for a trainer that is not private, or numbers out of range.

    Source: Ghosh and others 2020 (IFCA), algorithm 1; f-CDPFL of Malekmohammadi and others 2024
    (RC-DPFL).
    """
    trainer.private_claim()  # Refuses a trainer that is not private.
    choice = make_choice(model, selection_rule.selection, selection_rule.score)
    num_trained = rounds_of_training(num_rounds, ends_with_choice)
    is_offered = jnp.ones(num_models, bool)

    def init(key):
        if is_identical_start:
            keys = jnp.stack([key] * num_models)
        else:
            keys = jax.random.split(key, num_models)
        return ServerState(jax.vmap(model.init)(keys))

    def stage_of(server, hyper, round_index):
        is_choosing = round_index < hyper.algorithm["num_selections"]
        stage = jnp.where(is_choosing, _SELECT, _FROZEN)
        is_last = ends_with_choice & (round_index + 1 == num_rounds)
        return jnp.where(is_last, _LAST, stage).astype(jnp.int32)

    def broadcast(server, client):
        """Sends all models if clients choose; else the one that the client chose last."""
        is_choosing = client.stage != _FROZEN
        return Choices(server.models, jnp.int32(num_models), is_choosing, client.known)

    def client(message, own, client, hyper, key):
        own_key = fold(key, Purpose.SELECTION)
        # All clients are at the same stage, so the choice is skipped under vmap too.
        chosen = jax.lax.cond(
            client.stage != _FROZEN,
            lambda: choice.of(own_key, message.offered(), client, is_offered, hyper.algorithm),
            lambda: own,
        )
        chosen = jnp.where(client.size > 0, chosen, own)
        is_last = client.stage == _LAST
        return trained_model(
            trainer, message, chosen, client, hyper.local, is_last, is_weighted, key
        )

    def server_step(server, aggregate, hyper, round, key):
        return ServerState(optax.apply_updates(server.models, aggregate)), {}

    trained = claim_of(trainer, lambda hyper: hyper.local)
    assert trained is not None
    (train_event,) = trained.events
    last = (only_chosen(choice),) if ends_with_choice else ()
    events = trained_and_chosen(train_event, choice), train_event, *last
    not_covered = NOT_COVERED if choice.event is None else None
    return FederatedAlgorithm(
        name="f_cdpfl",
        init=init,
        broadcast=broadcast,
        client=client,
        aggregator=mean_per_model(num_models, is_weighted=True),
        server_step=server_step,
        training=training_of(trainer, record=RecordClaim(events, not_covered)),
        views=Views(personal=lambda server, own, client: trees.take(server.models, own)),
        client_state=ClientState(init=lambda server: jnp.int32(0), known=lambda own: own),
        stages=Stages(stage_of=stage_of, choice=choice),
    ).with_numbers(
        numbers_of(selection_rule, num_rounds, num_trained), {**RANGES, "num_selections": Index}
    )


def check_clusters(argument: str, clusters: Sequence[int], num_clients: int) -> None:
    """Requires a cluster for each client."""
    rule = f"hold a whole number from 0 for each of the {num_clients} clients"
    fits = len(clusters) == num_clients and all(int(c) == c and c >= 0 for c in clusters)
    checks.require(fits, argument, rule, clusters)


@checked
def o_dpcfl(
    model: Model,
    trainer: LocalTrainer,
    *,
    num_clients: Count,
    clusters: Sequence[Index],
    is_weighted: bool = False,
) -> FederatedAlgorithm:
    """Declares one federation for each true cluster, the reference for all clustered methods.

    No budget is spent on choices: with a private trainer all of it is for training.

    Args:
      model: the model to train.
      trainer: local training.
      num_clients: the population.
      clusters: the cluster of each client, from 0, `[num_clients]`; taken as public.
      is_weighted: weight clients by their number of examples within a cluster.

    Returns:
      The algorithm; all models start equal.

    Raises:
      ValueError: if a client has no cluster.

    Source: O-CDPFL of Malekmohammadi and others 2024 (RC-DPFL).
    """
    check_clusters("clusters", clusters, num_clients)
    num_models = int(max(clusters)) + 1
    table = np.asarray(clusters, np.int32)

    def init(key):
        start = model.init(key)
        return ServerState(
            jax.tree.map(lambda p: jnp.broadcast_to(p, (num_models, *p.shape)), start)
        )

    def own_model(server, client):
        return trees.take(server.models, jnp.asarray(table)[client.index])

    def client(message, own, client, hyper, key):
        result = trainer.train(message, client, hyper.local, key)
        weight = result.weight if is_weighted else (result.weight > 0).astype(jnp.float32)
        update = ModelChoice(Known(jnp.asarray(table)[client.index]), result.delta)
        return ClientOutput(update, weight, own, result.metrics)

    def server_step(server, aggregate, hyper, round, key):
        return ServerState(optax.apply_updates(server.models, aggregate)), {}

    return FederatedAlgorithm(
        name="o_dpcfl",
        init=init,
        broadcast=own_model,
        client=client,
        aggregator=mean_per_model(num_models, is_weighted=True),
        server_step=server_step,
        training=training_of(trainer),
        numbers=Numbers(num_clients=num_clients),
        views=Views(personal=lambda server, own, client: own_model(server, client)),
    )


class GroupedState(NamedTuple):
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
        return GroupedState(models, jnp.zeros(num_clients, jnp.int32))

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
        return GroupedState(models, clusters), {}

    return FederatedAlgorithm(
        name="km_cdpfl",
        init=init,
        broadcast=broadcast,
        client=client,
        aggregator=Stacked(stateless, contribute, combine),
        server_step=server_step,
        training=training_of(trainer),
        numbers=Numbers(num_clients=num_clients),
        views=Views(
            personal=lambda server, own, client: trees.take(
                server.models, server.clusters[client.index]
            )
        ),
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
