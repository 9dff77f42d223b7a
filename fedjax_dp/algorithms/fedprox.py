"""FedProx: FedAvg with a pull of local models towards the received one."""

from typing import Any

from fedjax_dp.algorithms.base import ClientOutput, FederatedAlgorithm
from fedjax_dp.algorithms.fedavg import fedavg
from fedjax_dp.clients.base import LocalTrainer
from fedjax_dp.clients.regularizers import proximal
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.ranges import NonNegative, Positive
from fedjax_dp.models.base import Model


@checked
def fedprox(
    model: Model,
    trainer: LocalTrainer,
    *,
    mu: NonNegative = 0.01,
    server_learning_rate: Positive = 1.0,
    **options: Any,
) -> FederatedAlgorithm:
    """Declares FedProx: each local objective gains `mu / 2 * ‖w − w_server‖²`.

    Args:
      model: the model to train.
      trainer: local training; each step's gradient passes through the proximal term.
      mu: strength of the proximal term; 0 is FedAvg.
      server_learning_rate: the server's step size.
      **options: further options of `fedavg`.

    Returns:
      The algorithm.

    Raises:
      ValueError: for a number out of its range.

    Source: Li and others 2020 (FedProx), algorithm 2.
    """

    def client(message, own, client, hyper, key):
        pull = proximal(hyper.algorithm["mu"])
        result = trainer.train(message, client, hyper.local, key, gradient_transform=pull)
        return ClientOutput(result.delta, result.weight, own, result.metrics)

    own: dict[str, Any] = {"server_learning_rate": server_learning_rate, "name": "fedprox"}
    algorithm = fedavg(model, trainer, **(own | options))
    return algorithm.with_numbers({"mu": mu}, {"mu": NonNegative})._replace(client=client)
