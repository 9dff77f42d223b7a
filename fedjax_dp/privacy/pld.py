"""Privacy loss distributions, composed where the answer lies, so that no δ is too small for them.

A composition is a convolution, and a transform computes it with errors of 1e-16 of its largest
number: far more than the tail that a small δ is made of. Here the losses are weighted by `e^(θs)`
first, for a θ that moves the bulk of the composition to the ε in question, and weighted back
behind the transform. Errors are then relative to what is asked for, and a window of a few standard
deviations holds all that counts.
"""

import functools
import json
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import dp_accounting as dpa
import numpy as np
from dp_accounting import dp_event as standard
from dp_accounting.pld import privacy_loss_distribution as dpa_pld
from scipy import fft, signal, special, stats

from fedjax_dp.privacy.events import (
    CurveDpEvent,
    DpEvent,
    effective_noise_multiplier,
    from_dict,
    key_of,
)
from fedjax_dp.privacy.rdp import EPS

# What the width of the lattice may add to ε, as a share of it.
_SHARE = 4e-4
# What is promised: an answer that may exceed the exact curve by more is not called tight.
_TIGHT = 1e-3
# Chances that are cut off: of the largest losses, in terms of δ, and of a window's ends.
_CUT, _LOG_OUTSIDE = 2.0**-24, math.log(1e-10)
# The lattice adds as the square of its width.
_LOOSENESS = math.sqrt(_TIGHT / _SHARE)
_MAX_POINTS, _MAX_WINDOW = 2**17, 2**20
# Logarithm of what a frequency may hold without being counted; far below all rounding.
_NEGLIGIBLE = -80.0
# Beyond these a weight would overflow.
_LARGEST_EXPONENT = 600.0


class Losses(NamedTuple):
    """One step's privacy loss on the multiples of a width, never to the advantage of privacy.

    What lies between two multiples goes to both, such that the mass of either distribution is
    kept (connect the dots); what rounding may move is moved up.

    Attributes:
      first: the first multiple.
      masses: `[points]`, probabilities of the multiples from the first on.
      spreads: `[points]`, how much variance the rounding of a loss to the lattice added, by place.
      infinity: probability of an infinite loss.
    """

    first: int
    masses: np.ndarray
    spreads: np.ndarray
    infinity: float


class Answer(NamedTuple):
    """What losses say.

    Attributes:
      value: ε or δ, never below the exact one.
      is_tight: whether it exceeds that by no more than 1e-3 of itself.
    """

    value: float
    is_tight: bool


def epsilon(parts: Sequence[tuple[DpEvent, int]], relation: str, dp_delta: float) -> Answer:
    """Bounds ε of a composition at one δ.

    Guarantee: the value is at least the exact ε; tails that were cut off and what rounding may
    have cost are in it.

    Args:
      parts: events that have privacy loss distributions, as `translation.translate` tells them,
        and how often each ran.
      relation: "add_remove" or "replace_one".
      dp_delta: δ in [0, 1).

    Returns:
      The bound; inf where there is none.

    Source: Koskela, Jälkö, Honkela 2020 (composition by transforms); Doroshenko and others 2022
    (lattice); Esscher 1932 (weights).
    """
    if dp_delta == 0:
        is_free = all(isinstance(part, dpa.NoOpDpEvent) for part, _ in parts)
        return Answer(0.0 if is_free else math.inf, is_free)
    return _answer(parts, relation, _Question(dp_delta=dp_delta))


def delta(parts: Sequence[tuple[DpEvent, int]], relation: str, at: float) -> Answer:
    """Bounds δ of a composition at one ε.

    Guarantee: the value is at least the exact δ; tails that were cut off and what rounding may
    have cost are in it.

    Args:
      parts: as for `epsilon`.
      relation: "add_remove" or "replace_one".
      at: ε, at least 0.

    Returns:
      The bound, at most 1.
    """
    return _answer(parts, relation, _Question(epsilon=at))


class _Question(NamedTuple):
    """What is asked: ε at a δ, or δ at an ε."""

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


def _answer(parts: Sequence[tuple[DpEvent, int]], relation: str, question: _Question) -> Answer:
    merged = _merged(parts)
    if not merged:
        return Answer(0.0, True)
    if any(isinstance(part, dpa.NonPrivateDpEvent) for part, _ in merged):
        return Answer(question.worst, False)
    counts = [count for _, count in merged]
    # The chance to be cut off in one step; powers of 16, so that later rounds share the lattices.
    cut = 2.0 ** (4 * math.floor(math.log2(question.smallest * _CUT / sum(counts)) / 4))
    width = _first_width(merged, relation, cut)
    directions: list[_Composition] = []
    for _ in range(10):
        try:
            lattices = [_lattice(key_of(part), relation, width, cut) for part, _ in merged]
        except OverflowError:
            # Losses of many hundreds, which dp-accounting has no numbers for.
            return Answer(question.worst, False)
        # Weights that were found on a coarser lattice are good on a finer one.
        tilts: Sequence[float | None] = [each.tilt for each in directions]
        tilts = tilts or [None] * max(map(len, lattices))
        directions = [
            _Composition([each[i % len(each)] for each in lattices], counts, width, question, tilt)
            for i, tilt in enumerate(tilts)
        ]
        # What the lattice adds counts in the direction that costs the most.
        costly = max(directions, key=lambda each: each.estimate)
        wanted = max(costly.wanted_width, costly.smallest_width)
        if wanted >= width:
            break
        width = max(wanted, width / 2**12)
    found = costly.answer()
    for each in directions:
        if each is costly or each.is_covered(found):
            continue
        other = each.answer()
        if other.value > found.value:
            costly, found = each, other
    return Answer(found.value, found.is_tight and costly.wanted_width * _LOOSENESS >= width)


def _merged(parts: Sequence[tuple[DpEvent, int]]) -> list[tuple[DpEvent, int]]:
    """Makes one Gaussian of all; drops what costs nothing."""
    gaussians = [dpa.SelfComposedDpEvent(e, n) for e, n in parts if type(e) is dpa.GaussianDpEvent]
    others: list[tuple[DpEvent, int]] = []
    for part, count in parts:
        facts = [(part, name) for name in ("sampling_probability", "truncated_batch_size")]
        is_free = isinstance(part, dpa.NoOpDpEvent) or count == 0 or _is_any_zero(facts)
        if type(part) is not dpa.GaussianDpEvent and not is_free:
            inner = getattr(part, "event", part)
            is_bare = any(getattr(inner, name, 1.0) < _LEAST_NOISE for name in _NOISES)
            others.append((dpa.NonPrivateDpEvent() if is_bare else part, int(count)))
    if gaussians:
        noise = effective_noise_multiplier(dpa.ComposedDpEvent(gaussians))
        if noise is not None:
            is_noised = noise >= _LEAST_NOISE
            one = dpa.GaussianDpEvent(noise) if is_noised else dpa.NonPrivateDpEvent()
            others.append((one, 1))
    return others


# Losses beyond 1e13 are told from infinite ones by other accountants.
_LEAST_NOISE = 1e-7
# What events call their noise.
_NOISES = ("noise_multiplier", "noise_parameter", "standard_deviation")


def _is_any_zero(facts: Sequence[tuple[Any, str]]) -> bool:
    return any(getattr(event, name, None) == 0 for event, name in facts)


class _Composition:
    """The losses of one direction of a whole composition, weighted for a question.

    Attributes:
      tilt: θ.
      log_total: logarithm of E[e^(θs)] of the composed loss s.
      mean: of the weighted s.
      deviation: its standard deviation.
      added: what the lattice added to its variance.
      sizes: the sum of what the steps' weighted losses are in size.
    """

    def __init__(
        self,
        steps: Sequence[Losses],
        counts: Sequence[int],
        width: float,
        question: _Question,
        tilt: float | None,
    ):
        self.steps, self.counts, self.width, self.question = steps, counts, width, question
        self._places = [(each.first + np.arange(each.masses.size)) * width for each in steps]
        with np.errstate(divide="ignore"):
            self._logs = [np.log(each.masses) for each in steps]
        self.tilt, found = _tilt(self, tilt)
        self.log_total, self.mean, variance, self.added, self.sizes = found
        self.deviation = max(math.sqrt(variance), width / 4)

    def cumulants(self, tilt: float) -> tuple[float, float, float, float, float]:
        """Sums over the steps, weighted: log total, mean, variance, variance added, sizes."""
        totals = np.zeros(5)
        for each, count, places, logs in zip(
            self.steps, self.counts, self._places, self._logs, strict=True
        ):
            exponents = logs + tilt * places
            largest = exponents.max()
            weights = np.exp(exponents - largest)
            total = weights.sum()
            mean = weights @ places / total
            variance = weights @ (places - mean) ** 2 / total
            added = each.spreads @ (weights / np.maximum(each.masses, 1e-300)) / total
            size = abs(mean) + math.sqrt(variance)
            totals += count * np.array([largest + math.log(total), mean, variance, added, size])
        return tuple(totals.tolist())  # type: ignore[return-value]

    def _log_total(self, tilt: float) -> float:
        """The logarithm of E[e^(θs)] alone."""
        total = 0.0
        for count, places, logs in zip(self.counts, self._places, self._logs, strict=True):
            exponents = logs + tilt * places
            largest = float(exponents.max())
            total += count * (largest + math.log(np.exp(exponents - largest).sum()))
        return total

    @property
    def estimate(self) -> float:
        """What the answer is about: ε, or the logarithm of δ."""
        excess = (self.tilt + 1) / 2 * self.added
        if self.question.epsilon is None:
            return self.mean - excess
        return self.log_total - self.tilt * (self.question.epsilon + excess)

    @property
    def wanted_width(self) -> float:
        """The width at which the lattice adds no more than its share, a power of 2.

        To second order a lattice adds (θ + 1)/2 times the variance of its rounding to ε; higher
        ones vanish where neither e^(θ·width) nor e^width is far from 1.
        """
        if self.question.epsilon is None:
            allowed = _SHARE * max(self.mean, 0.1 * self.deviation)
        else:
            allowed = _SHARE / (self.tilt + 1 / self.deviation)
        excess = (self.tilt + 1) / 2 * self.added
        by_excess = self.width * math.sqrt(allowed / excess) if excess > 0 else math.inf
        return _power_of_two(min(by_excess, 0.5 / (self.tilt + 1)))

    @property
    def smallest_width(self) -> float:
        """The width below which lattice or window would hold too many points."""
        longest = max(each.masses.size for each in self.steps) * self.width
        window = 16 * self.deviation
        return 2 * _power_of_two(max(longest / _MAX_POINTS, window / _MAX_WINDOW))

    def is_covered(self, answer: Answer) -> bool:
        """Tells whether this direction surely costs no more, without composing it.

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
        if any(each.infinity >= 1 for each in self.steps):
            return 1.0
        finite = zip(self.steps, self.counts, strict=True)
        return -math.expm1(sum(c * math.log1p(-each.infinity) for each, c in finite))

    @property
    def _relative(self) -> float:
        """What rounding may take off the weights of the steps together, as a share."""
        sizes = 32 * sum(self.counts) + 8 * self.tilt * self.sizes + 8 * abs(self.log_total)
        return EPS * sizes

    def _end(self, side: int) -> float:
        """Where the weighted sum ends but for a chance of 1e-10, by Chernoff's bound."""
        ends = []
        for factor in (0.1, 0.4, 1.0):
            push = side * factor * math.sqrt(-2 * _LOG_OUTSIDE) / self.deviation
            log_moved = self._log_total(self.tilt + push)
            ends.append((log_moved - self.log_total - _LOG_OUTSIDE) / push)
        return min(ends) if side > 0 else max(ends)

    def answer(self) -> Answer:
        """Composes, and bounds ε or δ."""
        tilt, width, counts = self.tilt, self.width, self.counts
        start = sum(c * each.first for each, c in zip(self.steps, counts, strict=True))
        size = sum(c * (each.masses.size - 1) for each, c in zip(self.steps, counts, strict=True))
        centre = round(self.mean / width)
        first = max(start, min(math.floor(self._end(-1) / width), centre - 1))
        last = min(start + size, max(math.ceil(self._end(1) / width), centre + 1))
        if last - centre > 2 * _MAX_WINDOW:
            return Answer(self.question.worst, False)
        # What lies below the window folds back into it, which takes nothing off the answer.
        first = max(first, last - 4 * _MAX_WINDOW)
        weighted, lost = self._convolved(first - start, last - first + 1)
        places = (first - centre + np.arange(weighted.size)) * width
        keep = int(np.searchsorted(places, -_LARGEST_EXPONENT / max(tilt, EPS)))
        places, weighted = places[keep:], weighted[keep:]
        with np.errstate(under="ignore"):
            weights = (np.maximum(weighted, 0.0) + lost) * np.exp(-tilt * places)
        # Sums over i ≥ j of w·e^(l_j − l_i), and of w·(1 − e^(l_j − l_i)): all terms positive.
        gaps = signal.lfilter([1.0], [1.0, -math.exp(-width)], weights[::-1])[::-1]
        tails = np.cumsum((-math.expm1(-width) * np.append(gaps[1:], 0.0))[::-1])[::-1]
        infinite = self._infinite
        if last < start + size:
            infinite += math.exp(min(self.log_total - tilt * last * width + _LOG_OUTSIDE, 0.0))
        relative = self._relative + 8 * EPS * weighted.size
        curve = _Curve(
            centre * width,
            places,
            tails,
            gaps,
            self.log_total - tilt * centre * width,
            infinite,
            relative,
            relative < 1e-5 and lost < 1e-6 * width / self.deviation,
        )
        if self.question.dp_delta is not None:
            return curve.epsilon(self.question.dp_delta)
        assert self.question.epsilon is not None
        return curve.delta(self.question.epsilon)

    def _convolved(self, offset: int, size: int) -> tuple[np.ndarray, float]:
        """The weighted composition in a window, and what every number may be wrong by.

        Every output of a transform of n is a sum of its inputs along log2(n) additions and
        products, each rounded; the power multiplies a relative error.
        """
        length = fft.next_fast_len(max(size, 2), real=True)
        product = np.ones(length // 2 + 1, complex)
        log_sizes = np.zeros(length // 2 + 1)
        error = 8 * EPS * math.log2(length)
        for count, places, logs in zip(self.counts, self._places, self._logs, strict=True):
            exponents = logs + self.tilt * places
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
        lost = error * (1 + 2 * sum(self.counts)) * mass + 2 * math.exp(_NEGLIGIBLE)
        composed = fft.irfft(product, length)
        return np.roll(composed, -(offset % length))[:size], lost


class _Curve(NamedTuple):
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
        """Bounds ε at a δ above 0."""
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
        """Bounds δ at an ε of at least 0."""
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


def _tilt(
    composition: _Composition, tilt: float | None
) -> tuple[float, tuple[float, float, float, float, float]]:
    """Finds the weight that moves the mean to the ε in question; any weight gives a valid bound.

    At the mean m of the weighted sum of deviation s, δ is about `E·e^(−θm)` over `1 + √(2π)·θ·s`
    and `1 + θ + √(2π)/s`, which is what a Gaussian tail comes to.
    """
    question, width = composition.question, composition.width
    root = math.sqrt(2 * math.pi)

    def excess(tilt: float, found: Sequence[float]) -> tuple[float, float, float]:
        log_total, mean, variance, *_ = found
        deviation = max(math.sqrt(variance), width / 4)
        if question.epsilon is not None:
            return question.epsilon - mean, -(deviation**2), deviation
        assert question.dp_delta is not None
        log_delta = log_total - tilt * mean - math.log1p(tilt * root * deviation)
        value = log_delta - math.log1p(tilt + root / deviation) - math.log(question.dp_delta)
        return value, -tilt * deviation**2 - root * deviation / (1 + tilt * root * deviation), 1.0

    low, high, smallest = 0.0, math.inf, 0.0
    if tilt is None:
        deviation = max(math.sqrt(composition.cumulants(0.0)[2]), width / 4)
        tilt = math.sqrt(2 * max(-math.log(question.dp_delta or 1e-5), 0.1)) / deviation
        smallest = 1e-6 / deviation
    for _ in range(40):
        at, found = tilt, composition.cumulants(tilt)
        value, slope, unit = excess(tilt, found)
        # Both functions fall; a step that would leave the bracket halves it.
        low, high = (tilt, high) if value > 0 else (low, tilt)
        if abs(value) < 0.3 * unit or high <= smallest or tilt * width > 64:
            break
        step = tilt - value / slope
        if not low < step < high:
            step = (low + high) / 2 if high < math.inf else 2 * tilt
        tilt = min(step, 4 * tilt)
    return at, found


def _power_of_two(number: float) -> float:
    return 2.0 ** math.floor(math.log2(number))


@functools.lru_cache(maxsize=128)
def _lattice(key: str, relation: str, width: float, cut: float) -> tuple[Losses, ...]:
    """One step on a lattice, one entry for each direction of the neighbours that differs."""
    event = from_dict(json.loads(key))
    if isinstance(event, CurveDpEvent):
        return (_of_masses(event.loss_masses(width)),)
    if isinstance(event, dpa.TruncatedSubsampledGaussianDpEvent):
        return _truncated(event, relation, width, cut)
    pair = _gaussian_pair(event, relation)
    return pair.losses(width, cut) if pair is not None else _of_library(event, width, cut)


def _first_width(parts: Sequence[tuple[DpEvent, int]], relation: str, cut: float) -> float:
    """A coarse width to begin with: a few hundred points on the longest step."""
    longest = 2.0**-4
    spans = [_gaussian_pair(part, relation) for part, _ in parts]
    ranges = [pair.span(cut) for pair in spans if pair is not None]
    if len(ranges) == len(parts):
        longest = max(high - low for low, high in ranges)
    return _power_of_two(longest / 2**9)


class _Pair(NamedTuple):
    """Two mixtures of the same Gaussians, whose ratio grows along the axis.

    Attributes:
      rate: q, the weight of what a unit moves; the rest lies at 0.
      noise: standard deviation of each Gaussian.
      is_exchange: whether the second mixture has its unit at −1, and not at 0.
    """

    rate: float
    noise: float
    is_exchange: bool

    @property
    def _logs(self) -> tuple[float, float]:
        """Logarithms of q and 1 − q."""
        return math.log(self.rate), math.log1p(-self.rate) if self.rate < 1 else -math.inf

    def loss(self, x: float) -> float:
        """The privacy loss at x."""
        log_q, log_p = self._logs
        half = 1 / (2 * self.noise**2)
        here = float(np.logaddexp(log_p, log_q + 2 * x * half - half))
        there = float(np.logaddexp(log_p, log_q - 2 * x * half - half)) if self.is_exchange else 0.0
        return here - there

    def place(self, losses: np.ndarray) -> np.ndarray:
        """Where the privacy loss is what is asked for, `[points]`; -inf below all losses."""
        log_q, log_p = self._logs
        with np.errstate(all="ignore"):
            if self.is_exchange:
                y = np.abs(losses) / 2
                log_sinh = y + np.log(-np.expm1(-2 * y)) - math.log(2)
                lift = log_p - log_q + 1 / (2 * self.noise**2) + log_sinh
                root = np.logaddexp(0.5 * np.logaddexp(0, 2 * lift), lift)
                return self.noise**2 * (losses / 2 + np.sign(losses) * np.where(y > 0, root, 0.0))
            small = np.log1p(np.expm1(np.minimum(losses, 1.0)) / self.rate)
            large = losses - log_q + np.log1p(-np.exp(log_p - losses))
            found = np.where(losses > 1, large, small)
        return 0.5 + self.noise**2 * np.where(np.isnan(found), -np.inf, found)

    def span(self, cut: float) -> tuple[float, float]:
        """The losses beyond which no Gaussian here has more than a chance of `cut`."""
        reach = -float(special.ndtri_exp(math.log(cut))) * self.noise
        return self.loss(-reach - self.is_exchange), self.loss(1 + reach)

    def losses(self, width: float, cut: float) -> tuple[Losses, ...]:
        """Spreads both directions over a lattice; one where they are alike."""
        low, high = self.span(cut)
        first, last = math.floor(low / width), max(math.ceil(high / width), 0)
        if self.is_exchange or self.rate == 1:
            first = min(first, -1)
        places = np.arange(first, last + 1) * width
        x = self.place(places)
        x[0] = -np.inf if self._is_all_above(places[0]) else x[0]
        centres = (0.0, 1.0, -1.0) if self.is_exchange else (0.0, 1.0)
        masses = [_interval_masses((x - centre) / self.noise) for centre in centres]
        p, q = 1 - self.rate, self.rate
        upper = masses[0].times(p) + masses[1].times(q)
        lower = masses[0].times(p) + masses[2].times(q) if self.is_exchange else masses[0]
        forward = _spread(first, places, upper, lower, width)
        if self.is_exchange or self.rate == 1:
            return (forward,)
        backward = _spread(-last, -places[::-1], lower.reversed(), upper.reversed(), width)
        return forward, backward

    def _is_all_above(self, loss: float) -> bool:
        return not self.is_exchange and self.rate < 1 and loss <= math.log1p(-self.rate)


class _Masses(NamedTuple):
    """Logarithms of the masses below, in, and above the cells, and what they may be wrong by.

    Attributes:
      inside: `[cells]`, logarithms.
      errors: `[cells]`, logarithms.
      below: mass below the first cell.
      above: mass above the last cell.
    """

    inside: np.ndarray
    errors: np.ndarray
    below: float
    above: float

    def times(self, weight: float) -> "_Masses":
        """The masses times a weight of at least 0."""
        log_weight = math.log(weight) if weight > 0 else -math.inf
        inside, errors = self.inside + log_weight, self.errors + log_weight
        return _Masses(inside, errors, weight * self.below, weight * self.above)

    def __add__(self, other: "_Masses") -> "_Masses":  # type: ignore[override]
        """The masses of a sum."""
        inside = np.logaddexp(self.inside, other.inside)
        errors = np.logaddexp(self.errors, other.errors)
        return _Masses(inside, errors, self.below + other.below, self.above + other.above)

    def reversed(self) -> "_Masses":
        """The masses along the other direction of the axis."""
        return _Masses(self.inside[::-1], self.errors[::-1], self.above, self.below)


def _interval_masses(x: np.ndarray) -> _Masses:
    """Masses of the standard normal distribution between neighbours of `x`, kept relative."""
    logs = special.log_ndtr(-np.abs(x))
    near, far = logs[:-1], logs[1:]
    left = np.where(x[1:] <= 0, far, near)
    right = np.where(x[1:] <= 0, near, far)
    is_across = (x[:-1] < 0) & (x[1:] > 0)
    with np.errstate(all="ignore"):
        inside = left + np.log(-np.expm1(right - left))
        across = np.log1p(-np.exp(near) - np.exp(far))
        inside = np.where(is_across, across, np.where(left == -np.inf, -np.inf, inside))
        largest = np.where(is_across, 0.0, np.maximum(near, far))
        size = 1 + np.abs(np.where(np.isfinite(largest), largest, 0.0))
        errors = largest + np.log(8 * EPS * size)
    below, above = math.exp(special.log_ndtr(x[0])), math.exp(special.log_ndtr(-x[-1]))
    return _Masses(inside, errors, below, above)


def _spread(first: int, places: np.ndarray, upper: _Masses, lower: _Masses, width: float) -> Losses:
    """Gives the mass of every cell to its ends, such that both distributions keep theirs."""
    with np.errstate(over="ignore", under="ignore"):
        mass, other = np.exp(upper.inside), np.exp(places[:-1] + lower.inside)
        error = np.exp(upper.errors)
        lost = error + np.exp(places[:-1] + lower.errors)
        lost = lost + 8 * EPS * (mass + other) * (2 + np.abs(places[:-1]))
        mass = (mass + error) * (1 + 16 * EPS)
        up = np.clip((mass - other + lost) / -math.expm1(-width), 0.0, mass)
    masses, spreads = np.zeros(places.size), np.zeros(places.size)
    masses[1:] += up
    masses[:-1] += mass - up
    masses[0] += upper.below
    with np.errstate(invalid="ignore", divide="ignore", under="ignore"):
        spreads[:-1] = np.where(mass > 0, up * (1 - up / mass), 0.0) * width**2
    return Losses(first, masses, spreads, min(upper.above * (1 + 64 * EPS), 1.0))


def _gaussian_pair(event: Any, relation: str) -> _Pair | None:
    """The dominating pair of a Gaussian, sampled or not; None for any other event."""
    rate = 1.0
    if isinstance(event, dpa.TruncatedSubsampledGaussianDpEvent):
        is_exchange = relation == "replace_one"
        return _Pair(float(event.sampling_probability), float(event.noise_multiplier), is_exchange)
    if isinstance(event, dpa.PoissonSampledDpEvent):
        rate, event = float(event.sampling_probability), event.event
    if not isinstance(event, dpa.GaussianDpEvent):
        return None
    return _Pair(rate, float(event.noise_multiplier), relation == "replace_one")


def _truncated(event: Any, relation: str, width: float, cut: float) -> tuple[Losses, ...]:
    """A Poisson draw cut to a capacity: with some chance it was cut, and then a unit is exchanged.

    Source: dp-accounting, `from_truncated_subsampled_gaussian_mechanism`.
    """
    size, rate, capacity = (
        event.dataset_size,
        event.sampling_probability,
        event.truncated_batch_size,
    )
    pair = _gaussian_pair(event, relation)
    assert pair is not None
    chance = float(stats.binom.sf(capacity - 1, size - 1, rate))
    if chance == 0:
        return pair.losses(width, cut)
    drawn = float(stats.binom.sf(capacity, size, rate)) * capacity / chance / size
    (cut_off,) = _Pair(min(drawn, 1.0), event.noise_multiplier / 2, True).losses(width, cut)
    return tuple(_mixture(cut_off, kept, chance) for kept in pair.losses(width, cut))


def _mixture(one: Losses, other: Losses, chance: float) -> Losses:
    first = min(one.first, other.first)
    size = max(each.first + each.masses.size for each in (one, other)) - first
    masses, spreads = np.zeros(size), np.zeros(size)
    for each, weight in ((one, chance), (other, 1 - chance)):
        inside = slice(each.first - first, each.first - first + each.masses.size)
        masses[inside] += weight * each.masses
        spreads[inside] += weight * each.spreads
    infinity = chance * one.infinity + (1 - chance) * other.infinity
    # The chance is a sum of binomial terms, good to ten digits.
    return Losses(first, masses * (1 + 16 * EPS), spreads, min(infinity * (1 + 1e-9), 1.0))


def _of_masses(masses: dict[int, float], infinity: float = 0.0) -> Losses:
    first, last = min(masses), max(masses)
    dense = np.zeros(last - first + 1)
    dense[np.array(list(masses)) - first] = list(masses.values())
    return Losses(first, dense * (1 + 16 * EPS), np.zeros(dense.size), infinity)


# Events whose lattices dp-accounting makes, from the differences of their curves.
_LIBRARY: dict[type, Callable[[Any, float], dpa_pld.PrivacyLossDistribution]] = {
    dpa.LaplaceDpEvent: lambda e, width: dpa_pld.from_laplace_mechanism(
        parameter=e.noise_multiplier, value_discretization_interval=width
    ),
    dpa.PoissonSampledDpEvent: lambda e, width: dpa_pld.from_laplace_mechanism(
        parameter=e.event.noise_multiplier,
        sampling_prob=e.sampling_probability,
        value_discretization_interval=width,
    ),
    standard.DiscreteLaplaceDpEvent: lambda e, width: dpa_pld.from_discrete_laplace_mechanism(
        parameter=e.noise_parameter, sensitivity=e.sensitivity, value_discretization_interval=width
    ),
    standard.MixtureOfGaussiansDpEvent: lambda e, width: dpa_pld.from_mixture_gaussian_mechanism(
        standard_deviation=e.standard_deviation,
        sensitivities=e.sensitivities,
        sampling_probs=e.sampling_probs,
        value_discretization_interval=width,
    ),
}


def _of_library(event: Any, width: float, cut: float) -> tuple[Losses, ...]:
    """A lattice of dp-accounting; what differences of its curve may be wrong by is added."""
    del cut
    found = _LIBRARY[type(event)](event, width)
    lattices = []
    for pmf in (found._pmf_remove, found._pmf_add):
        dense = pmf.to_dense_pmf()
        masses, infinity = np.asarray(dense._probs, float), float(dense._infinity_mass)
        above = np.cumsum(masses[::-1])[::-1] + infinity
        masses = masses + 8 * EPS * above / math.expm1(width) * (masses > 0)
        lattices.append(Losses(int(dense._lower_loss), masses, masses * width**2 / 6, infinity))
    return tuple(lattices) if not found._symmetric else tuple(lattices[:1])
