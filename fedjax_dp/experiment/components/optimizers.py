"""The local optimisers that a configuration can name, with the options that it can hold."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import optax

from fedjax_dp.core.ranges import Decay, NonNegative, Positive
from fedjax_dp.core.registry import Registry


def sgd(
    learning_rate: Any,
    *,
    momentum: Decay | None = None,
    nesterov: bool = False,
    weight_decay: NonNegative | None = None,
) -> optax.GradientTransformation:
    """Takes steps along the gradient.

    Args:
      learning_rate: step size.
      momentum: what is kept of earlier steps, in [0, 1); none takes plain steps.
      nesterov: look ahead along the momentum.
      weight_decay: strength of a squared penalty on the parameters, whose gradient is added to that
        of the loss, ahead of momentum, at least 0; none adds nothing.

    Returns:
      The optimiser.
    """
    steps = optax.sgd(learning_rate, momentum=momentum, nesterov=nesterov)
    if weight_decay is None:
        return steps
    return optax.chain(optax.add_decayed_weights(weight_decay), steps)


def adam(
    learning_rate: Any,
    *,
    b1: Decay = 0.9,
    b2: Decay = 0.999,
    eps: NonNegative = 1e-8,
    eps_root: NonNegative = 0.0,
    nesterov: bool = False,
) -> optax.GradientTransformation:
    """Scales steps by averages of the gradient and of its square.

    Args:
      learning_rate: step size.
      b1: what the average of gradients keeps, in [0, 1).
      b2: what the average of squares keeps, in [0, 1).
      eps: added to the root, at least 0.
      eps_root: added under the root, at least 0.
      nesterov: look ahead along the momentum.

    Returns:
      The optimiser.
    """
    return optax.adam(learning_rate, b1, b2, eps, eps_root, nesterov=nesterov)


def adamw(
    learning_rate: Any,
    *,
    b1: Decay = 0.9,
    b2: Decay = 0.999,
    eps: NonNegative = 1e-8,
    eps_root: NonNegative = 0.0,
    weight_decay: NonNegative = 1e-4,
    nesterov: bool = False,
) -> optax.GradientTransformation:
    """Adam, and parameters that decay.

    Args:
      learning_rate: step size.
      b1: what the average of gradients keeps, in [0, 1).
      b2: what the average of squares keeps, in [0, 1).
      eps: added to the root, at least 0.
      eps_root: added under the root, at least 0.
      weight_decay: share of the parameters that a step of size 1 takes away, at least 0.
      nesterov: look ahead along the momentum.

    Returns:
      The optimiser.
    """
    return optax.adamw(
        learning_rate, b1, b2, eps, eps_root, weight_decay=weight_decay, nesterov=nesterov
    )


def adagrad(
    learning_rate: Any,
    *,
    initial_accumulator_value: NonNegative = 0.1,
    eps: NonNegative = 1e-7,
) -> optax.GradientTransformation:
    """Scales steps by the sum of squared gradients.

    Args:
      learning_rate: step size.
      initial_accumulator_value: what the sum starts from, at least 0.
      eps: added under the root, at least 0.

    Returns:
      The optimiser.
    """
    return optax.adagrad(learning_rate, initial_accumulator_value, eps)


def rmsprop(
    learning_rate: Any,
    *,
    decay: Decay = 0.9,
    eps: Positive = 1e-8,
    initial_scale: NonNegative = 0.0,
    centered: bool = False,
    momentum: Decay | None = None,
    nesterov: bool = False,
) -> optax.GradientTransformation:
    """Scales steps by an average of squared gradients.

    Args:
      learning_rate: step size.
      decay: what the average keeps, in [0, 1).
      eps: added to what is divided by, above 0.
      initial_scale: what the average starts from, at least 0.
      centered: divide by the deviation of gradients instead of their size.
      momentum: what is kept of earlier steps, in [0, 1); none keeps nothing.
      nesterov: look ahead along the momentum.

    Returns:
      The optimiser.
    """
    return optax.rmsprop(
        learning_rate,
        decay,
        eps,
        initial_scale,
        centered=centered,
        momentum=momentum,
        nesterov=nesterov,
    )


def yogi(
    learning_rate: Any, *, b1: Decay = 0.9, b2: Decay = 0.999, eps: NonNegative = 1e-3
) -> optax.GradientTransformation:
    """Adam with an average of squares that changes by additions.

    Args:
      learning_rate: step size.
      b1: what the average of gradients keeps, in [0, 1).
      b2: what the average of squares keeps, in [0, 1).
      eps: added to the root, at least 0.

    Returns:
      The optimiser.
    """
    return optax.yogi(learning_rate, b1, b2, eps)


# Somebody's own is a function `(learning_rate, *, options…) -> GradientTransformation` as well.
OPTIMIZERS: Registry[Callable[..., optax.GradientTransformation]] = Registry(
    {factory.__name__: factory for factory in (sgd, adam, adamw, adagrad, rmsprop, yogi)}
)


def local_optimizer(name: str, options: Mapping[str, Any]) -> Callable[..., Any]:
    """Gives the optimiser of local training.

    Args:
      name: a key of `OPTIMIZERS`.
      options: its options.

    Returns:
      `(learning_rate, **numbers) -> optimiser`.
    """
    if name == "sgd" and not options:
        # Trainers know plain steps by this very function.
        return optax.sgd
    switches = {k: v for k, v in options.items() if k not in optimizer_numbers(options)}
    return functools.partial(OPTIMIZERS[name], **switches)


def optimizer_numbers(options: Mapping[str, Any]) -> dict[str, float]:
    """Picks the options that are numbers, which a sweep may change without compiling again.

    Args:
      options: of an optimiser.

    Returns:
      For `LocalConfig.optimizer`.
    """
    return {
        name: float(value)
        for name, value in options.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
