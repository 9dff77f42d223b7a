"""FedProx: FedAvg whose clients are pulled back to the model that they were sent."""

from typing import Any

from fedjax_dp.algorithms.base import ClientOutput, FederatedAlgorithm
from fedjax_dp.algorithms.fedavg import fedavg
from fedjax_dp.clients.base import LocalTrainer
from fedjax_dp.clients.regularizers import proximal
from fedjax_dp.models.base import Model


def fedprox(
    model: Model, trainer: LocalTrainer, *, mu: float = 0.01, **options: Any
) -> FederatedAlgorithm:
    """Declares FedProx: each local objective gains `mu / 2 * ‖w − w_server‖²`.

    Args:
      model: what is trained.
      trainer: local training; each step's gradient passes through the proximal term.
      mu: strength of the proximal term, at least 0; 0 is FedAvg.
      **options: further options of `fedavg`.

    Returns:
      The algorithm.

    Source: Li and others 2020, algorithm 2.
    """
    pull = proximal(mu)

    def client(server, row, client, config, key):
        result = trainer.train(server.params, client, config, key, gradient_transform=pull)
        return ClientOutput(result.delta, result.weight, row, result.metrics)

    return fedavg(model, trainer, name="fedprox", **options)._replace(client=client)
