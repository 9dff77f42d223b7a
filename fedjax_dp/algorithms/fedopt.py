"""FedAvg with momentum or an adaptive optimiser at the server."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_dp.algorithms.base import FederatedAlgorithm
from fedjax_dp.algorithms.fedavg import averaged
from fedjax_dp.clients.base import LocalTrainer
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.ranges import Decay, Positive
from fedjax_dp.core.trees import PyTree
from fedjax_dp.models.base import Model
from fedjax_dp.server.base import Aggregator


class AdaptiveState(NamedTuple):
    """Running means of the aggregate and of its square."""

    first: PyTree
    second: PyTree


def adaptive(
    second_moment: Callable[[jax.Array, jax.Array], jax.Array],
    learning_rate: Any,
    b1: Any,
    adaptivity: Any,
    is_inside_root: bool = False,
) -> optax.GradientTransformation:
    """Builds the server optimiser of FedAdam, FedYogi and FedAdagrad from `(v, squared) -> v`.

    It differs from Optax's in three points of the paper: no bias correction, a second moment that
    starts at `adaptivity**2`, and `adaptivity` outside the root, unless `is_inside_root`.

    Source: Reddi and others 2021, algorithm 2; inside the root Mugunthan 2022, algorithm 1 of
    chapter 3.
    """

    def init(params):
        first = jax.tree.map(jnp.zeros_like, params)
        return AdaptiveState(first, jax.tree.map(lambda p: jnp.full_like(p, adaptivity**2), params))

    def update(gradient, state, params=None):
        del params
        first = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, state.first, gradient)
        second = jax.tree.map(lambda v, g: second_moment(v, g * g), state.second, gradient)
        step = jax.tree.map(lambda m, v: -learning_rate * m / root(v), first, second)
        return step, AdaptiveState(first, second)

    def root(v):
        return jnp.sqrt(v + adaptivity) if is_inside_root else jnp.sqrt(v) + adaptivity

    return optax.GradientTransformation(init, update)


@checked
def fedavgm(
    model: Model,
    trainer: LocalTrainer,
    *,
    server_learning_rate: Positive = 1.0,
    momentum: Decay = 0.9,
    aggregator: Aggregator | None = None,
) -> FederatedAlgorithm:
    """Declares FedAvgM: FedAvg with momentum at the server.

    Args:
      model: the model to train.
      trainer: local training.
      server_learning_rate: the server's step size.
      momentum: the share of the last step to add to the next.
      aggregator: combines deltas; by default the mean weighted by client size.

    Returns:
      The algorithm.

    Raises:
      ValueError: for a number out of its range.

    Source: Hsu, Qi and Brown 2019.
    """
    return averaged(
        model,
        trainer,
        lambda n: optax.sgd(n["server_learning_rate"], momentum=n["momentum"]),
        numbers={"server_learning_rate": server_learning_rate, "momentum": momentum},
        ranges_of={"server_learning_rate": Positive, "momentum": Decay},
        aggregator=aggregator,
        name="fedavgm",
    )


_RANGES = {"server_learning_rate": Positive, "b1": Decay, "b2": Decay, "adaptivity": Positive}


def _with_adaptive_server(
    name: str,
    second_moment: Callable[[Mapping[str, Any], jax.Array, jax.Array], jax.Array],
    model: Model,
    trainer: LocalTrainer,
    aggregator: Aggregator | None,
    is_inside_root: bool = False,
    **numbers: Any,
) -> FederatedAlgorithm:
    """Declares averaging with a server optimiser given by its rule `(numbers, v, squared) -> v`."""

    def optimizer_of(n):
        rule = partial(second_moment, n)
        rate, b1, adaptivity = n["server_learning_rate"], n["b1"], n["adaptivity"]
        return adaptive(rule, rate, b1, adaptivity, is_inside_root)

    return averaged(
        model,
        trainer,
        optimizer_of,
        numbers=numbers,
        ranges_of={name: _RANGES[name] for name in numbers},
        aggregator=aggregator,
        name=name,
    )


@checked
def fedadam(
    model: Model,
    trainer: LocalTrainer,
    *,
    server_learning_rate: Positive = 0.01,
    b1: Decay = 0.9,
    b2: Decay = 0.99,
    adaptivity: Positive = 1e-3,
    is_inside_root: bool = False,
    aggregator: Aggregator | None = None,
) -> FederatedAlgorithm:
    """Declares FedAdam: FedAvg with Adam at the server.

    Args:
      model: the model to train.
      trainer: local training.
      server_learning_rate: the server's step size.
      b1: decay of the first moment.
      b2: decay of the second moment.
      adaptivity: the paper's τ.
      is_inside_root: whether a step is divided by √(v + τ), as Mugunthan 2022 prints it, instead of
        √v + τ.
      aggregator: combines deltas; by default the mean weighted by client size.

    Returns:
      The algorithm.

    Raises:
      ValueError: for a number out of its range.

    Source: Reddi and others 2021, algorithm 2.
    """
    return _with_adaptive_server(
        "fedadam",
        lambda n, v, squared: n["b2"] * v + (1 - n["b2"]) * squared,
        model,
        trainer,
        aggregator,
        is_inside_root,
        server_learning_rate=server_learning_rate,
        b1=b1,
        b2=b2,
        adaptivity=adaptivity,
    )


@checked
def fedyogi(
    model: Model,
    trainer: LocalTrainer,
    *,
    server_learning_rate: Positive = 0.01,
    b1: Decay = 0.9,
    b2: Decay = 0.99,
    adaptivity: Positive = 1e-3,
    is_inside_root: bool = False,
    aggregator: Aggregator | None = None,
) -> FederatedAlgorithm:
    """Declares FedYogi: FedAvg with Yogi at the server.

    Args:
      model: the model to train.
      trainer: local training.
      server_learning_rate: the server's step size.
      b1: decay of the first moment.
      b2: decay of the second moment.
      adaptivity: the paper's τ.
      is_inside_root: whether a step is divided by √(v + τ), as Mugunthan 2022 prints it, instead of
        √v + τ.
      aggregator: combines deltas; by default the mean weighted by client size.

    Returns:
      The algorithm.

    Raises:
      ValueError: for a number out of its range.

    Source: Reddi and others 2021, algorithm 2.
    """
    return _with_adaptive_server(
        "fedyogi",
        lambda n, v, squared: v - (1 - n["b2"]) * squared * jnp.sign(v - squared),
        model,
        trainer,
        aggregator,
        is_inside_root,
        server_learning_rate=server_learning_rate,
        b1=b1,
        b2=b2,
        adaptivity=adaptivity,
    )


@checked
def fedadagrad(
    model: Model,
    trainer: LocalTrainer,
    *,
    server_learning_rate: Positive = 0.01,
    b1: Decay = 0.0,
    adaptivity: Positive = 1e-3,
    aggregator: Aggregator | None = None,
) -> FederatedAlgorithm:
    """Declares FedAdagrad: FedAvg with Adagrad at the server.

    Args:
      model: the model to train.
      trainer: local training.
      server_learning_rate: the server's step size.
      b1: decay of the first moment.
      adaptivity: the paper's τ.
      aggregator: combines deltas; by default the mean weighted by client size.

    Returns:
      The algorithm.

    Raises:
      ValueError: for a number out of its range.

    Source: Reddi and others 2021, algorithm 2.
    """
    return _with_adaptive_server(
        "fedadagrad",
        lambda n, v, squared: v + squared,
        model,
        trainer,
        aggregator,
        server_learning_rate=server_learning_rate,
        b1=b1,
        adaptivity=adaptivity,
    )
