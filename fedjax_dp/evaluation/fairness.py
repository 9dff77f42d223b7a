"""How evenly a model serves the clients: worst client, disparity, quantiles, minority."""

from collections.abc import Mapping, Sequence

import numpy as np

from fedjax_dp.core import checks
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.evaluation.evaluate import Evaluation


@checked
def summarize(
    evaluation: Evaluation, quantiles: Sequence[float] = (0.1, 0.25, 0.5, 0.75, 0.9)
) -> dict[str, float]:
    """Summarises accuracy and loss over clients, each client counting once.

    Clients without held-out examples are left out; one whose loss is not finite is not. The numbers
    are exact and not private.

    Args:
      evaluation: results by client.
      quantiles: which quantiles of client accuracy to report, each in [0, 1].

    Returns:
      `worst_client_accuracy`, `worst_tenth_accuracy` (the mean of the tenth of the clients, rounded
      up, that is worst off), `best_client_accuracy`, `accuracy_disparity` (best minus worst),
      `mean_client_accuracy`, `std_client_accuracy`, `worst_client_loss`, and
      `client_accuracy_qNN` for each quantile; empty where no client has an accuracy.

    Source: `clustered_dp` section 9 (min_acc, acc_disparity).
    """
    checks.probability("quantiles", quantiles, allow_zero=True)
    summary = {}
    losses = evaluation.client_loss[evaluation.client_sizes > 0]
    if losses.size:
        summary["worst_client_loss"] = float(losses.max())
    accuracies = evaluation.client_accuracy[np.isfinite(evaluation.client_accuracy)]
    if not accuracies.size:
        return summary
    summary |= {
        "worst_client_accuracy": float(accuracies.min()),
        "worst_tenth_accuracy": float(np.sort(accuracies)[: -(-len(accuracies) // 10)].mean()),
        "best_client_accuracy": float(accuracies.max()),
        "accuracy_disparity": float(accuracies.max() - accuracies.min()),
        "mean_client_accuracy": float(accuracies.mean()),
        "std_client_accuracy": float(accuracies.std()),
    }
    for q in quantiles:
        summary[f"client_accuracy_q{round(100 * q):02d}"] = float(np.quantile(accuracies, q))
    return summary


@checked
def disparity_of_gains(values: np.ndarray, references: np.ndarray) -> float:
    """Computes the largest difference between two clients' distances to their references.

    With accuracies under reference and trained models it is F_acc; with training losses F_loss. A
    client without a number (NaN), as one without held-out examples, is left out.

    Args:
      values: a number for each client, `[num_clients]`.
      references: what each client would have under its reference model, `[num_clients]`.

    Returns:
      `max_ij |(reference_i − value_i) − (reference_j − value_j)|`; NaN where no client has both.

    Source: `clustered_dp` section 9.
    """
    gap = np.asarray(references, dtype=np.float64) - np.asarray(values, dtype=np.float64)
    gap = gap[~np.isnan(gap)]
    return float(gap.max() - gap.min()) if gap.size else float("nan")


@checked
def by_group(values: np.ndarray, is_minority: np.ndarray) -> dict[str, float]:
    """Averages a number over all clients, the majority and the minority.

    A client without a number (NaN), as one without held-out examples, is left out.

    Args:
      values: a number for each client, `[num_clients]`.
      is_minority: who belongs to the minority, `[num_clients]`, bool.

    Returns:
      `all`, `majority` and `minority`; NaN for a group without clients.

    Raises:
      ValueError: if the two arrays do not match.
    """
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


@checked
def cluster_fairness(
    accuracy: np.ndarray,
    loss: np.ndarray,
    reference_accuracy: np.ndarray,
    reference_loss: np.ndarray,
    is_minority: np.ndarray,
) -> dict[str, float]:
    """Computes the fairness metrics of clustered federated learning.

    The paper compares with the best model of a client's cluster; that is replaced by a reference
    model, trained centrally without privacy on the pooled data of the cluster.

    Args:
      accuracy: held-out accuracy of each client's final model, in [0, 1], `[num_clients]`.
      loss: training loss of each client's final model, `[num_clients]`.
      reference_accuracy: held-out accuracy of the reference model of its cluster, `[num_clients]`.
      reference_loss: training loss of the reference model of its cluster, `[num_clients]`.
      is_minority: who belongs to the minority cluster, `[num_clients]`, bool.

    Returns:
      `acc_all`, `acc_maj`, `acc_min`, `min_acc`, `acc_disparity` and `F_acc` in percent, and
      `F_loss`.

    Source: `clustered_dp` section 9.
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


@checked
def over_seeds(results: Sequence[Mapping[str, float]]) -> dict[str, tuple[float, float]]:
    """Summarises metrics over seeds.

    Args:
      results: the metrics of each seed; those that all of them have are summarised.

    Returns:
      For each metric its mean and its standard deviation with n - 1 in the denominator; NaN for a
      single seed.

    Raises:
      ValueError: if there is no result.
    """
    checks.require(len(results) > 0, "results", "hold at least one seed", results)
    shared = set.intersection(*(set(r) for r in results))
    summary = {}
    for name in (n for n in results[0] if n in shared):
        values = np.array([r[name] for r in results], dtype=np.float64)
        spread = float(values.std(ddof=1)) if len(values) > 1 else float("nan")
        summary[name] = (float(values.mean()), spread)
    return summary
