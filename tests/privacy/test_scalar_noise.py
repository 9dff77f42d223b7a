"""Staircase and bounded Laplace noise have their laws, and the laws are private."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from fedjax_dp.privacy import events as ev
from fedjax_dp.privacy import scalar_noise as sn
from fedjax_dp.privacy.accounting import Ledger

ZEROS = jnp.zeros(1_000_000)


def staircase_cdf(x, epsilon, sensitivity, gamma):
    """Geng and others 2015, the density of step k: a(γ)·e^(−kε), e^−ε of it past γΔ."""
    a = (1 - np.exp(-epsilon)) / (2 * sensitivity * (gamma + np.exp(-epsilon) * (1 - gamma)))
    k, rest = np.divmod(np.abs(x) / sensitivity, 1.0)
    step = a * sensitivity * (gamma + (1 - gamma) * np.exp(-epsilon))
    whole = step * (1 - np.exp(-epsilon * k)) / (1 - np.exp(-epsilon))
    part = np.minimum(rest, gamma) + np.exp(-epsilon) * np.maximum(rest - gamma, 0)
    half = whole + a * sensitivity * np.exp(-epsilon * k) * part
    return 0.5 + np.sign(x) * half


def bounded_laplace_cdf(x, scale, largest):
    inside = 1 - np.exp(-largest / scale)
    half = (1 - np.exp(-np.minimum(np.abs(x), largest) / scale)) / inside
    return 0.5 + np.sign(x) * half / 2


@pytest.mark.parametrize("epsilon,flatness", [(1.0, None), (5.0, None), (0.5, 0.3)])
def test_staircase_law_accepts_the_right_scale_and_rejects_three_percent_off(epsilon, flatness):
    noised = sn.add_staircase(jax.random.key(0), ZEROS, epsilon, 2.0, flatness=flatness)
    draws = np.asarray(noised, np.float64)
    gamma = 1 / (1 + np.exp(epsilon / 2)) if flatness is None else flatness
    assert stats.kstest(draws, staircase_cdf, args=(epsilon, 2.0, gamma)).pvalue > 1e-3
    for wrong in (0.97, 1.03):
        off = stats.kstest(draws, staircase_cdf, args=(epsilon, 2.0 * wrong, gamma))
        assert off.pvalue < 1e-6


@pytest.mark.parametrize("epsilon,expected", [(1.0, 0.9595), (5.0, 0.0826)])
def test_staircase_beats_laplace_by_the_published_error(epsilon, expected):
    # secure_aggregation.md §11 (5): E|X| = Δ e^(ε/2)/(e^ε − 1) at the best γ; Laplace has Δ/ε.
    draws = np.asarray(sn.add_staircase(jax.random.key(1), ZEROS, epsilon, 1.0), np.float64)
    exact = np.exp(epsilon / 2) / np.expm1(epsilon)
    assert exact == pytest.approx(expected, abs=6e-5)
    assert np.abs(draws).mean() == pytest.approx(exact, rel=0.01)
    assert np.abs(draws).mean() < 1 / epsilon


def test_bounded_laplace_law_accepts_the_right_scale_and_rejects_three_percent_off():
    epsilon, dp_delta, sensitivity = 0.8, 1e-3, 1.5
    largest = sensitivity / epsilon * np.log(1 + (np.exp(epsilon) - 1) / (2 * dp_delta))
    assert sn.bounded_laplace_range(epsilon, dp_delta, sensitivity) == pytest.approx(largest)
    noised = sn.add_bounded_laplace(jax.random.key(2), ZEROS, epsilon, dp_delta, sensitivity)
    draws = np.asarray(noised, np.float64)
    assert np.abs(draws).max() <= largest * (1 + 1e-6)
    scale = sensitivity / epsilon
    assert stats.kstest(draws, bounded_laplace_cdf, args=(scale, largest)).pvalue > 1e-3
    for wrong in (0.97, 1.03):
        off = stats.kstest(draws, bounded_laplace_cdf, args=(wrong * scale, largest))
        assert off.pvalue < 1e-6


@pytest.mark.parametrize("epsilon", [0.5, 2.0])
def test_histograms_on_neighbours_differ_by_no_more_than_epsilon(epsilon):
    bins = np.arange(-3, 4.25, 0.25)
    counts = [
        np.histogram(np.asarray(sn.add_staircase(jax.random.key(i), ZEROS + x, epsilon, 1.0)), bins)
        for i, x in enumerate((0.0, 1.0))
    ]
    a, b = (c[0].astype(float) for c in counts)
    enough = (a > 2000) & (b > 2000)
    ratio = np.abs(np.log(a[enough] / b[enough]))
    slack = 5 * np.sqrt(1 / a[enough] + 1 / b[enough])
    assert enough.sum() > 5 and np.all(ratio <= epsilon + slack) and ratio.max() > 0.9 * epsilon


def test_bounded_laplace_is_epsilon_delta_private():
    # Numerically, over all shifts up to the sensitivity: δ(ε) of the truncated densities.
    epsilon, dp_delta, sensitivity = 1.0, 1e-2, 1.0
    scale = sensitivity / epsilon
    largest = sn.bounded_laplace_range(epsilon, dp_delta, sensitivity)
    x, width = np.linspace(-largest - 1, largest + 1, 400_001, retstep=True)

    def density(shift):
        inside = np.abs(x - shift) <= largest
        height = 1 / (2 * scale * (1 - np.exp(-largest / scale)))
        return np.where(inside, height * np.exp(-np.abs(x - shift) / scale), 0)

    spent = [
        np.sum(np.maximum(density(0) - np.exp(epsilon) * density(s), 0)) * width
        for s in (0.1, 0.5, 1.0)
    ]
    assert max(spent) <= dp_delta * (1 + 1e-3) and max(spent) > 0.95 * dp_delta


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 6.0])
def test_pure_dp_costs_what_randomised_response_costs(epsilon):
    p = np.exp(epsilon) / (1 + np.exp(epsilon))
    orders = np.array([1.5, 2.0, 10.0])
    expected = np.log(p**orders * (1 - p) ** (1 - orders) + (1 - p) ** orders * p ** (1 - orders))
    event = sn.PureDpEvent(epsilon)
    np.testing.assert_allclose(event.rdp(orders, "add_remove"), expected / (orders - 1), rtol=1e-9)
    assert ev.from_dict(json.loads(json.dumps(ev.to_dict(event)))) == event
    ledger = Ledger()
    ledger.charge(event)
    assert ledger.epsilon(1e-300)[0] <= epsilon + np.log(1e300) / 1023
    ledger.charge(event, count=99)
    # At a large ε the conversion itself costs a little more than adding up.
    assert ledger.epsilon(1e-5)[0] < 100 * epsilon * 1.001


@pytest.mark.parametrize(
    "call,message",
    [
        (lambda: sn.add_staircase(jax.random.key(0), ZEROS, 0.0, 1.0), "epsilon must be positive"),
        (lambda: sn.add_staircase(jax.random.key(0), ZEROS, 1.0, 0.0), "sensitivity must be"),
        (
            lambda: sn.add_staircase(jax.random.key(0), ZEROS, 1.0, 1.0, flatness=1.0),
            "flatness must lie in",
        ),
        (
            lambda: sn.add_bounded_laplace(jax.random.key(0), ZEROS, 1.0, 0.5, 1.0),
            "dp_delta must lie in",
        ),
    ],
)
def test_bad_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
