"""How often a member of a population is drawn: laws of samplers, by cumulative probabilities."""

import numpy as np
from scipy import special


def binomial(steps: int, rate: float, turns: int | None = None) -> np.ndarray:
    """Returns the law of independent draws at one rate, in `turns` of the steps or in all."""
    turns, counts = steps if turns is None else turns, np.arange(steps + 1)
    return np.where(counts < turns, special.bdtr(counts, turns, min(rate, 1.0)), 1.0)


def cut_rate(size: int, rate: float, capacity: int) -> float:
    """Returns the rate at which Poisson sampling draws a member into one of `capacity` slots."""
    # The mean number of slots that are filled is the sum of P(more than k are drawn).
    return float(np.sum(special.bdtrc(np.arange(capacity), size, min(rate, 1.0)))) / size
