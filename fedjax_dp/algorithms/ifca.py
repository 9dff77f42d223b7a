"""IFCA and f-CDPFL, whose clients choose a model of several, and the oracle that knows clusters."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

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
    claim_of,
    training_of,
    views_of_clusters,
    weighted,
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
from fedjax_dp.server.base import Summed
from fedjax_dp.server.mean import ModelChoice, by_model, mean_per_model, spread
from fedjax_dp.server.parts import public_divisor


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
    private_mean: Summed | None = None,
) -> FederatedAlgorithm:
    """Declares IFCA with averaging of models.

    Every client computes its training loss under each server model, trains the best one and sends
    its delta to that model's mean. The choice reads the client's data without noise, which a
    private trainer would not cover, so private trainers are refused.

    Guarantee: for clients that of the private mean. A client's update has two parts, its delta in
    the place of the model that it chose, "delta", and a one there, "count"; they are clipped
    together and released once, choice included. A model moves by its noised sum over its noised
    count, or over 1 if that is smaller. What a client chose last is exact, and is not covered.

    Args:
      model: the model to train.
      trainer: local training, not a private one.
      num_models: number of clusters, at least 1.
      is_weighted: weight clients by their number of examples within a cluster.
      server_learning_rate: the server's step size.
      private_mean: combines updates if clients are protected, such as `gaussian_mean`.

    Returns:
      The algorithm; a client's state is the index of the model that it last trained.

    Raises:
      ValueError: for a private trainer, weights together with a private mean, or one without a
        public divisor.

    Source: Ghosh and others 2020 (IFCA), algorithm 1, option II.
    """
    checks.require(
        not trainer.is_private,
        "trainer",
        "be non-private, since the choice of a model by exact loss leaks; a private choice needs "
        "the exponential mechanism",
        trainer.is_private,
    )
    weighted(is_weighted).check_weights(private_mean is not None)
    divisor = private_mean and public_divisor(private_mean)

    def init(key):
        return ServerState(jax.vmap(model.init)(jax.random.split(key, num_models)))

    def choose(models, client):
        losses = jax.lax.map(lambda params: mean_loss(model, params, client), models)
        return jnp.argmin(losses).astype(jnp.int32)

    def client(message, own, client, hyper, key):
        choice = choose(message, client)
        result = trainer.train(trees.take(message, choice), client, hyper.local, key)
        update: PyTree = ModelChoice(choice, result.delta)
        if divisor is not None:
            count = jax.nn.one_hot(choice, num_models) * jnp.float32(client.size > 0)
            update = {"delta": spread(result.delta, count), "count": count}
        return ClientOutput(update, result.weight, choice, result.metrics)

    def server_step(server, aggregate, hyper, round, key):
        if divisor is not None:
            count = jnp.maximum(aggregate["count"] * divisor(hyper.aggregator), 1.0)
            aggregate = by_model(aggregate["delta"], divisor(hyper.aggregator) / count)
        step = trees.scale(aggregate, hyper.algorithm["server_learning_rate"])
        return ServerState(optax.apply_updates(server.models, step)), {}

    return FederatedAlgorithm(
        name="ifca",
        init=init,
        broadcast=lambda server, client: server.models,
        client=client,
        aggregator=private_mean or mean_per_model(num_models, is_weighted=is_weighted),
        server_step=server_step,
        training=training_of(trainer),
        views=views_of_clusters(lambda server, own, client: choose(server.models, client)),
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
        views=views_of_clusters(lambda server, own, client: own),
        client_state=ClientState(init=lambda server: jnp.int32(0), known=lambda own: own),
        stages=Stages(stage_of=stage_of, choice=choice),
    ).with_numbers(
        numbers_of(selection_rule, num_rounds, num_trained), {**RANGES, "num_selections": Index}
    )


def update_of_ifca(params: PyTree, options: Mapping[str, Any]) -> PyTree:
    """Returns the shapes of an update that a private mean combines."""
    count = jax.ShapeDtypeStruct((options["num_models"],), jnp.float32)
    return {"delta": jax.eval_shape(spread, params, count), "count": count}


def update_of_oracle(params: PyTree, options: Mapping[str, Any]) -> PyTree:
    """Returns the shapes of an update that a private mean combines."""
    shares = jax.ShapeDtypeStruct((int(max(options["clusters"])) + 1,), jnp.float32)
    return jax.eval_shape(spread, params, shares)


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
    private_mean: Summed | None = None,
) -> FederatedAlgorithm:
    """Declares one federation for each true cluster, the reference for all clustered methods.

    No budget is spent on choices: with a private trainer all of it is for training.

    Guarantee: for records that of the trainer. For clients that of the private mean, on deltas in
    the place of the client's model, of which noise is on each: every model moves by its noised sum,
    divided by the public expected number of its clients.

    Args:
      model: the model to train.
      trainer: local training.
      num_clients: the population.
      clusters: the cluster of each client, from 0, `[num_clients]`; taken as public.
      is_weighted: weight clients by their number of examples within a cluster.
      private_mean: combines updates if clients are protected, such as `gaussian_mean`.

    Returns:
      The algorithm; all models start equal.

    Raises:
      ValueError: if a client has no cluster, for weights together with a private mean, or for one
        without a public divisor.

    Source: O-CDPFL of Malekmohammadi and others 2024 (RC-DPFL).
    """
    check_clusters("clusters", clusters, num_clients)
    num_models = int(max(clusters)) + 1
    table = np.asarray(clusters, np.int32)
    weighted(is_weighted).check_weights(private_mean is not None)
    divisor = private_mean and public_divisor(private_mean)

    def init(key):
        start = model.init(key)
        return ServerState(
            jax.tree.map(lambda p: jnp.broadcast_to(p, (num_models, *p.shape)), start)
        )

    def cluster_of(client):
        return jnp.asarray(table)[client.index]

    def client(message, own, client, hyper, key):
        result = trainer.train(message, client, hyper.local, key)
        weight = result.weight if is_weighted else (result.weight > 0).astype(jnp.float32)
        update = ModelChoice(Known(cluster_of(client)), result.delta)
        if divisor is not None:
            update = spread(result.delta, jax.nn.one_hot(cluster_of(client), num_models))
        return ClientOutput(update, weight, own, result.metrics)

    def server_step(server, aggregate, hyper, round, key):
        if divisor is not None:
            sizes = np.bincount(table, minlength=num_models)
            aggregate = by_model(aggregate, jnp.float32(num_clients) * trees.reciprocal(sizes))
        return ServerState(optax.apply_updates(server.models, aggregate)), {}

    return FederatedAlgorithm(
        name="o_dpcfl",
        init=init,
        broadcast=lambda server, client: trees.take(server.models, cluster_of(client)),
        client=client,
        aggregator=private_mean or mean_per_model(num_models, is_weighted=True),
        server_step=server_step,
        training=training_of(trainer),
        numbers=Numbers(num_clients=num_clients),
        views=views_of_clusters(lambda server, own, client: cluster_of(client)),
    )
