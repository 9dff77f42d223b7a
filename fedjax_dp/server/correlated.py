"""Correlated noise (DP-FTRL): noise that partly takes back that of earlier rounds."""

from functools import partial
from typing import Any, NamedTuple

from fedjax_dp.core import checks, trees
from fedjax_dp.core.trees import PyTree
from fedjax_dp.privacy import mechanisms
from fedjax_dp.privacy.correlated_noise import BandedNoise
from fedjax_dp.server.base import Aggregator
from fedjax_dp.server.private import PrivateState, private_mean


class CorrelatedState(NamedTuple):
    """The numbers of the mean and the noise of the rounds that are tied together.

    Attributes:
      numbers: clip norm and noise multiplier.
      noise: state of the banded noise.
    """

    numbers: PrivateState
    noise: Any


def correlated_gaussian_mean(
    structure: PyTree,
    banded: BandedNoise,
    clip_norm: float,
    noise_multiplier: float,
    cohort_size: float,
    *,
    per_layer: bool = False,
) -> Aggregator:
    """Builds the Gaussian mean with banded correlated noise, for cohorts that nobody samples.

    Guarantee: unit of privacy is one client. Two participations of a client are at least as many
    rounds apart as there are bands, so that they meet independent columns of noise and each costs
    one Gaussian release of `noise_multiplier`; the engine refuses participations that do not keep
    this distance.

    Args:
      structure: the updates, as arrays or shapes.
      banded: from `privacy.correlated_noise.banded_noise`.
      clip_norm: bound on the L2 norm of one client's update, above 0.
      noise_multiplier: noise standard deviation over `clip_norm`, at least 0.
      cohort_size: the public divisor, above 0.
      per_layer: clip layer by layer instead of over the whole update.

    Returns:
      The aggregator; its state holds a copy of the model for each band but one.

    Source: Kairouz and others 2021 (DP-FTRL); Choquette-Choo and others 2023, theorem 2.
    """
    checks.positive("cohort_size", cohort_size)
    gaussian = partial(mechanisms.gaussian, method="per_layer" if per_layer else "global")
    mean = private_mean(gaussian, clip_norm, noise_multiplier, cohort_size)

    def init(server):
        return CorrelatedState(mean.init(server), banded.init(structure))

    def contribute(state, update, weight):
        return mean.contribute(state.numbers, update, weight)

    def combine(state, total, key):
        summed, num_clipped = total
        stddev = state.numbers.clip_norm * state.numbers.noise_multiplier
        noise, noised = banded.add_noise(key, state.noise, summed, stddev)
        info = {"num_clipped": num_clipped, "noise_stddev": stddev / cohort_size}
        return state._replace(noise=noise), trees.scale(noised, 1.0 / cohort_size), info

    return Aggregator(
        init,
        contribute,
        combine,
        sensitivity=lambda state: gaussian(*state.numbers).sensitivity,
        event=lambda state: gaussian(*state.numbers).event(),
        min_separation=len(banded.coefficients),
    )
