"""Figures of what ran: accuracy by ε of all, majority and minority clients, and mixtures."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from experiments import study_plots
from experiments.clustered_dp.grid import METHODS
from experiments.clustered_dp.metrics import over_seeds
from experiments.clustered_dp.tables import DATASETS

# Metrics of the curves, and what they are the mean accuracy of.
GROUPS = {"acc_all": "all clients", "acc_maj": "majority", "acc_min": "minority"}
Results = Sequence[dict[str, Any]]


def draw(results: Results) -> dict[str, Figure]:
    """Draws the figures of a folder's results, by file name.

    Curves need a method with two budgets. Mixtures are those of R-DPCFL; RC-DPFL has the same
    first round, but for the noise multiplier.
    """
    figures = {}
    data = results[0]["setting"]["data"]["name"]
    for metric, who in GROUPS.items():
        curves, seeds = by_epsilon(results, metric)
        if any(len(budgets) > 1 for budgets, _, _ in curves.values()):
            title = f"{DATASETS.get(data, data)}, {who}"
            figures[f"{metric}_by_epsilon"] = study_plots.accuracy_by_epsilon(curves, title, seeds)
    for result in results:
        if result["method"].startswith("R-DPCFL") and "mixture" in result:
            figures[f"mixture,{stem(result)}"] = mixture(result)
    return figures


def stem(result: dict[str, Any]) -> str:
    """The stem of a result's file."""
    return f"method={result['method']},epsilon={result['epsilon']:g},seed={result['seed']}"


def by_epsilon(results: Results, metric: str) -> tuple[dict[str, Any], list[int]]:
    """Computes curves over ε of methods with several budgets, and the numbers of seeds."""
    curves, seeds = {}, []
    for method in METHODS:
        mine = [r for r in results if r["method"] == method]
        budgets = sorted({r["epsilon"] for r in mine})
        if len(budgets) < 2:
            continue
        found = [[r["metrics"] for r in mine if r["epsilon"] == e] for e in budgets]
        summaries = [over_seeds(metrics)[metric] for metrics in found]
        means, spreads = zip(*summaries, strict=True)
        curves[method] = (budgets, list(means), np.nan_to_num(spreads).tolist())
        seeds += [len(metrics) for metrics in found]
    return curves, seeds


def mixture(result: dict[str, Any]) -> Figure:
    """Draws the updates of a run's first round with the mixture that was fitted to them."""
    fitted = {name: np.asarray(values) for name, values in result["mixture"].items()}
    title = f"ε = {result['epsilon']:g}, round 1, MSS {result['separation']:.1f}"
    return study_plots.updates_and_mixture(
        fitted["features"], fitted["true_clusters"], fitted["means"], fitted["radii"], title
    )
