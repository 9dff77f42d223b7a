"""Centralised training: all examples pooled, the reference for the cost of federation."""

import numpy as np

from fedjax_dp.algorithms.base import FederatedAlgorithm
from fedjax_dp.algorithms.fedavg import fedavg
from fedjax_dp.clients.base import LocalTrainer
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.messages import Known
from fedjax_dp.data.federated import FederatedData
from fedjax_dp.models.base import Model


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
