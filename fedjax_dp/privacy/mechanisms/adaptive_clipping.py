"""Clip norms that follow a quantile of the update norms, privately."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from chex import PRNGKey

from fedjax_dp.core import checks
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.decimals import rounded_up
from fedjax_dp.core.ranges import Fraction, NonNegative, Positive
from fedjax_dp.privacy.mechanisms import random_bits
from fedjax_dp.privacy.sensitivities import Scalar

# A clip norm outside of this range has diverged; it is held there instead of reaching 0 or inf.
_SMALLEST, _LARGEST = 1e-12, 1e12


class AdaptiveClipping(NamedTuple):
    """The rule by which a clip norm is adapted, and the noise that hides the count it needs.

    Attributes:
      initial_clip_norm: the clip norm of the first round, above 0.
      target_quantile: the target share of contributions that are not clipped, in [0, 1].
      learning_rate: the step size of the logarithm of the clip norm, at least 0.
      count_stddev: standard deviation of the noise on the count of unclipped contributions.
      expected_cohort_size: the public expected number of contributions of a round.
    """

    initial_clip_norm: float
    target_quantile: float
    learning_rate: float
    count_stddev: float
    expected_cohort_size: float

    def contribution(self, norm: jax.Array, clip_norm: Scalar) -> jax.Array:
        """Computes what one unit adds to the count.

        Guarantee: its absolute value is 1/2 for any input, so that the sum has sensitivity 1/2
        under add/remove and 1 under replace-one.

        Args:
          norm: the norm before clipping; inf for an update that was not finite.
          clip_norm: the bound of this round.

        Returns:
          1/2 if the contribution was not clipped, -1/2 if it was; float32. Padding must be
          masked after this, before the sum.
        """
        return jnp.where(norm <= clip_norm, 0.5, -0.5).astype(jnp.float32)

    def step(
        self, key: PRNGKey, clip_norm: Scalar, total: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Moves the clip norm towards the target quantile.

        Too many clipped contributions make it larger, too few make it smaller.

        Args:
          key: used for the noise on the count and nothing else.
          clip_norm: the bound of this round.
          total: sum of `contribution` over the real units of this round.

        Returns:
          `(next clip norm, noised share of unclipped contributions)`, both released.

        Source: Andrew, Thakkar, McMahan, Ramaswamy 2021, algorithm 1 and equation (1).
        """
        noised = total + self.count_stddev * random_bits.normal(key, ())
        unclipped = noised / self.expected_cohort_size + 0.5
        rate = jnp.exp(-self.learning_rate * (unclipped - self.target_quantile))
        return jnp.clip(clip_norm * rate, _SMALLEST, _LARGEST), unclipped


@checked
def make_adaptive_clipping(
    expected_cohort_size: Positive,
    *,
    initial_clip_norm: Positive = 0.1,
    target_quantile: Fraction = 0.5,
    learning_rate: NonNegative = 0.2,
    count_stddev: Positive | None = None,
) -> AdaptiveClipping:
    """Builds the rule with the defaults of the paper.

    Guarantee: round t's clip norm depends on rounds before t only, through noised counts that
    `update_noise_multiplier` pays for.

    Args:
      expected_cohort_size: the public expected number of contributions of a round, above 0.
      initial_clip_norm: above 0.
      target_quantile: in [0, 1].
      learning_rate: at least 0.
      count_stddev: above 0; `expected_cohort_size / 20` if None.

    Returns:
      The rule.
    """
    stddev = expected_cohort_size / 20 if count_stddev is None else count_stddev
    return AdaptiveClipping(
        initial_clip_norm,
        target_quantile,
        learning_rate,
        float(stddev),
        float(expected_cohort_size),
    )


@checked
def update_noise_multiplier(noise_multiplier: Positive, count_stddev: Positive) -> float:
    """Computes the multiplier of updates that leaves the count its share of a round's.

    Updates and count are one Gaussian release of the same sample: `z⁻² = z_Δ⁻² + (2σ_b)⁻²`, since
    contributions to the count are ±1/2. A round is charged with z. A count that alone costs more
    than the round is refused.

    Source: Andrew, Thakkar, McMahan, Ramaswamy 2021, theorem 1.
    """
    left = noise_multiplier**-2 - (2 * count_stddev) ** -2
    rule = f"exceed {rounded_up(noise_multiplier / 2, 6)} for this multiplier"
    checks.require(left > 0, "count_stddev", rule, count_stddev)
    return 1 / math.sqrt(left)
