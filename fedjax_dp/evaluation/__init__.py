"""Exact, non-private evaluation: loss, accuracy, other metrics, fairness over clients."""

from fedjax_dp.evaluation.evaluate import (
    Evaluation,
    Heterogeneity,
    heterogeneity,
    personal_evaluator,
    shared_evaluator,
    summarize,
    wilson_interval,
)
from fedjax_dp.evaluation.metrics import Metric

__all__ = [
    "Evaluation",
    "Heterogeneity",
    "Metric",
    "heterogeneity",
    "personal_evaluator",
    "shared_evaluator",
    "summarize",
    "wilson_interval",
]
