"""Where a cost that falls with the noise meets its budget, for one multiplier or many at once."""

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike
from scipy import optimize

# Multipliers outside of this range have no use, so that a search that gets there has failed.
SMALLEST, LARGEST = 2.0**-10, 2.0**24
# Largest logarithm of a ratio: beyond it costs count as without bound.
BOUND = 50.0
_TOLERANCE = 1e-7


def log_ratio(spent: ArrayLike, budget: ArrayLike) -> np.ndarray:
    """Compares costs with budgets, such that root finders can use it.

    Args:
      spent: costs.
      budget: what they may be.

    Returns:
      Logarithms of the ratios, above 0 where a budget is exceeded, from -50 to 50.
    """
    with np.errstate(divide="ignore"):
        ratio = np.asarray(spent, float) / np.asarray(budget, float)
        return np.clip(np.log(ratio), -BOUND, BOUND)


def root(excess: Callable[[float], float], start: float, step: float) -> float | None:
    """Finds where a falling function of the logarithm of a multiplier reaches zero, from above.

    Args:
      excess: the function.
      start: where to begin.
      step: how far to look first; doubled until the zero lies between two points.

    Returns:
      A point where it is not above zero; None where there is none.
    """
    smallest, largest = math.log(SMALLEST), math.log(LARGEST)
    low = high = start
    reach = step
    while excess(high) > 0:
        if high == largest:
            return None
        low, high, reach = high, min(high + reach, largest), 2 * reach
    reach = step
    while low == high or excess(low) <= 0:
        if low == smallest:
            return smallest
        low, high, reach = max(low - reach, smallest), low, 2 * reach
    found = float(optimize.brentq(excess, low, high, xtol=_TOLERANCE, rtol=1e-12))
    lift = _TOLERANCE
    while excess(found) > 0:
        found, lift = found + lift, 2 * lift
    return found


def roots(excess: Callable[[np.ndarray, np.ndarray], np.ndarray], count: int) -> np.ndarray:
    """Finds the zeros of many falling functions at once, by false position with Illinois weights.

    Args:
      excess: `(which, logarithms of multipliers) → values`, all `[functions asked]`.
      count: how many functions there are.

    Returns:
      `[count]`, the upper end of each bracket, where the function is known not to be above zero;
      nan where it is above zero everywhere, and then no other is searched for.
    """
    everyone = np.arange(count)
    low, high = np.full(count, math.log(SMALLEST)), np.full(count, math.log(LARGEST))
    at_low, at_high = excess(everyone, low), excess(everyone, high)
    if np.any(at_high > 0):
        return np.where(at_high > 0, np.nan, high)
    high = np.where(at_low <= 0, low, high)
    last_side = np.zeros(count)
    for iteration in range(200):
        (open_,) = np.nonzero(high - low > _TOLERANCE)
        if not open_.size:
            break
        a, b, fa, fb = low[open_], high[open_], at_low[open_], at_high[open_]
        middle = _between(a, b, fa, fb, is_halved=iteration % 3 == 2)
        value = excess(open_, middle)
        is_below = value > 0
        side = np.where(is_below, -1.0, 1.0)
        # An end that stays twice weighs half.
        weight = np.where(side == last_side[open_], 0.5, 1.0)
        low[open_], at_low[open_] = (
            np.where(is_below, middle, a),
            np.where(is_below, value, weight * fa),
        )
        high[open_], at_high[open_] = (
            np.where(is_below, b, middle),
            np.where(is_below, weight * fb, value),
        )
        last_side[open_] = side
    return high


def _between(
    a: np.ndarray, b: np.ndarray, fa: np.ndarray, fb: np.ndarray, *, is_halved: bool
) -> np.ndarray:
    """Where to look next in brackets from a to b: by false position, or in the middle."""
    is_slow = is_halved | (np.abs(fa) > 5) | (np.abs(fb) > 5)
    middle = np.where(is_slow, a + (b - a) / 2, (a * fb - b * fa) / (fb - fa))
    # Both ends must close in, so that no step may come closer than a part of the tolerance.
    return np.clip(middle, a + _TOLERANCE / 4, b - _TOLERANCE / 4)
