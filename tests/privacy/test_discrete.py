"""Integer noise has the law that it names, to far more digits than floats have."""

import math
import random
from fractions import Fraction

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import floats, later, telling
from scipy import special, stats

from fedjax_dp.privacy.mechanisms import discrete

pytestmark = floats

NUM_DRAWS = 1_000_000
DRAW = jax.jit(discrete.draw, static_argnums=1)


def thresholds(law):
    """Cumulative probabilities of the magnitudes, as exact fractions."""
    words = np.asarray(law.thresholds).astype(object)
    return [(int(a) << 95) + (int(b) << 63) + (int(c) << 31) + int(d) for a, b, c, d in words.T]


def test_table_agrees_with_sums_in_high_precision():
    """Magnitudes of the discrete Gaussian against sums in high precision."""
    from decimal import Decimal, localcontext

    with localcontext() as context:
        context.prec = 60
        sigma = Decimal.from_float(7.3)
        weights = [(-Decimal(k * k) / (2 * sigma * sigma)).exp() for k in range(200)]
        total = weights[0] + 2 * sum(weights[1:])
        below = Decimal(0)
        cumulative = []
        for k, w in enumerate(weights):
            below += w if k == 0 else 2 * w
            cumulative.append(below / total)
        got = thresholds(discrete.discrete_gaussian(7.3))
        for k in range(60):
            error = abs(Decimal(got[k]) / Decimal(2**127) - cumulative[k])
            assert error < Decimal(2) ** -124


@telling
def test_search_reads_all_127_bits():
    law = discrete.discrete_gaussian(7.3)
    exact = thresholds(law)[:60]

    def found(numbers):
        words = [
            [n >> 95, (n >> 63) & 0xFFFFFFFF, (n >> 31) & 0xFFFFFFFF, (n & 0x7FFFFFFF) << 1]
            for n in numbers
        ]
        return np.asarray(discrete.magnitude_of(jnp.asarray(np.array(words, np.uint32).T), law))

    np.testing.assert_array_equal(found(exact), np.arange(1, 61))
    np.testing.assert_array_equal(found([n - 1 for n in exact]), np.arange(60))
    np.testing.assert_array_equal(found([0]), [0])


@pytest.mark.parametrize("law", [discrete.discrete_gaussian, lambda s: discrete.skellam(s**2)])
def test_no_long_run_sees_what_a_table_leaves_out(law):
    """Thresholds err by the last of 127 bits each; what follows the last magnitude is as small."""
    table = thresholds(law(300.0))
    magnitudes = len(set(table))
    last = sorted(set(table))[-2]
    assert 2**127 - last < 2**127 * 2.0**-120
    # 10,000 releases of 10^9 numbers, from the widest table: 2^22 magnitudes.
    assert magnitudes < 2**16 and 1e13 * 2**22 * 2.0**-127 * (1 + math.exp(12)) < 1e-10


LAWS = {
    "gaussian": lambda s: (discrete.discrete_gaussian(s), lambda k: np.exp(-(k**2) / (2 * s * s))),
    "skellam": lambda s: (discrete.skellam(s * s), lambda k: special.ive(np.abs(k), s * s)),
}


def chisquare(draws, weight, reach):
    """p-value against a law, magnitudes beyond `reach` put together on each side."""
    support = np.arange(-reach, reach + 1)
    clipped = np.clip(draws, -reach, reach)
    far = np.arange(reach, reach + 60 * reach + 200)
    mass = weight(support.astype(float))
    mass[[0, -1]] = weight(far.astype(float)).sum()
    observed = np.bincount(clipped + reach, minlength=support.size)
    keep = mass / mass.sum() * len(draws) > 5
    expected = mass[keep] / mass[keep].sum() * observed[keep].sum()
    return stats.chisquare(observed[keep], expected).pvalue


@pytest.mark.parametrize("scale", later([0.4, 1.0, 12.7], but=[1.0], mark=telling))
@pytest.mark.parametrize("name", LAWS)
def test_law_accepts_the_right_scale_and_rejects_three_percent_off(name, scale):
    law, weight = LAWS[name](scale)
    draws = np.asarray(DRAW(jax.random.key(1), (NUM_DRAWS,), law))
    assert draws.dtype == np.int32
    reach = math.ceil(4 * scale) + 2
    assert chisquare(draws, weight, reach) > 1e-3
    for wrong in (0.97, 1.03):
        assert chisquare(draws, LAWS[name](wrong * scale)[1], reach) < 1e-6
    np.testing.assert_allclose(draws.std(), law.stddev, rtol=0.01)


@telling
def test_wide_law_passes_kolmogorov_smirnov_and_rejects_three_percent_off():
    law = discrete.discrete_gaussian(3000.0)
    draws = np.asarray(DRAW(jax.random.key(2), (NUM_DRAWS,), law), np.float64)
    # Spread over the unit cells, a wide discrete Gaussian is a continuous one.
    draws += np.random.default_rng(0).uniform(-0.5, 0.5, NUM_DRAWS)
    assert stats.kstest(draws, stats.norm(scale=3000).cdf).pvalue > 1e-3
    for wrong in (0.97, 1.03):
        assert stats.kstest(draws, stats.norm(scale=3000 * wrong).cdf).pvalue < 1e-6


def bernoulli_exp(gamma, rng):
    if gamma > 1:
        for _ in range(int(gamma)):
            if not bernoulli_exp(Fraction(1), rng):
                return False
        return bernoulli_exp(gamma - int(gamma), rng)
    k = 1
    while True:
        chance = gamma / k
        if rng.randrange(chance.denominator) >= chance.numerator:
            return k % 2 == 1
        k += 1


def canonne_kamath_steinke(sigma, rng):
    """The exact rejection sampler of Canonne, Kamath, Steinke 2020, algorithms 1 to 3."""
    t = math.floor(sigma) + 1
    while True:
        u = rng.randrange(t)
        if not bernoulli_exp(Fraction(u, t), rng):
            continue
        v = 0
        while bernoulli_exp(Fraction(1), rng):
            v += 1
        x, is_negative = u + t * v, rng.randrange(2)
        if is_negative and x == 0:
            continue
        gap = abs(x) - sigma * sigma / t
        if bernoulli_exp(gap * gap / (2 * sigma * sigma), rng):
            return -x if is_negative else x


@telling
@pytest.mark.parametrize("sigma", later([Fraction(3, 2), Fraction(5)], but=[Fraction(3, 2)]))
def test_draws_agree_with_the_exact_rejection_sampler(sigma):
    rng = random.Random(0)
    exact = np.array([canonne_kamath_steinke(sigma, rng) for _ in range(20_000)])
    law = discrete.discrete_gaussian(float(sigma))
    ours = np.asarray(DRAW(jax.random.key(3), (200_000,), law))
    reach = math.ceil(3 * sigma)
    table = [np.bincount(np.clip(x, -reach, reach) + reach) for x in (exact, ours)]
    assert stats.chi2_contingency(np.array(table)).pvalue > 1e-3


@telling
def test_shares_of_skellam_noise_add_up():
    share = discrete.skellam(2.5)
    keys = jax.random.split(jax.random.key(4), 8)
    total = sum(np.asarray(DRAW(k, (200_000,), share)) for k in keys)
    weight = lambda k: special.ive(np.abs(k), 20.0)  # noqa: E731
    assert chisquare(total, weight, 18) > 1e-3


def test_no_noise_is_no_noise():
    for law in (discrete.discrete_gaussian(0.0), discrete.skellam(0.0)):
        assert not np.any(DRAW(jax.random.key(0), (1000,), law))


@telling
def test_another_scale_does_not_recompile():
    @jax.jit
    @chex.assert_max_traces(n=1)
    def run(key, law):
        return discrete.draw(key, (10,), law)

    for sigma in (20.0, 20.5):
        law = discrete.discrete_gaussian(sigma)
        run(jax.random.key(0), law._replace(thresholds=jnp.asarray(law.thresholds)))


def test_laws_without_a_table_are_refused():
    with pytest.raises(ValueError, match="sigma must be at most 2\\^15"):
        discrete.discrete_gaussian(2.0**16)
    with pytest.raises(ValueError, match="variance must be in"):
        discrete.skellam(-1.0)
