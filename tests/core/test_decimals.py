"""Bounds in few digits: never on the wrong side, never further off than their last digit."""

import math
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedjax_dp.core.decimals import rounded_down, rounded_up


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
