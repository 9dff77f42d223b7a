"""How often a member is drawn: laws of samplers against SciPy, sums by hand, and draws."""

import jax
import numpy as np
import pytest
from marks import later
from scipy import stats

from fedjax_dp.data import participants, sampling


def law(sampler, num_clients, cohort_size, rounds):
    made = participants.participation(sampler, num_clients, cohort_size)
    return made.sampler.law(rounds, num_clients, made.cohort_size)


@pytest.mark.parametrize("rounds", [1, 7, 100])
@pytest.mark.parametrize(
    ("sampler", "size", "rate"),
    [
        (sampling.poisson(), 3.5, 3.5 / 40),
        (sampling.without_amplification(sampling.poisson()), 3.5, 3.5 / 40),
        (sampling.fixed_size(), 20, 0.5),
        (sampling.full_participation(), None, 1.0),
    ],
)
def test_independent_rounds_have_a_binomial_law(sampler, size, rate, rounds):
    wanted = stats.binom.cdf(np.arange(rounds + 1), rounds, rate)
    np.testing.assert_allclose(law(sampler, 40, size, rounds), wanted, rtol=1e-10, atol=1e-300)


def test_a_capacity_lowers_the_rate_to_the_mean_of_filled_slots():
    counts = np.arange(41)
    filled = np.sum(stats.binom.pmf(counts, 40, 0.25) * np.minimum(counts, 8)) / 40
    wanted = stats.binom.cdf(np.arange(31), 30, filled)
    np.testing.assert_allclose(law(sampling.poisson(8), 40, 10, 30), wanted, rtol=1e-10)


def test_whole_rounds_come_before_the_others():
    sampler = sampling.full_participation_first(3, sampling.fixed_size())
    found = law(sampler, 10, 2, 8)
    np.testing.assert_allclose(found[:3], 0)
    np.testing.assert_allclose(found[3:], stats.binom.cdf(np.arange(6), 5, 0.2))
    assert law(sampler, 10, 2, 2).tolist() == [0, 0, 1]


@pytest.mark.parametrize("rounds", [1, 3, 4, 11])
@pytest.mark.parametrize("size", [3, 4])
def test_turns_are_counted_in_the_draws_themselves(size, rounds):
    """Ten clients in blocks of 3, 3, 3, 1, or 4, 4, 2: without randomness, by one run."""
    cohorts = participants.participation(sampling.cyclic(), 10, size)
    drawn = cohorts.draws(jax.random.key(0), np.arange(rounds))
    times = np.bincount(np.asarray(drawn.indices)[np.asarray(drawn.is_real)], minlength=10)
    wanted = [np.mean(times <= k) for k in range(rounds + 1)]
    np.testing.assert_allclose(law(sampling.cyclic(), 10, size, rounds), wanted)


@pytest.mark.parametrize(("separation", "size"), later([(3, 2), (4, 2), (1, 5)], but=[(3, 2)]))
def test_separated_draws_have_their_law(separation, size):
    """Ten clients, nine rounds, many runs: frequencies within five standard errors."""
    cohorts = participants.participation(sampling.min_separated(separation), 10, size)
    keys = jax.random.split(jax.random.key(5), 200)
    drawn = jax.jit(jax.vmap(lambda key: cohorts.draws(key, np.arange(9))))(keys)
    held = np.where(np.asarray(drawn.is_real), np.asarray(drawn.indices), -1).reshape(200, -1)
    times = np.stack([np.sum(held == client, axis=1) for client in range(10)])
    found = law(cohorts.sampler, 10, size, 9)
    for k, probability in enumerate(found):
        error = np.sqrt(probability * (1 - probability) / 200)
        assert abs(np.mean(times <= k) - probability) <= 5 * error + 1e-12


@pytest.mark.parametrize("share", [0.05, 0.5, 0.95, 0.999])
@pytest.mark.parametrize(("size", "rounds"), [(4, 100), (20, 100), (20, 1)])
def test_a_quantile_is_that_of_scipy(share, size, rounds):
    cohorts = participants.participation(sampling.poisson(), 40, size)
    wanted = stats.binom.ppf(share, rounds, size / 40)
    assert cohorts.quantile_of_draws(share, rounds) == wanted


def test_a_law_that_is_not_known_is_refused():
    cohorts = participants.participation(sampling.fixed_size(), 10, 2)
    with pytest.raises(ValueError, match="participation must draw cohorts of which it is known"):
        cohorts.of_any_draw(charges_all=False).quantile_of_draws(0.5, 10)
    with pytest.raises(ValueError, match=r"share must be in \(0, 1\], got 0"):
        cohorts.quantile_of_draws(0, 10)
    with pytest.raises(ValueError, match="num_rounds must be an integer of at least 1"):
        cohorts.quantile_of_draws(0.5, 0)
