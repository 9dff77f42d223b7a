"""O-DPCFL: the oracle that knows each client's cluster from the start."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_dp.algorithms.base import FederatedAlgorithm, Numbers, Views, training_of
from fedjax_dp.algorithms.values import ClientOutput
from fedjax_dp.clients.base import LocalTrainer
from fedjax_dp.core import checks, trees
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.messages import Known
from fedjax_dp.core.ranges import Count, Index
from fedjax_dp.core.trees import PyTree
from fedjax_dp.models.base import Model
from fedjax_dp.server.mean import ModelChoice, mean_per_model


class ServerState(NamedTuple):
    """The models of all clusters, `[models, ...]`."""

    models: PyTree


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
    checks.require(
        len(clusters) == num_clients and all(int(c) == c and c >= 0 for c in clusters),
        "clusters",
        f"hold a whole number from 0 for each of the {num_clients} clients",
        clusters,
    )
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
