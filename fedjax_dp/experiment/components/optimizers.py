"""The local optimisers that a configuration can name, with their options."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import optax

from fedjax_dp.clients.optimizers import KINDS, sgd
from fedjax_dp.core.registry import Registry

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
