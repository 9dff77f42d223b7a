"""Confidence intervals of proportions from few examples."""

import numpy as np
import scipy.special
from numpy.typing import ArrayLike

from fedjax_dp.core import checks
from fedjax_dp.core.argument_checks import checked


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
