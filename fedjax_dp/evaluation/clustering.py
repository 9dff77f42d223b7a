"""Whether hidden clusters were found: exactly, as a share of clients, the smallest of them."""

import numpy as np
from numpy.typing import ArrayLike
from scipy.optimize import linear_sum_assignment

from fedjax_dp.core import checks
from fedjax_dp.core.argument_checks import checked


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


@checked
def is_partition_found(assigned: ArrayLike, true: ArrayLike) -> bool:
    """Tells whether a partition of clients is the true one, whatever the clusters are called.

    Args:
      assigned: the cluster that each client ended in, `[clients]`.
      true: the cluster that it belongs to, `[clients]`.

    Returns:
      True if two clients share a found cluster exactly where they share a true one.

    Source: `clustered_dp` section 9 (clustering success).
    """
    counts = _counts(assigned, true) > 0
    return bool(np.all(counts.sum(axis=0) == 1) and np.all(counts.sum(axis=1) == 1))


@checked
def is_minority_found(assigned: ArrayLike, true: ArrayLike, minority: int | None = None) -> bool:
    """Tells whether the clients of the smallest cluster form exactly one found cluster.

    Args:
      assigned: the cluster that each client ended in, `[clients]`.
      true: the cluster that it belongs to, `[clients]`.
      minority: which true cluster is asked for; the smallest where it is None.

    Returns:
      True if all of its clients, and nobody else, share a found cluster.

    Raises:
      ValueError: if no client belongs to that cluster.

    Source: `clustered_dp` section 9 (minority detection).
    """
    counts, real = _counts(assigned, true), np.unique(true)
    column = int(np.argmin(counts.sum(axis=0)))
    if minority is not None:
        checks.require(minority in real, "minority", "be a cluster with clients", minority)
        column = int(np.searchsorted(real, minority))
    holds = counts[:, column] > 0
    return bool(holds.sum() == 1 and counts[holds].sum() == counts[:, column].sum())


@checked
def matched_share(assigned: ArrayLike, true: ArrayLike) -> float:
    """Computes the share of clients in the right cluster under the best naming of clusters.

    Args:
      assigned: the cluster that each client ended in, `[clients]`.
      true: the cluster that it belongs to, `[clients]`.

    Returns:
      A number in (0, 1]; 1 exactly where the partition is found.

    Source: Kuhn 1955 (assignment).
    """
    counts = _counts(assigned, true)
    rows, columns = linear_sum_assignment(counts, maximize=True)
    return float(counts[rows, columns].sum() / counts.sum())
