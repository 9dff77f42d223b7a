"""Draws of noise follow their laws, far into the tails too."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.random import threefry_2x32
from marks import floats, later, telling
from scipy import special, stats

from fedjax_dp.core.backend import traced_for
from fedjax_dp.privacy.mechanisms import mechanism as mechanisms
from fedjax_dp.privacy.mechanisms import noise as sn
from fedjax_dp.privacy.mechanisms import random_bits
from fedjax_dp.privacy.mechanisms.selection import select

pytestmark = floats

NUM = 1_000_000
LAWS = {
    "normal": (random_bits.normal, stats.norm),
    "exponential": (random_bits.exponential, stats.expon),
    "laplace": (random_bits.laplace, stats.laplace),
    "gumbel": (random_bits.gumbel, stats.gumbel_r),
}


@telling
@pytest.mark.parametrize("name", later(LAWS, but=["normal"], mark=telling))
def test_laws_are_accepted_at_the_right_scale_and_rejected_three_percent_off(name):
    draw, law = LAWS[name]
    found = np.asarray(draw(jax.random.key(0), (NUM,)), np.float64)
    assert stats.kstest(found, law.cdf).pvalue > 1e-3
    for wrong in (0.97, 1.03):
        assert stats.kstest(found, law(scale=wrong).cdf).pvalue < 1e-6


def words_of(tails):
    """The two words of each number that hold a sign of 0 and these 62 bits."""
    tails = np.asarray(tails, np.uint64)
    first = (tails >> np.uint64(31)).astype(np.uint32)
    second = ((tails & np.uint64(2**31 - 1)) << np.uint64(1)).astype(np.uint32)
    return jnp.asarray(first), jnp.asarray(second)


HALF = jnp.full(8, 2**31, jnp.uint32)


@pytest.mark.parametrize("tail", [1, 2, 1000, 2**31 - 1, 2**31, 2**40, 2**61, 2**62 - 2**37])
def test_a_normal_number_is_the_quantile_of_its_bits_on_either_side(tail):
    first, second = words_of([tail, tail])
    low, high = np.asarray(
        random_bits.normal_of(first | jnp.array([0, 2**31], jnp.uint32), second, HALF)
    )
    assert high == -low
    assert low == pytest.approx(stats.norm.ppf((tail + 0.5) * 2.0**-63), rel=6e-7, abs=3e-10)


def test_normal_numbers_are_quantiles_to_rounding_wherever_they_lie():
    tails = np.unique(np.exp(np.linspace(0, np.log(2.0**61.9), 200_000)).astype(np.uint64))
    found = np.asarray(random_bits.normal_of(*words_of(tails), HALF), np.float64)
    np.testing.assert_allclose(found, stats.norm.ppf((tails + 0.5) * 2.0**-63), rtol=6e-7)
    assert np.all(np.diff(found) >= -2e-7 * np.abs(found[1:]))


def test_normal_numbers_near_zero_lie_as_close_as_their_bits_allow():
    # A step of 2^-31 in 1 − 2p is one of √(2π)/2 times as much in the quantile.
    steps = np.arange(1000)
    found = np.asarray(
        random_bits.normal_of(*words_of((2**31 - 1 - steps) << 31), HALF), np.float64
    )
    expected = -(steps + 0.5) * 2.0**-31 * np.sqrt(2 * np.pi) / 2
    np.testing.assert_allclose(found, expected, rtol=3e-7)


def tail_beyond(further):
    """The mass that crafted bits of the outermost cell stand for, as its logarithm."""
    whole = sum((int(word) >> 1) << (31 * (8 - k)) for k, word in enumerate(further, 1))
    return math.log(2 * whole + 1) - (31 * 8 + 1 + 63) * math.log(2)


def outermost(further):
    """The largest number, with these bits to follow."""
    return float(
        random_bits.normal_of(jnp.uint32(2**31), jnp.uint32(1), jnp.asarray(further, jnp.uint32))
    )


def test_the_outermost_cell_continues_with_the_conditional_tail():
    rng = np.random.default_rng(0)
    # Random bits behind none to seven words of zeros.
    for zeros in range(8):
        for _ in range(5):
            further = rng.integers(0, 2**32, 8).astype(np.uint32)
            further[:zeros] = 0
            expected = -float(special.ndtri_exp(tail_beyond(further)))
            assert outermost(further) == pytest.approx(expected, rel=1e-6)


@telling
def test_law_in_the_outermost_cell_is_that_of_the_normal_tail():
    further = np.random.default_rng(1).integers(0, 2**32, (50_000, 8)).astype(np.uint32)
    ends = jax.vmap(random_bits.normal_of, (None, None, 0))(
        jnp.uint32(2**31), jnp.uint32(0), further
    )
    # Given the cell, the mass beyond a number is uniform over that of the cell.
    shares = np.exp(stats.norm.logsf(np.asarray(ends, np.float64)) + 63 * np.log(2))
    assert stats.kstest(shares, stats.uniform.cdf).pvalue > 1e-3
    for wrong in (0.97, 1.03):
        assert stats.kstest(shares, stats.uniform(scale=wrong).cdf).pvalue < 1e-6


def test_body_and_tail_meet_without_a_gap_and_the_tail_is_monotone():
    last, second_last = words_of([1]), words_of([2])
    body = [
        -float(random_bits.normal_of(*(w[0] for w in words), HALF)) for words in (second_last, last)
    ]
    nearest = outermost(np.full(8, 2**32 - 1, np.uint32))
    # The cell begins where half the width of the cell before it ends.
    assert body[0] < body[1] < nearest
    assert nearest == pytest.approx(-stats.norm.ppf(2.0**-63), rel=1e-6)
    steps = [0] * 8
    ends = []
    for place in range(7, -1, -1):
        for value in (2, 2**16, 2**32 - 2):
            steps[place] = value
            ends.append(outermost(np.array(steps, np.uint32)))
    assert ends == sorted(ends, reverse=True)


def test_normal_numbers_reach_so_far_that_no_run_is_long_enough_to_see_it():
    farthest = outermost(np.zeros(8, np.uint32))
    # The last cell holds 2^-311 of each side's mass; its number stands in its middle.
    assert farthest == pytest.approx(-special.ndtri_exp(-312 * np.log(2)), rel=1e-6)
    assert farthest > 20.5
    # What docs/privacy/proofs.md adds up for 10,000 releases of 10^9 numbers.
    releases, size = 10_000, 10**9
    beyond = releases * size * 2.0 ** -(311 - 1)
    twice = releases * size**2 * 2.0**-125
    assert (1 + math.exp(12)) * (beyond + twice) < 1e-10


def test_the_mass_beyond_all_draws_of_a_long_run_is_negligible(monkeypatch):
    monkeypatch.setattr(
        random_bits, "_threefry", lambda key, counts, *_: (jnp.zeros_like(counts),) * 2
    )
    farthest = abs(float(random_bits.normal(jax.random.key(0), (2,))[0]))
    beyond = 2 * np.exp(special.log_ndtr(-farthest))
    assert 10_000 * 1e9 * beyond * (1 + math.exp(12)) < 1e-10


@telling
def test_a_draw_is_the_same_in_and_out_of_jit_vmap_and_loops():
    key, shape = jax.random.key(5), (33, 7)
    expected = np.asarray(jax.jit(random_bits.normal, static_argnums=1)(key, shape))
    np.testing.assert_allclose(random_bits.normal(key, shape), expected, rtol=3e-7, atol=1e-9)
    keys = jnp.stack([key, jax.random.key(6)])
    together = jax.jit(jax.vmap(lambda k: random_bits.normal(k, shape)))(keys)
    np.testing.assert_allclose(together[0], expected, rtol=3e-7, atol=1e-9)
    looped = jax.lax.map(lambda k: random_bits.normal(k, shape), keys)
    np.testing.assert_allclose(looped, together, rtol=3e-7, atol=1e-9)


def test_the_outermost_cell_is_reached_with_any_key(monkeypatch):
    # Only the words of the numbers themselves are zero; those that follow are drawn.
    drawn = random_bits.blocks
    monkeypatch.setattr(
        random_bits,
        "blocks",
        lambda key, shape: (
            (jnp.zeros(shape, jnp.uint32),) * 2 if shape == (3,) else drawn(key, shape)
        ),
    )
    ends = {float(random_bits.normal(jax.random.key(i), (3,))[0]) for i in range(4)}
    assert len(ends) == 4 and max(ends) < stats.norm.ppf(2.0**-63) * (1 - 1e-6)


@pytest.mark.parametrize("size", [2, 40, 1000, 40_960])
@pytest.mark.parametrize("seed", [0, 1, 2**32 - 1])
def test_words_are_those_of_the_threefry_cipher(size, seed):
    key = jax.random.fold_in(jax.random.key(seed), 5)
    counts = jnp.concatenate([jnp.arange(size), jnp.zeros(size, int)]).astype(jnp.uint32)
    expected = threefry_2x32(jax.random.key_data(key), counts)
    np.testing.assert_array_equal(jnp.concatenate(random_bits.blocks(key, (size,))), expected)


@telling
def test_draws_for_many_arrays_have_their_shapes_and_nothing_is_drawn_twice():
    # Two large enough to be drawn on their own, of the same shape, and some that share a draw.
    shapes = [(3, 4), (), (301, 501), (0, 2), (5,), (301, 501), (2048, 100)]
    leaves = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    parts = jax.jit(lambda key: random_bits.like(key, leaves, random_bits.normal))(
        jax.random.key(1)
    )
    assert [part.shape for part in parts] == shapes
    row = np.concatenate([np.asarray(part).reshape(-1) for part in parts])
    assert stats.kstest(row, stats.norm.cdf).pvalue > 1e-3
    assert abs(np.corrcoef(parts[2].reshape(-1), parts[5].reshape(-1))[0, 1]) < 0.01
    assert random_bits.like(jax.random.key(1), [], random_bits.normal) == []


@pytest.mark.parametrize(("kind", "stored"), [("cpu", 0), ("gpu", 2)])
def test_a_large_draw_is_stored_by_itself_on_a_gpu(kind, stored):
    """Its compiler would transpose each coefficient of each number to the layout of a kernel."""
    leaves = [jax.ShapeDtypeStruct((3, 3, 256, 512), jnp.float32)] * 2
    with traced_for(kind):
        text = str(
            jax.make_jaxpr(lambda key: random_bits.like(key, leaves, random_bits.normal))(
                jax.random.key(1)
            )
        )
    found = re.findall(rf"f32\[{3 * 3 * 256 * 512}\] = optimization_barrier", text)
    assert len(found) == stored


@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 4), (0, 5)])
def test_bits_have_their_shape_and_depend_on_the_key(shape):
    first, second = (jnp.stack(random_bits.blocks(jax.random.key(i), shape)) for i in (0, 1))
    assert first.shape == (2, *shape) and first.dtype == jnp.uint32
    assert not first.size or np.any(np.asarray(first) != np.asarray(second))
    together = jax.vmap(lambda k: random_bits.blocks(k, shape)[0])(
        jax.random.split(jax.random.key(0), 2)
    )
    assert together.shape == (2, *shape)


@pytest.mark.parametrize("impl", ["rbg", "unsafe_rbg"])
@pytest.mark.parametrize(
    "made",
    [
        mechanisms.gaussian(1.0, 1.0),
        mechanisms.laplace(1.0, 1.0),
        mechanisms.staircase(1.0, 1.0, num_entries=3),
        mechanisms.bounded_laplace(1.0, 1.0, num_entries=3, entry_delta=1e-5),
    ],
    ids=["gaussian", "laplace", "staircase", "bounded_laplace"],
)
def test_noise_refuses_keys_without_a_stated_quality(made, impl):
    with pytest.raises(ValueError, match=f"key must be of threefry2x32 .*{impl}"):
        jax.eval_shape(made.add_noise, jax.random.key(0, impl=impl), jnp.zeros(3))
    legacy = jax.random.PRNGKey(0)
    assert jax.eval_shape(made.add_noise, legacy, jnp.zeros(3)).shape == (3,)


def blocks_of(high, low, further=0):
    """Crafted words; a draw of one block alone is what is drawn further."""
    return lambda key, shape: tuple(
        jnp.broadcast_to(jnp.asarray(word, jnp.uint32), shape)
        for word in ((high, low) if shape else (further, further))
    )


@pytest.mark.parametrize(
    ("high", "low", "further", "expected"),
    [
        (0, 0, 0, 97 * np.log(2)),
        (0, 0, 2**32 - 1, 64 * np.log(2)),
        (0, 1, 0, -np.log(1.5) + 64 * np.log(2)),
        (0, 2**32 - 1, 0, 32 * np.log(2)),
        (1, 0, 0, 32 * np.log(2)),
        (2**31, 0, 0, np.log(2)),
        (2**32 - 1, 2**32 - 1, 0, 2.0**-97),
        (2**32 - 1, 2**32 - 2, 0, 1.5 * 2.0**-64),
        (2**32 - 1, 0, 0, 2.0**-32),
    ],
)
def test_an_exponential_number_is_exact_at_both_ends(monkeypatch, high, low, further, expected):
    monkeypatch.setattr(random_bits, "blocks", blocks_of(high, low, further))
    found = random_bits.exponential(jax.random.key(0), (1,))
    assert float(found[0]) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(("epsilon", "dp_delta"), [(1.0, 1e-10), (0.1, 1e-15), (5.0, 1e-12)])
def test_bounded_laplace_noise_reaches_the_end_of_its_range(monkeypatch, epsilon, dp_delta):
    # Where it ended earlier the delta of what runs would not be the one that is accounted.
    monkeypatch.setattr(random_bits, "blocks", blocks_of(0, 0))
    monkeypatch.setattr(jax.random, "rademacher", lambda key, shape, dtype: jnp.ones(shape, dtype))
    noised = sn.add_bounded_laplace(jax.random.key(0), jnp.zeros(1), epsilon, dp_delta, 1.0)[0]
    expected = np.log1p(np.expm1(epsilon) / (2 * dp_delta)) / epsilon
    assert float(noised) == pytest.approx(expected, rel=1e-5)


def test_a_choice_may_fall_on_what_is_twenty_scales_behind(monkeypatch):
    # Ends at 16 scales, as those of a numeric library have them, would rule it out for good.
    monkeypatch.setattr(random_bits, "blocks", blocks_of([0, 2**32 - 1], [0, 2**32 - 1]))
    scores = jnp.array([0.0, -10.0])
    assert int(select(jax.random.key(0), scores, 4.0, 1.0)) == 1
