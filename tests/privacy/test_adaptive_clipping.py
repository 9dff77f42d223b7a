"""Adaptive clipping finds its quantile, and its count is noised and paid for."""

import dp_accounting as dpa
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import floats, later, telling
from scipy import stats

from fedjax_dp.privacy.accounting.ledger import Ledger
from fedjax_dp.privacy.mechanisms import clipping as ac

pytestmark = floats


def test_the_clip_norm_grows_when_too_many_are_clipped_and_shrinks_when_too_few_are():
    # Known failure elsewhere: the rule inverted.
    rule = ac.make_adaptive_clipping(100.0, target_quantile=0.5, count_stddev=1e-6)
    all_clipped, none_clipped = (
        sum(rule.contribution(jnp.float32(norm), 1.0) for _ in range(100)) for norm in (5.0, 0.1)
    )
    key = jax.random.key(0)
    grown, unclipped = rule.step(key, 1.0, all_clipped)
    np.testing.assert_allclose([grown, unclipped], [np.exp(0.2 * 0.5), 0.0], atol=1e-6)
    shrunk, unclipped = rule.step(key, 1.0, none_clipped)
    np.testing.assert_allclose([shrunk, unclipped], [np.exp(-0.2 * 0.5), 1.0], atol=1e-6)


@pytest.mark.parametrize("start", [1e-3, 50.0])
@pytest.mark.parametrize("quantile", later([0.2, 0.5, 0.9], but=[0.2]))
def test_the_clip_norm_settles_at_the_quantile_from_either_side(start, quantile):
    norms = np.random.default_rng(0).lognormal(size=1000).astype(np.float32)
    rule = ac.make_adaptive_clipping(1000.0, initial_clip_norm=start, target_quantile=quantile)

    @jax.jit
    def step(clip_norm, key):
        total = jnp.sum(jax.vmap(rule.contribution, (0, None))(norms, clip_norm))
        return rule.step(key, clip_norm, total)

    clip_norms = []
    clip_norm = jnp.float32(rule.initial_clip_norm)
    for i in range(400):
        clip_norm, _ = step(clip_norm, jax.random.key(i))
        clip_norms.append(float(clip_norm))
    settled = np.mean(clip_norms[-50:])
    assert stats.percentileofscore(norms, settled) / 100 == pytest.approx(quantile, abs=0.02)


def test_no_input_moves_the_count_by_more_than_a_half():
    rule = ac.make_adaptive_clipping(10.0)
    for norm in (0.0, 0.5, 1e30, np.inf, np.nan):
        got = rule.contribution(jnp.float32(norm), 1.0)
        assert abs(float(got)) == 0.5 and got.dtype == jnp.float32
    assert rule.contribution(jnp.float32(np.inf), 1.0) == -0.5


@telling
def test_the_count_is_noised_with_the_stated_deviation():
    rule = ac.make_adaptive_clipping(50.0, count_stddev=3.0)
    keys = jax.random.split(jax.random.key(0), 400_000)
    _, shares = jax.jit(jax.vmap(lambda k: rule.step(k, 1.0, jnp.float32(0))))(keys)
    noise = (np.asarray(shares) - 0.5) * 50
    assert stats.kstest(noise, stats.norm(scale=3.0).cdf).pvalue > 1e-3
    assert stats.kstest(noise, stats.norm(scale=3.1).cdf).pvalue < 1e-3


def test_updates_and_count_together_cost_what_the_round_is_charged():
    z, count_stddev = 1.2, 5.0
    update = ac.update_noise_multiplier(z, count_stddev)
    assert update > z
    both, one = Ledger(), Ledger()
    # The count has contributions of 1/2, so its multiplier is σ_b / (1/2).
    releases = [dpa.GaussianDpEvent(update), dpa.GaussianDpEvent(2 * count_stddev)]
    both.charge(dpa.PoissonSampledDpEvent(0.1, dpa.ComposedDpEvent(releases)), count=100)
    one.charge(dpa.PoissonSampledDpEvent(0.1, dpa.GaussianDpEvent(z)), count=100)
    np.testing.assert_allclose(both.epsilon(1e-5), one.epsilon(1e-5), rtol=1e-9)


def test_an_empty_round_still_takes_a_noised_step():
    rule = ac.make_adaptive_clipping(20.0)
    step = jax.jit(lambda key: rule.step(key, 1.0, jnp.float32(0))[0])
    steps = {float(step(jax.random.key(i))) for i in range(5)}
    assert len(steps) == 5 and np.all(np.isfinite(list(steps)))


def test_a_runaway_clip_norm_is_held():
    rule = ac.make_adaptive_clipping(1.0, learning_rate=1e4, count_stddev=1e-6)
    for total in (-1e6, 1e6):
        clip_norm, _ = rule.step(jax.random.key(0), 1.0, jnp.float32(total))
        assert np.isfinite(clip_norm) and clip_norm > 0


def test_a_count_that_costs_more_than_the_round_is_refused():
    with pytest.raises(ValueError, match="count_stddev must exceed 5"):
        ac.update_noise_multiplier(10.0, 4.0)
