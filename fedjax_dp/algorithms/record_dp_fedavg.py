"""DPFedAvg of record-level DP: clients are weighted by their sizes, not by their budgets."""

import jax.numpy as jnp

from fedjax_dp.algorithms.base import FederatedAlgorithm
from fedjax_dp.algorithms.dp_sgd import dp_sgd
from fedjax_dp.clients.base import LocalTrainer
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.ranges import Count
from fedjax_dp.models.base import Model
from fedjax_dp.server.noise_aware import weighted_by_client


@checked
def record_dp_fedavg(
    model: Model, trainer: LocalTrainer, *, num_clients: Count, is_weighted: bool = True
) -> FederatedAlgorithm:
    """Declares DP-SGD at the clients with a mean that does not depend on their budgets.

    The model is that of `dp_sgd`; each client's weight is in the round's info, as for the other
    methods of the comparison.

    Guarantee: as `dp_sgd`.

    Args:
      model: the model to train.
      trainer: a private trainer, each client with its own noise multiplier.
      num_clients: the population, at least 1.
      is_weighted: weight clients by their number of examples N_i instead of equally.

    Returns:
      The algorithm.

    Raises:
      ValueError: if the trainer is not private.

    Source: Noble and others 2022 (DPFedAvg), as in Malekmohammadi and others 2024 (Robust-HDP).
    """

    def weight_of(client, config):
        return client.size.astype(jnp.float32) if is_weighted else jnp.float32(1)

    aggregator = weighted_by_client(num_clients)
    algorithm = dp_sgd(model, trainer, weight_of=weight_of, aggregator=aggregator)
    return algorithm.for_clients(num_clients, "record_dp_fedavg")
