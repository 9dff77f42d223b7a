"""Hidden clusters of clients: whether they were found, and how evenly they are served."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from fedjax_dp.core import checks
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.evaluation.evaluate import Evaluation


class References(NamedTuple):
    """Results of models without privacy, by client, that the cost of privacy is counted from.

    Attributes:
      accuracy: on each client's held-out data, `[clients]`; None without such data.
      loss: on each client's training data, `[clients]`.
    """

    accuracy: np.ndarray | None
    loss: np.ndarray


class HiddenClusters(NamedTuple):
    """The true clusters of clients, which a run is compared with.

    Attributes:
      true: the cluster of each client, `[clients]`.
      references: returns the results to compare accuracies and losses with; None to compare
        neither.
    """

    true: np.ndarray
    references: Callable[[], References] | None = None

    def metrics(
        self, assigned: ArrayLike | None, held_out: Evaluation | None, training: Evaluation | None
    ) -> Mapping[str, float]:
        """Computes what a run reports about clusters; exact, so not private.

        Args:
          assigned: the cluster that each client ended in, `[clients]`; None without clusters.
          held_out: results on the clients' held-out data, if there are any.
          training: results on their training data; needed where there are references.

        Returns:
          `clusters_found`, `minority_found` and `clients_matched`, see the functions of these
          names, if there are clusters; `majority_accuracy` and `minority_accuracy`, means over
          clients, the minority being the smallest true cluster and the first of several; and with
          references `accuracy_cost_disparity` (F_acc) and `loss_cost_disparity` (F_loss).
        """
        found: dict[str, float] = {}
        if assigned is not None:
            found["clusters_found"] = float(is_partition_found(assigned, self.true))
            found["minority_found"] = float(is_minority_found(assigned, self.true))
            found["clients_matched"] = matched_share(assigned, self.true)
        if held_out is not None:
            names, counts = np.unique(self.true, return_counts=True)
            is_minority = self.true == names[np.argmin(counts)]
            for name, part in (("majority", ~is_minority), ("minority", is_minority)):
                found[f"{name}_accuracy"] = _mean(held_out.client_accuracy[part])
        if self.references is not None:
            assert training is not None
            accuracy, loss = self.references()
            if held_out is not None and accuracy is not None:
                found["accuracy_cost_disparity"] = cost_disparity(
                    held_out.client_accuracy, accuracy
                )
            found["loss_cost_disparity"] = cost_disparity(training.client_loss, loss)
        return found


@checked
def is_partition_found(assigned: ArrayLike, true: ArrayLike) -> bool:
    """Compares two partitions of the same clients.

    Args:
      assigned: the cluster that each client ended in, `[clients]`; its name does not matter.
      true: the true cluster of each client, `[clients]`.

    Returns:
      Whether clients share a found cluster exactly where they share a true one.

    Raises:
      ValueError: for different numbers of clients, or none.

    Source: the success of clustering in Malekmohammadi and others 2025 (R-DPCFL), section 6.
    """
    counts = _counts(assigned, true) > 0
    return bool(np.all(counts.sum(axis=0) == 1) and np.all(counts.sum(axis=1) == 1))


@checked
def is_minority_found(assigned: ArrayLike, true: ArrayLike, *, minority: int | None = None) -> bool:
    """Compares one true cluster with the found ones.

    Args:
      assigned: as for `is_partition_found`.
      true: as for `is_partition_found`.
      minority: the true cluster; None for the smallest, and the first of several.

    Returns:
      Whether its clients are one found cluster, without others.

    Raises:
      ValueError: as `is_partition_found`, or for a minority without clients.

    Source: as of `is_partition_found`.
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
    """Computes the share of clients in the right cluster, under the best naming of found clusters.

    Args:
      assigned: as for `is_partition_found`.
      true: as for `is_partition_found`.

    Returns:
      The share, in (0, 1].

    Raises:
      ValueError: as `is_partition_found`.

    Source: Kuhn 1955, for the naming.
    """
    # Slow to import, and used only here.
    from scipy.optimize import linear_sum_assignment

    counts = _counts(assigned, true)
    rows, columns = linear_sum_assignment(counts, maximize=True)
    return float(counts[rows, columns].sum() / counts.sum())


@checked
def cost_disparity(values: ArrayLike, references: ArrayLike) -> float:
    """Computes how unevenly clients pay for privacy.

    Of accuracies on held-out data it is F_acc, of losses on training data F_loss. The source
    compares with the best model of a client's cluster; which model the reference is, is up to the
    caller.

    Args:
      values: a result of each client, `[clients]`; NaN is left out.
      references: the same of a model without privacy, `[clients]`.

    Returns:
      `max_ij |(reference_i − value_i) − (reference_j − value_j)|`; NaN without clients.

    Raises:
      ValueError: for different numbers of clients.

    Source: Malekmohammadi and others 2024 (RC-DPFL), section 5.
    """
    values, references = (np.asarray(x, np.float64) for x in (values, references))
    rule = f"hold a number for each of the {values.size} clients of values"
    checks.require(values.shape == references.shape, "references", rule, references.shape)
    gap = references - values
    gap = gap[~np.isnan(gap)]
    return float(gap.max() - gap.min()) if gap.size else float("nan")


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


def _mean(values: np.ndarray) -> float:
    """Averages what is not NaN; NaN if nothing is left."""
    values = values[~np.isnan(values)]
    return float(values.mean()) if values.size else float("nan")
