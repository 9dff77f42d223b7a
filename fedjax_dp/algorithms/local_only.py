"""Local-only training: every client has its own model and sends nothing."""

from typing import NamedTuple

from fedjax_dp.algorithms.base import ClientState, FederatedAlgorithm, Views, training_of
from fedjax_dp.algorithms.values import ClientOutput
from fedjax_dp.clients.base import LocalTrainer
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.trees import PyTree
from fedjax_dp.models.base import Model
from fedjax_dp.server.mean import uniform_mean


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
