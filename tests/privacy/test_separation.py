"""Separation and overlap of clusters against distances by hand and shared densities."""

import numpy as np
import pytest
from scipy import integrate, stats

from fedjax_dp.privacy import overlap, separation_scores


def test_separation_and_overlap():
    centres = np.array([[0.0, 0.0], [3.0, 4.0], [0.0, 10.0]])
    scores = separation_scores(centres, [1.0, 0.5, 2.0])
    expected = np.array(
        [[np.inf, 2.5, 2.5], [2.5, np.inf, np.sqrt(45) / 4], [2.5, np.sqrt(45) / 4, np.inf]]
    )
    np.testing.assert_allclose(scores, expected)
    # σ is of the whole update, sigma/sqrt(p) of one coordinate: sqrt(p) Δ/(2σ).
    whole = separation_scores(centres[:2], 3.0 / np.sqrt(50))
    assert whole[0, 1] == pytest.approx(np.sqrt(50) * 5 / (2 * 3.0))


@pytest.mark.parametrize("separation", [0.0, 0.5, 1.7, 3.0])
def test_overlap_is_the_mass_that_two_normal_densities_share(separation):
    """Unit variance, means 2·SS apart: the integral of the smaller density."""
    densities = stats.norm(0), stats.norm(2 * separation)
    shared, _ = integrate.quad(
        lambda x: min(d.pdf(x) for d in densities), -12, 12 + 2 * separation, points=[separation]
    )
    assert overlap(separation) == pytest.approx(shared, abs=1e-6)


def test_overlap_of_the_extremes():
    np.testing.assert_allclose(overlap([np.inf, 0.0]), [0.0, 1.0])


def test_bad_numbers_are_refused():
    with pytest.raises(ValueError, match="centres must be"):
        separation_scores([[1.0]], 1.0)
    with pytest.raises(ValueError, match="separation must be at least 0"):
        overlap([-1.0])
