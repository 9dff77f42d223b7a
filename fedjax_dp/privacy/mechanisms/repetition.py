"""A random number of trials, of which the best is released."""

import math
import secrets
from collections.abc import Callable
from typing import NamedTuple

from dp_accounting.dp_event import DpEvent, RepeatAndSelectDpEvent
from scipy import optimize, stats

from fedjax_dp.core import checks

_BITS = 53


def _uniform() -> float:
    """Draws a number in (0, 1) from the operating system."""
    return (secrets.randbits(_BITS) + 0.5) / 2**_BITS


class Repetition(NamedTuple):
    """The distribution of the number of trials K, a truncated negative binomial one.

    With the shape η and the parameter γ, P[K = k] for k ≥ 1 is proportional to
    (1 − γ)^k Γ(k + η) / k!; at η = 0 that is the logarithmic, at η = 1 the geometric distribution;
    at η = ∞ it is the Poisson distribution, K = 0 included.

    Attributes:
      mean: the expected number of trials.
      shape: η.
    """

    mean: float
    shape: float

    def event(self, trial: DpEvent) -> DpEvent:
        """Returns the event of the best of the trials.

        Guarantee: that of the event for one release, the best trial's output, if K and all other
        trials stay hidden, each trial is drawn anew, independently of K, and its event is `trial`
        whatever its output. Scores may be any function of outputs and of public data.

        Args:
          trial: the event of one trial.

        Returns:
          The event, which Rényi accountants can analyse.

        Source: Papernot and Steinke 2022, theorems 2 and 6.
        """
        return RepeatAndSelectDpEvent(trial, self.mean, self.shape)

    def draw(self, uniform: Callable[[], float] = _uniform) -> int:
        """Draws K, at least 1 unless the shape is infinite, from numbers of 53 random bits.

        Args:
          uniform: `() -> number` in (0, 1); from the operating system by default.

        Returns:
          The number of trials.
        """
        u = uniform()
        if math.isinf(self.shape):
            return int(stats.poisson.ppf(u, self.mean))
        gamma = self._gamma()
        if gamma >= 1:
            return 1
        if self.shape == 0:
            # Source: Kemp 1981; a geometric number whose parameter is drawn.
            return 1 + int(math.log(uniform()) / math.log1p(-(gamma**u)))
        none = gamma**self.shape
        return int(stats.nbinom.ppf(none + u * (1 - none), self.shape, gamma))

    def _gamma(self) -> float:
        """Finds γ in (0, 1] at which the mean is that of the distribution."""

        def excess(log: float) -> float:
            return _mean(self.shape, log) - self.mean

        if self.mean == 1:
            return 1.0
        return math.exp(optimize.brentq(excess, math.log(1e-12), -1e-12, xtol=1e-15))


def repetition(mean: float, *, shape: float = 1.0) -> Repetition:
    """Builds the distribution of a number of trials.

    Args:
      mean: the expected number of trials, at least 1.
      shape: η, at least 0, ∞ allowed. A smaller shape spreads K more widely and costs less.

    Returns:
      The distribution.

    Raises:
      ValueError: for numbers out of range, or a mean of 10^9 or more.

    Source: Papernot and Steinke 2022.
    """
    checks.require(1 <= mean < 1e9, "mean", "be at least 1 and below 10^9", mean)
    checks.require(shape >= 0, "shape", "be at least 0", shape)
    return Repetition(float(mean), float(shape))


def _mean(shape: float, log_gamma: float) -> float:
    """Computes the mean of the distribution, at log γ below 0."""
    odds = math.expm1(-log_gamma)
    return odds / -log_gamma if shape == 0 else shape * odds / -math.expm1(shape * log_gamma)
