"""Aggregators and server steps."""

from fedjax_dp.server.base import Aggregator, stateless
from fedjax_dp.server.mean import (
    ModelChoice,
    gaussian_mean,
    mean_per_model,
    per_part,
    scaled_sum,
    uniform_mean,
    weighted_mean,
)
from fedjax_dp.server.optimizers import apply_aggregate

__all__ = [
    "Aggregator",
    "ModelChoice",
    "apply_aggregate",
    "gaussian_mean",
    "mean_per_model",
    "per_part",
    "scaled_sum",
    "stateless",
    "uniform_mean",
    "weighted_mean",
]
