"""The round whose model a run keeps: the last, or the best by an exact metric."""

import re

from fedjax_dp.core import checks
from fedjax_dp.experiment.schema.config import RunSection

KEY, _BEST = "run.keep", "best:"
# Ends of the names of metrics, by which direction is better.
_LARGER = ("accuracy", "f1", "mcc", "auc", "r2")
_SMALLER = ("loss", "perplexity", "calibration_error", "brier_score", "disparity", "mae", "mse")
# What evaluations add to these names.
_ADDED = re.compile(r"(_q\d+)?(_after_local)?$")


def kept_metric(section: RunSection) -> str | None:
    """Returns the metric that decides which round is kept; None for the last one."""
    return section.keep.removeprefix(_BEST) if section.keep.startswith(_BEST) else None


def check_kept(section: RunSection) -> None:
    """Refuses a metric of which no direction is known to be better."""
    metric = kept_metric(section)
    if metric is not None:
        require_direction(metric, KEY, section.keep)


def require_direction(metric: str, key: str, value: str) -> None:
    """Requires a metric, which the value of a key names, of which one direction is better."""
    rule = f"name a metric that ends in one of {', '.join(_LARGER + _SMALLER)}, of which one "
    rule += "direction is known to be better"
    checks.require(has_direction(metric), key, rule, value)


def has_direction(metric: str) -> bool:
    """Whether one direction of a metric is known to be better, by its name."""
    name = _ADDED.sub("", metric)
    # A spread of accuracies is no accuracy, and a number of clients without an AUC is no AUC.
    is_other = name.removeprefix("unseen_").startswith(("std_", "clients_without_"))
    return name.endswith(_LARGER + _SMALLER) and not is_other


def is_larger_better(metric: str) -> bool:
    """Whether larger values of a metric are better, of which one direction is known to be."""
    return _ADDED.sub("", metric).endswith(_LARGER)


def loss_of(metric: str, value: float) -> float:
    """Returns a metric with a sign by which smaller is better."""
    return -value if is_larger_better(metric) else value
