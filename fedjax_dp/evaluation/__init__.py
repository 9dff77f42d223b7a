"""Exact, non-private evaluation: loss, accuracy, and how evenly clients are served."""

from fedjax_dp.evaluation.evaluate import Evaluation, personal_evaluator, shared_evaluator
from fedjax_dp.evaluation.fairness import by_group, disparity_of_gains, summarize

__all__ = [
    "Evaluation",
    "by_group",
    "disparity_of_gains",
    "personal_evaluator",
    "shared_evaluator",
    "summarize",
]
