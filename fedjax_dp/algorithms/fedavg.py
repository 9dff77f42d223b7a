"""FedAvg: clients train the server's model, the server averages their updates."""

from collections.abc import Callable
from typing import Any

import optax

from fedjax_dp.algorithms.averaging import averaged
from fedjax_dp.algorithms.base import FederatedAlgorithm
from fedjax_dp.clients.base import LocalTrainer
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.ranges import Positive
from fedjax_dp.models.base import Model
from fedjax_dp.server.base import Aggregator


@checked
def fedavg(
    model: Model,
    trainer: LocalTrainer,
    *,
    server_learning_rate: Positive = 1.0,
    server_optimizer: Callable[..., Any] | optax.GradientTransformation = optax.sgd,
    aggregator: Aggregator | None = None,
    name: str = "fedavg",
) -> FederatedAlgorithm:
    """Declares FedAvg: clients train the server's model, the server steps along their mean delta.

    Args:
      model: the model to train.
      trainer: local training; a private one makes this DP-SGD at the clients.
      server_learning_rate: the server's step size.
      server_optimizer: an Optax factory that takes the server's learning rate, or an optimiser,
        which ignores it; it reads the mean delta as a negative gradient.
      aggregator: combines deltas; by default the mean weighted by client size.
      name: the name in reports.

    Returns:
      The algorithm.

    Raises:
      ValueError: for a number out of its range.

    Source: McMahan and others 2017, algorithm 1; Reddi and others 2021, algorithm 1.
    """

    def optimizer_of(numbers):
        if isinstance(server_optimizer, optax.GradientTransformation):
            return server_optimizer
        return server_optimizer(numbers["server_learning_rate"])

    return averaged(
        model,
        trainer,
        optimizer_of,
        numbers={"server_learning_rate": server_learning_rate},
        ranges_of={"server_learning_rate": Positive},
        aggregator=aggregator,
        name=name,
    )
