"""DP-SGD at the clients: a record of one client is the unit of privacy."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_dp.algorithms.base import FederatedAlgorithm
from fedjax_dp.algorithms.fedavg import fedavg
from fedjax_dp.clients.base import LocalConfig, LocalTrainer
from fedjax_dp.clients.client_data import ClientData
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.models.base import Model


@checked
def dp_sgd(
    model: Model,
    trainer: LocalTrainer,
    *,
    weight_of: Callable[[ClientData, LocalConfig], jax.Array] | None = None,
    **options: Any,
) -> FederatedAlgorithm:
    """Declares FedAvg whose clients run DP-SGD, each within its own budget.

    The server is not trusted: the noise is in every local step, so that an update is private before
    it leaves the client, and averaging is post-processing. Client sizes, by which the mean is
    weighted, are public.

    Guarantee: unit of privacy is one record of one client; zero-out, sizes being public; the event
    of a round is that of the trainer for the client's own size and numbers.

    Args:
      model: the model to train.
      trainer: a private trainer, such as `dp_sgd_trainer` builds.
      weight_of: `(client, config) -> weight`, at least 0, of a client with examples, instead of its
        size.
      **options: further options of `fedavg`.

    Returns:
      The algorithm.

    Raises:
      ValueError: if the trainer is not private.

    Source: Abadi and others 2016, algorithm 1.
    """
    trainer.private_claim()  # Refuses a trainer that is not private.
    algorithm = fedavg(model, trainer, name="dp_sgd", **options)
    if weight_of is None:
        return algorithm

    def client(message, own, client, hyper, key):
        output = algorithm.client(message, own, client, hyper, key)
        weight = jnp.where(client.size > 0, weight_of(client, hyper.local), 0.0)
        return output._replace(weight=weight)

    return algorithm._replace(client=client)
