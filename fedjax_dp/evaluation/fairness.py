"""Fairness over clients: worst client, disparity, quantiles; intervals of shares."""

from collections.abc import Sequence

import numpy as np
import scipy.special
from numpy.typing import ArrayLike

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


@checked
def wilson_interval(
    shares: ArrayLike, counts: ArrayLike, *, confidence: float = 0.95
) -> tuple[np.ndarray, np.ndarray]:
    """Bounds a success rate from the share of successes among independent trials.

    Unlike a share ± a multiple of its standard error, the interval stays within [0, 1] and has a
    width if all trials succeeded: for one success in one trial it is 0.21 to 1.

    Args:
      shares: successes over trials, in [0, 1]; NaN without trials.
      counts: the number of trials, of the same shape or one for all.
      confidence: approximate coverage, in (0, 1).

    Returns:
      Lower and upper ends; NaN without trials.

    Raises:
      ValueError: for a share outside [0, 1], a count that is negative or not a number, shapes that
        do not broadcast, or a confidence out of range.

    Source: Wilson 1927.
    """
    checks.require(0 < confidence < 1, "confidence", "be in (0, 1)", confidence)
    p, n = np.asarray(shares, np.float64), np.asarray(counts, np.float64)
    checks.require(bool(np.all(n >= 0)), "counts", "be at least 0", counts)
    is_share = np.isnan(p) | ((p >= 0) & (p <= 1))
    checks.require(bool(np.all(is_share)), "shares", "be in [0, 1] or NaN", shares)
    rule = f"be a number or of shape {p.shape}, as shares"
    checks.require(n.shape in ((), p.shape), "counts", rule, n.shape)
    square = float(scipy.special.ndtri((1 + confidence) / 2)) ** 2
    n = np.where(n > 0, n, np.nan)
    middle = (p + square / (2 * n)) / (1 + square / n)
    half = np.sqrt(square * (p * (1 - p) + square / (4 * n)) / n) / (1 + square / n)
    return np.maximum(middle - half, 0.0), np.minimum(middle + half, 1.0)
