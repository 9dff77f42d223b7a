"""How often a member of a population is drawn: laws of samplers, by cumulative probabilities."""

from collections.abc import Iterable

import numpy as np
from scipy import special


def times(steps: int, counts: np.ndarray, shares: np.ndarray) -> np.ndarray:
    """Returns the law where a share of the members is drawn a known number of times.

    Args:
      steps: the number of draws.
      counts: how often, `[groups]`, from 0 to `steps`.
      shares: of the members, `[groups]`, which add up to 1.

    Returns:
      The probabilities that a member is drawn at most 0, 1, … `steps` times, `[steps + 1]`.
    """
    return np.cumsum(np.bincount(counts, weights=shares, minlength=steps + 1))


def binomial(steps: int, rate: float, turns: int | None = None) -> np.ndarray:
    """Returns the law of independent draws at one rate, in `turns` of the steps or in all."""
    turns = steps if turns is None else turns
    return np.where(
        np.arange(steps + 1) < turns, special.bdtr(np.arange(steps + 1), turns, min(rate, 1.0)), 1.0
    )


def mixture(parts: Iterable[tuple[float, np.ndarray]]) -> np.ndarray:
    """Returns the law of members of several groups, from the share of each and its law."""
    return np.sum([share * law for share, law in parts], axis=0)


def cut_rate(size: int, rate: float, capacity: int) -> float:
    """Returns the rate at which Poisson sampling draws a member into one of `capacity` slots."""
    # The mean number of slots that are filled is the sum of P(more than k are drawn).
    return float(np.sum(special.bdtrc(np.arange(capacity), size, min(rate, 1.0)))) / size
