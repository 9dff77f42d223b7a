"""DP-SGD at the clients, and means that weight clients of different budgets."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from fedjax_dp.algorithms.base import FederatedAlgorithm
from fedjax_dp.algorithms.fedavg import fedavg
from fedjax_dp.clients.base import LocalConfig, LocalTrainer
from fedjax_dp.clients.client_data import ClientData
from fedjax_dp.core import checks, trees
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.ranges import Count
from fedjax_dp.models.base import Model
from fedjax_dp.server.noise_aware import weighted_by_client


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
    budgets = np.asarray(epsilon)
    return np.full(budgets.shape, np.min(budgets))


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


# Bounds the weight of a client without noise, or with a learning rate of 0.
_SMALLEST = 1e-20


@checked
def noise_oracle(model: Model, trainer: LocalTrainer, *, num_clients: Count) -> FederatedAlgorithm:
    """Declares DP-SGD at the clients and a mean with weights `w_i ∝ 1/σ_i²`.

    σ_i² is the variance of a client's update due to its own noise, `steps η² c² z² / b²` for each
    parameter. It is optimal for a server that knows every client's numbers; a real one does not.

    Guarantee: as `dp_sgd`.

    Args:
      model: the model to train.
      trainer: a private trainer, each client with its own noise multiplier.
      num_clients: the population, at least 1.

    Returns:
      The algorithm.

    Raises:
      ValueError: if the trainer is not private.

    Source: Malekmohammadi and others 2024 (Robust-HDP); Malekmohammadi 2025, equations 3.3 and 3.5.
    """

    def weight_of(client, config):
        steps = trainer.num_steps(client.size, config).astype(jnp.float32)
        stddev = trees.ratio(config.clip_norm * config.noise_multiplier, config.batch_size)
        variance = steps * jnp.square(config.learning_rate * stddev)
        return 1.0 / jnp.maximum(variance, _SMALLEST)

    aggregator = weighted_by_client(num_clients)
    algorithm = dp_sgd(model, trainer, weight_of=weight_of, aggregator=aggregator)
    return algorithm.for_clients(num_clients, "noise_oracle")
