"""Curves over rounds, compared with their formulas in float64."""

import math

import numpy as np
import pytest

from fedjax_dp.algorithms import schedules
from fedjax_dp.algorithms.schedules import table_of, warm_up

ROUNDS = 12
T = np.arange(ROUNDS, dtype=np.float64)
# Each with its formula, written for one round at a time.
CURVES = {
    "constant": (schedules.constant(), lambda t: 1.0),
    "linear": (schedules.linear(8, final=0.2), lambda t: 0.2 + 0.8 * max(0.0, (8 - t) / 8)),
    "linear that grows": (schedules.linear(4, final=3.0), lambda t: 1 + 2 * min(t / 4, 1)),
    "cosine": (
        schedules.cosine(8, final=0.1),
        lambda t: 0.1 + 0.9 * math.cos(math.pi / 2 * min(t / 8, 1)) ** 2,
    ),
    "steps after": (
        schedules.steps(after=[3, 7], factor=0.5),
        lambda t: 1.0 if t < 3 else 0.5 if t < 7 else 0.25,
    ),
    "steps every": (schedules.steps(every=5, factor=0.1), lambda t: 10.0 ** -(t // 5)),
    "exponential": (
        schedules.exponential(decay=0.9, every=2),
        lambda t: math.exp(t / 2 * math.log(0.9)),
    ),
    "staircase": (
        schedules.exponential(decay=0.5, every=3, staircase=True),
        lambda t: 0.5 ** (t // 3),
    ),
    "inverse": (schedules.inverse(every=4), lambda t: 4 / (4 + t)),
    "inverse root": (schedules.inverse(power=0.5), lambda t: math.sqrt(1 / (1 + t))),
    "inverse square": (schedules.inverse(power=2), lambda t: (1 + t) ** -2.0),
    "inverse ln": (schedules.inverse_log(), lambda t: 1 / math.log(t + math.e)),
    "inverse log10": (
        schedules.inverse_log(base="10"),
        lambda t: math.log(10) / (math.log(10) + math.log(t + 1)),
    ),
    "list": (schedules.listed(factors=[1, 0.5, 2]), lambda t: [1.0, 0.5, 2.0][min(int(t), 2)]),
}


@pytest.mark.parametrize("name", CURVES)
def test_a_curve_is_its_formula_in_every_round(name):
    curve, formula = CURVES[name]
    wanted = [formula(float(t)) for t in T]
    np.testing.assert_allclose([curve(int(t)) for t in T], wanted, rtol=1e-14)
    table = table_of(curve, ROUNDS, name)
    assert table.dtype == np.float32 and table.shape == (ROUNDS,)
    np.testing.assert_allclose(table, wanted, rtol=2**-23)


@pytest.mark.parametrize("name", CURVES)
def test_a_warm_up_grows_to_the_first_factor_of_any_curve(name):
    curve, formula = CURVES[name]
    first = formula(0.0)
    wanted = [first * (t + 1) / 4 for t in range(3)] + [formula(float(t)) for t in range(9)]
    np.testing.assert_allclose(table_of(warm_up(curve, 3), ROUNDS, name), wanted, rtol=2**-22)


def test_a_final_factor_is_reached_after_the_rounds_of_a_curve_and_stays():
    for curve in (schedules.linear(5, final=0.3), schedules.cosine(5, final=0.3)):
        table = table_of(curve, 9, "rate")
        assert table[0] == 1 and table[4] > 0.3
        np.testing.assert_allclose(table[5:], 0.3, rtol=2**-23)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: schedules.linear(0), "rounds must be an integer of at least 1"),
        (lambda: schedules.cosine(3, final=-1.0), "final must be at least 0"),
        (lambda: schedules.steps(), "after must be given without every, and only then"),
        (lambda: schedules.steps(after=[1], every=2), "after must be given without every"),
        (lambda: schedules.exponential(decay=0.0), "decay must be above 0"),
        (lambda: schedules.inverse(power=0.0), "power must be above 0"),
        (lambda: schedules.inverse_log(base="2"), "base must be one of"),
        (lambda: schedules.listed(factors=[]), "factors must have at least one entry"),
        (lambda: warm_up(schedules.constant(), 0), "rounds must be an integer of at least 1"),
        (
            lambda: table_of(lambda t: 1.0 - t, 3, "mu"),
            "mu: in round 2 the factor must be at least",
        ),
        (lambda: table_of(lambda t: math.nan, 3, "mu"), "mu: in round 0 the factor must be"),
        (lambda: table_of([1, None], 3, "mu"), "mu: in round 1 the factor must be at least 0"),
        (lambda: table_of([], 3, "mu"), "the curve of mu must have one factor for each round"),
    ],
)
def test_options_out_of_their_range_and_factors_that_are_none_are_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()
