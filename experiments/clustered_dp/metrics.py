"""Metrics of hidden clusters: whether they were found, how evenly they are served, over seeds."""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike
from scipy.optimize import linear_sum_assignment

from fedjax_dp.core import checks


def _counts(assigned: ArrayLike, true: ArrayLike) -> np.ndarray:
    """Counts clients by found and true cluster, `[found, true]`."""
    assigned, true = np.asarray(assigned), np.asarray(true)
    checks.require(
        assigned.ndim == 1 and assigned.shape == true.shape and assigned.size > 0,
        "assigned",
        f"name a cluster for each of the {true.size} clients of true",
        f"{assigned.shape} beside {true.shape}",
    )
    found, rows = np.unique(assigned, return_inverse=True)
    real, columns = np.unique(true, return_inverse=True)
    counts = np.zeros((len(found), len(real)), np.int64)
    np.add.at(counts, (rows, columns), 1)
    return counts


def is_partition_found(assigned: ArrayLike, true: ArrayLike) -> bool:
    """Whether clients share a found cluster exactly where they share a true one."""
    counts = _counts(assigned, true) > 0
    return bool(np.all(counts.sum(axis=0) == 1) and np.all(counts.sum(axis=1) == 1))


def is_minority_found(assigned: ArrayLike, true: ArrayLike, minority: int | None = None) -> bool:
    """Whether the clients of one true cluster, the smallest by default, form a found cluster."""
    counts, real = _counts(assigned, true), np.unique(true)
    column = int(np.argmin(counts.sum(axis=0)))
    if minority is not None:
        checks.require(minority in real, "minority", "be a cluster with clients", minority)
        column = int(np.searchsorted(real, minority))
    holds = counts[:, column] > 0
    return bool(holds.sum() == 1 and counts[holds].sum() == counts[:, column].sum())


def matched_share(assigned: ArrayLike, true: ArrayLike) -> float:
    """Computes the share of clients in the right cluster, under the best naming (Kuhn 1955)."""
    counts = _counts(assigned, true)
    rows, columns = linear_sum_assignment(counts, maximize=True)
    return float(counts[rows, columns].sum() / counts.sum())


def disparity_of_gains(values: ArrayLike, references: ArrayLike) -> float:
    """Computes `max_ij |(reference_i − value_i) − (reference_j − value_j)|`, NaN left out."""
    gap = np.asarray(references, dtype=np.float64) - np.asarray(values, dtype=np.float64)
    gap = gap[~np.isnan(gap)]
    return float(gap.max() - gap.min()) if gap.size else float("nan")


def by_group(values: ArrayLike, is_minority: ArrayLike) -> dict[str, float]:
    """Averages a number by client over all, majority and minority; NaN left out."""
    values, is_minority = np.asarray(values, dtype=np.float64), np.asarray(is_minority, dtype=bool)
    checks.require(
        values.shape == is_minority.shape, "is_minority", "match the clients", is_minority.shape
    )

    def mean(part: np.ndarray) -> float:
        part = part[~np.isnan(part)]
        return float(part.mean()) if part.size else float("nan")

    return {
        "all": mean(values),
        "majority": mean(values[~is_minority]),
        "minority": mean(values[is_minority]),
    }


def cluster_fairness(
    accuracy: np.ndarray,
    loss: np.ndarray,
    reference_accuracy: np.ndarray,
    reference_loss: np.ndarray,
    is_minority: np.ndarray,
) -> dict[str, float]:
    """Computes the fairness metrics of section 9, accuracies in percent.

    The paper compares with the best model of a client's cluster; here the reference is a model
    that is trained centrally, without privacy, on the pooled data of the cluster.
    """
    percent = 100 * np.asarray(accuracy, dtype=np.float64)
    groups = by_group(percent, is_minority)
    return {
        "acc_all": groups["all"],
        "acc_maj": groups["majority"],
        "acc_min": groups["minority"],
        "min_acc": float(np.nanmin(percent)),
        "acc_disparity": float(np.nanmax(percent) - np.nanmin(percent)),
        "F_acc": disparity_of_gains(percent, 100 * np.asarray(reference_accuracy, np.float64)),
        "F_loss": disparity_of_gains(loss, reference_loss),
    }


def over_seeds(results: Sequence[Mapping[str, float]]) -> dict[str, tuple[float, float]]:
    """Computes mean and standard deviation (n - 1) over seeds of the metrics that all have."""
    checks.require(len(results) > 0, "results", "hold at least one seed", results)
    shared = set.intersection(*(set(r) for r in results))
    summary = {}
    for name in (n for n in results[0] if n in shared):
        values = np.array([r[name] for r in results], dtype=np.float64)
        spread = float(values.std(ddof=1)) if len(values) > 1 else float("nan")
        summary[name] = (float(values.mean()), spread)
    return summary
