"""What is asked of a composition, and what is read off its δ as a function of ε."""

import math
from typing import NamedTuple

import numpy as np
from scipy import signal

from fedjax_dp.privacy.accounting.rdp import EPS


class Answer(NamedTuple):
    """What losses say.

    Attributes:
      value: ε or δ, never below the exact one.
      is_tight: whether it exceeds that by no more than 1e-3 of itself.
    """

    value: float
    is_tight: bool


class Question(NamedTuple):
    """What is asked: ε at a δ, or δ at an ε.

    Attributes:
      dp_delta: δ, above 0, where ε is asked for.
      epsilon: ε, at least 0, where δ is asked for.
    """

    dp_delta: float | None = None
    epsilon: float | None = None

    @property
    def smallest(self) -> float:
        """A δ below which nothing can change the answer."""
        if self.epsilon is not None:
            return max(math.exp(-self.epsilon - 40), 1e-280)
        assert self.dp_delta is not None
        return max(self.dp_delta, 1e-280)

    @property
    def worst(self) -> float:
        """What is answered where nothing can be said."""
        return math.inf if self.dp_delta is not None else 1.0

    def read_off(self, curve: "Curve") -> Answer:
        """Answers from a curve.

        Args:
          curve: of the composition that is asked about.

        Returns:
          The answer.
        """
        if self.dp_delta is not None:
            return curve.epsilon(self.dp_delta)
        assert self.epsilon is not None
        return curve.delta(self.epsilon)


class Curve(NamedTuple):
    """δ as a function of ε, about a centre, in units of `e^scale`.

    Attributes:
      centre: the loss from which places are counted.
      places: `[points]`, increasing.
      tails: δ at each place.
      gaps: what δ falls by in units of 1 − e^(ε − place), below each place.
      scale: logarithm of the unit.
      infinite: what is added to every δ.
      relative: what rounding may have taken off, as a share.
      is_sharp: whether what was added for rounding makes no difference.
    """

    centre: float
    places: np.ndarray
    tails: np.ndarray
    gaps: np.ndarray
    scale: float
    infinite: float
    relative: float
    is_sharp: bool

    def epsilon(self, dp_delta: float) -> Answer:
        """Bounds ε at one δ.

        Args:
          dp_delta: δ, above 0.

        Returns:
          The bound; inf where there is none.
        """
        left = dp_delta * (1 - 4 * EPS) - self.infinite
        if left <= 0 or self.relative >= 0.5:
            return Answer(math.inf, False)
        target = math.exp(min(math.log(left) - self.scale, 700.0)) / (1 + self.relative)
        # The first place at which δ is small enough; between it and the one before, δ is known.
        j = int(np.searchsorted(-self.tails, -target))
        is_inside = 0 < j < self.places.size
        j = min(j, self.places.size - 1)
        at = self.centre + float(self.places[j])
        if j > 0:
            share = min(max((target - float(self.tails[j])) / float(self.gaps[j]), 0.0), 0.99)
            at = max(at + math.log1p(-share), self.centre + float(self.places[j - 1]))
        at += 16 * EPS * (abs(at) + abs(self.centre))
        is_exact = is_inside and self.is_sharp and self.infinite <= 1e-5 * dp_delta
        return Answer(max(at, 0.0), is_exact or at <= 0)

    def delta(self, epsilon: float) -> Answer:
        """Bounds δ at one ε.

        Args:
          epsilon: ε, at least 0.

        Returns:
          The bound, at most 1.
        """
        place = epsilon - self.centre - 16 * EPS * (epsilon + abs(self.centre))
        j = int(np.searchsorted(self.places, place))
        if self.relative >= 0.5:
            return Answer(1.0, False)
        if j == self.places.size:
            return Answer(min(self.infinite, 1.0), True)
        value = float(self.tails[j]) - math.expm1(place - self.places[j]) * float(self.gaps[j])
        log_value = self.scale + math.log(max(value, 1e-300)) + math.log1p(self.relative)
        total = math.exp(min(log_value + 8 * EPS * abs(log_value), 0.0)) + self.infinite
        is_exact = j > 0 and self.is_sharp and self.infinite <= 1e-5 * total
        return Answer(min(total, 1.0), is_exact)


def tails_of(weights: np.ndarray, width: float) -> tuple[np.ndarray, np.ndarray]:
    """Sums up the tails that δ is made of, all terms positive.

    Args:
      weights: `[points]`, masses of the losses l on a lattice.
      width: of the lattice.

    Returns:
      At each point j the sums over i ≥ j of w·(1 − e^(l_j − l_i)), and of w·e^(l_j − l_i).
    """
    gaps = signal.lfilter([1.0], [1.0, -math.exp(-width)], weights[::-1])[::-1]
    tails = np.cumsum((-math.expm1(-width) * np.append(gaps[1:], 0.0))[::-1])[::-1]
    return tails, gaps
