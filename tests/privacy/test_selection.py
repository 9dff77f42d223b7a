"""The exponential mechanism chooses as it states, and costs what it states."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special, stats

from fedjax_dp.privacy import selection
from fedjax_dp.privacy.accounting import Ledger

KEYS = jax.random.split(jax.random.key(3), 40_000)


def frequencies(scores, epsilon, sensitivity):
    choose = jax.jit(jax.vmap(selection.select, (0, None, None, None)))
    picks = np.asarray(choose(KEYS, jnp.asarray(scores), epsilon, sensitivity))
    return np.bincount(picks, minlength=len(scores))


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 4.0])
def test_choices_follow_the_softmax_of_the_scores(epsilon):
    # clustered_dp.md §11 (5).
    scores, sensitivity = np.array([0.2, 0.9, 0.55, 0.7]), 0.25
    expected = len(KEYS) * special.softmax(epsilon * scores / (2 * sensitivity))
    observed = frequencies(scores, epsilon, sensitivity)
    assert stats.chisquare(observed, expected).pvalue > 1e-3
    for wrong in (0.5, 2.0):
        off = len(KEYS) * special.softmax(wrong * epsilon * scores / (2 * sensitivity))
        assert epsilon < 1 or stats.chisquare(observed, off).pvalue < 1e-6


def test_no_budget_chooses_uniformly_and_an_infinite_one_takes_the_best():
    scores = np.array([0.2, 0.9, 0.55, 0.9])
    for epsilon in (0.0, -1.0, np.nan):
        observed = frequencies(scores, jnp.float32(epsilon), 0.1)
        assert stats.chisquare(observed).pvalue > 1e-3
    observed = frequencies(scores, jnp.inf, 0.1)
    assert observed[0] == observed[2] == 0
    assert stats.chisquare(observed[[1, 3]]).pvalue > 1e-3


def test_a_score_that_is_no_number_is_never_preferred():
    observed = frequencies(np.array([np.nan, 0.1, -np.inf]), 1.0, 0.1)
    np.testing.assert_array_equal(observed, [0, len(KEYS), 0])
    observed = frequencies(np.array([np.nan, np.nan]), 1.0, 0.1)
    assert stats.chisquare(observed).pvalue > 1e-3


def test_scale_of_the_noise_in_percent_of_accuracy():
    # clustered_dp.md §11 (2): 2·(100/6599)/(0.03·5) = 0.2020. The odds of two choices that lie one
    # scale apart are e.
    scale = 2 * (100 / 6599) / (0.03 * 5)
    assert scale == pytest.approx(0.2020, abs=1e-4)
    observed = frequencies(np.array([50.0, 50.0 + scale]), 0.03 * 5, 100 / 6599)
    expected = len(KEYS) * np.array([1, np.e]) / (1 + np.e)
    assert stats.chisquare(observed, expected).pvalue > 1e-3


@pytest.mark.parametrize("epsilon", [0.2, 1.0, 3.0])
def test_the_stated_cost_bounds_the_true_divergence(epsilon):
    # Over many neighbouring scores the Rényi divergence of the choice stays below α ε²/8, and a
    # quarter less would not.
    rng = np.random.default_rng(0)
    orders = np.array([1.5, 2.0, 8.0, 32.0])
    worst = np.zeros(len(orders))
    for _ in range(3000):
        size = rng.integers(2, 5)
        scores = rng.normal(size=size) * rng.choice([0.1, 1.0, 5.0])
        moved = scores + rng.choice([-1.0, 1.0], size=size)
        p, q = (special.log_softmax(epsilon * s / 2) for s in (scores, moved))
        divergence = special.logsumexp(orders[:, None] * p + (1 - orders[:, None]) * q, axis=1)
        worst = np.maximum(worst, divergence / (orders - 1))
    ledger = Ledger("record", "replace_one")
    ledger.charge(selection.selection_event(epsilon))
    stated = orders * ledger.events(0).events[0].event.rho
    assert np.all(worst <= stated)
    assert np.any(worst > 0.75 * stated)


def test_loss_scores_clip_each_example():
    losses = jnp.asarray([0.5, 9.0, jnp.nan, jnp.inf, -1.0, 100.0])
    is_real = jnp.asarray([True, True, True, True, True, False])
    got = selection.loss_score(losses, is_real, 2.0)
    assert float(got) == pytest.approx(-(0.5 + 2 + 2 + 2 + 0) / 5)
    assert float(selection.loss_score(losses, jnp.zeros(6, bool), 2.0)) == 0


def test_replacing_one_example_moves_the_score_by_no_more_than_stated():
    rng = np.random.default_rng(0)
    losses, bound, n = rng.exponential(size=30), 1.5, 30
    real = jnp.ones(n, bool)
    base = float(selection.loss_score(jnp.asarray(losses), real, bound))
    for value in (0.0, 1e9, np.nan):
        changed = losses.copy()
        changed[7] = value
        moved = abs(float(selection.loss_score(jnp.asarray(changed), real, bound)) - base)
        assert moved <= bound / n * (1 + 1e-5)


@pytest.mark.parametrize("epsilon", [-1.0, np.inf])
def test_bad_budgets_are_refused(epsilon):
    with pytest.raises(ValueError, match="epsilon must be at least 0"):
        selection.selection_event(epsilon)
