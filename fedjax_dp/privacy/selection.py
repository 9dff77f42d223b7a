"""The exponential mechanism: a private choice among a few, by the largest noisy score."""

import dp_accounting as dpa
import jax
import jax.numpy as jnp
from chex import PRNGKey

from fedjax_dp.core import checks
from fedjax_dp.privacy import draws
from fedjax_dp.privacy.events import DpEvent

Scalar = jax.typing.ArrayLike


def select(
    key: PRNGKey,
    scores: jax.Array,
    epsilon: Scalar,
    sensitivity: Scalar,
    *,
    is_offered: jax.Array | None = None,
) -> jax.Array:
    """Chooses an index with probability proportional to `exp(ε·score/(2·sensitivity))`.

    Adds Gumbel noise of scale `2·sensitivity/ε` to the scores and takes the largest.

    Guarantee: ε-DP and ε²/8-zCDP under the relation for which `sensitivity` bounds how far one
    unit moves any score; the caller bounds the scores. Charge `selection_event`.

    Args:
      key: used for this choice and nothing else.
      scores: `[choices]` floats, larger is better. A score that is not a number is the worst.
      epsilon: at least 0; may be traced. 0 chooses uniformly, inf takes the best (ties at
        random). A traced value below 0 or nan counts as 0.
      sensitivity: above 0, in units of the scores; may be traced.
      is_offered: `[choices]`, bool, which of them may be chosen; must not depend on the data. All
        where None.

    Returns:
      The index, int32.

    Source: McSherry and Talwar 2007; Durfee and Rogers 2019 (Gumbel noise).
    """
    scores = jnp.asarray(scores, jnp.float32)
    scores = jnp.where(jnp.isnan(scores), -jnp.inf, scores)
    scores = jnp.clip(scores, jnp.finfo(jnp.float32).min / 4, jnp.finfo(jnp.float32).max / 4)
    epsilon = jnp.where(jnp.asarray(epsilon) > 0, epsilon, 0.0)
    if is_offered is None:
        is_offered = jnp.ones(scores.shape, bool)
    behind = scores - jnp.max(scores, where=is_offered, initial=jnp.finfo(jnp.float32).min)
    # Multiplying instead of dividing the noise keeps both ends, ε = 0 and ε = inf, defined.
    logits = jnp.where((behind == 0) | (epsilon == 0), 0.0, behind * epsilon / (2 * sensitivity))
    noisy = logits + draws.gumbel(key, scores.shape)
    return jnp.argmax(jnp.where(is_offered, noisy, -jnp.inf)).astype(jnp.int32)


def selection_event(epsilon: float) -> DpEvent:
    """Names the cost of one private choice.

    The mechanism has range bounded by ε, which costs ε²/8 in zCDP, a quarter of what an ε-DP
    mechanism costs in general.

    Args:
      epsilon: as given to `select`, at least 0.

    Returns:
      The event. It holds for the relation of the scores' sensitivity and is not rescaled.

    Raises:
      ValueError: if `epsilon` is negative or not finite.

    Source: Cesar and Rogers 2021, "Bounding, Concentrating, and Truncating"; Dong, Durfee, Rogers
    2020.
    """
    checks.non_negative("epsilon", epsilon)
    return dpa.ZCDpEvent(rho=float(epsilon) ** 2 / 8)


def loss_score(losses: jax.Array, is_real: jax.Array, bound: Scalar) -> jax.Array:
    """Scores a model by minus the mean loss, each example's loss clipped on its own.

    Guarantee: replacing one example moves the score by at most `bound / n` for n real examples;
    clipping the mean instead would leave it unbounded.

    Args:
      losses: `[examples]`; a loss that is not a number counts as `bound`.
      is_real: `[examples]`, bool; false for padding.
      bound: the largest loss that counts, above 0; may be traced.

    Returns:
      A scalar in [-bound, 0]; 0 where there is no real example.
    """
    losses = jnp.asarray(losses, jnp.float32)
    losses = jnp.clip(jnp.where(jnp.isnan(losses), bound, losses), 0, bound)
    count = jnp.sum(is_real)
    return -jnp.sum(jnp.where(is_real, losses, 0)) / jnp.maximum(count, 1)
