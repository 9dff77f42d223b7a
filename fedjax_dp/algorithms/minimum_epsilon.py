"""Minimum-ε: all clients are calibrated to the smallest budget."""

import numpy as np
from numpy.typing import ArrayLike

from fedjax_dp.algorithms.base import FederatedAlgorithm
from fedjax_dp.algorithms.record_dp_fedavg import record_dp_fedavg
from fedjax_dp.clients.base import LocalTrainer
from fedjax_dp.core import checks
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.ranges import Count
from fedjax_dp.models.base import Model


@checked
def minimum_epsilon(
    model: Model, trainer: LocalTrainer, *, num_clients: Count, is_weighted: bool = True
) -> FederatedAlgorithm:
    """Declares DPFedAvg for clients that are all calibrated to the smallest budget.

    This is `record_dp_fedavg` with a trainer whose noise is calibrated to `smallest_budget`.

    Guarantee: as `dp_sgd`.

    Args:
      model: the model to train.
      trainer: a private trainer, each client's noise multiplier calibrated to the smallest budget.
      num_clients: the population, at least 1.
      is_weighted: weight clients by their number of examples N_i instead of equally.

    Returns:
      The algorithm.

    Raises:
      ValueError: if the trainer is not private.

    Source: Liu and others 2021 (PFA), the baseline of a common minimum.
    """
    algorithm = record_dp_fedavg(model, trainer, num_clients=num_clients, is_weighted=is_weighted)
    return algorithm._replace(name="minimum_epsilon")


@checked
def smallest_budget(epsilon: ArrayLike) -> np.ndarray:
    """Replaces all budgets by the smallest.

    Args:
      epsilon: budgets, above 0, `[clients]`.

    Returns:
      The budgets to calibrate clients to, `[clients]`.
    """
    checks.positive("epsilon", epsilon)
    return np.full(np.shape(epsilon), np.min(epsilon))
