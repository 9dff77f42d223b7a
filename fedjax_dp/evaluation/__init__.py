"""Exact, non-private evaluation: loss, accuracy, other metrics, fairness over clients."""

from fedjax_dp.evaluation.clusters import (
    HiddenClusters,
    References,
    cost_disparity,
    is_minority_found,
    is_partition_found,
    matched_share,
)
from fedjax_dp.evaluation.evaluate import (
    Evaluation,
    Heterogeneity,
    heterogeneity,
    personal_evaluator,
    shared_evaluator,
    summarize,
    wilson_interval,
)
from fedjax_dp.evaluation.metrics import Metric, RowsMetric

__all__ = [
    "Evaluation",
    "Heterogeneity",
    "HiddenClusters",
    "Metric",
    "References",
    "RowsMetric",
    "cost_disparity",
    "heterogeneity",
    "is_minority_found",
    "is_partition_found",
    "matched_share",
    "personal_evaluator",
    "shared_evaluator",
    "summarize",
    "wilson_interval",
]
