"""Exact, non-private evaluation: loss, accuracy, other metrics, fairness over clients."""

from fedjax_dp.evaluation.evaluate import Evaluation, personal_evaluator, shared_evaluator
from fedjax_dp.evaluation.fairness import Heterogeneity, heterogeneity, summarize, wilson_interval
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
