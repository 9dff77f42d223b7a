"""The study of operator splitting: its grid, its curves against NumPy, its findings."""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn import flaws
from marks import later, slow, telling
from oracles.splitting import LeastSquares, chapter_data, ergodic

from experiments.splitting import curves, findings, grid, networks, pictures, study
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


def models_of(oracle, rounds, steps):
    """Models of FedProx, with a step for each round."""
    u, models = np.zeros_like(oracle.optimum), []
    for t in range(rounds):
        u = oracle.prox(np.tile(u, (len(oracle.h), 1)), steps[t]).mean(axis=0)
        models.append(u)
    return np.array(models)


def test_an_average_from_the_first_round_on_hurts_and_one_of_the_later_half_does_not():
    """Near the minimum a model is as far away as its step is long, and so are averages."""
    draw, rounds = np.random.default_rng(0), 605
    a = draw.normal(size=(4, 40, 3))
    oracle = LeastSquares(a, a @ np.ones(3) + draw.normal(size=(4, 40)))
    steps = 0.1 / np.arange(1, rounds + 1)
    models = models_of(oracle, rounds, steps)
    gap = oracle.gap(models[-1])
    every = oracle.gap(ergodic(None, models, steps, np.ones(rounds))) / gap
    late = oracle.gap(curves.late_averages(models, steps)[-1]) / gap
    inverse = 1 / np.arange(1, rounds + 1)
    # Without what is left of the start, which only adds to it.
    assert every > (rounds * np.sum(inverse**2) / np.sum(inverse)) ** 2 / 2 > 1e4
    half = inverse[(rounds + 1) // 2 - 1 :]
    assert late == pytest.approx((rounds * np.sum(half**2) / np.sum(half)) ** 2, rel=0.1)
    assert 2 < late < 2.2


def test_late_averages_are_means_of_the_later_half():
    draw = np.random.default_rng(1)
    models, steps = draw.normal(size=(9, 2)), draw.uniform(0.1, 1, size=9)
    found = curves.late_averages(models, steps)
    for t in range(9):
        first = (t + 1) // 2
        expected = np.average(models[first : t + 1], axis=0, weights=steps[first : t + 1])
        np.testing.assert_allclose(found[t], expected)


def trade_off_of(**gaps):
    """Verdicts on curves of k local steps, whose gaps by round are given."""
    made = {
        "group": {"figure": "2.2", "name": "2.2-ls-k1", "setting": {"problem": "ls"}},
        "rounds": list(range(12)),
        "curves": {name: {"gap": gap, "reached": 0} for name, gap in gaps.items()},
    }
    turned = {**made, "group": {**made["group"], "name": "2.2-ls-eta"}}
    turned["curves"] = dict(reversed(made["curves"].items()))
    return [row[4] for row in findings.rows_of([made, turned])[:2]]


def test_only_curves_above_their_floor_are_early_and_only_converged_ones_are_final():
    falling = [9, 8.5, 8, 7.5, 7, 6.5, 6, 5, 4, 3, 2, 1]
    fast = [9, 7, 5, 3, 1, *7 * [0.2]]
    # After five rounds it is above the fast one, at its floor.
    floored = [9, *11 * [3]]
    assert trade_off_of(a=falling, b=fast, c=floored) == ["holds", "holds"]
    late = [9, 9, 9, 8.5, 8, *7 * [0.2]]
    assert trade_off_of(a=falling, b=late, c=floored) == ["does not hold", "holds"]
    lower = [9, 3, 1, *9 * [0.1]]
    assert trade_off_of(a=falling, b=fast, c=lower) == ["holds", "does not hold"]


@pytest.mark.parametrize(
    ("of_pi", "verdict"), [(9, "within a round"), (15, "holds"), (3, "does not hold")]
)
def test_what_one_round_could_turn_is_not_decided(of_pi, verdict):
    """Acceleration takes 100 rounds to ten; FedPi's ten, give or take one, are as good."""
    groups = {"prox-0": (100, 100), "fedavg-0": (100, 100), "prox-2": (10, of_pi)}
    made = []
    for name, (others, pi) in (groups | {"fedavg-2": (10, 10)}).items():
        labels = ("FedAvg",) if "fedavg" in name else ("FedProx", "FedRP", "FedSplit", "FedPi")
        rounds = dict.fromkeys(labels, others) | (
            {"FedSplit": pi, "FedPi": pi} if len(labels) > 1 else {}
        )
        group = {"figure": "2.8", "name": f"2.8-lr-{name}", "setting": {"problem": "lr"}}
        drawn = {label: {"gap": [9, 1], "reached": n} for label, n in rounds.items()}
        made.append({"group": group, "rounds": [0, 1], "curves": drawn})
    assert findings.rows_of(made)[-1][4] == verdict


def test_the_network_of_figure_23_is_the_authors():
    image = jax.ShapeDtypeStruct((32, 32, 3), jnp.float32)
    params = jax.eval_shape(networks.cifar_cnn(image, 10).init, jax.random.key(0))
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == 797_962
    x = np.random.default_rng(0).normal(size=(2, 3, 5)).astype(np.float32) * 30
    expected = np.empty_like(x)
    for c in range(5):
        before = x[..., c - 1] ** 2 if c else 0
        expected[..., c] = x[..., c] / (1 + 1e-4 / 2 * (x[..., c] ** 2 + before)) ** 0.75
    np.testing.assert_allclose(networks.response_normalised(x), expected, rtol=1e-5)


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
