"""The study of PrivacyFL: its tables beside the thesis', its scores, its figure."""

import types

import numpy as np
import pytest
from drawn import flaws
from marks import slow, telling

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
    one |= {"num_seeds": 2, "error_of_offsets": 2.6e-11}
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
        {"scenario": 1, "received": [0.7, 0.71, 0.8], "num_seeds": 5},
        {"scenario": 2, "received": [0.75, 0.76], "num_seeds": 5, "error_of_offsets": 1.4e-11},
    ]
    text = privacyfl.as_markdown({"sweep": sweep(), "scenarios": scenarios})
    assert (
        "| corrected | 0.1 | 0.1 | 41 | 0.300 | 0.300 | 0.300 | 0.310 | 0.700 | 2 | 3e-11 |" in text
    )
    assert "| none |  |  |  | 0.900 |" in text
    assert "| 1 | 0.700 | 0.710 | 0.800 | 0.75 | 0.793 | 0.823 | 5 |  |" in text
    assert "| 2 | 0.750 | 0.760 |  | 0.806 | 0.81 |  | 5 | 1e-11 |" in text


def test_a_run_converges_when_accuracy_stays_close():
    """By hand, of ten rounds: at most 0.02 below the last five without noise, which are 0.9."""
    free = np.array([[0.5, 0.9, 0.1, 0.9, 0.9, 0.9, 0.88, 0.92, 0.9, 0.9]])
    curves = np.full((5, 10), 0.885)
    curves[1, [0, 3]] = 0.87
    curves[2, :5] = 0.4
    # Too late, and not at the end.
    curves[3, :6] = 0.4
    curves[4, 9] = 0.87
    found = privacyfl.rounds_to_converge(curves, np.repeat(free, 5, axis=0))
    assert found == [1, 5, 6, None, None]
    one = {"num_clients": 30, "noise": "printed", "asked": 1.0, "epsilon": 463.04}
    one |= {"accuracy": [0.5] + [0.9] * 9, "own": 0.8, "rounds_to_converge": found}
    text = privacyfl.as_markdown({"grid": [one]})
    assert "| 30 | printed | 1 | 464 | 0.500 | 0.900 | 0.800 | 5 | 3 of 5 |" in text


@telling
def test_a_grid_is_one_program_and_counts_what_the_printed_noise_is_worth(monkeypatch):
    """Two clients: the printed noise has twice the ε, √8 times that of a coordinate."""
    rng = np.random.default_rng(0)
    rows = {"x": rng.normal(size=(900, 3)).astype(np.float32)}
    rows["y"] = (rows["x"][:, 0] > 0).astype(np.int32)
    rows["x"][:, 0] += 4 * (2 * rows["y"] - 1)
    loaded = types.SimpleNamespace(train=rows, test=rows)
    monkeypatch.setattr(privacyfl.datasets, "load", lambda *_, **__: loaded)
    build, sims = privacyfl.simulation_of, []
    monkeypatch.setattr(
        privacyfl, "simulation_of", lambda *a, **k: sims.append(build(*a, **k)) or sims[-1]
    )
    found = {(one["noise"], one["asked"]): one for one in privacyfl.grid([2], 1, num_rounds=10)}
    assert [sim.num_traces() for sim in sims] == [1]
    for epsilon in privacyfl.EPSILONS:
        for noise, factor in (("printed", 2), ("corrected", 1)):
            # Six weights and two intercepts; each record is in one round alone.
            held = found[noise, epsilon]["epsilon"]
            assert held == pytest.approx(factor * epsilon * np.sqrt(8), rel=0.01)
    free = found["none", None]
    assert free["epsilon"] is None and free["rounds_to_converge"] == [1]
    assert free["accuracy"][-1] == 1 and found["corrected", 0.1]["rounds_to_converge"] == [None]


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
