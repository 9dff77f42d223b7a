"""The oracle of Robust-HDP: weights from the true noise of every client."""

import jax.numpy as jnp

from fedjax_dp.algorithms.base import FederatedAlgorithm
from fedjax_dp.algorithms.dp_sgd import dp_sgd
from fedjax_dp.clients.base import LocalTrainer
from fedjax_dp.core import trees
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.ranges import Count
from fedjax_dp.models.base import Model
from fedjax_dp.server.noise_aware import weighted_by_client

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
