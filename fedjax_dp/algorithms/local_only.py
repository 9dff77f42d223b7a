"""Local-only training: every client keeps its own model and sends nothing."""

from typing import NamedTuple

import jax.numpy as jnp

from fedjax_dp.algorithms.base import ClientOutput, FederatedAlgorithm
from fedjax_dp.clients.base import LocalTrainer
from fedjax_dp.core.trees import PyTree
from fedjax_dp.models.base import Model
from fedjax_dp.server.mean import uniform_mean


class ServerState(NamedTuple):
    """The parameters that every client starts from.

    Attributes:
      start: the common start.
    """

    start: PyTree


def local_only(model: Model, trainer: LocalTrainer) -> FederatedAlgorithm:
    """Declares training without any federation, the reference for personal models.

    Args:
      model: what is trained.
      trainer: local training; a private one makes this local DP-SGD.

    Returns:
      The algorithm; a client's row is its own model, and its optimiser starts afresh every round.
    """

    def client(server, own, client, config, key):
        result = trainer.train(own, client, config, key)
        return ClientOutput(jnp.float32(0), result.weight, result.params, result.metrics)

    return FederatedAlgorithm(
        name="local_only",
        init=lambda key: ServerState(model.init(key)),
        client=client,
        aggregator=uniform_mean(),
        server_step=lambda server, aggregate, round_index: server,
        config=trainer.config,
        model_of=None,
        init_row=lambda server: server.start,
        personal_model_of=lambda server, own, client: own,
        num_steps=trainer.num_steps,
        record_event=trainer.event,
        sends_updates=False,
    )
