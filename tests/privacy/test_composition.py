"""Advanced composition and sampling of any mechanism, against exact figures of small ones."""

import math
from decimal import Decimal, getcontext

import numpy as np
import pytest
from scipy import special

from fedjax_dp.privacy import advanced_composition, amplified_by_sampling

getcontext().prec = 50


def of_optimal(epsilon, count, total):
    """δ at an ε of the composition of k releases of ε each, at best (Kairouz and others 2015).

    Σ over j of C(k, j) max(0, e^((k − j)ε) − e^(jε + total))/(1 + e^ε)^k: randomised response.
    """
    j = np.arange(count + 1)
    whole = count * np.log1p(np.exp(epsilon))
    log_p = np.log(special.comb(count, j)) + (count - j) * epsilon - whole
    log_q = np.log(special.comb(count, j)) + j * epsilon - whole
    return np.sum(np.maximum(0, np.exp(log_p) - np.exp(log_q + total)))


@pytest.mark.parametrize("epsilon", [0.01, 0.1, 0.5, 2.0])
@pytest.mark.parametrize("count", [1, 10, 200])
@pytest.mark.parametrize("slack", [1e-3, 1e-8])
def test_advanced_composition_is_the_theorem_and_bounds_the_optimal_one(epsilon, count, slack):
    found = advanced_composition(epsilon, 1e-7, count, slack)
    e, k = Decimal(epsilon), Decimal(count)
    printed = k * e * (e.exp() - 1) + e * (2 * k * (1 / Decimal(slack)).ln()).sqrt()
    assert found.epsilon == pytest.approx(float(min(printed, k * e)), rel=1e-12)
    assert found.dp_delta == pytest.approx(count * 1e-7 + slack, rel=1e-12)
    # Of pure releases: at the bound no more than the slack is left.
    assert of_optimal(epsilon, count, found.epsilon) <= slack
    # A tenth of the bound is not enough where it is near the optimum.
    if count == 200 and epsilon == 0.01:
        assert of_optimal(epsilon, count, 0.1 * found.epsilon) > slack


def test_advanced_composition_saves_over_basic_for_many_small_releases_alone():
    many = advanced_composition(0.01, 0.0, 10_000, 1e-5)
    assert many.epsilon < 0.06 * 100
    assert advanced_composition(3.0, 0.0, 5, 1e-5).epsilon == 15.0
    assert advanced_composition(1e4, 0.0, 2, 1e-5).epsilon == 2e4
    assert advanced_composition(0.0, 0.0, 2, 1e-5) == (0.0, 1e-5)


@pytest.mark.parametrize("epsilon", [1e-9, 0.1, 1.0, 5.0, 30.0])
@pytest.mark.parametrize(("drawn", "of"), [(1, 1), (1, 7), (3, 8), (5, 10**6)])
def test_a_sample_costs_what_the_theorem_says(epsilon, drawn, of):
    found = amplified_by_sampling(epsilon, 1e-6, drawn, of)
    rate, e = Decimal(drawn) / Decimal(of), Decimal(epsilon)
    expected = float((1 + rate * (e.exp() - 1)).ln())
    assert found.epsilon == pytest.approx(expected, rel=1e-9)
    assert found.dp_delta == pytest.approx(1e-6 * drawn / of, rel=1e-12)


def test_randomised_response_of_one_record_of_several_reaches_the_bound():
    """Of n bits one is drawn and answered; all others are 1, so that it matters the most."""
    for epsilon, n in ((0.5, 4), (2.0, 10)):
        p = math.exp(epsilon) / (1 + math.exp(epsilon))
        says_zero = [(p + (n - 1) * (1 - p)) / n, 1 - p]
        ratio = math.log(says_zero[0] / says_zero[1])
        assert amplified_by_sampling(epsilon, 0.0, 1, n).epsilon == pytest.approx(ratio, rel=1e-12)


def test_huge_numbers_have_finite_costs_where_the_theorem_has():
    assert amplified_by_sampling(1e4, 0.0, 1, 10).epsilon == pytest.approx(1e4 - math.log(10))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: amplified_by_sampling(1.0, 0.0, 9, 8), "num_drawn must be at most 8, got 9"),
        (lambda: advanced_composition(-1.0, 0.0, 2, 1e-5), "epsilon must be"),
        (lambda: advanced_composition(1.0, 1.0, 2, 1e-5), "dp_delta must be"),
        (lambda: advanced_composition(1.0, 0.0, 0, 1e-5), "count must be"),
        (lambda: advanced_composition(1.0, 0.0, 2, 0.0), "slack must be"),
    ],
)
def test_bad_input_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
