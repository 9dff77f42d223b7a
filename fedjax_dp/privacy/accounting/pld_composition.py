"""Losses of a whole composition, weighted such that its bulk lies at the ε in question.

A composition is a convolution, and a transform computes it with errors of 1e-16 of its largest
number: far more than the tail that a small δ is made of. Here the losses are weighted by `e^(θs)`
first, for a θ that moves the bulk of the composition to the ε in question, and weighted back
behind the transform. Errors are then relative to what is asked for, and a window of a few standard
deviations holds all that counts.
"""

import math

import numpy as np
from scipy import fft

from fedjax_dp.privacy.accounting.pld_curve import Answer, Curve, Question, tails_of
from fedjax_dp.privacy.accounting.pld_lattice import power_of_two
from fedjax_dp.privacy.accounting.pld_weights import Steps, find_tilt
from fedjax_dp.privacy.accounting.rdp import EPS

# What the width of the lattice may add to ε, as a share of it.
_SHARE = 4e-4
# What is promised: an answer that may exceed the exact curve by more is not called tight.
_TIGHT = 1e-3
# Both are shares of ε, or of this many standard deviations of the loss where ε is less.
_LEAST_EPSILON = 0.1
# The chance that is cut off at each end of a window, its logarithm.
_LOG_OUTSIDE = math.log(1e-10)
_MAX_POINTS, _MAX_WINDOW = 2**17, 2**20
# Logarithm of what a frequency may hold without being counted; far below all rounding.
_NEGLIGIBLE = -80.0
# Beyond these a weight would overflow.
_LARGEST_EXPONENT = 600.0


class Composition:
    """The losses of one direction of a whole composition, weighted for a question.

    Attributes:
      steps: what is composed.
      question: what is asked.
      tilt: θ.
      log_total: as in `Cumulants`.
      mean: as in `Cumulants`.
      added: as in `Cumulants`.
      sizes: as in `Cumulants`.
      deviation: the standard deviation of the weighted loss.
    """

    def __init__(self, steps: Steps, question: Question, tilt: float | None = None):
        """Finds the weight; nothing is composed yet.

        Args:
          steps: what is composed.
          question: what is asked.
          tilt: as for `find_tilt`.
        """
        self.steps, self.question = steps, question
        self.tilt, found = find_tilt(steps, question, tilt)
        self.log_total, self.mean, variance, self.added, self.sizes = found
        self.deviation = steps.deviation(variance)

    @property
    def estimate(self) -> float:
        """What the answer is about: ε, or the logarithm of δ."""
        excess = (self.tilt + 1) / 2 * self.added
        if self.question.epsilon is None:
            return self.mean - excess
        return self.log_total - self.tilt * (self.question.epsilon + excess)

    def wanted_width(self, found: float = math.inf, least: float = _LEAST_EPSILON) -> float:
        """Finds the width at which the lattice adds no more than its share, a power of 2.

        To second order a lattice adds (θ + 1)/2 times the variance of its rounding to ε; higher
        ones vanish where neither e^(θ·width) nor e^width is far from 1.

        Args:
          found: ε on a coarser lattice, far below the estimate where rare steps make up δ.
          least: the smallest ε that it is a share of, in standard deviations of the loss.

        Returns:
          The width.
        """
        if self.question.epsilon is None:
            allowed = _SHARE * max(min(self.mean, found), least * self.deviation)
        else:
            allowed = _SHARE / (self.tilt + 1 / self.deviation)
        excess = (self.tilt + 1) / 2 * self.added
        by_excess = self.steps.width * math.sqrt(allowed / excess) if excess > 0 else math.inf
        return power_of_two(min(by_excess, 0.5 / (self.tilt + 1)))

    @property
    def smallest_width(self) -> float:
        """The width below which lattice or window would hold too many points."""
        longest = max(each.masses.size for each in self.steps.losses) * self.steps.width
        window = 16 * self.deviation
        return 2 * power_of_two(max(longest / _MAX_POINTS, window / _MAX_WINDOW))

    def is_resolved(self, found: float = math.inf) -> bool:
        """Tells whether the lattice adds no more than is promised; it adds as its width squared.

        Args:
          found: as for `wanted_width`.

        Returns:
          Whether the answer is tight.
        """
        return self.wanted_width(found) * math.sqrt(_TIGHT / _SHARE) >= self.steps.width

    def is_covered(self, answer: Answer) -> bool:
        """Tells whether this direction surely costs no more, without composing it.

        Args:
          answer: what another direction costs.

        Returns:
          Whether it covers this one.

        Source: Canonne, Kamath, Steinke 2020, proposition 12: `E[(1 − e^(ε−s))₊]` is at most
        `E[e^(θ(s−ε))]` times `θ^θ/(1 + θ)^(1 + θ)`.
        """
        at, allowed = answer.value, self.question.dp_delta
        if self.question.epsilon is not None:
            at, allowed = self.question.epsilon, answer.value
        if self.tilt <= 0 or not math.isfinite(at):
            return at == math.inf
        assert allowed is not None
        tilt, left = self.tilt, allowed - self._infinite
        log_bound = self.log_total - tilt * at + tilt * math.log(tilt)
        log_bound -= (1 + tilt) * math.log1p(tilt)
        rounding = self._relative + 16 * EPS * (tilt * at + tilt * math.log1p(tilt) + 1)
        return left > 0 and log_bound + rounding < math.log(left)

    @property
    def _infinite(self) -> float:
        """The chance of an infinite loss."""
        if any(each.infinity >= 1 for each in self.steps.losses):
            return 1.0
        finite = zip(self.steps.losses, self.steps.counts, strict=True)
        return -math.expm1(sum(c * math.log1p(-each.infinity) for each, c in finite))

    @property
    def _relative(self) -> float:
        """What rounding may take off the weights of the steps together, as a share."""
        sizes = 32 * sum(self.steps.counts) + 8 * self.tilt * self.sizes + 8 * abs(self.log_total)
        return EPS * sizes

    def _end(self, side: int) -> float:
        """Where the weighted sum ends but for a chance of 1e-10, by Chernoff's bound."""
        ends = []
        for factor in (0.1, 0.4, 1.0):
            push = side * factor * math.sqrt(-2 * _LOG_OUTSIDE) / self.deviation
            log_moved = self.steps.log_total(self.tilt + push)
            ends.append((log_moved - self.log_total - _LOG_OUTSIDE) / push)
        return min(ends) if side > 0 else max(ends)

    def _window(self) -> tuple[int, int, int, int]:
        """First and last point of all sums, and first and last of those that are computed."""
        pairs = list(zip(self.steps.losses, self.steps.counts, strict=True))
        start = sum(count * each.first for each, count in pairs)
        end = start + sum(count * (each.masses.size - 1) for each, count in pairs)
        width, centre = self.steps.width, round(self.mean / self.steps.width)
        first = max(start, min(math.floor(self._end(-1) / width), centre - 1))
        last = min(end, max(math.ceil(self._end(1) / width), centre + 1))
        # What lies below the window folds back into it, which takes nothing off the answer.
        return start, end, max(first, last - 4 * _MAX_WINDOW), last

    def answer(self) -> Answer:
        """Composes, and bounds ε or δ."""
        start, end, first, last = self._window()
        tilt, width = self.tilt, self.steps.width
        centre = round(self.mean / width)
        if last - centre > 2 * _MAX_WINDOW:
            return Answer(self.question.worst, False)
        weighted, lost = self._convolved(first - start, last - first + 1)
        places = (first - centre + np.arange(weighted.size)) * width
        keep = int(np.searchsorted(places, -_LARGEST_EXPONENT / max(tilt, EPS)))
        places, weighted = places[keep:], weighted[keep:]
        with np.errstate(under="ignore"):
            weights = (np.maximum(weighted, 0.0) + lost) * np.exp(-tilt * places)
        infinite = self._infinite
        if last < end:
            infinite += math.exp(min(self.log_total - tilt * last * width + _LOG_OUTSIDE, 0.0))
        relative = self._relative + 8 * EPS * weighted.size
        is_sharp = relative < 1e-5 and lost < 1e-6 * width / self.deviation
        scale = self.log_total - tilt * centre * width
        tails, gaps = tails_of(weights, width)
        curve = Curve(centre * width, places, tails, gaps, scale, infinite, relative, is_sharp)
        return self.question.read_off(curve)

    def _convolved(self, offset: int, size: int) -> tuple[np.ndarray, float]:
        """The weighted composition in a window, and what every number may be wrong by.

        Every output of a transform of n is a sum of its inputs along log2(n) additions and
        products, each rounded; the power multiplies a relative error.
        """
        length = fft.next_fast_len(max(size, 2), real=True)
        product = np.ones(length // 2 + 1, complex)
        log_sizes = np.zeros(length // 2 + 1)
        error = 8 * EPS * math.log2(length)
        for count, exponents in self.steps.exponents(self.tilt):
            weights = np.exp(exponents - exponents.max())
            weights /= weights.sum()
            # Sums outside of the window fold back into it: that is allowed for, and so in one step.
            wrapped = np.zeros(-(-weights.size // length) * length)
            wrapped[: weights.size] = weights
            spectrum = fft.rfft(wrapped.reshape(-1, length).sum(axis=0))
            log_sizes += count * np.log(np.minimum(np.abs(spectrum) + error, 1.0))
            counts_for = (log_sizes > _NEGLIGIBLE) & (spectrum != 0)
            product[~counts_for] = 0.0
            power = spectrum[counts_for]
            product[counts_for] *= np.exp(count * np.log(power)) if count > 1 else power
        with np.errstate(under="ignore"):
            mass = 2 * float(np.exp(log_sizes).sum()) / length
        lost = error * (1 + 2 * sum(self.steps.counts)) * mass + 2 * math.exp(_NEGLIGIBLE)
        composed = fft.irfft(product, length)
        return np.roll(composed, -(offset % length))[:size], lost
