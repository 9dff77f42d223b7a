"""The exponential mechanism chooses as it states, and costs what it states."""

from functools import partial

import dp_accounting as dpa
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dp_accounting import pld as dpa_pld
from marks import telling
from scipy import special, stats

from fedjax_dp.privacy.accounting.ledger import Ledger, UnsupportedEvent
from fedjax_dp.privacy.accounting.renyi import orders_of, rdp_curves
from fedjax_dp.privacy.mechanisms import selection

KEYS = jax.random.split(jax.random.key(3), 40_000)


def frequencies(scores, epsilon, sensitivity):
    choose = jax.jit(jax.vmap(selection.select, (0, None, None, None)))
    picks = np.asarray(choose(KEYS, jnp.asarray(scores), epsilon, sensitivity))
    return np.bincount(picks, minlength=len(scores))


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 4.0])
def test_choices_follow_the_softmax_of_the_scores(epsilon):
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
    # R-DPCFL at ε = 5: 2·(100/6599)/(0.03·5) = 0.2020. The odds of two choices that lie one
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
    stated = rdp_curves([ledger.events(0).events[0].event], "replace_one")
    stated = np.interp(orders, orders_of("rdp"), stated[0])
    assert np.all(worst <= stated)
    assert np.any(worst > 0.75 * stated)


def hockey_stick(masses, interval, a):
    """δ at each a of a pair of distributions, from the first one's losses."""
    loss = np.array(list(masses)) * interval
    p = np.array(list(masses.values()))
    return np.array([np.sum(np.maximum(0, p * -np.expm1(x - loss))) for x in np.atleast_1d(a)])


@telling
@pytest.mark.parametrize("epsilon", [0.00317, 0.15, 1.0, 3.0, 40.0])
def test_losses_are_those_of_two_distributions_that_dominate_randomised_responses(epsilon):
    interval = 1e-4
    masses = selection.BoundedRangeDpEvent(epsilon).loss_masses(interval)
    loss, p = np.array(list(masses)) * interval, np.array(list(masses.values()))
    assert p.min() >= 0
    assert np.sum(p) == pytest.approx(1, abs=1e-10)
    assert np.sum(p * np.exp(-loss)) == pytest.approx(1, abs=1e-10)
    # Two answers with losses t and t - ε are what bounded range allows at worst; t = (a + ε)/2.
    t = np.linspace(0, epsilon, 41)[1:-1]
    yes = np.expm1(t - epsilon) / np.expm1(-epsilon)
    worst = 0.0
    for a in np.linspace(-0.95, 0.95, 39) * epsilon:
        exact = yes * np.maximum(0, -np.expm1(a - t))
        exact = exact + (1 - yes) * np.maximum(0, -np.expm1(a - t + epsilon))
        [stated] = hockey_stick(masses, interval, a)
        assert np.all(exact <= stated * (1 + 1e-9))
        worst = max(worst, exact.max() / stated)
    assert worst > 0.99


def test_losses_dominate_choices_between_neighbouring_scores():
    rng, epsilon, interval = np.random.default_rng(1), 1.0, 1e-3
    masses = selection.BoundedRangeDpEvent(epsilon).loss_masses(interval)
    at = np.linspace(-0.8, 0.8, 9) * epsilon
    stated, worst = hockey_stick(masses, interval, at), np.zeros(len(at))
    for _ in range(3000):
        size = rng.integers(2, 5)
        scores = rng.normal(size=size) * rng.choice([0.1, 1.0, 5.0])
        moved = scores + rng.choice([-1.0, 1.0], size=size)
        p, q = (np.exp(special.log_softmax(epsilon * s / 2)) for s in (scores, moved))
        true = np.sum(np.maximum(0, p - np.exp(at)[:, None] * q), axis=1)
        worst = np.maximum(worst, true)
    assert np.all(worst <= stated * (1 + 1e-9))
    assert np.all(worst > 0.9 * stated)


@pytest.mark.parametrize("count", [1, 2, 8])
def test_successive_choices_cost_no_more_than_the_ledger_charges(count):
    """The adversary picks the worst randomised response after every answer: dynamic programming."""
    epsilon, steps = 0.3, 30
    grid = np.arange(-2 * count * steps, 2 * count * steps + 1)
    a = grid * epsilon / steps
    t = np.arange(1, steps)
    yes = np.expm1(t * epsilon / steps - epsilon) / np.expm1(-epsilon)
    # δ that is left at each a, where outside of the table it is 0 and 1 - e^a.
    left = np.maximum(0, -np.expm1(a))
    for _ in range(count):

        def after(shift, left=left):
            moved = grid - shift
            inside = np.interp(moved, grid, left)
            outside = np.maximum(0, -np.expm1(moved * epsilon / steps))
            return np.where(np.abs(moved) <= grid[-1], inside, outside)

        left = np.max(
            [y * after(s) + (1 - y) * after(s - steps) for s, y in zip(t, yes, strict=True)], axis=0
        )
    ledger = Ledger("record", "replace_one")
    ledger.charge(selection.selection_event(epsilon), count=count)
    for at in (0.2, 0.4, 0.6, 0.8):
        [index] = np.flatnonzero(np.isclose(a, at * count * epsilon))
        stated = ledger.delta(a[index], "pld")[0]
        assert left[index] <= stated * (1 + 1e-9)
        if count == 1:
            assert left[index] == pytest.approx(stated, rel=1e-6)
    pure = Ledger("record", "replace_one")
    pure.charge(dpa.RandomizedResponseDpEvent(2 / (1 + np.exp(epsilon)), 2), count=count)
    assert ledger.epsilon(1e-4, "pld")[0] < count * epsilon
    assert ledger.epsilon(1e-4, "pld")[0] < pure.epsilon(1e-4)[0]


@telling
def test_choices_compose_with_training_by_distributions():
    """Against dp-accounting alone: above training without choices, below choices as ε-DP."""
    training = dpa.PoissonSampledDpEvent(0.05, dpa.GaussianDpEvent(1.0))
    epsilon, count = 0.15, 20
    relation = dpa.NeighboringRelation.REPLACE_ONE
    account = dpa_pld.PLDAccountant(relation).compose(training, 300)
    alone = account.get_epsilon(1e-5)
    parameters = dpa_pld.common.DifferentialPrivacyParameters(epsilon)
    pure = dpa_pld.privacy_loss_distribution.from_privacy_parameters(parameters)
    trained = dpa_pld.privacy_loss_distribution.from_gaussian_mechanism(
        1.0, sampling_prob=0.05, neighboring_relation=relation
    )
    composed = trained.self_compose(300).compose(pure.self_compose(count))
    ledger = Ledger("record", "replace_one")
    ledger.charge(training, count=300)
    # Two lattices of different widths agree to what either may add.
    np.testing.assert_allclose(ledger.epsilon(1e-5, "pld"), [alone], rtol=1e-3)
    ledger.charge(selection.selection_event(epsilon), count=count)
    [found] = ledger.epsilon(1e-5, "pld")
    assert alone + 1e-3 < found < composed.get_epsilon_for_delta(1e-5) - 1e-3
    with pytest.raises(UnsupportedEvent, match="accountant 'pld'"):
        ledger.epsilon(1e-5, "rdp")
    again = Ledger.from_json(ledger.to_json())
    assert again.epsilon(1e-5, "pld") == found


def test_summed_scores_clip_each_example():
    scores = jnp.asarray([0.5, 9.0, jnp.nan, jnp.inf, -1.0, 100.0])
    is_real = jnp.asarray([True, True, True, True, True, False])
    got = selection.summed_scores(scores, is_real, 2.0, 1024)
    assert got.dtype == jnp.int32 and int(got) == 256 + 3 * 1024
    assert int(selection.summed_scores(scores, jnp.zeros(6, bool), 2.0, 1024)) == 0


@pytest.mark.parametrize("limit", [1, 3, 2**20, 2**31 - 1])
def test_sums_of_whole_scores_fit_into_their_integers(limit):
    units = selection.score_units(limit)
    assert 1 <= units <= 2**20 and units * limit < 2**31
    assert units == 2**20 or 2 * units * limit >= 2**31 - 2 * limit


def test_a_choice_among_whole_numbers_sees_what_float32_would_lose():
    """Two totals that are equal in float32, at a budget at which they differ."""
    scores = jnp.int32([2**30, 2**30 + 40, -5])
    offered = jnp.array([True, True, False])
    select = partial(selection.select, is_offered=offered)
    chosen = jax.jit(jax.vmap(lambda key: select(key, scores, 2.0, 40.0)))(
        jax.random.split(jax.random.key(0), 4000)
    )
    counts = np.bincount(np.asarray(chosen), minlength=3)
    assert counts[2] == 0
    chance = 1 / (1 + np.exp(-1))
    assert abs(counts[1] / 4000 - chance) < 5 * np.sqrt(chance * (1 - chance) / 4000)
