"""MR-MTL: every client has its own model, pulled towards the mean of all."""

from typing import Any, NamedTuple

import jax.numpy as jnp
import optax

from fedjax_dp.algorithms.base import (
    ClientOutput,
    ClientState,
    FederatedAlgorithm,
    Numbers,
    Views,
    field,
    training_of,
)
from fedjax_dp.clients.base import LocalTrainer, Objective
from fedjax_dp.clients.regularizers import distance_to, towards
from fedjax_dp.core import trees
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.ranges import Count, NonNegative
from fedjax_dp.core.trees import PyTree
from fedjax_dp.models.base import Model
from fedjax_dp.server.base import Summed
from fedjax_dp.server.mean import scaled_sum
from fedjax_dp.server.parts import public_divisor


class ServerState(NamedTuple):
    """The mean of all clients' models over the population, and their common start."""

    mean: PyTree
    start: PyTree


@checked
def mr_mtl(
    model: Model,
    trainer: LocalTrainer,
    *,
    num_clients: Count,
    strength: NonNegative = 1.0,
    is_pull_clipped: bool = False,
    private_mean: Summed | None = None,
) -> FederatedAlgorithm:
    """Declares mean-regularised multi-task learning.

    A client minimises its own loss plus `strength/2 ‖θ_i − θ̄‖²` from its last model. The pull
    towards the mean is added to the gradient after clipping and noise: it reads earlier uploads
    only and costs no privacy. Without it this is local training. Plain SGD diverges if the learning
    rate times the strength is above 2.

    Guarantee: for records that of the trainer. For clients that of the private mean: the mean of
    all models then moves by bounded changes and noise, and is no longer exactly theirs. A client's
    own model is exact, never leaves it, and is not covered.

    Args:
      model: the model to train.
      trainer: local training; a private one makes this MR-MTL under record-level privacy.
      num_clients: the population, at least 1.
      strength: λ.
      is_pull_clipped: add the pull to the gradient of every example before it is clipped, as the
        authors do, which leaves less of the clip norm for the examples.
      private_mean: combines the changes of models if clients are protected, such as
        `gaussian_mean`.

    Returns:
      The algorithm; a client's state is its own model.

    Raises:
      ValueError: for a number out of its range, a trainer with update transforms, after which the
        mean would not be that of the clients' models, or a private mean without a public divisor.

    Source: Liu and others 2022 (MR-MTL), algorithm 1; a pull after clipping is ours.
    """
    trainer.require_untransformed(
        "the server's model is the mean of the clients' models, unchanged"
    )

    def init(key):
        start = model.init(key)
        return ServerState(start, start)

    def client(message, own, client, hyper, key):
        strength = hyper.algorithm["strength"]
        if is_pull_clipped:
            distance = distance_to(message, strength)
            objective = Objective(lambda loss, params: loss + distance(params))
            how: dict[str, Any] = {"objective": objective}
        else:
            how = {"gradient_transform": towards(message, strength)}
        result = trainer.train(own, client, hyper.local, key, **how)
        return ClientOutput(result.delta, jnp.float32(1), result.params, result.metrics)

    divisor = private_mean and public_divisor(private_mean)

    def server_step(server, aggregate, hyper, round, key):
        if divisor is not None:
            aggregate = trees.scale(aggregate, divisor(hyper.aggregator) / num_clients)
        return server._replace(mean=optax.apply_updates(server.mean, aggregate)), {}

    return FederatedAlgorithm(
        name="mr_mtl",
        init=init,
        broadcast=lambda server, client: server.mean,
        client=client,
        aggregator=private_mean or scaled_sum(num_clients),
        server_step=server_step,
        training=training_of(trainer),
        numbers=Numbers(num_clients=num_clients),
        views=Views(shared=field("mean"), personal=lambda server, own, client: own),
        client_state=ClientState(init=lambda server: server.start),
    ).with_numbers({"strength": strength}, {"strength": NonNegative})
