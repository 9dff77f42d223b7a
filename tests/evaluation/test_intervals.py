"""Intervals of shares, against SciPy's."""

import numpy as np
import pytest
from scipy.stats import binomtest

from fedjax_dp.evaluation import wilson_interval


@pytest.mark.parametrize("confidence", [0.5, 0.95])
def test_intervals_are_those_of_scipy(confidence):
    right = np.array([0, 1, 0, 3, 7, 800, 1000])
    trials = np.array([1, 1, 4, 4, 10, 1000, 1000])
    low, high = wilson_interval(right / trials, trials, confidence=confidence)
    for k, n, a, b in zip(right, trials, low, high, strict=True):
        expected = binomtest(int(k), int(n)).proportion_ci(confidence, "wilson")
        assert (a, b) == pytest.approx((expected.low, expected.high), abs=1e-12)


def test_without_trials_there_is_no_interval():
    low, high = wilson_interval([np.nan, 0.5], [0, 2])
    assert np.isnan(low[0]) and np.isnan(high[0]) and low[1] < 0.5 < high[1]
