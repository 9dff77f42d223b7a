"""Private selection: by the exponential mechanism, and the best of a random number of trials."""

import math
import secrets
from collections.abc import Callable
from typing import ClassVar, NamedTuple

import attr
import jax
import jax.numpy as jnp
import numpy as np
from chex import PRNGKey
from dp_accounting.dp_event import RepeatAndSelectDpEvent
from scipy import optimize, stats

from fedjax_dp.core import checks
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.ranges import Bounds, Count, NonNegative, PositiveNumbers
from fedjax_dp.privacy.events import CurveDpEvent, DpEvent
from fedjax_dp.privacy.mechanisms import random_bits

# Of a number that is drawn from the operating system.
_BITS = 53


@attr.s(frozen=True, slots=True, auto_attribs=True)
class BoundedRangeDpEvent(CurveDpEvent):
    """A choice whose privacy loss is, for any neighbours, in some interval of length ε.

    The exponential mechanism is such a choice. Losses of opposite ends of the interval cannot both
    occur, so that it costs less than ε-DP mechanisms in general.

    Attributes:
      epsilon: length of the interval, at least 0, under the relation of the ledger.
    """

    epsilon: float
    has_loss_masses: ClassVar[bool] = True

    def rdp(self, orders: np.ndarray, relation: str) -> np.ndarray:
        """Computes the curve of ε²/8-zCDP.

        Args:
          orders: `[orders]`, above 1.
          relation: not read; ε is stated for it.

        Returns:
          `[orders]`.

        Source: Cesar and Rogers 2021, lemma 3.2.
        """
        del relation
        return orders * self.epsilon**2 / 8

    def loss_masses(self, interval: float) -> dict[int, float]:
        """Spreads the loss of the dominating pair, which has the density `e^(s/2)` on [-ε, ε].

        Among choices with losses in [t - ε, t] randomised response with these two losses has the
        largest δ at every a: `(1 - e^(t-ε))·(1 - e^(a-t)) / (1 - e^-ε)`. At the worst t, (a + ε)/2,
        this is `(1 - e^((a-ε)/2))² / (1 - e^-ε)`, which is convex in e^a and so the curve of a pair
        of distributions that dominates all of them; its density follows by deriving it twice.
        Exchanging the neighbours turns t into ε - t: the pair serves both directions.

        Args:
          interval: width of the lattice, above 0.

        Returns:
          By multiple of `interval` the probability of that loss; what lies between two multiples
          goes to both, such that the mass of either distribution is kept.

        Source: Dong, Durfee, Rogers 2020 for the worst case of one choice; Zhu, Dong, Wang 2022,
        proposition 8 and theorem 10, for curves of dominating pairs and their composition;
        Doroshenko and others 2022 for the lattice.
        """
        if self.epsilon == 0:
            return {0: 1.0}
        last = int(np.ceil(self.epsilon / interval))
        left = np.arange(-last, last) * interval
        low, high = np.maximum(left, -self.epsilon), np.minimum(left + interval, self.epsilon)
        middle, width = (low + high) / 2, np.maximum(high - low, 0.0)
        # The integral of e^(s/2) over a cell as a share of the whole, in terms that stay finite.
        whole = -np.expm1(-self.epsilon)
        cell = np.exp((high - self.epsilon) / 2) * -np.expm1(-width / 2) / whole
        upward = np.expm1(left - middle) / np.expm1(-interval)
        masses = np.zeros(2 * last + 1)
        masses[1:] += cell * upward
        masses[:-1] += cell * (1 - upward)
        return dict(zip(range(-last, last + 1), masses.tolist(), strict=True))


@checked
def select(
    key: PRNGKey,
    scores: jax.Array,
    epsilon: Bounds,
    sensitivity: PositiveNumbers,
    *,
    is_offered: jax.Array | None = None,
) -> jax.Array:
    """Chooses an index with probability proportional to `exp(ε·score/(2·sensitivity))`.

    Adds Gumbel noise of scale `2·sensitivity/ε` to the scores and takes the largest.

    Guarantee: ε-DP and ε²/8-zCDP under the relation for which `sensitivity` bounds how far one
    unit moves any score; the caller bounds the scores. Differences of whole scores are exact; the
    logit ε·score/(2·sensitivity) is rounded to float32, which may add about 2e-6 to ε. Charge
    `selection_event`.

    Args:
      key: used for this choice and nothing else.
      scores: `[choices]` floats, larger is better; or integers of one sign, which are subtracted
        without rounding (`summed_scores`). NaN counts as the worst score.
      epsilon: at least 0; may be traced. 0 chooses uniformly, inf takes the best (ties at
        random). A traced value below 0 or nan counts as 0.
      sensitivity: above 0, in units of the scores; may be traced.
      is_offered: `[choices]`, bool, which of them may be chosen; must not depend on the data. All
        if None.

    Returns:
      The index, int32.

    Source: McSherry and Talwar 2007; Durfee and Rogers 2019 (Gumbel noise).
    """
    scores = jnp.asarray(scores)
    if not jnp.issubdtype(scores.dtype, jnp.integer):
        scores = scores.astype(jnp.float32)
        scores = jnp.where(jnp.isnan(scores), -jnp.inf, scores)
        scores = jnp.clip(scores, jnp.finfo(jnp.float32).min / 4, jnp.finfo(jnp.float32).max / 4)
    least = jnp.iinfo if jnp.issubdtype(scores.dtype, jnp.integer) else jnp.finfo
    epsilon = jnp.where(jnp.asarray(epsilon) > 0, epsilon, 0.0)
    if is_offered is None:
        is_offered = jnp.ones(scores.shape, bool)
    best = jnp.max(scores, where=is_offered, initial=least(scores.dtype).min)
    # A choice that is not offered may have a larger score; it must not overflow.
    gap = (jnp.minimum(scores, best) - best).astype(jnp.float32)
    # Multiplying instead of dividing the noise keeps both ends, ε = 0 and ε = inf, defined.
    logits = jnp.where((gap == 0) | (epsilon == 0), 0.0, gap * epsilon / (2 * sensitivity))
    noisy = logits + random_bits.gumbel(key, scores.shape)
    return jnp.argmax(jnp.where(is_offered, noisy, -jnp.inf)).astype(jnp.int32)


@checked
def selection_event(epsilon: NonNegative) -> DpEvent:
    """Builds the event of one private choice.

    The mechanism has range bounded by ε, which costs ε²/8 in zCDP, a quarter of what an ε-DP
    mechanism costs in general. By "pld" it costs about ε²/6, since the worst case of each a is
    taken, and composes with training that only "pld" can analyse.

    Args:
      epsilon: as given to `select`, at least 0.

    Returns:
      The event. It holds for the relation of the scores' sensitivity and is not rescaled.

    Source: Cesar and Rogers 2021; Dong, Durfee, Rogers 2020.
    """
    return BoundedRangeDpEvent(float(epsilon))


@checked
def score_units(limit: Count) -> int:
    """Chooses the number of whole units of the largest score of one example.

    Args:
      limit: the largest number of examples whose scores are summed, at least 1.

    Returns:
      A power of two, at most 2^20; `limit` times it fits into int32.
    """
    return 1 << min(20, int(np.iinfo(np.int32).max // limit).bit_length() - 1)


@checked
def summed_scores(
    scores: jax.Array, is_real: jax.Array, largest: PositiveNumbers, units: Count
) -> jax.Array:
    """Sums scores of examples as integers, each of them clipped separately.

    A float32 sum of n scores is rounded by up to n·2^-24 of the largest score, which with a million
    examples is 6 % of what one of them may change. Integers are added without rounding.

    Guarantee: replacing one example moves the sum by at most `units`, exactly, for any scores.
    Clipping a mean instead would leave it unbounded.

    Args:
      scores: `[..., examples]`; NaN counts as `largest`.
      is_real: bool, of the same shape or one that broadcasts to it; false for padding.
      largest: the largest score that counts, above 0; may be traced.
      units: the value of `largest` in whole units, by `score_units`.

    Returns:
      `[...]`, int32, at least 0.

    Raises:
      ValueError: if `units` is not an integer from 1 to `score_units(examples)`.
    """
    most = score_units(max(1, jnp.shape(scores)[-1]))
    checks.require(units <= most, "units", f"be at most {most}, so that the sum fits int32", units)
    share = jnp.clip(jnp.asarray(scores, jnp.float32) / largest, 0.0, 1.0)
    whole = jnp.round(jnp.where(jnp.isnan(share), 1.0, share) * units).astype(jnp.int32)
    return jnp.sum(jnp.where(is_real, whole, 0), axis=-1)


def _uniform() -> float:
    """Draws a number in (0, 1) from the operating system."""
    return (secrets.randbits(_BITS) + 0.5) / 2**_BITS


class Repetition(NamedTuple):
    """The distribution of the number of trials K, a truncated negative binomial one.

    With the shape η and the parameter γ, P[K = k] for k ≥ 1 is proportional to
    (1 − γ)^k Γ(k + η) / k!; at η = 0 that is the logarithmic, at η = 1 the geometric distribution;
    at η = ∞ it is the Poisson distribution, K = 0 included.
    """

    mean: float
    shape: float  # η.

    def event(self, trial: DpEvent) -> DpEvent:
        """Returns the event of the best of the trials, which Rényi accountants can analyse.

        Guarantee: that of the event for one release, the best trial's output, if K and all other
        trials stay hidden, each trial is drawn anew, independently of K, and its event is `trial`
        whatever its output. Scores may be any function of outputs and of public data.

        Source: Papernot and Steinke 2022, theorems 2 and 6.
        """
        return RepeatAndSelectDpEvent(trial, self.mean, self.shape)

    def draw(self, uniform: Callable[[], float] = _uniform) -> int:
        """Draws K, at least 1 for a finite shape, from a number in (0, 1) of 53 random bits."""
        u = uniform()
        if math.isinf(self.shape):
            return int(stats.poisson.ppf(u, self.mean))
        gamma = self._gamma()
        if gamma >= 1:
            return 1
        if self.shape == 0:
            # Source: Kemp 1981; a geometric number whose parameter is drawn.
            return 1 + int(math.log(uniform()) / math.log1p(-(gamma**u)))
        none = gamma**self.shape
        return int(stats.nbinom.ppf(none + u * (1 - none), self.shape, gamma))

    def _gamma(self) -> float:
        """Finds γ in (0, 1] at which the mean is that of the distribution."""

        def excess(log: float) -> float:
            return _mean(self.shape, log) - self.mean

        if self.mean == 1:
            return 1.0
        return math.exp(optimize.brentq(excess, math.log(1e-12), -1e-12, xtol=1e-15))


def repetition(mean: float, *, shape: float = 1.0) -> Repetition:
    """Builds the distribution of a number of trials; its mean is from 1 to below 10^9.

    A smaller shape η, of at least 0 and ∞ allowed, spreads K more widely and costs less.

    Source: Papernot and Steinke 2022.
    """
    checks.require(1 <= mean < 1e9, "mean", "be at least 1 and below 10^9", mean)
    checks.require(shape >= 0, "shape", "be at least 0", shape)
    return Repetition(float(mean), float(shape))


def _mean(shape: float, log_gamma: float) -> float:
    """Computes the mean of the distribution, at log γ below 0."""
    odds = math.expm1(-log_gamma)
    return odds / -log_gamma if shape == 0 else shape * odds / -math.expm1(shape * log_gamma)
