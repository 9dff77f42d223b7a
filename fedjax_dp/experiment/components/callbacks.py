"""Callbacks by name: early stopping, experiment trackers, and those of users."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np

from fedjax_dp.core import checks
from fedjax_dp.core.ranges import Count, NonNegative
from fedjax_dp.core.registry import Registry
from fedjax_dp.experiment.components import trackers
from fedjax_dp.experiment.components.experiment import Callback, Progress
from fedjax_dp.experiment.components.measured import RELEASED, Measured, measured


def early_stopping(
    *,
    metric: Measured = "test_loss",
    goal: Literal["smaller", "larger"] = "smaller",
    patience: Count = 5,
    min_change: NonNegative = 0.0,
) -> Callback:
    """Stops a run whose metric has not improved for some evaluations.

    Args:
      metric: a name in `metrics.jsonl`, of a number and not of a table.
      goal: whether "smaller" or "larger" is better.
      patience: evaluations without a better value, at least 1.
      min_change: the least improvement, at least 0.

    Returns:
      The callback. It is private if the metric is released with noise; others are exact.
    """

    def call(progress: Progress) -> bool:
        signed = measured(progress.rows, metric, "metric of early_stopping")
        signed *= 1 if goal == "smaller" else -1
        best, waited = np.inf, 0
        for value in signed:
            is_better = value < best - min_change
            best, waited = (value, 0) if is_better else (best, waited + 1)
        return waited >= patience

    return Callback(call, is_private=metric in RELEASED)


def _adopted(own: Any) -> Callable[..., Callback]:
    """Adopts a user's callback: a `Callback`, or a function of its options that returns one."""
    if isinstance(own, Callback):
        return lambda: own
    checks.require(callable(own), "callback", "be a Callback, or a function that returns one", own)
    return own


CALLBACKS: Registry[Callable[..., Callback]] = Registry(
    {
        "early_stopping": early_stopping,
        "mlflow": trackers.mlflow,
        "wandb": trackers.wandb,
        "trackio": trackers.trackio,
    },
    _adopted,
)


def followed(chosen: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Returns by key the metrics that callbacks of a configuration follow."""
    name, option = early_stopping.__name__, "metric"
    if name not in chosen:
        return {}
    default = inspect.signature(early_stopping).parameters[option].default
    return {f"run.callbacks.{name}.{option}": chosen[name].get(option, default)}


def callbacks_of(chosen: Mapping[str, Mapping[str, Any]]) -> dict[str, Callback]:
    """Builds the callbacks that a configuration names, from options by name."""
    made = {name: CALLBACKS[name](**options) for name, options in chosen.items()}
    for name, callback in made.items():
        found = type(callback).__name__
        is_one = isinstance(callback, Callback)
        checks.require(is_one, f"the result of {name}", "be a Callback", found)
    return made
