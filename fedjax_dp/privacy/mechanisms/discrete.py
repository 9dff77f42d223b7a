"""Integer noise without floating point: discrete Gaussian and Skellam."""

import decimal
import functools
import math
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from chex import PRNGKey

from fedjax_dp.core import checks, keys

# Weights are fixed-point integers of this many bits; thresholds keep 127 of them: what a draw of #
# four 32-bit words has besides its sign.
_BITS = 192
_WORDS = 4
_DRAWN_BITS = 32 * _WORDS - 1
# Weights below this share of the largest are dropped.
_SMALLEST_WEIGHT = 1 << (_BITS - 142)
MAX_STDDEV = 2.0**15


class IntegerLaw(NamedTuple):
    """A symmetric law on the integers, as a table that a compiled draw searches.

    Its total variation distance from the named law is below 2^-105 per draw. Drawing is all integer
    arithmetic: the result shows no rounding of floats.
    """

    # `[4, magnitudes]` uint32: words of the cumulative probabilities of magnitudes 0, 1, ..., most
    # significant first.
    thresholds: np.ndarray | jax.Array
    stddev: float


def _fixed_exp(exponent: decimal.Decimal) -> int:
    with decimal.localcontext() as context:
        context.prec = 80
        return int(exponent.exp() * (1 << _BITS))


def _law(weights: Iterator[int]) -> IntegerLaw:
    """Builds the table from weights of 0, 1, 2, ... on each side, the first being the largest."""
    one_sided = list(weights)
    masses = [one_sided[0], *(2 * w for w in one_sided[1:])]
    total = sum(masses)
    below, words = 0, []
    for mass in masses:
        below += mass
        threshold = min((below << _DRAWN_BITS) // total, (1 << _DRAWN_BITS) - 1)
        words.append(_split(threshold))
    # Tables of power-of-two size are searched in whole steps, and compiled for few sizes.
    size = 1 << max(len(words) - 1, 1).bit_length()
    words += [_split((1 << _DRAWN_BITS) - 1)] * (size - len(words))
    k = np.arange(len(masses), dtype=float)
    shares = np.array([mass / total for mass in masses])
    thresholds = np.array(words, np.uint32).T.copy()
    thresholds.flags.writeable = False
    return IntegerLaw(thresholds, float(np.sqrt(np.sum(shares * k * k))))


def _split(threshold: int) -> tuple[int, ...]:
    """Writes a threshold as words, most significant first; the last has a bit less."""
    shifts = [*range(_DRAWN_BITS - 32, 0, -32)]
    return *((threshold >> s) & 0xFFFFFFFF for s in shifts), threshold & 0x7FFFFFFF


@functools.lru_cache(maxsize=128)
def discrete_gaussian(sigma: float) -> IntegerLaw:
    """Builds the discrete Gaussian, `P(k) ∝ exp(−k²/(2σ²))`, for σ in [0, 2^15]; 0 is no noise.

    Guarantee: added to integers with L2 sensitivity Δ it is Δ²/(2σ²)-zCDP, as continuous noise is.

    Source: Canonne, Kamath, Steinke 2020, definition 1 and theorem 14. Their rejection sampler has
    no table; this one draws from the same law in constant time on any accelerator.
    """
    check_scale("sigma", sigma)

    def weights() -> Iterator[int]:
        weight = 1 << _BITS
        yield weight
        if sigma == 0:
            return
        precision = 1 / decimal.Decimal(float(sigma)) ** 2
        ratio, factor = _fixed_exp(-precision / 2), _fixed_exp(-precision)
        while True:
            weight = (weight * ratio) >> _BITS
            ratio = (ratio * factor) >> _BITS
            if weight < _SMALLEST_WEIGHT:
                return
            yield weight

    with decimal.localcontext() as context:
        context.prec = 80
        return _law(weights())


@functools.lru_cache(maxsize=128)
def skellam(variance: float) -> IntegerLaw:
    """Builds the difference of two Poisson variables, `P(k) ∝ I_k(variance)`, variance up to 2^30.

    Sums of Skellam variables are Skellam, so that shares of many parties add up without loss.

    Source: Agarwal, Kairouz, Liu 2021, definition 3.1.
    """
    checks.require(0 <= variance <= MAX_STDDEV**2, "variance", "be in [0, 2^30]", variance)
    if variance == 0:
        return discrete_gaussian(0.0)
    numerator, denominator = float(variance).as_integer_ratio()
    # Miller's recurrence runs down, where it is stable; its starting values do not matter.
    start = math.ceil(15 * math.sqrt(variance)) + 200
    after, here = 0, 1 << _BITS
    values = []
    for k in range(start, 0, -1):
        after, here = here, after + 2 * k * here * denominator // numerator
        values.append(here)
        if here.bit_length() > 4 * _BITS:
            shift = here.bit_length() - 2 * _BITS
            after, here = after >> shift, here >> shift
            values = [v >> shift for v in values]
    scale = values[-1]
    weights = [(v << _BITS) // scale for v in reversed(values)]
    return _law(iter([w for w in weights if w >= _SMALLEST_WEIGHT]))


def check_scale(argument: str, value: float) -> None:
    """Requires a scale from 0 to 2^15; others have no table."""
    checks.non_negative(argument, value)
    rule = "be at most 2^15; make the lattice coarser"
    checks.require(value <= MAX_STDDEV, argument, rule, value)


def draw(key: PRNGKey, shape: tuple[int, ...], law: IntegerLaw) -> jax.Array:
    """Draws independent integers, int32; laws with tables of one size share a program."""
    keys.require_stated(key)
    words = jax.random.bits(key, (_WORDS, *shape), jnp.uint32)
    magnitude = magnitude_of(words, law)
    return jnp.where(words[-1] & 1, -magnitude, magnitude)


def magnitude_of(words: jax.Array, law: IntegerLaw) -> jax.Array:
    """Looks up the magnitudes of random words, `[4, ...]`; the last bit is not read."""
    *rows, last_row = jnp.asarray(law.thresholds, jnp.uint32)
    *drawn, last = words
    last = last >> 1

    def reached(at: jax.Array) -> jax.Array:
        is_reached = last >= last_row[at]
        for word, row in zip(reversed(drawn), reversed(rows), strict=True):
            bound = row[at]
            is_reached = (word > bound) | ((word == bound) & is_reached)
        return is_reached

    magnitude = jnp.zeros(words.shape[1:], jnp.int32)
    step = last_row.shape[0] // 2
    while step:
        ahead = magnitude + step
        magnitude = jnp.where(reached(ahead - 1), ahead, magnitude)
        step //= 2
    return magnitude
