"""The study of operator splitting: its grid, its curves against NumPy, its findings."""

import json
import pathlib

import numpy as np
import pytest
from drawn import flaws
from marks import later, slow, telling
from oracles.splitting import LeastSquares, chapter_data

from experiments.splitting import curves, grid, pictures, study
from fedjax_dp.io import plots

KEPT = pathlib.Path(study.__file__).parent / "results" / "curves"


def test_groups_have_names_of_their_own_and_share_programs():
    groups = grid.groups()
    assert len({g.name for g in groups}) == len(groups)
    assert len({g.setting for g in groups}) < 0.7 * len(groups)
    figures = {g.figure for g in groups}
    assert figures == {"2.2", "2.4", "2.4 plain", "2.5", "2.7", "2.8", "B.1", "B.2"}
    for group in groups:
        names = {frozenset(numbers) for numbers in group.curves.values()}
        assert len(names) == 1, "curves of a program differ in numbers alone"
        assert study.described(group)["setting"]["problem"] in ("ls", "lr")


def gaps_of_prox(oracle, method, num_rounds):
    alpha, beta, gamma = curves.METHODS[method]
    u, gaps = np.zeros((25, 100)), []
    for _ in range(num_rounds):
        z = u + alpha * (oracle.prox(u, 1e-5) - u)
        gaps.append(oracle.gap(z.mean(axis=0)))
        u = (1 - gamma) * u + gamma * ((1 - beta) * z + beta * z.mean(axis=0))
    return gaps


def gaps_of_fedavg(oracle, num_rounds):
    u, gaps = np.zeros((25, 100)), []
    for _ in range(num_rounds):
        u = np.tile(oracle.steps(u, 1e-5, 5).mean(axis=0), (25, 1))
        gaps.append(oracle.gap(u[0]))
    return gaps


# Batches of all 5,000 rows are the whole loss, and 20 steps solve a proximal step.
@slow
@pytest.mark.parametrize("batch_size", [None, 5000])
def test_curves_of_a_program_are_those_of_numpy(batch_size):
    oracle, of = LeastSquares(*chapter_data(0.25)), {"batch_size": batch_size}
    numbers = {
        m: grid._numbers("ls", m, 1e-5, in_batches=batch_size is not None) for m in grid.PROXIMAL
    }
    prox = curves.Group("p", "2.8", curves.Setting("ls", 0.25, "prox", 4, **of), 20, numbers)
    found = curves.run(prox)
    for method in grid.PROXIMAL:
        np.testing.assert_allclose(found[method]["gap"], gaps_of_prox(oracle, method, 4), rtol=1e-4)
    numbers = {"FedAvg": grid._numbers("ls", "FedAvg", 1e-5)}
    steps = curves.Group("g", "2.2", curves.Setting("ls", 0.25, "gradient", 3, **of), 5, numbers)
    found = curves.run(steps)["FedAvg"]["gap"]
    np.testing.assert_allclose(found, gaps_of_fedavg(oracle, 3), rtol=1e-4)


@pytest.mark.parametrize(
    "figure", later(["2.7", "2.2", "2.5", "2.8", "B.1"], but=["2.7"], mark=telling)
)
def test_panels_say_what_they_show_and_can_be_read(figure, monkeypatch, tmp_path):
    groups = [g for g in grid.groups() if g.figure == figure]
    results = [json.loads((KEPT / f"{g.name}.json").read_text("utf-8")) for g in groups]
    shown = {}
    monkeypatch.setattr(plots, "save", lambda drawn, path: shown.__setitem__(path.name, drawn))
    pictures.draw(results, tmp_path)
    assert f"figure_{figure}.png" in shown
    for drawn in shown.values():
        assert flaws(drawn) == []
        for axes in drawn.axes:
            assert axes.get_title().startswith(("Least squares", "Logistic regression"))
            named = [line for line in axes.get_lines() if not line.get_label().startswith("_")]
            looks = {(line.get_color(), str(line._dash_pattern)) for line in named}
            assert len(looks) == len(named), "two curves of a panel look the same"
    if figure == "2.7":
        titles = [axes.get_title() for axes in shown["figure_2.7.png"].axes]
        assert all("H =" in title for title in titles) and len(set(titles)) == 3
