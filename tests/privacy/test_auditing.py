"""Lower bounds on ε against closed forms, published values, and mechanisms of known privacy."""

import math
from fractions import Fraction

import dp_accounting
import numpy as np
import pytest
from marks import later, telling
from scipy import stats

from fedjax_dp.privacy.reports import auditing

REPETITIONS = 200
CONFIDENCE = 0.95
# A share of wrong bounds that is compatible with 5 % in so many repetitions.
MOST_WRONG = stats.binom.ppf(0.99, REPETITIONS, 1 - CONFIDENCE)


def randomized_response(rng, epsilon, size):
    """Bits of members and of others, each reported truthfully with probability e^ε / (1 + e^ε)."""
    truth = math.exp(epsilon) / (1 + math.exp(epsilon))
    return (rng.uniform(size=size) < truth) * 1.0, (rng.uniform(size=size) > truth) * 1.0


@pytest.mark.parametrize(("errors", "trials"), [(0, 10), (3, 50), (9, 10), (700, 2000)])
def test_the_upper_limit_of_a_rate_inverts_the_binomial_tail(errors, trials):
    for significance in (0.05, 1e-3):
        bound = auditing.rate_upper_bound(errors, trials, significance)
        assert stats.binom.cdf(errors, trials, bound) == pytest.approx(significance, rel=1e-9)
        test = stats.binomtest(errors, trials, alternative="less")
        interval = test.proportion_ci(1 - significance)
        assert bound == pytest.approx(interval.high, rel=1e-9)


def test_nothing_is_known_of_a_rate_that_always_failed_or_was_never_tried():
    np.testing.assert_array_equal(auditing.rate_upper_bound([5, 0], [5, 0], 0.05), 1.0)


def test_error_rates_of_randomized_response_give_its_epsilon():
    for epsilon in (0.1, 1.0, 5.0):
        rate = 1 / (1 + math.exp(epsilon))
        assert auditing.epsilon_of_rates(rate, rate, 0.0) == pytest.approx(epsilon, rel=1e-12)


@pytest.mark.parametrize(("fpr", "fnr"), [(0.01, 0.6), (0.6, 0.01), (0.3, 0.3), (0.5, 0.6)])
def test_rates_lie_on_the_boundary_of_the_region_of_their_epsilon(fpr, fnr):
    # Kairouz and others: FPR + e^ε FNR ≥ 1 − δ and FNR + e^ε FPR ≥ 1 − δ.
    dp_delta = 0.02
    epsilon = float(auditing.epsilon_of_rates(fpr, fnr, dp_delta))
    slack = [a + math.exp(epsilon) * b - (1 - dp_delta) for a, b in ((fpr, fnr), (fnr, fpr))]
    assert min(slack) >= -1e-12
    assert epsilon == 0 or min(slack) == pytest.approx(0, abs=1e-12)


def test_rates_that_delta_alone_explains_prove_nothing():
    assert auditing.epsilon_of_rates(0.0, 0.95, 0.05) == 0
    assert np.isinf(auditing.epsilon_of_rates(0.0, 0.5, 0.05))
    assert auditing.epsilon_of_rates(1.0, 1.0, 0.0) == 0


@pytest.mark.parametrize("epsilon", [0.5, 2.0])
def test_threshold_bounds_on_randomized_response_are_valid_and_tight(epsilon):
    bounds = []
    for seed in range(REPETITIONS):
        scores = randomized_response(np.random.default_rng(seed), epsilon, 4000)
        bounds.append(auditing.threshold_bound(*scores, 0.0).epsilon)
    assert np.sum(np.array(bounds) > epsilon) <= MOST_WRONG
    assert np.median(bounds) > 0.75 * epsilon


def test_threshold_bounds_on_laplace_noise_are_valid_and_tight():
    epsilon, bounds = 1.0, []
    for seed in range(REPETITIONS):
        noise = np.random.default_rng(seed).laplace(scale=1 / epsilon, size=(2, 4000))
        bounds.append(auditing.threshold_bound(noise[0] + 1, noise[1], 0.0).epsilon)
    assert np.sum(np.array(bounds) > epsilon) <= MOST_WRONG
    assert np.median(bounds) > 0.7 * epsilon


@pytest.mark.parametrize("mu", later([0.5, 2.0], but=[2.0], mark=telling))
def test_bounds_on_gaussian_noise_are_valid_and_tight(mu):
    bounds = []
    for seed in range(REPETITIONS):
        noise = np.random.default_rng(seed).normal(size=(2, 10_000))
        scores = noise[0] + mu, noise[1]
        bounds.append(
            (
                auditing.threshold_bound(*scores, 0.1).epsilon,
                auditing.gaussian_bound(*scores, 1e-5).epsilon,
            )
        )
    claims = np.array([dp_accounting.get_epsilon_gaussian(1 / mu, d) for d in (0.1, 1e-5)])
    assert np.all(np.sum(np.array(bounds) > claims, axis=0) <= MOST_WRONG)
    assert np.all(np.median(bounds, axis=0) > (0.55 if mu < 1 else 0.8) * claims)


@pytest.mark.parametrize("bound", [auditing.threshold_bound, auditing.gaussian_bound])
def test_half_the_noise_is_found_by_both_bounds(bound):
    claim = dp_accounting.get_epsilon_gaussian(1.0, 0.1)
    noise = np.random.default_rng(0).normal(size=(2, 2000))
    assert bound(noise[0] + 1, noise[1], 0.1).epsilon < claim
    assert bound(noise[0] + 2, noise[1], 0.1).epsilon > 1.5 * claim


def test_canaries_that_score_low_are_found_as_well():
    rng = np.random.default_rng(0)
    inside, outside = rng.normal(size=1000) + 3, rng.normal(size=1000)
    high = auditing.threshold_bound(inside, outside, 1e-5).epsilon
    low = auditing.threshold_bound(-inside, -outside, 1e-5).epsilon
    assert high > 3 and low == pytest.approx(high, rel=0.15)


def test_the_threshold_is_not_chosen_on_the_runs_that_prove_it():
    # Every second run separates perfectly, the others not at all.
    rng = np.random.default_rng(0)
    scores = rng.normal(size=(2, 1000))
    scores[0, ::2] += 10
    assert auditing.threshold_bound(*scores, 1e-5).epsilon == 0


def test_no_runs_prove_nothing():
    empty = np.zeros(0)
    assert auditing.threshold_bound(empty, empty, 0.1).epsilon == 0
    assert auditing.threshold_bound(np.ones(1), np.zeros(1), 0.1).epsilon == 0


@pytest.mark.parametrize("dp_delta", [1e-10, 1e-5, 0.1])
@pytest.mark.parametrize("mu", [0.01, 0.3, 1.0, 5.0, 30.0])
def test_epsilon_of_gaussian_dp(mu, dp_delta):
    expected = dp_accounting.get_epsilon_gaussian(1 / mu, dp_delta)
    assert auditing.gaussian_epsilon(mu, dp_delta) == pytest.approx(expected, rel=1e-6, abs=1e-9)


def test_one_run_values_of_the_paper():
    # Steinke, Nasr, Jagielski 2023, appendix D; the last one from section 7, figure 11, where the
    # paper cuts 2.6758 off to 2.675.
    assert auditing.one_run_p_value(100, 100, 75, math.log(3), 0.0) == pytest.approx(
        0.553, abs=1e-3
    )
    for counts, dp_delta, expected in (
        ((100, 100, 75), 0.0, 0.702),
        ((100, 100, 75), 1e-4, 0.699),
        ((1000, 100, 75), 1e-4, 0.673),
        ((100_000, 1510, 1439), 1e-5, 2.675),
    ):
        epsilon = auditing.one_run_epsilon(*counts, dp_delta)
        assert epsilon == pytest.approx(expected, abs=1e-3)


def exact_p_value(m, r, v, odds, dp_delta):
    """Corollary 5.4 in rational numbers, `odds` being e^ε."""
    q = Fraction(odds, odds + 1)
    pmf = [math.comb(r, k) * q**k * (1 - q) ** (r - k) for k in range(r + 1)]
    tail = [sum(pmf[max(k, 0) :]) for k in range(-m, r + 1)]
    above = tail[m + v]
    gain = max((tail[m + v - i] - above) / i for i in range(1, m + 1))
    return float(min(above + 2 * m * Fraction(dp_delta) * gain, Fraction(1)))


@pytest.mark.parametrize("counts", [(10, 10, 10), (12, 7, 6), (30, 20, 13), (9, 1, 1), (9, 3, 0)])
@pytest.mark.parametrize("odds", [1, 2, 9])
def test_one_run_p_values_in_rational_numbers(counts, odds):
    for dp_delta in (0.0, 0.003, 0.2):
        got = auditing.one_run_p_value(*counts, math.log(odds), dp_delta)
        assert got == pytest.approx(exact_p_value(*counts, odds, dp_delta), rel=1e-9)


@pytest.mark.parametrize("size", [5, 16, 400])
def test_perfect_guesses_have_a_closed_form(size):
    expected = max(-math.log(0.05 ** (-1 / size) - 1), 0)
    got = auditing.one_run_epsilon(size, size, size, 0.0)
    assert got == pytest.approx(expected, abs=1e-9)


@telling
@pytest.mark.parametrize("epsilon", [0.5, 3.0])
def test_one_run_bounds_on_randomized_response_are_valid_and_tight(epsilon):
    bounds, num_guesses = [], 1500
    for seed in range(REPETITIONS):
        rng = np.random.default_rng(seed)
        included = rng.uniform(size=3000) < 0.5
        is_true = rng.uniform(size=3000) < 1 / (1 + math.exp(-epsilon))
        # All that is released is a bit a canary; ties are broken by noise of the guesser's own.
        scores = np.where(is_true, included, ~included) + 1e-3 * rng.uniform(size=3000)
        bounds.append(auditing.one_run_bound(scores, included, 1e-6, guess_shares=(0.5,)).epsilon)
    assert np.sum(np.array(bounds) > epsilon) <= MOST_WRONG
    # The lower limit of a rate, by the normal approximation, as odds.
    truth = 1 / (1 + math.exp(-epsilon))
    lower = truth - stats.norm.ppf(0.95) * math.sqrt(truth * (1 - truth) / num_guesses)
    assert np.median(bounds) == pytest.approx(math.log(lower / (1 - lower)), abs=0.05)


@telling
def test_one_run_bounds_on_gaussian_noise_are_valid_and_see_it():
    mu, bounds = 1.5, []
    claim = dp_accounting.get_epsilon_gaussian(1 / mu, 1e-5)
    for seed in range(REPETITIONS):
        rng = np.random.default_rng(seed)
        included = rng.uniform(size=1000) < 0.5
        scores = mu * included + rng.normal(size=1000)
        bounds.append(auditing.one_run_bound(scores, included, 1e-5).epsilon)
    assert np.max(bounds) < claim
    assert np.median(bounds) > 1.2


def test_the_guesser_abstains_in_the_middle():
    included = np.array([True, False] * 50)
    scores = np.zeros(100)
    scores[:10] = np.where(included[:10], 1.0, -1.0)
    bound = auditing.one_run_bound(scores, included, 0.0, guess_shares=(0.1,))
    assert bound.epsilon == pytest.approx(auditing.one_run_epsilon(100, 10, 10, 0.0))
    three = auditing.one_run_bound(scores, included, 0.0, guess_shares=(0.1, 0.5, 1.0))
    shared = auditing.one_run_epsilon(100, 10, 10, 0.0, confidence=1 - 0.05 / 3)
    assert three.epsilon == pytest.approx(shared)


def test_guessing_proves_nothing():
    rng = np.random.default_rng(0)
    included = rng.uniform(size=2000) < 0.5
    assert auditing.one_run_bound(rng.normal(size=2000), included, 1e-5).epsilon < 0.1
    assert auditing.one_run_epsilon(100, 0, 0, 0.0) == 0


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: auditing.threshold_bound([1.0, np.nan], [0.0], 0.1), "scores_in must be finite"),
        (lambda: auditing.threshold_bound([[1.0]], [0.0], 0.1), "scores_in must be one row"),
        (lambda: auditing.one_run_p_value(10, 11, 3, 1.0, 0.0), "counts must be canaries"),
        (lambda: auditing.one_run_bound([1.0, 2.0], [True], 0.0), "is_included must match"),
        (lambda: auditing.one_run_bound([1.0], [True], 0.0, guess_shares=()), "guess_shares must"),
    ],
)
def test_bad_arguments_are_named(call, match):
    with pytest.raises(ValueError, match=match):
        call()
