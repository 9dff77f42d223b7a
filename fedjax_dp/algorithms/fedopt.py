"""FedAvg with momentum or an adaptive optimiser at the server."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_dp.algorithms.base import FederatedAlgorithm
from fedjax_dp.algorithms.fedavg import fedavg
from fedjax_dp.clients.base import LocalTrainer
from fedjax_dp.core import checks
from fedjax_dp.core.trees import PyTree
from fedjax_dp.models.base import Model


class AdaptiveState(NamedTuple):
    """Moments of the aggregate.

    Attributes:
      first: running mean of the aggregate.
      second: running second moment.
    """

    first: PyTree
    second: PyTree


def adaptive(
    second_moment: Callable[[jax.Array, jax.Array], jax.Array],
    learning_rate: float,
    b1: float,
    adaptivity: float,
) -> optax.GradientTransformation:
    """Builds the server optimiser that FedAdam, FedYogi and FedAdagrad share.

    It differs from Optax's own in three points of the paper: no bias correction, a second moment
    that starts at `adaptivity**2`, and `adaptivity` outside the root.

    Args:
      second_moment: `(v, squared) -> v`, the rule that tells the three apart.
      learning_rate: the server's step size, above 0.
      b1: decay of the first moment, in [0, 1).
      adaptivity: the paper's τ, above 0.

    Returns:
      The optimiser.

    Source: Reddi and others 2021, algorithm 2.
    """
    checks.positive("server_learning_rate", learning_rate)
    checks.positive("adaptivity", adaptivity)
    checks.require(0 <= b1 < 1, "b1", "lie in [0, 1)", b1)

    def init(params):
        first = jax.tree.map(jnp.zeros_like, params)
        return AdaptiveState(first, jax.tree.map(lambda p: jnp.full_like(p, adaptivity**2), params))

    def update(gradient, state, params=None):
        del params
        first = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, state.first, gradient)
        second = jax.tree.map(lambda v, g: second_moment(v, g * g), state.second, gradient)
        step = jax.tree.map(
            lambda m, v: -learning_rate * m / (jnp.sqrt(v) + adaptivity), first, second
        )
        return step, AdaptiveState(first, second)

    return optax.GradientTransformation(init, update)


def fedavgm(
    model: Model,
    trainer: LocalTrainer,
    *,
    server_learning_rate: float = 1.0,
    momentum: float = 0.9,
    **options: Any,
) -> FederatedAlgorithm:
    """Declares FedAvgM: FedAvg with momentum at the server.

    Args:
      model: what is trained.
      trainer: local training.
      server_learning_rate: the server's step size, above 0.
      momentum: the share of the last step that is kept, in [0, 1).
      **options: further options of `fedavg`.

    Returns:
      The algorithm.

    Source: Hsu, Qi and Brown 2019.
    """
    checks.positive("server_learning_rate", server_learning_rate)
    checks.require(0 <= momentum < 1, "momentum", "lie in [0, 1)", momentum)
    optimizer = optax.sgd(server_learning_rate, momentum=momentum)
    return fedavg(model, trainer, server_optimizer=optimizer, name="fedavgm", **options)


def fedadam(
    model: Model,
    trainer: LocalTrainer,
    *,
    server_learning_rate: float = 0.01,
    b1: float = 0.9,
    b2: float = 0.99,
    adaptivity: float = 1e-3,
    **options: Any,
) -> FederatedAlgorithm:
    """Declares FedAdam: FedAvg with Adam at the server.

    Args:
      model: what is trained.
      trainer: local training.
      server_learning_rate: the server's step size, above 0.
      b1: decay of the first moment, in [0, 1).
      b2: decay of the second moment, in [0, 1).
      adaptivity: the paper's τ, above 0.
      **options: further options of `fedavg`.

    Returns:
      The algorithm.

    Source: Reddi and others 2021, algorithm 2.
    """
    checks.require(0 <= b2 < 1, "b2", "lie in [0, 1)", b2)
    optimizer = adaptive(
        lambda v, squared: b2 * v + (1 - b2) * squared, server_learning_rate, b1, adaptivity
    )
    return fedavg(model, trainer, server_optimizer=optimizer, name="fedadam", **options)


def fedyogi(
    model: Model,
    trainer: LocalTrainer,
    *,
    server_learning_rate: float = 0.01,
    b1: float = 0.9,
    b2: float = 0.99,
    adaptivity: float = 1e-3,
    **options: Any,
) -> FederatedAlgorithm:
    """Declares FedYogi: FedAvg with Yogi at the server.

    Args:
      model: what is trained.
      trainer: local training.
      server_learning_rate: the server's step size, above 0.
      b1: decay of the first moment, in [0, 1).
      b2: decay of the second moment, in [0, 1).
      adaptivity: the paper's τ, above 0.
      **options: further options of `fedavg`.

    Returns:
      The algorithm.

    Source: Reddi and others 2021, algorithm 2.
    """
    checks.require(0 <= b2 < 1, "b2", "lie in [0, 1)", b2)
    optimizer = adaptive(
        lambda v, squared: v - (1 - b2) * squared * jnp.sign(v - squared),
        server_learning_rate,
        b1,
        adaptivity,
    )
    return fedavg(model, trainer, server_optimizer=optimizer, name="fedyogi", **options)


def fedadagrad(
    model: Model,
    trainer: LocalTrainer,
    *,
    server_learning_rate: float = 0.01,
    b1: float = 0.0,
    adaptivity: float = 1e-3,
    **options: Any,
) -> FederatedAlgorithm:
    """Declares FedAdagrad: FedAvg with Adagrad at the server.

    Args:
      model: what is trained.
      trainer: local training.
      server_learning_rate: the server's step size, above 0.
      b1: decay of the first moment, in [0, 1).
      adaptivity: the paper's τ, above 0.
      **options: further options of `fedavg`.

    Returns:
      The algorithm.

    Source: Reddi and others 2021, algorithm 2.
    """
    optimizer = adaptive(lambda v, squared: v + squared, server_learning_rate, b1, adaptivity)
    return fedavg(model, trainer, server_optimizer=optimizer, name="fedadagrad", **options)
