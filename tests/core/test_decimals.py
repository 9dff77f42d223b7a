"""Bounds in few digits: never on the wrong side, never further off than their last digit."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedjax_dp.core.decimals import in_bytes, rounded_down, rounded_up, shown


@settings(max_examples=200, deadline=None)
@given(st.floats(allow_nan=False, allow_infinity=False), st.integers(1, 9))
def test_a_bound_in_few_digits_is_a_bound(value, digits):
    assert float(rounded_down(value, digits)) <= value <= float(rounded_up(value, digits))
    exact = Fraction(repr(value))
    up, down = (Fraction(of(value, digits)) for of in (rounded_up, rounded_down))
    assert down <= exact <= up
    if value:
        unit = Fraction(10) ** (math.floor(math.log10(abs(value))) + 2 - digits)
        assert up - exact < unit and exact - down < unit
        written = rounded_up(value, digits).lstrip("-").partition("e")[0].replace(".", "")
        assert len(written.strip("0")) <= digits


@pytest.mark.parametrize(
    ("value", "up", "down"),
    [
        (1e-9, "1e-09", "1e-09"),
        (2.0**-30, "9.314e-10", "9.313e-10"),
        (1e9, "1e+09", "1e+09"),
        (8.0, "8", "8"),
        (7.99999, "8", "7.999"),
        (0.1, "0.1", "0.1"),
        (123456.0, "123500", "123400"),
        (0.00012345, "0.0001235", "0.0001234"),
        (1e-4, "0.0001", "0.0001"),
        (1e6, "1e+06", "1e+06"),
        (0.0, "0", "0"),
        (math.inf, "inf", "inf"),
        (math.nan, "nan", "nan"),
    ],
)
def test_bounds_as_they_are_written(value, up, down):
    assert (rounded_up(value), rounded_down(value)) == (up, down)


@settings(max_examples=100, deadline=None)
@given(st.floats(allow_nan=False, allow_infinity=False), st.integers(0, 6))
def test_figures_with_a_number_of_decimals_are_bounds_too(value, decimals):
    up, down = (shown(name, value, decimals=decimals) for name in ("epsilon", "budget"))
    assert Fraction(down) <= Fraction(repr(value)) <= Fraction(up)
    assert Fraction(up) - Fraction(down) in (0, Fraction(1, 10**decimals))
    assert all(len(text.partition(".")[2]) == decimals for text in (up, down))
    plain = shown("test_accuracy", value, decimals=decimals)
    assert plain == f"{value:.{decimals}f}"


def test_the_side_of_a_figure_follows_from_its_name():
    for name in ("epsilon_client", "privacy.record.dp_delta", "sampling_rate", "ε", "δ"):
        assert shown(name, 1.00001) == "1.001", name
    for name in ("epsilon_lower", "noise_multiplier", "budget", "confidence", "laplace_scale"):
        assert shown(name, 1.99999) == "1.999", name
    # A float32 is the decimal that it was given as, but ε is no number that rounds run with.
    third = float(np.float32(0.1))
    assert (shown("clip_norm", third), shown("epsilon", third)) == ("0.1", "0.1001")
    assert [shown("epsilon", x, decimals=4) for x in ("inf", 4.0)] == ["inf", "4.0000"]


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 bytes"), (84, "84 bytes"), (999.6, "1 kB"), (1234, "1.23 kB"), (8.04e12, "8.04 TB")],
)
def test_bytes_are_written_in_the_unit_that_suits_them(count, text):
    assert in_bytes(count) == text
