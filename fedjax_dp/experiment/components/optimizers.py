"""The local optimisers that a configuration can name, with their options."""

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
    """Takes steps along the gradient, with a penalty that Optax's SGD does not have.

    Args:
      momentum: the share of earlier steps to retain, in [0, 1); none takes plain steps.
      nesterov: look ahead along the momentum.
      weight_decay: strength of a squared penalty on the parameters, whose gradient is added to that
        of the loss before momentum, at least 0; none adds nothing.
    """
    steps = optax.sgd(learning_rate, momentum=momentum, nesterov=nesterov)
    if weight_decay is None:
        return steps
    return optax.chain(optax.add_decayed_weights(weight_decay), steps)


_MOMENTS = {"b1": Decay, "b2": Decay, "eps": NonNegative}
_ADAM = {**_MOMENTS, "eps_root": NonNegative, "nesterov": bool}
# By name, the options that a configuration can set of Optax's own optimisers.
KINDS: Mapping[str, Mapping[str, Any]] = {
    "adam": _ADAM,
    "adamw": {**_ADAM, "weight_decay": NonNegative},
    "adagrad": {"initial_accumulator_value": NonNegative, "eps": NonNegative},
    "rmsprop": {
        "decay": Decay,
        "eps": Positive,
        "initial_scale": NonNegative,
        "centered": bool,
        "momentum": Decay | None,
        "nesterov": bool,
    },
    "yogi": _MOMENTS,
}
# A user's optimiser is a function `(learning_rate, *, options…) -> GradientTransformation` too.
OPTIMIZERS: Registry[Callable[..., optax.GradientTransformation]] = Registry(
    {"sgd": sgd} | {name: getattr(optax, name) for name in KINDS}
)


def local_optimizer(name: str, options: Mapping[str, Any]) -> Callable[..., Any]:
    """Returns `(learning_rate, **numbers) -> optimiser`, with the other options bound."""
    if name == "sgd" and not options:
        # Trainers recognise plain steps by this function.
        return optax.sgd
    switches = {k: v for k, v in options.items() if k not in optimizer_numbers(options)}
    return functools.partial(OPTIMIZERS[name], **switches)


def optimizer_numbers(options: Mapping[str, Any]) -> dict[str, float]:
    """Selects the numeric options, which a sweep may change without recompiling."""
    return {
        name: float(value)
        for name, value in options.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
