"""Exact, non-private evaluation: loss, accuracy, and how evenly clients are served."""

from fedjax_dp.evaluation.clustering import (
    is_minority_found,
    is_partition_found,
    matched_share,
)
from fedjax_dp.evaluation.evaluate import Evaluation, personal_evaluator, shared_evaluator
from fedjax_dp.evaluation.fairness import (
    by_group,
    cluster_fairness,
    disparity_of_gains,
    over_seeds,
    summarize,
)
from fedjax_dp.evaluation.heterogeneity import Heterogeneity, heterogeneity
from fedjax_dp.evaluation.intervals import wilson_interval

__all__ = [
    "Evaluation",
    "Heterogeneity",
    "by_group",
    "cluster_fairness",
    "disparity_of_gains",
    "heterogeneity",
    "is_minority_found",
    "is_partition_found",
    "matched_share",
    "over_seeds",
    "personal_evaluator",
    "shared_evaluator",
    "summarize",
    "wilson_interval",
]
