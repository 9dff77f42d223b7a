"""FedAvg: clients train the server's model, the server averages what they changed."""

from typing import Any, NamedTuple

import optax

from fedjax_dp.algorithms.base import ClientOutput, FederatedAlgorithm
from fedjax_dp.clients.base import LocalTrainer
from fedjax_dp.core.trees import PyTree
from fedjax_dp.models.base import Model
from fedjax_dp.server.base import Aggregator
from fedjax_dp.server.mean import weighted_mean
from fedjax_dp.server.optimizers import apply_aggregate


class ServerState(NamedTuple):
    """One model and the state of its server optimiser.

    Attributes:
      params: the model's parameters.
      opt_state: the optimiser's state.
    """

    params: PyTree
    opt_state: Any


def fedavg(
    model: Model,
    trainer: LocalTrainer,
    *,
    server_optimizer: optax.GradientTransformation | None = None,
    aggregator: Aggregator | None = None,
    name: str = "fedavg",
) -> FederatedAlgorithm:
    """Declares FedAvg: clients train the server's model, the server steps along their mean delta.

    Args:
      model: what is trained.
      trainer: local training; a private one makes this DP-SGD at the clients.
      server_optimizer: reads the mean delta as a negative gradient; `optax.sgd(1.0)` where None.
      aggregator: how deltas are combined; the mean weighted by client size where it is None.
      name: the name in reports.

    Returns:
      The algorithm.

    Source: McMahan and others 2017, algorithm 1; Reddi and others 2021, algorithm 1.
    """
    optimizer = server_optimizer or optax.sgd(1.0)

    def init(key):
        params = model.init(key)
        return ServerState(params, optimizer.init(params))

    def client(server, row, client, config, key):
        result = trainer.train(server.params, client, config, key)
        return ClientOutput(result.delta, result.weight, row, result.metrics)

    def server_step(server, aggregate, round_index):
        is_buffer = model.is_buffer(server.params) if model.buffer_keys else None
        opt_state, params = apply_aggregate(
            optimizer, server.opt_state, server.params, aggregate, is_buffer
        )
        return ServerState(params, opt_state)

    return FederatedAlgorithm(
        name=name,
        init=init,
        client=client,
        aggregator=aggregator or weighted_mean(),
        server_step=server_step,
        config=trainer.config,
        model_of=lambda server: server.params,
        num_steps=trainer.num_steps,
        check_noised=trainer.check_noised,
        record_event=trainer.event,
    )
