"""Correlated noise (DP-FTRL): noise that partly cancels that of earlier rounds."""

from functools import partial

from fedjax_dp.core import trees
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.privacy import mechanisms
from fedjax_dp.privacy.claims import ClientClaim
from fedjax_dp.privacy.mechanisms.correlated_noise import BandedNoise
from fedjax_dp.server.base import Summed
from fedjax_dp.server.private import private_mean


@checked
def correlated_gaussian_mean(
    banded: BandedNoise,
    clip_norm: float,
    noise_multiplier: float,
    expected_cohort_size: float,
    *,
    per_layer: bool = False,
) -> Summed:
    """Builds the Gaussian mean with banded correlated noise, for cohorts that are not sampled.

    Guarantee: unit of privacy is one client. A client's participations are at least as many rounds
    apart as there are bands, so that they get independent columns of noise and each costs one
    Gaussian release of `noise_multiplier`; the engine refuses participations that are closer
    together.

    Args:
      banded: from `privacy.banded_noise`.
      clip_norm: bound on the L2 norm of one client's update, above 0.
      noise_multiplier: noise standard deviation over `clip_norm`, at least 0.
      expected_cohort_size: the public divisor, above 0.
      per_layer: clip layer by layer instead of over the whole update.

    Returns:
      The aggregator; its state holds a copy of the model for each band except one.

    Source: Kairouz and others 2021 (DP-FTRL); Choquette-Choo and others 2023, theorem 2.
    """
    gaussian = partial(mechanisms.gaussian, method="per_layer" if per_layer else "global")
    mean = private_mean(gaussian, clip_norm, noise_multiplier, expected_cohort_size)

    def combine(state, numbers, total, close):
        summed, num_clipped = total
        stddev = numbers["clip_norm"] * numbers["noise_multiplier"]
        divisor = numbers["expected_cohort_size"]
        state, noised = banded.add_noise(close.private_key, state, summed, stddev)
        info = {"num_clipped": num_clipped, "noise_stddev": stddev / divisor}
        return state, trees.scale(noised, 1.0 / divisor), info

    assert isinstance(mean.claim, ClientClaim)
    claim = mean.claim._replace(min_separation=len(banded.coefficients))
    return mean._replace(init=banded.init, combine=combine, claim=claim)
