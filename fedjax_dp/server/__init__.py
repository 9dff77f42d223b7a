"""Aggregators and server steps."""

from fedjax_dp.server.base import Aggregator, stateless
from fedjax_dp.server.correlated import correlated_gaussian_mean
from fedjax_dp.server.distributed import discrete_mean
from fedjax_dp.server.mean import (
    ModelChoice,
    mean_per_model,
    per_part,
    scaled_sum,
    uniform_mean,
    weighted_mean,
)
from fedjax_dp.server.optimizers import apply_aggregate
from fedjax_dp.server.private import (
    adaptive_gaussian_mean,
    gaussian_mean,
    laplace_mean,
    private_mean,
)

__all__ = [
    "Aggregator",
    "ModelChoice",
    "adaptive_gaussian_mean",
    "apply_aggregate",
    "correlated_gaussian_mean",
    "discrete_mean",
    "gaussian_mean",
    "laplace_mean",
    "mean_per_model",
    "per_part",
    "private_mean",
    "scaled_sum",
    "stateless",
    "uniform_mean",
    "weighted_mean",
]
