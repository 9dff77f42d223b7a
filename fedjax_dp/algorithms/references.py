"""The references of federation: training on all examples pooled, and by every client alone."""

from typing import NamedTuple

import numpy as np

from fedjax_dp.algorithms.base import (
    ClientOutput,
    ClientState,
    FederatedAlgorithm,
    Views,
    training_of,
)
from fedjax_dp.algorithms.fedavg import fedavg
from fedjax_dp.clients.base import LocalTrainer
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.messages import Known
from fedjax_dp.core.trees import PyTree
from fedjax_dp.data.federated import FederatedData
from fedjax_dp.models.base import Model
from fedjax_dp.server.mean import uniform_mean


@checked
def pool(data: FederatedData) -> FederatedData:
    """Pools all clients into one, on which any algorithm is centralised training.

    Args:
      data: the clients' examples.

    Returns:
      A store of one client that owns every example; the arrays are not copied. Under record-level
      privacy the unit is still a record, and the pool has one budget.
    """
    return FederatedData(data.examples, np.array([0, data.num_examples]), ("all",))


@checked
def centralized(model: Model, trainer: LocalTrainer) -> FederatedAlgorithm:
    """Declares training on the pool of all examples, the reference for the cost of federation.

    Run it on `pool(data)`.

    Args:
      model: the model to train.
      trainer: training; a private one makes this central DP-SGD.

    Returns:
      The algorithm; one round is one run of the trainer, continued from the last.

    Source: with a private trainer Abadi and others 2016, algorithm 1.
    """
    base = fedavg(model, trainer, name="centralized")

    def client(message, own, client, hyper, key):
        output = base.client(message, own, client, hyper, key)
        return output._replace(update=Known(output.update))

    return base._replace(
        broadcast=lambda server, client: Known(base.broadcast(server, client)), client=client
    )


class ServerState(NamedTuple):
    """The parameters that every client starts from."""

    start: PyTree


@checked
def local_only(model: Model, trainer: LocalTrainer) -> FederatedAlgorithm:
    """Declares training without any federation, the reference for personal models.

    Args:
      model: the model to train.
      trainer: local training; a private one makes this local DP-SGD.

    Returns:
      The algorithm; a client's state is its own model, and its optimiser restarts every round.

    Source: the usual baseline of personal methods, as in Liu and others 2022.
    """

    def client(message, own, client, hyper, key):
        result = trainer.train(own, client, hyper.local, key)
        return ClientOutput((), result.weight, result.params, result.metrics)

    return FederatedAlgorithm(
        name="local_only",
        init=lambda key: ServerState(model.init(key)),
        broadcast=lambda server, client: (),
        client=client,
        aggregator=uniform_mean(),
        server_step=lambda server, aggregate, hyper, round, key: (server, {}),
        training=training_of(trainer),
        views=Views(personal=lambda server, own, client: own),
        client_state=ClientState(init=lambda server: server.start),
    )
