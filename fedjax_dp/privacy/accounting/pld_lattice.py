"""One step's privacy loss on the multiples of a width, rounded so that ε and δ are never too low.

A loss between two multiples goes to both, such that the mass of either distribution is kept
(connect the dots: Doroshenko and others 2022); the possible error of the arithmetic is moved up.
"""

import functools
import json
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import dp_accounting as dpa
import numpy as np
from scipy import special, stats

from fedjax_dp.privacy.accounting.dp_accounting_adapter import loss_lattices
from fedjax_dp.privacy.accounting.rdp import EPS
from fedjax_dp.privacy.events import CurveDpEvent, DpEvent, from_dict


class Losses(NamedTuple):
    """One step's privacy loss on the multiples of a width."""

    first: int  # The first multiple.
    masses: np.ndarray  # `[points]`, probabilities of the multiples from the first on.
    spreads: np.ndarray  # `[points]`, the variance that rounding to the lattice added, by place.
    infinity: float  # Probability of an infinite loss.


class _CellMasses(NamedTuple):
    """Logarithms of the masses of cells and of their errors, `[cells]`; masses below and above."""

    inside: np.ndarray
    errors: np.ndarray
    below: float
    above: float

    def times(self, weight: float) -> "_CellMasses":
        log_weight = math.log(weight) if weight > 0 else -math.inf
        inside, errors = self.inside + log_weight, self.errors + log_weight
        return _CellMasses(inside, errors, weight * self.below, weight * self.above)

    def __add__(self, other: "_CellMasses") -> "_CellMasses":  # type: ignore[override]
        """Adds the masses of two parts of a mixture."""
        inside = np.logaddexp(self.inside, other.inside)
        errors = np.logaddexp(self.errors, other.errors)
        return _CellMasses(inside, errors, self.below + other.below, self.above + other.above)

    def reversed(self) -> "_CellMasses":
        return _CellMasses(self.inside[::-1], self.errors[::-1], self.above, self.below)


class _GaussianPair(NamedTuple):
    """The dominating pair of a sampled Gaussian: two mixtures whose ratio grows along the axis."""

    rate: float  # q, the weight of the Gaussian at 1, or at −1; the rest lies at 0.
    noise: float  # Standard deviation of each Gaussian.
    is_exchange: bool  # Whether the second mixture has its unit at −1, and not at 0.

    @property
    def _logs(self) -> tuple[float, float]:
        """Logarithms of q and 1 − q."""
        return math.log(self.rate), math.log1p(-self.rate) if self.rate < 1 else -math.inf

    def loss(self, x: float) -> float:
        """Computes the privacy loss at a place."""
        log_q, log_p = self._logs
        half = 1 / (2 * self.noise**2)
        here = float(np.logaddexp(log_p, log_q + 2 * x * half - half))
        there = float(np.logaddexp(log_p, log_q - 2 * x * half - half)) if self.is_exchange else 0.0
        return here - there

    def place(self, losses: np.ndarray) -> np.ndarray:
        """Finds the places of given losses, `[points]`; -inf below all losses."""
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
        """Finds the lowest and highest loss, except with probability `cut` of each Gaussian."""
        reach = -float(special.ndtri_exp(math.log(cut))) * self.noise
        return self.loss(-reach - self.is_exchange), self.loss(1 + reach)

    def losses(self, width: float, cut: float) -> tuple[Losses, ...]:
        """Spreads the losses over a lattice, by direction of the neighbours if they differ."""
        low, high = self.span(cut)
        first, last = math.floor(low / width), max(math.ceil(high / width), 0)
        if self.is_exchange or self.rate == 1:
            first = min(first, -1)
        places = np.arange(first, last + 1) * width
        x = self.place(places)
        is_all_above = not self.is_exchange and self.rate < 1
        if is_all_above and places[0] <= math.log1p(-self.rate):
            x[0] = -np.inf
        centres = (0.0, 1.0, -1.0) if self.is_exchange else (0.0, 1.0)
        masses = [_normal_masses((x - centre) / self.noise) for centre in centres]
        p, q = 1 - self.rate, self.rate
        upper = masses[0].times(p) + masses[1].times(q)
        lower = masses[0].times(p) + masses[2].times(q) if self.is_exchange else masses[0]
        forward = _spread(first, places, upper, lower, width)
        if self.is_exchange or self.rate == 1:
            return (forward,)
        backward = _spread(-last, -places[::-1], lower.reversed(), upper.reversed(), width)
        return forward, backward


def _normal_masses(x: np.ndarray) -> _CellMasses:
    """Computes standard normal masses between increasing points, whose ends may be infinite."""
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
    return _CellMasses(inside, errors, below, above)


def _spread(
    first: int, places: np.ndarray, upper: _CellMasses, lower: _CellMasses, width: float
) -> Losses:
    """Splits each cell's mass onto its ends `places`, keeping the mass of both distributions."""
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


def _mixture(one: Losses, other: Losses, chance: float) -> Losses:
    """Mixes two losses on one lattice, the first drawn with the chance (good to ten digits)."""
    first = min(one.first, other.first)
    size = max(each.first + each.masses.size for each in (one, other)) - first
    masses, spreads = np.zeros(size), np.zeros(size)
    for each, weight in ((one, chance), (other, 1 - chance)):
        inside = slice(each.first - first, each.first - first + each.masses.size)
        masses[inside] += weight * each.masses
        spreads[inside] += weight * each.spreads
    infinity = chance * one.infinity + (1 - chance) * other.infinity
    return Losses(first, masses * (1 + 16 * EPS), spreads, min(infinity * (1 + 1e-9), 1.0))


def _pair_of(event: Any, relation: str) -> _GaussianPair | None:
    """Returns the dominating pair of a Gaussian, before any truncation; None for others."""
    rate, is_exchange = 1.0, relation == "replace_one"
    if isinstance(event, dpa.TruncatedSubsampledGaussianDpEvent):
        rate = float(event.sampling_probability)
    else:
        if isinstance(event, dpa.PoissonSampledDpEvent):
            rate, event = float(event.sampling_probability), event.event
        if not isinstance(event, dpa.GaussianDpEvent):
            return None
    return _GaussianPair(rate, float(event.noise_multiplier), is_exchange)


def _of_cut_draw(event: Any, pair: _GaussianPair, width: float, cut: float) -> tuple[Losses, ...]:
    """Spreads the losses of a truncated Poisson draw: if it was cut, a unit is replaced.

    Source: dp-accounting, `from_truncated_subsampled_gaussian_mechanism`.
    """
    size, rate = event.dataset_size, event.sampling_probability
    capacity = event.truncated_batch_size
    chance = float(stats.binom.sf(capacity - 1, size - 1, rate))
    if chance == 0:
        return pair.losses(width, cut)
    drawn = float(stats.binom.sf(capacity, size, rate)) * capacity / chance / size
    exchange = _GaussianPair(min(drawn, 1.0), event.noise_multiplier / 2, True)
    (cut_off,) = exchange.losses(width, cut)
    return tuple(_mixture(cut_off, kept, chance) for kept in pair.losses(width, cut))


@functools.lru_cache(maxsize=128)
def losses_of(key: str, relation: str, width: float, cut: float) -> tuple[Losses, ...]:
    """Spreads the losses of a step over a lattice, by direction of neighbours if they differ.

    `cut` is the chance of larger losses, which count as infinite. Raises `OverflowError` for losses
    of many hundreds, which dp-accounting has no numbers for.
    """
    event = from_dict(json.loads(key))
    if isinstance(event, CurveDpEvent):
        masses = event.loss_masses(width)
        dense = np.zeros(max(masses) - min(masses) + 1)
        dense[np.array(list(masses)) - min(masses)] = list(masses.values())
        return (Losses(min(masses), dense * (1 + 16 * EPS), np.zeros(dense.size), 0.0),)
    pair = _pair_of(event, relation)
    if pair is None:
        return tuple(_with_errors(*each, width) for each in loss_lattices(event, width))
    if isinstance(event, dpa.TruncatedSubsampledGaussianDpEvent):
        return _of_cut_draw(event, pair, width, cut)
    return pair.losses(width, cut)


def _with_errors(first: int, masses: np.ndarray, infinity: float, width: float) -> Losses:
    """Adds the possible error of differences of its curve to a lattice of dp-accounting."""
    above = np.cumsum(masses[::-1])[::-1] + infinity
    masses = masses + 8 * EPS * above / math.expm1(width) * (masses > 0)
    return Losses(first, masses, masses * width**2 / 6, infinity)


def first_width(parts: Sequence[tuple[DpEvent, int]], relation: str, cut: float) -> float:
    """Chooses a coarse width to begin with: a few hundred points on the longest step."""
    longest = 2.0**-4
    pairs = [_pair_of(part, relation) for part, _ in parts]
    ranges = [pair.span(cut) for pair in pairs if pair is not None]
    if len(ranges) == len(parts):
        longest = max(high - low for low, high in ranges)
    return power_of_two(longest / 2**9)


def power_of_two(number: float) -> float:
    """Rounds a width down to a power of 2, so that lattices nest."""
    return 2.0 ** math.floor(math.log2(number))
