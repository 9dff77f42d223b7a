"""Privacy losses of Gaussian noise, sampled or not, whose draw may be cut to a capacity."""

import math
from typing import Any, NamedTuple

import dp_accounting as dpa
import numpy as np
from scipy import special, stats

from fedjax_dp.privacy.accounting.pld_lattice import Losses, mixture, normal_masses, spread


class GaussianPair(NamedTuple):
    """Two mixtures of the same Gaussians, whose ratio grows along the axis.

    Neighbouring data of a sampled Gaussian can be told apart no better than these two.

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
        """Computes the privacy loss at a place.

        Args:
          x: the place.

        Returns:
          The logarithm of the ratio there.
        """
        log_q, log_p = self._logs
        half = 1 / (2 * self.noise**2)
        here = float(np.logaddexp(log_p, log_q + 2 * x * half - half))
        there = float(np.logaddexp(log_p, log_q - 2 * x * half - half)) if self.is_exchange else 0.0
        return here - there

    def place(self, losses: np.ndarray) -> np.ndarray:
        """Finds where the privacy loss is what is asked for.

        Args:
          losses: `[points]`.

        Returns:
          `[points]`, the places; -inf below all losses.
        """
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
        """Finds the losses beyond which no Gaussian here has more than some chance.

        Args:
          cut: that chance.

        Returns:
          The lowest loss and the highest.
        """
        reach = -float(special.ndtri_exp(math.log(cut))) * self.noise
        return self.loss(-reach - self.is_exchange), self.loss(1 + reach)

    def losses(self, width: float, cut: float) -> tuple[Losses, ...]:
        """Spreads the losses over a lattice.

        Args:
          width: of the lattice, a power of 2.
          cut: the chance of larger losses, which count as infinite.

        Returns:
          Both directions of the neighbours, or one where they are alike.
        """
        low, high = self.span(cut)
        first, last = math.floor(low / width), max(math.ceil(high / width), 0)
        if self.is_exchange or self.rate == 1:
            first = min(first, -1)
        places = np.arange(first, last + 1) * width
        x = self.place(places)
        x[0] = -np.inf if self._is_all_above(places[0]) else x[0]
        centres = (0.0, 1.0, -1.0) if self.is_exchange else (0.0, 1.0)
        masses = [normal_masses((x - centre) / self.noise) for centre in centres]
        p, q = 1 - self.rate, self.rate
        upper = masses[0].times(p) + masses[1].times(q)
        lower = masses[0].times(p) + masses[2].times(q) if self.is_exchange else masses[0]
        forward = spread(first, places, upper, lower, width)
        if self.is_exchange or self.rate == 1:
            return (forward,)
        backward = spread(-last, -places[::-1], lower.reversed(), upper.reversed(), width)
        return forward, backward

    def _is_all_above(self, loss: float) -> bool:
        return not self.is_exchange and self.rate < 1 and loss <= math.log1p(-self.rate)


def gaussian_pair(event: Any, relation: str) -> GaussianPair | None:
    """Finds the dominating pair of a Gaussian, sampled or not.

    Args:
      event: a part of a composition.
      relation: "add_remove", "zero_out" or "replace_one".

    Returns:
      The pair; of a draw that may be cut the one where it was not; None for any other event.
    """
    rate = 1.0
    if isinstance(event, dpa.TruncatedSubsampledGaussianDpEvent):
        is_exchange = relation == "replace_one"
        return GaussianPair(
            float(event.sampling_probability), float(event.noise_multiplier), is_exchange
        )
    if isinstance(event, dpa.PoissonSampledDpEvent):
        rate, event = float(event.sampling_probability), event.event
    if not isinstance(event, dpa.GaussianDpEvent):
        return None
    return GaussianPair(rate, float(event.noise_multiplier), relation == "replace_one")


def truncated(event: Any, relation: str, width: float, cut: float) -> tuple[Losses, ...]:
    """Spreads the losses of a Poisson draw that is cut to a capacity over a lattice.

    With some chance it was cut, and then a unit is exchanged.

    Args:
      event: a `TruncatedSubsampledGaussianDpEvent`.
      relation: as for `gaussian_pair`.
      width: of the lattice, a power of 2.
      cut: the chance of larger losses, which count as infinite.

    Returns:
      One entry for each direction of the neighbours that differs.

    Source: dp-accounting, `from_truncated_subsampled_gaussian_mechanism`.
    """
    size, rate = event.dataset_size, event.sampling_probability
    capacity = event.truncated_batch_size
    pair = gaussian_pair(event, relation)
    assert pair is not None
    chance = float(stats.binom.sf(capacity - 1, size - 1, rate))
    if chance == 0:
        return pair.losses(width, cut)
    drawn = float(stats.binom.sf(capacity, size, rate)) * capacity / chance / size
    (cut_off,) = GaussianPair(min(drawn, 1.0), event.noise_multiplier / 2, True).losses(width, cut)
    return tuple(mixture(cut_off, kept, chance) for kept in pair.losses(width, cut))
