"""Figures 3 and 4 of the clustered paper against the multipliers and the lemma that it states."""

import numpy as np
import pytest
from marks import telling

from experiments import noise_levels
from experiments.clustered_dp import figures
from fedjax_dp.io import plots


def at(first, later):
    return figures.FIRST_BATCHES.index(first), figures.LATER_BATCHES.index(later)


@telling
def test_multipliers_over_both_batch_sizes():
    """By dp-accounting at ε = 5: 1.444 with a full first batch, 1.165 with batches of 32."""
    z = figures.multipliers()
    assert z[at(6600, 32)] == pytest.approx(1.444, abs=0.001)
    assert z[at(32, 32)] == pytest.approx(1.165, abs=0.001)
    # A single batch size is a run without a first round of its own.
    alone = noise_levels.noise_multiplier_of_run(
        5.0, 1e-4, 6600, figures.LATER_BATCHES, num_rounds=200, accountant="rdp-classic-64"
    )
    both = [z[at(b, b)] for b in figures.LATER_BATCHES]
    np.testing.assert_allclose(both, alone, rtol=1e-5)
    assert np.all(np.diff(z, axis=1) > 0)
    # A full batch is one step; at 4,096 the recipe counts 1.6 and may ask for more.
    assert np.all(np.diff(z[:-1], axis=0) > 0)


@telling
def test_variances_over_both_batch_sizes():
    """Lemma 4.1 of R-DPCFL, K N η² p c² z²/b³, with the multipliers above."""
    first, later = figures.variances(figures.multipliers())
    whole = 6600 * 25e-8 * 11_181_642 * 9 * 1.444**2
    assert first[at(6600, 32)] == pytest.approx(whole / 6600**3, rel=0.002)
    assert later[at(6600, 32)] == pytest.approx(whole / 32**3, rel=0.002)
    small = 6600 * 25e-8 * 11_181_642 * 9 * 1.165**2 / 32**3
    assert first[at(32, 32)] == pytest.approx(small, rel=0.002)
    # The figures' message: the first update clears up by far more than later ones suffer.
    assert first[at(32, 32)] / first[at(6600, 32)] > 1e6
    assert later[at(6600, 32)] / later[at(32, 32)] < 2


@telling
def test_the_command_draws_what_was_computed(monkeypatch, tmp_path):
    shown = {}
    monkeypatch.setattr(plots, "save", lambda figure, path: shown.__setitem__(path.name, figure))
    figures.main(["--output", str(tmp_path)])
    z = figures.multipliers()
    lines = shown["multipliers_by_batch_sizes.png"].axes[0].get_lines()
    np.testing.assert_allclose([line.get_ydata() for line in lines], z.T)
    for name, table in zip(("first", "later"), figures.variances(z), strict=True):
        image = shown[f"variance_of_{name}_update.png"].axes[0].images[0]
        np.testing.assert_array_equal(image.get_array(), table)
