"""The study of PrivacyFL: its tables beside the thesis', its scores, its figure."""

import numpy as np
import pytest
from drawn import flaws
from marks import slow

from experiments.secure_aggregation import privacyfl, study


def test_scores_are_those_of_models_one_by_one():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(50, 4)), rng.integers(0, 3, 50)
    stacked = {"kernel": rng.normal(size=(2, 4, 3)), "bias": rng.normal(size=(2, 3))}
    found = privacyfl.accuracy(stacked, x, y)
    for i in range(2):
        outputs = [row @ stacked["kernel"][i] + stacked["bias"][i] for row in x]
        expected = np.mean([np.argmax(out) == label for out, label in zip(outputs, y, strict=True)])
        assert found[i] == pytest.approx(expected)


def made(noise, asked, level):
    score = {"shared": level, "received": [level + 0.01] * 3, "own": [0.6, 0.7, 0.8]}
    multiplier = 2 / asked if asked else 0.0
    one = {"noise": noise, "asked": asked, "multiplier": multiplier, "scores": [score] * 8}
    return one | ({"epsilon": [40.0, 41.0, 40.5]} if asked else {})


def sweep():
    rows = [made("none", None, 0.9)]
    return rows + [
        made(noise, epsilon, level)
        for noise in ("printed", "corrected")
        for epsilon, level in zip(privacyfl.EPSILONS, (0.3, 0.7, 0.85), strict=True)
    ]


def test_tables_have_our_figures_beside_the_printed_ones(tmp_path):
    study.main(["privacyfl", "--parts", "times", "--output", str(tmp_path)])
    text = (tmp_path / "privacyfl.md").read_text("utf-8")
    # The thesis has five to ten milliseconds of computation in its times.
    assert "| 1 | Boston | 4.300 | 4.31 |" in text
    assert "| 3 | Singapore | dropped | dropped |" in text and "| 3 | NYC | 0.700 | 0.709 |" in text
    scenarios = [
        {"scenario": 1, "received": [0.7, 0.71, 0.8]},
        {"scenario": 2, "received": [0.75, 0.76]},
    ]
    text = privacyfl.as_markdown({"sweep": sweep(), "scenarios": scenarios})
    assert "| corrected | 0.1 | 0.1 | 41 | 0.300 | 0.300 | 0.300 | 0.310 | 0.700 |" in text
    assert "| none |  |  |  | 0.900 |" in text
    assert "| 1 | 0.700 | 0.710 | 0.800 | 0.75 | 0.793 | 0.823 |" in text
    assert "| 2 | 0.750 | 0.760 |  | 0.806 | 0.81 |  |" in text


def test_the_figure_can_be_read():
    assert not flaws(privacyfl.draw(sweep()))


@slow
def test_a_sweep_learns_and_counts_what_the_printed_noise_is_worth():
    """Noise of a third: ε that holds is above that of the same ε as corrected."""
    rows = privacyfl.sweep(1)
    by_name = {(one["noise"], one["asked"]): one for one in rows}
    last = by_name["none", None]["scores"][7]
    assert last["shared"] > np.mean(last["own"])
    assert by_name["none", None]["error_of_offsets"] < 1e-9
    for epsilon in privacyfl.EPSILONS:
        printed, corrected = (by_name[n, epsilon]["epsilon"] for n in ("printed", "corrected"))
        assert min(printed) > max(corrected)
