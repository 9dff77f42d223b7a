"""Draws of noise follow their laws, far into the tails too."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.random import threefry_2x32
from scipy import stats

from fedjax_dp.privacy import draws
from fedjax_dp.privacy import scalar_noise as sn
from fedjax_dp.privacy.selection import select

NUM = 1_000_000
LAWS = {
    "normal": (draws.normal, stats.norm),
    "exponential": (draws.exponential, stats.expon),
    "laplace": (draws.laplace, stats.laplace),
    "gumbel": (draws.gumbel, stats.gumbel_r),
}


@pytest.mark.parametrize("name", LAWS)
def test_laws_are_accepted_at_the_right_scale_and_rejected_three_percent_off(name):
    draw, law = LAWS[name]
    found = np.asarray(draw(jax.random.key(0), (NUM,)), np.float64)
    assert stats.kstest(found, law.cdf).pvalue > 1e-3
    for wrong in (0.97, 1.03):
        assert stats.kstest(found, law(scale=wrong).cdf).pvalue < 1e-6


@pytest.mark.parametrize("tail", [0, 1, 2, 1000, 2**20, 2**30, 2**31 - 1])
def test_a_normal_number_is_the_quantile_of_its_bits_on_either_side(tail):
    bits = jnp.array([tail, tail + 2**31], jnp.uint32)
    low, high = np.asarray(draws.normal_of(bits), np.float64)
    assert high == -low
    assert low == pytest.approx(stats.norm.ppf((tail + 0.5) * 2.0**-32), rel=2e-6, abs=3e-7)


def test_normal_numbers_are_quantiles_to_rounding_wherever_they_lie():
    tails = np.unique(np.exp(np.linspace(0, np.log(2.0**31), 200_000)).astype(np.int64)) - 1
    found = np.asarray(draws.normal_of(jnp.asarray(tails, jnp.uint32)), np.float64)
    # The tail is rounded to float32 before its quantile is taken.
    tail = ((tails.astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-32)).astype(np.float64)
    np.testing.assert_allclose(found, stats.norm.ppf(tail), rtol=6e-7, atol=6e-8)
    assert np.all(np.diff(found) >= 0)


@pytest.mark.parametrize("size", [2, 40, 1000, 40_960])
@pytest.mark.parametrize("seed", [0, 1, 2**32 - 1])
def test_words_are_those_of_the_threefry_cipher(size, seed):
    key = jax.random.fold_in(jax.random.key(seed), 5)
    counts = jnp.arange(size, dtype=jnp.uint32)
    expected = threefry_2x32(jax.random.key_data(key), counts)
    np.testing.assert_array_equal(draws.bits(key, (size,)), expected)
    # The last block of an odd number of words gives one.
    np.testing.assert_array_equal(draws.bits(key, (size - 1,))[: size // 2], expected[: size // 2])


def test_draws_for_many_arrays_have_their_shapes_and_nothing_is_drawn_twice():
    # Two large enough to be drawn on their own, of the same shape, and some that share a draw.
    shapes = [(3, 4), (), (301, 501), (0, 2), (5,), (301, 501), (2048, 100)]
    leaves = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    parts = draws.like(jax.random.key(1), leaves, draws.normal)
    assert [part.shape for part in parts] == shapes
    row = np.concatenate([np.asarray(part).reshape(-1) for part in parts])
    assert stats.kstest(row, stats.norm.cdf).pvalue > 1e-3
    assert abs(np.corrcoef(parts[2].reshape(-1), parts[5].reshape(-1))[0, 1]) < 0.01
    assert draws.like(jax.random.key(1), [], draws.normal) == []


@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 4), (0, 5)])
@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_bits_have_their_shape_and_depend_on_the_key(shape, impl):
    first, second = (draws.bits(jax.random.key(i, impl=impl), shape) for i in (0, 1))
    assert first.shape == shape and first.dtype == jnp.uint32
    assert not first.size or np.any(np.asarray(first) != np.asarray(second))
    together = jax.vmap(lambda k: draws.bits(k, shape))(jax.random.split(jax.random.key(0), 2))
    assert together.shape == (2, *shape)


def test_bits_are_balanced_and_no_word_repeats_more_than_by_chance():
    words = np.asarray(draws.bits(jax.random.key(3), (NUM,)))
    for place in range(32):
        ones = int(((words >> place) & 1).sum())
        assert abs(ones - NUM / 2) < 5 * np.sqrt(NUM) / 2
    # Birthdays: 116 pairs are expected among a million words of 32 bits.
    assert NUM - len(np.unique(words)) == pytest.approx(116, abs=55)
    halves = words.reshape(2, -1) / 2.0**32
    assert abs(np.corrcoef(halves)[0, 1]) < 5 / np.sqrt(NUM / 2)


def test_a_normal_number_reaches_beyond_six_deviations():
    assert draws.normal_of(jnp.uint32(0)) < -6.3 and draws.normal_of(jnp.uint32(2**31)) > 6.3


def bits_of(high, low):
    return lambda key, shape: jnp.array([high, low], jnp.uint32).reshape(shape)


@pytest.mark.parametrize(
    ("high", "low", "expected"),
    [
        (0, 0, -np.log(0.5) + 64 * np.log(2)),
        (0, 2**32 - 1, 32 * np.log(2)),
        (1, 0, 32 * np.log(2)),
        (2**31, 0, np.log(2)),
        (2**32 - 1, 2**32 - 1, 2.0**-65),
        (2**32 - 1, 0, 2.0**-32),
    ],
)
def test_an_exponential_number_is_exact_at_both_ends(monkeypatch, high, low, expected):
    monkeypatch.setattr(draws, "bits", bits_of(high, low))
    assert float(draws.exponential(None, ())) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(("epsilon", "dp_delta"), [(1.0, 1e-10), (0.1, 1e-15), (5.0, 1e-12)])
def test_bounded_laplace_noise_reaches_the_end_of_its_range(monkeypatch, epsilon, dp_delta):
    # Where it ended earlier the delta of what runs would not be the one that is accounted.
    monkeypatch.setattr(draws, "bits", bits_of(0, 0))
    monkeypatch.setattr(jax.random, "rademacher", lambda key, shape, dtype: jnp.ones(shape, dtype))
    noised = sn.add_bounded_laplace(jax.random.key(0), jnp.float32(0), epsilon, dp_delta, 1.0)
    expected = np.log1p(np.expm1(epsilon) / (2 * dp_delta)) / epsilon
    assert float(noised) == pytest.approx(expected, rel=1e-5)


def test_a_choice_may_fall_on_what_is_twenty_scales_behind(monkeypatch):
    # Ends at 16 scales, as those of a numeric library have them, would rule it out for good.
    noise = jnp.array([[0, 2**32 - 1], [0, 2**32 - 1]], jnp.uint32)
    monkeypatch.setattr(draws, "bits", lambda key, shape: noise)
    scores = jnp.array([0.0, -10.0])
    assert int(select(None, scores, 4.0, 1.0)) == 1
