"""Continuous noise: Gaussian and Laplace on trees, correlated over rounds, or by entry."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import attr
import dp_accounting as dpa
import jax
import jax.numpy as jnp
import numpy as np
from chex import PRNGKey

from fedjax_dp.core import checks, keys, sums, trees
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.packages import needed_for
from fedjax_dp.core.ranges import Count, HalfFraction, PositiveNumbers, ProperFraction
from fedjax_dp.core.trees import PyTree, library_promotion
from fedjax_dp.privacy.events import CurveDpEvent, DpEvent
from fedjax_dp.privacy.mechanisms import random_bits
from fedjax_dp.privacy.sensitivities import Scalar

# The smallest ε of one entry that staircase noise is drawn for, which bounds its number of steps;
# the largest, beyond which noise is too rare and too small to be seen in a sum; and by how much
# rounding may change the ratio of two steps' probabilities.
SMALLEST_STAIRCASE_EPSILON, LARGEST_STAIRCASE_EPSILON = 2.0**-16, 16.0
_RATIO_ERROR = 2.0**-18
# Binary digits of a number of steps, and the most of the width of a step.
_NUM_DIGITS, _STEP_BITS = 23, 12
# Positions on a step are known to this share of its width.
_POSITION_ERROR = 2.0**-20
# Of rounds times bands of correlated noise: as many floats are held while coefficients are
# optimised, 4 GB.
_MOST_TERMS = 2**30


def _check_scale(argument: str, value: Scalar) -> None:
    if isinstance(value, int | float | np.number | np.ndarray):
        checks.non_negative(argument, value)


def release(value: jax.Array, scale: Scalar, draw: jax.Array) -> jax.Array:
    """Adds scaled noise; zeros, never NaN, if a traced scale is negative or not finite."""
    scale = jnp.asarray(scale, value.dtype)
    is_valid = jnp.isfinite(scale) & (scale >= 0)
    return jnp.where(is_valid, value + scale * draw, 0)


def _add(key: PRNGKey, tree: PyTree, scale: Scalar, sampler: Callable[..., jax.Array]) -> PyTree:
    leaves, treedef = jax.tree.flatten(tree)
    wide = [trees.at_least_float32(jnp.asarray(leaf)) for leaf in leaves]
    for leaf in wide:
        is_float = jnp.issubdtype(leaf.dtype, jnp.floating)
        checks.require(is_float, "tree", "hold floats only", leaf.dtype.name)
    pairs = zip(wide, random_bits.like(key, wide, sampler), strict=True)
    noised = [release(leaf, scale, draw.astype(leaf.dtype)) for leaf, draw in pairs]
    return jax.tree.unflatten(treedef, noised)


@checked
def add_gaussian(key: PRNGKey, tree: PyTree, stddev: Scalar) -> PyTree:
    """Adds independent Gaussian noise to every entry of a tree.

    Small leaves share a draw and large ones have one each (`random_bits.like`), in float32 or
    better.

    Guarantee: none by itself; it follows from the sensitivity from which `stddev` was computed
    (`sensitivities.noise_stddev`). Draws reach 20.6 standard deviations but leave gaps between
    their possible values; see `discrete` for noise without gaps.

    Args:
      key: used for this addition and nothing else.
      tree: a tree of float arrays.
      stddev: standard deviation per entry, in units of the parameters, at least 0; may be
        traced. A traced value that is negative or not finite releases zeros.

    Returns:
      The noised tree, its leaves float32 or better.
    """
    _check_scale("stddev", stddev)
    return _add(key, tree, stddev, random_bits.normal)


@checked
def add_laplace(key: PRNGKey, tree: PyTree, scale: Scalar) -> PyTree:
    """Adds independent Laplace noise to every entry of a tree.

    The density is `exp(−|x|/scale) / (2·scale)`, with standard deviation `√2·scale`; the scale
    is a multiple of the L1 sensitivity, not of the L2 one.

    Args:
      key: used for this addition and nothing else.
      tree: a tree of float arrays.
      scale: in units of the parameters, at least 0; may be traced. A traced value that is
        negative or not finite releases zeros.

    Returns:
      The noised tree, its leaves float32 or better.
    """
    _check_scale("scale", scale)
    return _add(key, tree, scale, random_bits.laplace)


@attr.s(frozen=True, slots=True, auto_attribs=True)
class PureDpEvent(CurveDpEvent):
    """Any mechanism that is ε-DP, with nothing else known about it.

    Attributes:
      epsilon: ε of one run, under the relation of the ledger that it is charged to.
    """

    epsilon: float

    def rdp(self, orders: np.ndarray, relation: str) -> np.ndarray:
        """Computes the largest divergence that ε-DP allows, that of randomised response.

        Args:
          orders: `[orders]`, above 1.
          relation: not read; ε is stated for it.

        Returns:
          `[orders]`.

        Source: Bun and Steinke 2016, proposition 3.3 and its proof.
        """
        del relation
        epsilon = self.epsilon
        top = np.logaddexp(orders * epsilon, (1 - orders) * epsilon)
        return (top - np.logaddexp(0, epsilon)) / (orders - 1)


@attr.s(frozen=True, slots=True, auto_attribs=True)
class EntrywiseDpEvent(CurveDpEvent):
    """Noise on every entry of a vector separately, with a bound on each entry.

    Attributes:
      noise_multiplier: the bound on an entry over ε of that entry, measured in contributions: one
        entry costs ε = 1/`noise_multiplier` under add/remove, and twice that under replace-one.
      num_entries: the number of entries that one unit contributes to.
    """

    noise_multiplier: float
    num_entries: int

    def rdp(self, orders: np.ndarray, relation: str) -> np.ndarray:
        """Computes the curve of pure DP with the ε of all entries together."""
        if self.noise_multiplier == 0:
            return np.full(np.shape(orders), np.inf)
        steps = 2 if relation == "replace_one" else 1
        return PureDpEvent(steps * self.num_entries / self.noise_multiplier).rdp(orders, relation)

    @property
    def entry_stddev(self) -> float:
        """The standard deviation of the noise over the bound on an entry."""
        is_noised = self.noise_multiplier > 0
        return float(self._stddev(1 / self.noise_multiplier)) if is_noised else 0.0

    def _stddev(self, epsilon: float) -> jax.Array:
        raise NotImplementedError


@attr.s(frozen=True, slots=True, auto_attribs=True)
class StaircaseDpEvent(EntrywiseDpEvent):
    """Staircase noise on every number of a vector."""

    def _stddev(self, epsilon: float) -> jax.Array:
        return staircase_stddev(epsilon)


@attr.s(frozen=True, slots=True, auto_attribs=True)
class BoundedLaplaceDpEvent(EntrywiseDpEvent):
    """Bounded Laplace noise on every number of a vector.

    Attributes:
      entry_delta: δ of one entry under add/remove, in (0, 1/2); replace-one costs as much as two
        units in a row.
    """

    entry_delta: float

    def slack(self, relation: str) -> float:
        """Computes the δ of all entries together.

        Args:
          relation: "add_remove", "zero_out" or "replace_one".

        Returns:
          A number of at least 0.
        """
        if self.noise_multiplier == 0:
            return 1.0
        steps = 1.0
        if relation == "replace_one":
            steps += float(np.exp(min(1 / self.noise_multiplier, 700.0)))
        return self.num_entries * self.entry_delta * steps

    def _stddev(self, epsilon: float) -> jax.Array:
        return bounded_laplace_stddev(epsilon, self.entry_delta)


def _noised(
    key: PRNGKey, tree: PyTree, noised: Callable[[PRNGKey, jax.Array], jax.Array]
) -> PyTree:
    """Adds noise to each leaf in float32 or better, by a key of the leaf."""
    leaves, treedef = jax.tree.flatten(tree)
    leaves = [trees.at_least_float32(jnp.asarray(leaf)) for leaf in leaves]
    each = [noised(keys.fold(key, index), leaf) for index, leaf in enumerate(leaves)]
    return jax.tree.unflatten(treedef, each)


@checked
def add_staircase(
    key: PRNGKey,
    tree: PyTree,
    epsilon: PositiveNumbers,
    sensitivity: PositiveNumbers,
    *,
    flatness: ProperFraction | None = None,
) -> PyTree:
    """Adds staircase noise to every number of a tree.

    Guarantee: each number by itself is ε-DP if `sensitivity` bounds how far one unit moves it,
    roundings of the sum included: `mechanisms.staircase` sums on a lattice, where nothing is
    rounded. The density drops in steps, so that even a tiny move may cost all of ε: a vector of d
    numbers costs d·ε, whatever its norm. Charge `PureDpEvent(epsilon)` d times.

    The noise is drawn for ε − 2^-18 and a step that is up to 2^-11 wider than the sensitivity, so
    that neither the probabilities of steps nor their edges, as floats, exceed the claim. Edges are
    exact multiples of the step: the digits of many steps are added one after another, with the
    rounding error of each addition.

    Args:
      key: used for this addition and nothing else.
      tree: a tree of float arrays.
      epsilon: from 2^-16 to 16; may be traced. A traced value outside releases zeros.
      sensitivity: Δ, above 0, in units of the numbers; may be traced.
      flatness: γ in (0, 1), the part of each step that lies on its higher level;
        `1/(1 + e^(ε/2))`, which has the smallest mean absolute error, if None.

    Returns:
      The noised tree, float32 or better.

    Source: Geng, Kairouz, Oh, Viswanath 2015, algorithm 1.
    """
    if not checks.is_traced(epsilon):
        can_all_be_drawn = bool(np.all(_can_be_drawn(np.asarray(epsilon))))
        rule = "be from 2^-16 to 16 for staircase noise"
        checks.require(can_all_be_drawn, "epsilon", rule, epsilon)
    epsilon = jnp.asarray(epsilon, jnp.float32)
    can_be_drawn = _can_be_drawn(epsilon)
    epsilon = jnp.where(can_be_drawn, epsilon, 1.0) - _RATIO_ERROR
    gamma = 1 / (1 + jnp.exp(epsilon / 2)) if flatness is None else flatness
    # Of a step's higher level over its lower one: ln(γ/(1 − γ)) + ε.
    log_odds = epsilon / 2 if flatness is None else math.log(flatness / (1 - flatness)) + epsilon
    width = _few_bits(sensitivity)

    def noised(key: PRNGKey, x: jax.Array) -> jax.Array:
        sign = jax.random.rademacher(keys.fold(key, 0), x.shape, x.dtype)
        step = _geometric(keys.fold(key, 1), x.shape, epsilon)
        within = jax.random.uniform(keys.fold(key, 2), x.shape, x.dtype)
        is_rare = _is_rare(keys.fold(key, 3), x.shape, jnp.abs(log_odds))
        is_low = jnp.where(log_odds >= 0, is_rare, ~is_rare)
        position = jnp.where(is_low, gamma + (1 - gamma) * within, gamma * within)
        total = sums.Sum(x, jnp.zeros_like(x))
        # Products of few bits by few bits are exact.
        for digits in (step >> _STEP_BITS << _STEP_BITS, step & ((1 << _STEP_BITS) - 1)):
            total = sums.add(total, sign * digits.astype(x.dtype) * width.astype(x.dtype))
        moved = total.high + (total.low + sign * position * width.astype(x.dtype))
        return jnp.where(can_be_drawn, moved, 0)

    return _noised(key, tree, noised)


def _can_be_drawn(epsilon: Any) -> Any:
    return (epsilon >= SMALLEST_STAIRCASE_EPSILON) & (epsilon <= LARGEST_STAIRCASE_EPSILON)


def _few_bits(sensitivity: Scalar) -> jax.Array:
    """Rounds a width up to a number of few digits, whose multiples are floats."""
    wide = jnp.asarray(sensitivity, jnp.float32) * np.float32(1 + _POSITION_ERROR)
    digits, exponent = jnp.frexp(wide)
    return jnp.ldexp(jnp.ceil(digits * 2.0**_STEP_BITS) * 2.0**-_STEP_BITS, exponent)


def _geometric(key: PRNGKey, shape: tuple[int, ...], epsilon: jax.Array) -> jax.Array:
    """Draws numbers k of probability proportional to `e^(−kε)`, int32, digit by digit.

    Binary digits are independent, digit j being 1 with odds `e^(−2^j·ε)`. Rounded odds change the
    ratio of two probabilities by little; a rounded exponential over ε would by much of a small ε.
    """

    def with_digit(digit: jax.Array, number: jax.Array) -> jax.Array:
        log_odds = jnp.ldexp(epsilon, digit)
        is_one = _is_rare(jax.random.fold_in(key, digit), shape, log_odds)
        return number + (is_one.astype(jnp.int32) << digit)

    return jax.lax.fori_loop(0, _NUM_DIGITS, with_digit, jnp.zeros(shape, jnp.int32))


def _is_rare(key: PRNGKey, shape: tuple[int, ...], log_odds: jax.Array) -> jax.Array:
    """Draws booleans that are true with odds `e^(−log_odds)`, exact to 3e-7 of themselves.

    A fair coin decides, except for a share of `tanh(log_odds/2)` of the draws, which are true.
    """
    coin_key, share_key = jax.random.split(key)
    coin = jax.random.bernoulli(coin_key, 0.5, shape)
    kept, lost = random_bits.complements(share_key, shape)
    most_kept, most_lost = _shares(log_odds)
    # Whichever share is small is compared, and so exact.
    return coin & jnp.where(log_odds > 1, kept < most_kept, lost >= most_lost)


def _shares(log_odds: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Computes `1 − tanh(log_odds/2)` and `tanh(log_odds/2)`, each exact relative to itself."""
    return 2 / (1 + jnp.exp(log_odds)), jnp.tanh(log_odds / 2)


def staircase_stddev(epsilon: Scalar) -> jax.Array:
    """Computes the deviation of staircase noise of the default flatness, in sensitivities.

    Source: moments of the sampler of Geng, Kairouz, Oh, Viswanath 2015, algorithm 1.
    """
    epsilon = jnp.asarray(epsilon, jnp.float32)
    # The width of the higher level is also the share of draws that lie on the lower one.
    shrink, gamma = jnp.exp(-epsilon), jax.nn.sigmoid(-epsilon / 2)
    left, rest = -jnp.expm1(-epsilon), 1 - gamma
    step, step_squared = shrink / left, shrink * (1 + shrink) / left**2
    within = rest * gamma / 2 + gamma * (gamma + rest / 2)
    squared = rest * gamma**2 / 3 + gamma * (gamma**2 + gamma * rest + rest**2 / 3)
    return jnp.sqrt(step_squared + 2 * step * within + squared)


@checked
def add_bounded_laplace(
    key: PRNGKey,
    tree: PyTree,
    epsilon: PositiveNumbers,
    dp_delta: HalfFraction,
    sensitivity: PositiveNumbers,
) -> PyTree:
    """Adds Laplace noise that is cut off at a fixed distance to every number of a tree.

    Guarantee: each number by itself is (ε, δ)-DP if `sensitivity` bounds how far one unit moves it;
    a vector costs the composition of its numbers, see `BoundedLaplaceDpEvent`.

    Args:
      key: used for this addition and nothing else.
      tree: a tree of float arrays.
      epsilon: above 0; may be traced.
      dp_delta: δ in (0, 1/2).
      sensitivity: Δ, above 0, in units of the numbers; may be traced.

    Returns:
      The noised tree, float32 or better; nothing moves by more than `bounded_laplace_range`.

    Source: Geng, Ding, Guo, Kumar 2020, definition 2 and theorem 1.
    """
    largest = bounded_laplace_range(epsilon, dp_delta, sensitivity)
    scale = sensitivity / jnp.asarray(epsilon, jnp.float32)
    cut, inside = jnp.exp(-largest / scale), -jnp.expm1(-largest / scale)

    def noised(key: PRNGKey, x: jax.Array) -> jax.Array:
        sign = jax.random.rademacher(keys.fold(key, 0), x.shape, x.dtype)
        small, rest = random_bits.complements(keys.fold(key, 1), x.shape)
        # What is left of the density at the distance, between its value at the end and 1.
        far, near = -jnp.log(cut + small * inside), -jnp.log1p(-rest * inside)
        distance = scale * jnp.where(small < 0.5, far, near)
        return x + sign * jnp.minimum(distance, largest).astype(x.dtype)

    return _noised(key, tree, noised)


def bounded_laplace_range(epsilon: Scalar, dp_delta: float, sensitivity: Scalar) -> jax.Array:
    """Computes the largest noise that may be added, `Δ/ε·ln(1 + (e^ε − 1)/(2δ))`."""
    epsilon = jnp.asarray(epsilon, jnp.float32)
    # Beyond ε = 30 the ones are lost in float32, and e^ε would soon be infinite.
    near = jnp.log1p(jnp.expm1(jnp.minimum(epsilon, 30)) / (2 * dp_delta))
    far = epsilon - math.log(2 * dp_delta)
    scale = jnp.asarray(sensitivity, jnp.float32) / epsilon
    return scale * jnp.where(epsilon > 30, far, near)


def bounded_laplace_stddev(epsilon: Scalar, dp_delta: float) -> jax.Array:
    """Computes the deviation of bounded Laplace noise, in sensitivities."""
    epsilon = jnp.asarray(epsilon, jnp.float32)
    reach = bounded_laplace_range(epsilon, dp_delta, 1.0) * epsilon
    lost = jnp.exp(-reach)
    squared = (2 - lost * (reach**2 + 2 * reach + 2)) / (1 - lost)
    return jnp.sqrt(squared) / epsilon


class BandedNoise(NamedTuple):
    """A run's correlated noise: the release is `C⁻¹(C x + z)` for a banded Toeplitz C.

    Rounds add up in the model, so that noise which partly cancels that of earlier rounds hurts less
    than independent noise of the same privacy.

    Attributes:
      coefficients: `[bands]` first column of C, float32; Euclidean norm 1.
      sensitivity: how far one unit of contribution 1 moves C x over the whole run.
      num_rounds: the number of rounds that it was built for.
    """

    coefficients: np.ndarray
    sensitivity: float
    num_rounds: int

    def init(self, tree: PyTree) -> PyTree:
        """Builds the state before the first round.

        Args:
          tree: the tree to be noised.

        Returns:
          The last noises, `[bands - 1, ...]` at every leaf, float32. It must be kept with the
          run: without it, later noise is not private.
        """
        rows = len(self.coefficients) - 1
        return jax.tree.map(lambda x: jnp.zeros((rows, *jnp.shape(x)), jnp.float32), tree)

    def add_noise(
        self, key: PRNGKey, state: PyTree, total: PyTree, stddev: jax.typing.ArrayLike
    ) -> tuple[PyTree, PyTree]:
        """Adds one round's noise to the sum of one round's clipped contributions.

        Args:
          key: used for this round and nothing else.
          state: from `init` or the round before.
          total: a tree of float arrays.
          stddev: `noise_multiplier · sensitivity · clip norm` of this round, by which a
            participation in it is charged; may be traced. A traced value that is negative or not
            finite releases zeros.

        Returns:
          `(state, noised)`, the noised tree float32 or better.

        Source: Choquette-Choo and others 2023, algorithm 9 (row by row solution of C z̃ = z).
        """
        leaves, treedef = jax.tree.flatten(total)
        past = jax.tree.leaves(state)
        first, *rest = [float(c) for c in self.coefficients]
        kept, noised = [], []
        parts = zip(leaves, past, random_bits.like(key, leaves, random_bits.normal), strict=True)
        for leaf, buffer, draw in parts:
            known = sum((c * buffer[i] for i, c in enumerate(rest)), start=jnp.float32(0))
            new = (draw - known) / first
            kept.append(jnp.concatenate([new[None], buffer[:-1]]) if rest else buffer)
            wide = trees.at_least_float32(jnp.asarray(leaf))
            noised.append(release(wide, stddev, new))
        return jax.tree.unflatten(treedef, kept), jax.tree.unflatten(treedef, noised)

    def event(self, noise_multiplier: float) -> DpEvent:
        """Builds the event of the whole run, which is one Gaussian release of C x.

        Guarantee: charged once, before the first round, it covers every prefix of the run. Adding
        or removing a unit means that its contributions are zero while all others take part as
        before.

        Args:
          noise_multiplier: as in `add_noise`, at least 0.

        Returns:
          The event.
        """
        checks.non_negative("noise_multiplier", noise_multiplier)
        return dpa.GaussianDpEvent(float(noise_multiplier))


@checked
def banded_noise(
    num_rounds: Count,
    bands: Count,
    *,
    min_separation: Count,
    max_participations: Count | None = None,
) -> BandedNoise:
    """Finds the best banded noise for a participation pattern.

    Guarantee: holds if two participations of a unit are at least `min_separation` rounds apart
    and there are at most `max_participations` of them; cyclic cohorts of a population always meet
    this. More than `num_rounds` rounds need new noise and another charge.

    Args:
      num_rounds: rounds of the run, at least 1.
      bands: the number of correlated rounds, from 1 (independent noise) to `min_separation`;
        the state holds `bands - 1` copies of the model.
      min_separation: rounds from one participation of a unit to its next, at least 1.
      max_participations: at least 1; as many as fit into the run if None.

    Returns:
      The noise.

    Source: Choquette-Choo and others 2023, theorem 2 (sensitivity) and section 4 (bands).
    """
    rule = f"be at most min_separation, {min_separation}"
    checks.require(bands <= min_separation, "bands", rule, bands)
    most = max(1, _MOST_TERMS // num_rounds)
    rule = f"be at most {most} in a run of {num_rounds} rounds, which are optimised together"
    checks.require(min(bands, num_rounds) <= most, "bands", rule, bands)
    fitting = math.ceil(num_rounds / min_separation)
    if max_participations is not None:
        fitting = min(fitting, max_participations)
    coefficients = best_coefficients(num_rounds, min(bands, num_rounds))
    # Rounded to float32 before the sensitivity is taken, which then is that of the noise that runs.
    coefficients = coefficients.astype(np.float32)
    norm = float(np.linalg.norm(coefficients.astype(float)))
    return BandedNoise(coefficients, math.sqrt(fitting) * norm, num_rounds)


def best_coefficients(num_rounds: int, bands: int) -> np.ndarray:
    """Finds the banded Toeplitz strategy of least error at fixed privacy, of norm 1."""
    if bands == 1:
        return np.ones(1)
    # Importing it takes a third of a second, which runs without correlated noise need not pay.
    with needed_for("correlated noise over several rounds", "correlated"):
        from jax_privacy.matrix_factorization import toeplitz

    with library_promotion():
        found = np.asarray(toeplitz.optimize_banded_toeplitz(num_rounds, bands), float)
    return found / np.linalg.norm(found)
