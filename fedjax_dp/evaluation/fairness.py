"""Fairness over clients: worst client, disparity, quantiles."""

from collections.abc import Sequence

import numpy as np

from fedjax_dp.core import checks
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.evaluation.evaluate import Evaluation


@checked
def summarize(
    evaluation: Evaluation, quantiles: Sequence[float] = (0.1, 0.25, 0.5, 0.75, 0.9)
) -> dict[str, float]:
    """Summarises accuracy and loss over clients, each client counting once.

    Clients without held-out examples are left out; those with a loss that is not finite are not.
    The numbers are exact and not private.

    Args:
      evaluation: results by client.
      quantiles: the quantiles of client accuracy to report, each in [0, 1].

    Returns:
      `worst_client_accuracy`, `worst_tenth_accuracy` (the mean over the worst tenth of the clients,
      rounded up), `best_client_accuracy`, `accuracy_disparity` (best minus worst),
      `mean_client_accuracy`, `std_client_accuracy`, `worst_client_loss`, and `client_accuracy_qNN`
      for each quantile; empty if no client has an accuracy.

    Source: Malekmohammadi and others 2024 (RC-DPFL), section 5, for the worst accuracy and the
    disparity.
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
