"""WeiAvg: clients are weighted by the budgets that they declare."""

import jax.numpy as jnp
from numpy.typing import ArrayLike

from fedjax_dp.algorithms.base import FederatedAlgorithm
from fedjax_dp.algorithms.dp_sgd import dp_sgd
from fedjax_dp.clients.base import LocalTrainer
from fedjax_dp.core import checks
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.ranges import Count
from fedjax_dp.models.base import Model
from fedjax_dp.server.noise_aware import weighted_by_client


@checked
def weiavg(
    model: Model,
    trainer: LocalTrainer,
    *,
    num_clients: Count,
    declared_epsilon: ArrayLike | None = None,
) -> FederatedAlgorithm:
    """Declares DP-SGD at the clients and a mean with weights `w_i = ε_i / Σ ε_j`.

    Guarantee: as `dp_sgd`, for any declared budgets: the noise depends on the trainer, the weights
    on the declared budgets, which are public here and can mislead the server.

    Args:
      model: the model to train.
      trainer: a private trainer, each client with its own noise multiplier.
      num_clients: the population, at least 1.
      declared_epsilon: the budgets that clients declare, above 0, `[num_clients]`; a run by
        configuration uses the true ones by default.

    Returns:
      The algorithm.

    Raises:
      ValueError: if the trainer is not private, or budgets are missing, not positive or too few.

    Source: Liu and others 2021 (PFA), algorithm 5 (WeiAvg).
    """
    epsilon = jnp.asarray(
        checks.positive_for_each_client("declared_epsilon", declared_epsilon, num_clients)
    )
    algorithm = dp_sgd(
        model,
        trainer,
        weight_of=lambda client, config: epsilon[client.index],
        aggregator=weighted_by_client(num_clients),
    )
    return algorithm.for_clients(num_clients, "weiavg")
