"""IFCA: several server models; each client trains the one that fits its data best."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_dp.algorithms.base import ClientState, FederatedAlgorithm, Views, training_of
from fedjax_dp.algorithms.values import ClientOutput
from fedjax_dp.clients.base import LocalTrainer
from fedjax_dp.clients.selection import mean_loss
from fedjax_dp.core import checks, trees
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.ranges import Count, Positive
from fedjax_dp.core.trees import PyTree
from fedjax_dp.models.base import Model
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
