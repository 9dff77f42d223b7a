"""One step's privacy loss on the multiples of a width, rounded such that privacy never gains.

A loss between two multiples goes to both of them, in the parts that keep the mass of either
distribution; what the arithmetic may have lost is moved up.
"""

import math
from typing import NamedTuple

import numpy as np
from scipy import special

from fedjax_dp.privacy.accounting.rdp import EPS


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


class CellMasses(NamedTuple):
    """The masses below, in, and above the cells between points, and what they may be wrong by.

    Attributes:
      inside: `[cells]`, logarithms of the masses.
      errors: `[cells]`, logarithms of what they may be wrong by.
      below: mass below the first cell.
      above: mass above the last cell.
    """

    inside: np.ndarray
    errors: np.ndarray
    below: float
    above: float

    def times(self, weight: float) -> "CellMasses":
        """Scales the masses.

        Args:
          weight: a factor of at least 0.

        Returns:
          The masses times that.
        """
        log_weight = math.log(weight) if weight > 0 else -math.inf
        inside, errors = self.inside + log_weight, self.errors + log_weight
        return CellMasses(inside, errors, weight * self.below, weight * self.above)

    def __add__(self, other: "CellMasses") -> "CellMasses":  # type: ignore[override]
        """Adds the masses of two parts of a mixture."""
        inside = np.logaddexp(self.inside, other.inside)
        errors = np.logaddexp(self.errors, other.errors)
        return CellMasses(inside, errors, self.below + other.below, self.above + other.above)

    def reversed(self) -> "CellMasses":
        """Gives the masses along the other direction of the axis."""
        return CellMasses(self.inside[::-1], self.errors[::-1], self.above, self.below)


def normal_masses(x: np.ndarray) -> CellMasses:
    """Computes the standard normal masses between neighbours, to digits of their own.

    Args:
      x: `[cells + 1]`, increasing; the ends may be infinite.

    Returns:
      The masses.
    """
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
    return CellMasses(inside, errors, below, above)


def spread(
    first: int, places: np.ndarray, upper: CellMasses, lower: CellMasses, width: float
) -> Losses:
    """Gives the mass of every cell to its ends, such that both distributions keep theirs.

    Args:
      first: the first multiple.
      places: `[cells + 1]`, the losses at the ends of the cells: multiples of the width.
      upper: masses of the distribution whose loss it is.
      lower: masses of the other one.
      width: of the lattice.

    Returns:
      The losses.

    Source: Doroshenko and others 2022 (connect the dots).
    """
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


def mixture(one: Losses, other: Losses, chance: float) -> Losses:
    """Mixes two losses on the same lattice.

    Args:
      one: drawn with the chance.
      other: drawn otherwise.
      chance: in [0, 1], good to ten digits.

    Returns:
      The losses of the mixture.
    """
    first = min(one.first, other.first)
    size = max(each.first + each.masses.size for each in (one, other)) - first
    masses, spreads = np.zeros(size), np.zeros(size)
    for each, weight in ((one, chance), (other, 1 - chance)):
        inside = slice(each.first - first, each.first - first + each.masses.size)
        masses[inside] += weight * each.masses
        spreads[inside] += weight * each.spreads
    infinity = chance * one.infinity + (1 - chance) * other.infinity
    return Losses(first, masses * (1 + 16 * EPS), spreads, min(infinity * (1 + 1e-9), 1.0))


def of_masses(masses: dict[int, float]) -> Losses:
    """Takes losses that lie on the lattice already.

    Args:
      masses: probabilities by multiple.

    Returns:
      The losses.
    """
    first, last = min(masses), max(masses)
    dense = np.zeros(last - first + 1)
    dense[np.array(list(masses)) - first] = list(masses.values())
    return Losses(first, dense * (1 + 16 * EPS), np.zeros(dense.size), 0.0)


def power_of_two(number: float) -> float:
    """Rounds a width down to a power of 2, so that lattices nest.

    Args:
      number: above 0.

    Returns:
      The power.
    """
    return 2.0 ** math.floor(math.log2(number))
