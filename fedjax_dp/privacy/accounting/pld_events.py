"""Which privacy losses an event has: ours for Gaussian noise, dp-accounting's for the rest."""

import functools
import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import dp_accounting as dpa
import numpy as np
from dp_accounting import dp_event as standard
from dp_accounting.pld import privacy_loss_distribution as dpa_pld

from fedjax_dp.privacy.accounting.pld_gaussian import gaussian_pair, truncated
from fedjax_dp.privacy.accounting.pld_lattice import Losses, of_masses, power_of_two
from fedjax_dp.privacy.accounting.rdp import EPS
from fedjax_dp.privacy.events import CurveDpEvent, DpEvent, from_dict


@functools.lru_cache(maxsize=128)
def losses_of(key: str, relation: str, width: float, cut: float) -> tuple[Losses, ...]:
    """Spreads the losses of one step over a lattice.

    Args:
      key: the event, as `events.key_of` writes it.
      relation: "add_remove", "zero_out" or "replace_one".
      width: of the lattice, a power of 2.
      cut: the chance of larger losses, which count as infinite.

    Returns:
      One entry for each direction of the neighbours that differs.

    Raises:
      OverflowError: for losses of many hundreds, which dp-accounting has no numbers for.
    """
    event = from_dict(json.loads(key))
    if isinstance(event, CurveDpEvent):
        return (of_masses(event.loss_masses(width)),)
    if isinstance(event, dpa.TruncatedSubsampledGaussianDpEvent):
        return truncated(event, relation, width, cut)
    pair = gaussian_pair(event, relation)
    return _of_library(event, width) if pair is None else pair.losses(width, cut)


def first_width(parts: Sequence[tuple[DpEvent, int]], relation: str, cut: float) -> float:
    """Chooses a coarse width to begin with: a few hundred points on the longest step.

    Args:
      parts: events, and how often each ran.
      relation: as for `losses_of`.
      cut: as for `losses_of`.

    Returns:
      A power of 2.
    """
    longest = 2.0**-4
    spans = [gaussian_pair(part, relation) for part, _ in parts]
    ranges = [pair.span(cut) for pair in spans if pair is not None]
    if len(ranges) == len(parts):
        longest = max(high - low for low, high in ranges)
    return power_of_two(longest / 2**9)


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


def _of_library(event: Any, width: float) -> tuple[Losses, ...]:
    """A lattice of dp-accounting; what differences of its curve may be wrong by is added."""
    found = _LIBRARY[type(event)](event, width)
    lattices = []
    for pmf in (found._pmf_remove, found._pmf_add):
        dense = pmf.to_dense_pmf()
        masses, infinity = np.asarray(dense._probs, float), float(dense._infinity_mass)
        above = np.cumsum(masses[::-1])[::-1] + infinity
        masses = masses + 8 * EPS * above / math.expm1(width) * (masses > 0)
        lattices.append(Losses(int(dense._lower_loss), masses, masses * width**2 / 6, infinity))
    return tuple(lattices) if not found._symmetric else tuple(lattices[:1])
