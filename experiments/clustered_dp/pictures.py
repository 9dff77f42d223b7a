"""Figures of what ran: accuracy by ε of all, majority and minority clients, and mixtures."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from experiments import study_plots
from experiments.clustered_dp.grid import METHODS
from experiments.clustered_dp.tables import DATASETS, over_seeds

# Metrics of the curves, and what they are the mean accuracy of.
GROUPS = {"acc_all": "all clients", "acc_maj": "majority", "acc_min": "minority"}
Results = Sequence[dict[str, Any]]
# Of a mixture, called MSS.
SEPARATION = "smallest separation"


def draw(results: Results) -> dict[str, Figure]:
    """Draws the figures of a folder, by file name; curves are of methods with several budgets."""
    figures = {}
    data = results[0]["setting"]["data"]["name"]
    for metric, who in GROUPS.items():
        curves, num_seeds = by_epsilon(results, metric)
        if curves:
            title = f"{DATASETS.get(data, data)}, {who}"
            figure = study_plots.accuracy_by_epsilon(curves, title, [num_seeds])
            figures[f"{metric}_by_epsilon"] = figure
    for result in results:
        if "mixture" in result:
            figures[f"mixture,{stem(result)}"] = mixture(result)
    return figures


def stem(result: dict[str, Any]) -> str:
    """The stem of a result's file."""
    return f"method={result['method']},epsilon={result['epsilon']:g},seed={result['seed']}"


def by_epsilon(results: Results, metric: str) -> tuple[dict[str, Any], int]:
    """Computes curves over ε, and their number of seeds: those of every method at every budget."""
    budgets = {m: sorted({r["epsilon"] for r in results if r["method"] == m}) for m in METHODS}
    several = [r for r in results if len(budgets[r["method"]]) > 1]
    found: dict[tuple[str, float], dict[int, dict[str, float]]] = {}
    for r in several:
        found.setdefault((r["method"], r["epsilon"]), {})[r["seed"]] = r["metrics"]
    shared = set.intersection(*map(set, found.values())) if found else set()
    curves = {}
    for method in METHODS if shared else ():
        if len(budgets[method]) > 1:
            members = ([found[method, e][seed] for seed in shared] for e in budgets[method])
            means, spreads = zip(*(over_seeds(m)[metric] for m in members), strict=True)
            curves[method] = (budgets[method], list(means), np.nan_to_num(spreads).tolist())
    return curves, len(shared)


def mixture(result: dict[str, Any]) -> Figure:
    """Draws the updates of a run's first round with the mixture that was fitted to them."""
    fitted = {name: np.asarray(values) for name, values in result["mixture"].items()}
    title = f"First round, ε = {result['epsilon']:g}, {SEPARATION} {result['separation']:.1f}"
    return study_plots.updates_and_mixture(
        fitted["features"], fitted["true_clusters"], fitted["means"], fitted["radii"], title
    )
