"""ε and δ by privacy loss distributions, for a composition of events that have them.

One step's loss is rounded to a lattice (`pld_lattice`), which is refined until it adds no more than
promised; the more costly direction of the neighbours is found. A composition is a convolution, and
a transform computes it with errors of 1e-16 of its largest number: far more than the tail that a
small δ is made of. So the losses are weighted by `e^(θs)` first, for a θ that moves the bulk of the
composition to the ε in question, and weighted back after the transform. Errors are then relative to
the result, and a window of a few standard deviations suffices.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import dp_accounting as dpa
import numpy as np
from scipy import fft, signal

from fedjax_dp.privacy.accounting.pld_lattice import Losses, first_width, losses_of, power_of_two
from fedjax_dp.privacy.accounting.rdp import EPS
from fedjax_dp.privacy.events import DpEvent, effective_noise_multiplier, key_of

# What the width of the lattice may add to ε, as a share of ε.
_SHARE = 4e-4
# The promise: an answer that may exceed the exact curve by more is not tight.
_TIGHT = 1e-3
# Both are shares of ε, or of this many standard deviations of the loss if ε is less.
_LEAST_EPSILON = 0.1
# The logarithm of the probability cut off at each end of a window.
_LOG_OUTSIDE = math.log(1e-10)
_MAX_POINTS, _MAX_WINDOW = 2**17, 2**20
# Logarithm of the size below which a frequency is ignored; far below all rounding.
_NEGLIGIBLE = -80.0
# Beyond these a weight would overflow.
_LARGEST_EXPONENT = 600.0
# The probability cut off at the largest losses of all steps together, as a share of δ.
_CUT = 2.0**-24
# Other accountants treat losses beyond 1e13 as infinite.
_LEAST_NOISE = 1e-7
# Lattices are refined for a found ε of at least this many standard deviations of the loss.
_LEAST_FOUND = 0.01
# The fields of events that hold their noise, and those that hold their sampling.
_NOISES = ("noise_multiplier", "noise_parameter", "standard_deviation")
_CHANCES = ("sampling_probability", "truncated_batch_size")


class Answer(NamedTuple):
    """A bound on ε or δ, never below the exact one."""

    value: float
    is_tight: bool  # Whether it exceeds the exact one by no more than 1e-3 of itself.


class Question(NamedTuple):
    """ε at `dp_delta`, which is above 0, or δ at `epsilon`, which is at least 0."""

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
        """The trivial bound."""
        return math.inf if self.dp_delta is not None else 1.0


def convolve_weighted(
    log_weights: Sequence[np.ndarray], counts: Sequence[int], offset: int, size: int
) -> tuple[np.ndarray, float]:
    """Composes weighted losses with themselves and each other in a window, by one transform.

    The losses of step kind k are the multiples of a lattice from some first one on; `log_weights`
    are the logarithms of their masses p plus θ times the loss, up to a constant, `[points]` each.
    Weighting by `e^(θs)` commutes with convolution, so that the tail of a composition at ε is found
    by a θ that moves the weighted mean there, and by weighting the result back by `e^(−θs)`: the
    error below is then relative to that tail, however small it is.

    Every output of a transform of n is a sum of its inputs along log2(n) additions and products,
    each rounded; the power multiplies a relative error. Sums outside of the window, `size` points
    from `offset` above the sum of all first multiples, fold back into it, which can only increase
    the result. Returns the weighted masses, `[size]`, which sum to 1, and a bound on the error of
    each.

    Source: Koskela, Jälkö, Honkela 2020 (composition by transforms); Esscher 1932 (weights).
    """
    length = fft.next_fast_len(max(size, 2), real=True)
    product = np.ones(length // 2 + 1, complex)
    log_sizes = np.zeros(length // 2 + 1)
    error = 8 * EPS * math.log2(length)
    for count, exponents in zip(counts, log_weights, strict=True):
        weights = np.exp(exponents - exponents.max())
        weights /= weights.sum()
        # One step folds back as the sums do.
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
    lost = error * (1 + 2 * sum(counts)) * mass + 2 * math.exp(_NEGLIGIBLE)
    composed = fft.irfft(product, length)
    return np.roll(composed, -(offset % length))[:size], lost


class _Cumulants(NamedTuple):
    """Sums over weighted steps, of which s is the composed loss."""

    log_total: float  # The logarithm of E[e^(θs)].
    mean: float  # Of the weighted s, as the variance.
    variance: float
    added: float  # To the variance, by the lattice.
    sizes: float  # Of the steps' weighted losses, added up.


class Composition:
    """The losses of one direction of neighbours, weighted for a question; composed on demand."""

    def __init__(
        self,
        losses: Sequence[Losses],
        counts: Sequence[int],
        width: float,
        question: Question,
        tilt: float | None = None,
    ):
        """Weights the kinds of step, whose search for θ begins at `tilt` if given."""
        self._losses, self._counts, self.width = losses, counts, width
        self._question = question
        self._places = [(each.first + np.arange(each.masses.size)) * width for each in losses]
        with np.errstate(divide="ignore"):
            self._logs = [np.log(each.masses) for each in losses]
        self.tilt, found = self._find_tilt(tilt)
        self._log_total, self._mean, variance, self._added, self._sizes = found
        self._deviation = self._deviation_of(variance)

    def _exponents(self, tilt: float) -> list[np.ndarray]:
        """Logarithms of the weighted masses of each kind, `[points]`."""
        return [logs + tilt * x for x, logs in zip(self._places, self._logs, strict=True)]

    def _cumulants(self, tilt: float) -> _Cumulants:
        totals = np.zeros(5)
        kinds = zip(self._losses, self._counts, self._places, self._exponents(tilt), strict=True)
        for each, count, places, exponents in kinds:
            largest = exponents.max()
            weights = np.exp(exponents - largest)
            total = weights.sum()
            mean = weights @ places / total
            variance = weights @ (places - mean) ** 2 / total
            added = each.spreads @ (weights / np.maximum(each.masses, 1e-300)) / total
            size = abs(mean) + math.sqrt(variance)
            totals += count * np.array([largest + math.log(total), mean, variance, added, size])
        return _Cumulants(*totals.tolist())

    def _log_total_at(self, tilt: float) -> float:
        """Computes the logarithm of E[e^(θs)] alone."""
        total = 0.0
        for count, exponents in zip(self._counts, self._exponents(tilt), strict=True):
            largest = float(exponents.max())
            total += count * (largest + math.log(np.exp(exponents - largest).sum()))
        return total

    def _deviation_of(self, variance: float) -> float:
        """The standard deviation, no smaller than what the lattice resolves."""
        return max(math.sqrt(variance), self.width / 4)

    def _find_tilt(self, tilt: float | None) -> tuple[float, _Cumulants]:
        """Finds the θ that moves the mean to the ε in question; any θ yields a valid bound."""
        low, high, smallest = 0.0, math.inf, 0.0
        if tilt is None:
            deviation = self._deviation_of(self._cumulants(0.0).variance)
            tilt = math.sqrt(2 * max(-math.log(self._question.dp_delta or 1e-5), 0.1)) / deviation
            smallest = 1e-6 / deviation
        for _ in range(40):
            at, found = tilt, self._cumulants(tilt)
            value, slope, unit = self._excess(tilt, found)
            # Both functions fall; a step that would leave the bracket halves it.
            low, high = (tilt, high) if value > 0 else (low, tilt)
            if abs(value) < 0.3 * unit or high <= smallest or tilt * self.width > 64:
                break
            step = tilt - value / slope
            if not low < step < high:
                step = (low + high) / 2 if high < math.inf else 2 * tilt
            tilt = min(step, 4 * tilt)
        return at, found

    def _excess(self, tilt: float, found: _Cumulants) -> tuple[float, float, float]:
        """Returns by how much θ is too small, the slope of that, and its unit.

        At the mean m of the weighted sum of deviation s, δ is about that of a Gaussian tail,
        `E·e^(−θm)` over `1 + √(2π)·θ·s` and `1 + θ + √(2π)/s`.
        """
        deviation = self._deviation_of(found.variance)
        if self._question.epsilon is not None:
            return self._question.epsilon - found.mean, -(deviation**2), deviation
        assert self._question.dp_delta is not None
        root = math.sqrt(2 * math.pi)
        log_delta = found.log_total - tilt * found.mean - math.log1p(tilt * root * deviation)
        value = log_delta - math.log1p(tilt + root / deviation) - math.log(self._question.dp_delta)
        return value, -tilt * deviation**2 - root * deviation / (1 + tilt * root * deviation), 1.0

    @property
    def estimate(self) -> float:
        """An estimate of the answer: ε, or the logarithm of δ."""
        excess = (self.tilt + 1) / 2 * self._added
        if self._question.epsilon is None:
            return self._mean - excess
        return self._log_total - self.tilt * (self._question.epsilon + excess)

    def wanted_width(self, epsilon: float = math.inf, least: float = _LEAST_EPSILON) -> float:
        """Finds the width at which the lattice adds no more than its share to ε, a power of 2.

        To second order a lattice adds (θ + 1)/2 times the variance of its rounding; higher orders
        vanish if neither e^(θ·width) nor e^width is far from 1. `epsilon` is that on a coarser
        lattice, far below the estimate if rare steps make up δ; `least` the smallest ε that the
        share is of, in standard deviations of the loss.
        """
        if self._question.epsilon is None:
            allowed = _SHARE * max(min(self._mean, epsilon), least * self._deviation)
        else:
            allowed = _SHARE / (self.tilt + 1 / self._deviation)
        excess = (self.tilt + 1) / 2 * self._added
        by_excess = self.width * math.sqrt(allowed / excess) if excess > 0 else math.inf
        return power_of_two(min(by_excess, 0.5 / (self.tilt + 1)))

    @property
    def smallest_width(self) -> float:
        """The width below which lattice or window would hold too many points."""
        longest = max(each.masses.size for each in self._losses) * self.width
        window = 16 * self._deviation
        return 2 * power_of_two(max(longest / _MAX_POINTS, window / _MAX_WINDOW))

    def is_resolved(self, epsilon: float) -> bool:
        """Whether the lattice error is within its share; it grows as the width squared."""
        return self.wanted_width(epsilon) * math.sqrt(_TIGHT / _SHARE) >= self.width

    def is_covered(self, answer: Answer) -> bool:
        """Whether this direction surely costs no more than another's answer, without composing it.

        Source: Canonne, Kamath, Steinke 2020, proposition 12: `E[(1 − e^(ε−s))₊]` is at most
        `E[e^(θ(s−ε))]` times `θ^θ/(1 + θ)^(1 + θ)`.
        """
        at, allowed = answer.value, self._question.dp_delta
        if self._question.epsilon is not None:
            at, allowed = self._question.epsilon, answer.value
        if self.tilt <= 0 or not math.isfinite(at):
            return at == math.inf
        assert allowed is not None
        tilt, left = self.tilt, allowed - self._infinite
        log_bound = self._log_total - tilt * at + tilt * math.log(tilt)
        log_bound -= (1 + tilt) * math.log1p(tilt)
        rounding = self._relative + 16 * EPS * (tilt * at + tilt * math.log1p(tilt) + 1)
        return left > 0 and log_bound + rounding < math.log(left)

    @property
    def _infinite(self) -> float:
        """The chance of an infinite loss."""
        if any(each.infinity >= 1 for each in self._losses):
            return 1.0
        finite = zip(self._losses, self._counts, strict=True)
        return -math.expm1(sum(c * math.log1p(-each.infinity) for each, c in finite))

    @property
    def _relative(self) -> float:
        """The largest relative loss of the steps' weights by rounding."""
        sizes = 32 * sum(self._counts) + 8 * self.tilt * self._sizes + 8 * abs(self._log_total)
        return EPS * sizes

    def _end(self, side: int) -> float:
        """The end of the weighted sum, except with probability 1e-10 (Chernoff's bound)."""
        ends = []
        for factor in (0.1, 0.4, 1.0):
            push = side * factor * math.sqrt(-2 * _LOG_OUTSIDE) / self._deviation
            log_moved = self._log_total_at(self.tilt + push)
            ends.append((log_moved - self._log_total - _LOG_OUTSIDE) / push)
        return min(ends) if side > 0 else max(ends)

    def _window(self) -> tuple[int, int, int, int]:
        """First and last point of all sums, and first and last of those that are computed."""
        pairs = list(zip(self._losses, self._counts, strict=True))
        start = sum(count * each.first for each, count in pairs)
        end = start + sum(count * (each.masses.size - 1) for each, count in pairs)
        centre = round(self._mean / self.width)
        first = max(start, min(math.floor(self._end(-1) / self.width), centre - 1))
        last = min(end, max(math.ceil(self._end(1) / self.width), centre + 1))
        # What lies below the window folds back into it, which never lowers the answer.
        return start, end, max(first, last - 4 * _MAX_WINDOW), last

    def answer(self) -> Answer:
        """Composes, and bounds ε or δ."""
        start, end, first, last = self._window()
        tilt, width = self.tilt, self.width
        centre = round(self._mean / width)
        if last - centre > 2 * _MAX_WINDOW:
            return Answer(self._question.worst, False)
        exponents = self._exponents(tilt)
        size = last - first + 1
        weighted, lost = convolve_weighted(exponents, self._counts, first - start, size)
        places = (first - centre + np.arange(weighted.size)) * width
        keep = int(np.searchsorted(places, -_LARGEST_EXPONENT / max(tilt, EPS)))
        places, weighted = places[keep:], weighted[keep:]
        with np.errstate(under="ignore"):
            weights = (np.maximum(weighted, 0.0) + lost) * np.exp(-tilt * places)
        infinite = self._infinite
        if last < end:
            infinite += math.exp(min(self._log_total - tilt * last * width + _LOG_OUTSIDE, 0.0))
        relative = self._relative + 8 * EPS * weighted.size
        is_sharp = relative < 1e-5 and lost < 1e-6 * width / self._deviation
        scale = self._log_total - tilt * centre * width
        # Sums over i ≥ j of w·e^(l_j − l_i), and of w·(1 − e^(l_j − l_i)): all terms are positive.
        gaps = signal.lfilter([1.0], [1.0, -math.exp(-width)], weights[::-1])[::-1]
        tails = np.cumsum((-math.expm1(-width) * np.append(gaps[1:], 0.0))[::-1])[::-1]
        curve = _Curve(centre * width, places, tails, gaps, scale, infinite, relative, is_sharp)
        if self._question.dp_delta is not None:
            return curve.epsilon(self._question.dp_delta)
        assert self._question.epsilon is not None
        return curve.delta(self._question.epsilon)


class _Curve(NamedTuple):
    """δ as a function of ε, about a centre, in units of `e^scale`."""

    centre: float  # The loss from which places are counted.
    places: np.ndarray  # `[points]`, increasing.
    tails: np.ndarray  # δ at each place.
    gaps: np.ndarray  # The fall of δ in units of 1 − e^(ε − place), below each place.
    scale: float
    infinite: float  # Added to every δ.
    relative: float  # The share that rounding may have lost.
    is_sharp: bool  # Whether the amount added for rounding is negligible.

    def epsilon(self, dp_delta: float) -> Answer:
        """Bounds ε at one δ above 0; inf without a bound."""
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
        """Bounds δ at one ε of at least 0, at most 1."""
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


Parts = Sequence[tuple[DpEvent, int]]


def epsilon(parts: Parts, relation: str, dp_delta: float) -> Answer:
    """Bounds ε of a composition of translated events at a δ in [0, 1); inf without a bound.

    Guarantee: the value is at least the exact ε; it includes the tails that were cut off and the
    possible rounding error.
    """
    if dp_delta == 0:
        is_free = all(isinstance(part, dpa.NoOpDpEvent) for part, _ in parts)
        return Answer(0.0 if is_free else math.inf, is_free)
    return _answer(parts, relation, Question(dp_delta=dp_delta))


def delta(parts: Parts, relation: str, epsilon: float) -> Answer:
    """Bounds δ of a composition at one ε of at least 0, as `epsilon` does; at most 1."""
    return _answer(parts, relation, Question(epsilon=epsilon))


def _answer(parts: Parts, relation: str, question: Question) -> Answer:
    """Answers in the more costly direction of the neighbours."""
    merged = _merged(parts)
    if not merged:
        return Answer(0.0, True)
    if any(isinstance(part, dpa.NonPrivateDpEvent) for part, _ in merged):
        return Answer(question.worst, False)
    directions = _directions(merged, relation, question)
    if not directions:
        return Answer(question.worst, False)
    costly, answer = _worst(directions)
    if question.epsilon is None and _wanted(costly, answer.value) < costly.width:
        # The lattice was chosen for an ε far larger than the one found.
        finer = _directions(merged, relation, question, answer.value)
        if finer:
            costly, answer = _worst(finer)
    of_lattice = answer.value if question.epsilon is None else math.inf
    return Answer(answer.value, answer.is_tight and costly.is_resolved(of_lattice))


def _wanted(composition: Composition, epsilon: float) -> float:
    """Computes the lattice width that a composition needs, from an estimate of its ε."""
    known = () if math.isinf(epsilon) else (epsilon, _LEAST_FOUND)
    return max(composition.wanted_width(*known), composition.smallest_width)


def _worst(directions: Sequence[Composition]) -> tuple[Composition, Answer]:
    """Answers in the costliest direction; others are composed only if they might cost more."""
    costly = _costliest(directions)
    answer = costly.answer()
    for each in directions:
        if each is costly or each.is_covered(answer):
            continue
        other = each.answer()
        if other.value > answer.value:
            costly, answer = each, other
    return costly, answer


def _directions(
    merged: Parts, relation: str, question: Question, epsilon: float = math.inf
) -> list[Composition]:
    """Refines the lattice until it adds no more than its share; None if losses overflow."""
    counts = [count for _, count in merged]
    # The probability cut off in one step; powers of 16, so that later rounds share the lattices.
    cut = 2.0 ** (4 * math.floor(math.log2(question.smallest * _CUT / sum(counts)) / 4))
    width = first_width(merged, relation, cut)
    directions: list[Composition] = []
    for _ in range(10):
        try:
            lattices = [losses_of(key_of(part), relation, width, cut) for part, _ in merged]
        except OverflowError:
            # Losses of many hundreds, which dp-accounting has no numbers for.
            return []
        # Weights from a coarser lattice are good on a finer one.
        tilts: Sequence[float | None] = [each.tilt for each in directions]
        tilts = tilts or [None] * max(map(len, lattices))
        directions = [
            Composition([x[i % len(x)] for x in lattices], counts, width, question, tilt)
            for i, tilt in enumerate(tilts)
        ]
        # What the lattice adds counts in the direction that costs the most.
        wanted = _wanted(_costliest(directions), epsilon)
        if wanted >= width:
            break
        width = max(wanted, width / 2**12)
    return directions


def _costliest(directions: Sequence[Composition]) -> Composition:
    return max(directions, key=lambda each: each.estimate)


def _merged(parts: Parts) -> list[tuple[DpEvent, int]]:
    """Merges Gaussians into one; drops events that cost nothing."""
    gaussians = [dpa.SelfComposedDpEvent(e, n) for e, n in parts if type(e) is dpa.GaussianDpEvent]
    others: list[tuple[DpEvent, int]] = []
    for part, count in parts:
        is_drawn = all(getattr(part, name, None) != 0 for name in _CHANCES)
        is_free = isinstance(part, dpa.NoOpDpEvent) or count == 0 or not is_drawn
        if type(part) is not dpa.GaussianDpEvent and not is_free:
            inner = getattr(part, "event", part)
            is_bare = any(getattr(inner, name, 1.0) < _LEAST_NOISE for name in _NOISES)
            others.append((dpa.NonPrivateDpEvent() if is_bare else part, int(count)))
    noise = effective_noise_multiplier(dpa.ComposedDpEvent(gaussians))
    if noise is not None:
        is_noised = noise >= _LEAST_NOISE
        others.append((dpa.GaussianDpEvent(noise) if is_noised else dpa.NonPrivateDpEvent(), 1))
    return others
