"""The number of trials has its distribution, and the best of them the cost that goes with it."""

import math

import dp_accounting as dpa
import numpy as np
import pytest
from dp_accounting.dp_event import RepeatAndSelectDpEvent
from dp_accounting.rdp import RdpAccountant
from scipy.special import gammaln

from fedjax_dp.privacy.accounting.ledger import Ledger
from fedjax_dp.privacy.accounting.renyi import orders_of
from fedjax_dp.privacy.mechanisms.selection import Repetition, repetition


def probabilities(shape, mean, most=4000):
    """P[K = k] for k from 0, by the definition; the parameter is found by halving."""
    k = np.arange(most)
    if math.isinf(shape):
        return np.exp(k * np.log(mean) - mean - gammaln(k + 1))

    def at(gamma):
        with np.errstate(divide="ignore"):
            logs = k * np.log1p(-gamma) + gammaln(k + shape) - gammaln(k + 1)
        logs[0] = -np.inf
        weights = np.exp(logs - logs[1:].max())
        return weights / weights.sum()

    low, high = 1e-6, 1.0 - 1e-9
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if at(middle) @ k > mean else (low, middle)
    return at(low)


@pytest.mark.parametrize("shape", [0.0, 0.5, 1.0, 3.0, math.inf])
@pytest.mark.parametrize("mean", [1.5, 10.0])
def test_numbers_of_trials_have_their_distribution(shape, mean):
    """The share of draws up to each k, by the inequality of Dvoretzky, Kiefer and Wolfowitz."""
    rng = np.random.default_rng(3)
    drawn = [Repetition(mean, shape).draw(rng.random) for _ in range(4000)]
    expected = np.cumsum(probabilities(shape, mean))
    found = np.cumsum(np.bincount(drawn, minlength=len(expected))[: len(expected)]) / len(drawn)
    # Exceeded with a probability below 1e-5.
    assert np.max(np.abs(found - expected)) < math.sqrt(math.log(2e5) / (2 * len(drawn)))


def test_one_trial_on_average_is_one_trial():
    assert {Repetition(1.0, shape).draw(lambda: 0.999) for shape in (0.0, 1.0, 2.0)} == {1}


@pytest.mark.parametrize("shape", [0.0, 1.0, math.inf])
def test_the_best_trial_costs_what_dp_accounting_says(shape):
    trial = dpa.SelfComposedDpEvent(dpa.PoissonSampledDpEvent(0.05, dpa.GaussianDpEvent(1.2)), 50)
    ledger = Ledger("client", "zero_out")
    ledger.charge(repetition(8, shape=shape).event(trial))
    account = RdpAccountant(orders_of("rdp"))
    account.compose(RepeatAndSelectDpEvent(trial, 8.0, shape))
    np.testing.assert_allclose(ledger.epsilon(1e-5), account.get_epsilon(1e-5), rtol=1e-9)
    once = Ledger("client", "zero_out")
    once.charge(trial)
    assert ledger.epsilon(1e-5) > 1.2 * once.epsilon(1e-5)


@pytest.mark.parametrize(
    ("mean", "shape", "rule"),
    [
        (0.5, 1.0, "mean must be at least 1"),
        (1e9, 1.0, "mean must be at least 1 and below"),
        (math.nan, 1.0, "mean must be at least 1"),
        (2.0, -1.0, "shape must be at least 0"),
        (2.0, math.nan, "shape must be at least 0"),
    ],
)
def test_a_distribution_that_cannot_be_is_refused(mean, shape, rule):
    with pytest.raises(ValueError, match=rule):
        repetition(mean, shape=shape)
