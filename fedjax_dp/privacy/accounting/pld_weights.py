"""Steps on a lattice, weighted by `e^(θs)`, and the θ that a question needs."""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from fedjax_dp.privacy.accounting.pld_curve import Question
from fedjax_dp.privacy.accounting.pld_lattice import Losses


class Cumulants(NamedTuple):
    """What weighted steps come to, summed up over all of them.

    Attributes:
      log_total: logarithm of E[e^(θs)] of the composed loss s.
      mean: of the weighted s.
      variance: of the weighted s.
      added: what the lattice added to the variance.
      sizes: the sum of what the steps' weighted losses are in size.
    """

    log_total: float
    mean: float
    variance: float
    added: float
    sizes: float


class Steps:
    """The losses of all steps in one direction of the neighbours.

    Attributes:
      losses: of each kind of step.
      counts: how often each kind ran.
      width: of the lattice.
    """

    def __init__(self, losses: Sequence[Losses], counts: Sequence[int], width: float):
        """Takes the steps.

        Args:
          losses: of each kind of step.
          counts: how often each kind ran.
          width: of the lattice.
        """
        self.losses, self.counts, self.width = losses, counts, width
        self._places = [(each.first + np.arange(each.masses.size)) * width for each in losses]
        with np.errstate(divide="ignore"):
            self._logs = [np.log(each.masses) for each in losses]

    def exponents(self, tilt: float) -> Iterator[tuple[int, np.ndarray]]:
        """Weights each kind of step.

        Args:
          tilt: θ.

        Yields:
          How often it ran, and the logarithms of its weighted masses, `[points]`.
        """
        for count, places, logs in zip(self.counts, self._places, self._logs, strict=True):
            yield count, logs + tilt * places

    def cumulants(self, tilt: float) -> Cumulants:
        """Sums up the weighted steps.

        Args:
          tilt: θ.

        Returns:
          The sums.
        """
        totals = np.zeros(5)
        kinds = zip(self.losses, self._places, self.exponents(tilt), strict=True)
        for each, places, (count, exponents) in kinds:
            largest = exponents.max()
            weights = np.exp(exponents - largest)
            total = weights.sum()
            mean = weights @ places / total
            variance = weights @ (places - mean) ** 2 / total
            added = each.spreads @ (weights / np.maximum(each.masses, 1e-300)) / total
            size = abs(mean) + math.sqrt(variance)
            totals += count * np.array([largest + math.log(total), mean, variance, added, size])
        return Cumulants(*totals.tolist())

    def log_total(self, tilt: float) -> float:
        """Computes the logarithm of E[e^(θs)] alone.

        Args:
          tilt: θ.

        Returns:
          The logarithm.
        """
        total = 0.0
        for count, exponents in self.exponents(tilt):
            largest = float(exponents.max())
            total += count * (largest + math.log(np.exp(exponents - largest).sum()))
        return total

    def deviation(self, variance: float) -> float:
        """Computes a standard deviation, no smaller than what the lattice can tell.

        Args:
          variance: of the weighted sum.

        Returns:
          The deviation.
        """
        return max(math.sqrt(variance), self.width / 4)


def find_tilt(
    steps: Steps, question: Question, tilt: float | None = None
) -> tuple[float, Cumulants]:
    """Finds the weight that moves the mean to the ε in question; any weight gives a valid bound.

    Args:
      steps: what is weighted.
      question: what is asked.
      tilt: where to begin, such as what was found on a coarser lattice.

    Returns:
      θ, and what the steps come to under it.
    """
    low, high, smallest = 0.0, math.inf, 0.0
    if tilt is None:
        deviation = steps.deviation(steps.cumulants(0.0).variance)
        tilt = math.sqrt(2 * max(-math.log(question.dp_delta or 1e-5), 0.1)) / deviation
        smallest = 1e-6 / deviation
    for _ in range(40):
        at, found = tilt, steps.cumulants(tilt)
        value, slope, unit = _excess(steps, question, tilt, found)
        # Both functions fall; a step that would leave the bracket halves it.
        low, high = (tilt, high) if value > 0 else (low, tilt)
        if abs(value) < 0.3 * unit or high <= smallest or tilt * steps.width > 64:
            break
        step = tilt - value / slope
        if not low < step < high:
            step = (low + high) / 2 if high < math.inf else 2 * tilt
        tilt = min(step, 4 * tilt)
    return at, found


def _excess(
    steps: Steps, question: Question, tilt: float, found: Cumulants
) -> tuple[float, float, float]:
    """By how much a weight is too small, the slope of that, and the unit that it is measured in.

    At the mean m of the weighted sum of deviation s, δ is about `E·e^(−θm)` over `1 + √(2π)·θ·s`
    and `1 + θ + √(2π)/s`, which is what a Gaussian tail comes to.
    """
    deviation = steps.deviation(found.variance)
    if question.epsilon is not None:
        return question.epsilon - found.mean, -(deviation**2), deviation
    assert question.dp_delta is not None
    root = math.sqrt(2 * math.pi)
    log_delta = found.log_total - tilt * found.mean - math.log1p(tilt * root * deviation)
    value = log_delta - math.log1p(tilt + root / deviation) - math.log(question.dp_delta)
    return value, -tilt * deviation**2 - root * deviation / (1 + tilt * root * deviation), 1.0
