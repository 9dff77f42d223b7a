"""PrivacyFL's experiments by the released configuration: rows, noise, averages and files."""

import csv
import types

import numpy as np
import pytest
from drawn import flaws

from experiments.secure_aggregation import released, study


def test_answers_of_two_and_of_several_classes():
    two = released.Linear(np.array([[1.0, -1.0]]), np.array([0.5]))
    x = np.array([[1.0, 0.0], [0.0, 1.0], [0.0, 0.4]])
    assert two.accuracy(x, np.array([1, 0, 0])) == pytest.approx(2 / 3)
    three = released.Linear(np.array([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]]), np.array([0, 0, 0.5]))
    assert three.accuracy(x, np.array([0, 1, 2])) == 1
    both = released.mean([two, released.Linear(np.array([[3.0, 1.0]]), np.array([1.5]))])
    assert both.weights.tolist() == [[2.0, 0.0]] and both.intercepts.tolist() == [1.0]


def test_pixels_are_as_they_are():
    (x, y), (x_test, y_test) = released.digits()
    assert len(y) == 1497 and len(y_test) == 300
    assert x.max() == x_test.max() == 16 and np.array_equal(x, np.round(x))


def test_clients_score_the_mean_less_their_own_noise():
    """That is the mean of models without noise, and a share of the others' noise."""
    rows = released.scenarios(1)
    (x, y), test = released.digits()
    models = [released.logistic((x[a:b], y[a:b])) for a, b in ((0, 150), (150, 300), (300, 550))]
    alone = [row["accuracy"] for row in rows if row["scenario"] == 1]
    assert alone == [model.accuracy(*test) for model in models]
    for scenario, epsilons in ((2, (1, 1)), (3, (0.1,) * 3), (4, (1, 1, 0.1))):
        rng, n = np.random.default_rng((0, scenario)), len(epsilons)
        noise = [rng.laplace(0, 2 / (n * 150 * epsilon), (10, 64)) for epsilon in epsilons]
        clear = released.mean(models[:n])
        for c in range(n):
            others = sum(noise[j] for j in range(n) if j != c) / n
            expected = clear._replace(weights=clear.weights + others).accuracy(*test)
            (row,) = (r for r in rows if (r["scenario"], r["client"]) == (scenario, c + 1))
            assert row["accuracy"] == expected


@pytest.mark.parametrize(("part", "iterations"), [("growing", 8), ("serverless", 7)])
def test_clients_train_on_all_their_rows_so_far(part, iterations, monkeypatch):
    seen = []

    def record(rows, seed=None, start=None):
        seen.append(rows)
        return released.Linear(np.zeros((10, 64)), np.eye(10)[0])

    monkeypatch.setattr(released, "logistic", record)
    monkeypatch.setattr(released, "stochastic", record)
    found = released.PARTS[part].rows(1)
    (x, y), (_, y_test) = released.digits()
    expected = [(c, i) for i in range(1, iterations + 1) for c in range(3)]
    for (c, i), rows in zip(expected, seen, strict=True):
        first = 30 * iterations * c
        np.testing.assert_array_equal(rows[0], x[first : first + 30 * i])
        np.testing.assert_array_equal(rows[1], y[first : first + 30 * i])
    name = "own" if part == "growing" else "own_3"
    assert all(row[name] == pytest.approx(np.mean(y_test == 0)) for row in found)


def test_noise_on_growing_rows_shrinks_with_them(monkeypatch):
    scales = {}

    def record(clients, smallest, epsilon):
        scales[smallest, epsilon] = 2 / (clients * smallest * epsilon)
        return scales[smallest, epsilon]

    monkeypatch.setattr(released, "scale_of", record)
    nothing = released.Linear(np.zeros((10, 64)), np.zeros(10))
    monkeypatch.setattr(released, "logistic", lambda rows: nothing)
    released.growing(1)
    assert scales[30, 0.1] == pytest.approx(2 / 9) and scales[240, 8.0] == pytest.approx(1 / 2880)
    monkeypatch.undo()
    assert released.scale_of(3, 150, 0.1) == pytest.approx(2 / 45)


def test_clients_start_from_the_same_model():
    rng = np.random.default_rng(0)
    x = rng.uniform(size=(30, 5))
    rows = x, (x[:, 0] > 0.5).astype(int)
    start = released.stochastic(rows, 1)
    weights, intercepts = start.weights.copy(), start.intercepts.copy()
    first, second = (released.stochastic(rows, 2, start) for _ in range(2))
    np.testing.assert_array_equal(start.weights, weights)
    np.testing.assert_array_equal(start.intercepts, intercepts)
    np.testing.assert_array_equal(first.weights, second.weights)
    assert not np.array_equal(first.weights, weights)


def test_models_of_the_grid_go_on_from_the_mean(monkeypatch):
    """Each training adds 1 to what it starts from: 20 rounds without noise add 20."""
    rng = np.random.default_rng(0)
    rows = {"x": rng.uniform(size=(1300, 3)).astype(np.float32), "y": np.arange(1300) % 2}
    loaded = types.SimpleNamespace(train=rows, test=rows)
    monkeypatch.setattr(released.datasets, "load", lambda *_, **__: loaded)
    seen, means = [], []

    def train(part, seed, start=None):
        seen.append(part[0])
        level = 0.0 if start is None else start.weights
        return released.Linear(np.ones((1, 3)) + level, np.zeros(1))

    mean = released.mean
    monkeypatch.setattr(released, "stochastic", train)
    monkeypatch.setattr(released, "mean", lambda models: means.append(mean(models)) or means[-1])
    found = released.grid(1, [2])
    # The last 20 rounds are those without noise.
    np.testing.assert_allclose([m.weights[0, 0] for m in means[-20:]], np.arange(1, 21))
    assert len(found) == 4 * 20 and found[-1]["epsilon"] is None
    # No row is read twice in a run.
    read = np.concatenate(seen[-40:])
    assert len(np.unique(read, axis=0)) == len(read) == 2 * 20 * 30


def test_a_changed_label_moves_a_model(monkeypatch):
    """A stand-in for training whose weights count the labels."""

    def count(rows):
        return released.Linear(np.bincount(rows[1], minlength=10)[:, None] / 7.0, np.zeros(10))

    monkeypatch.setattr(released, "logistic", count)
    rows = released.moves()
    assert len(rows) == 150
    assert {round(row["move"], 6) for row in rows} == {round(1 / 7, 6)}
    assert rows[0]["bound"] == pytest.approx(1 / 75)


def test_parts_are_written_and_drawn(tmp_path, monkeypatch):
    monkeypatch.setattr(study.plots, "save", lambda figure, path: None)
    study.main(f"released --parts scenarios --seeds 1 --output {tmp_path}".split())
    with (tmp_path / "released_scenarios.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 3 + 2 + 3 + 3
    # The first client alone, as released.
    assert rows[0]["scenario"] == "1" and float(rows[0]["accuracy"]) > 0.7
    grown = [
        {"epsilon": e, "seed": s, "iteration": i, "own": 0.6 + i / 50, "shared": 0.5 + s / 10}
        for e in released.privacyfl.EPSILONS
        for s in (0, 1)
        for i in range(1, 9)
    ]
    alone = [
        {"seed": s, "iteration": i, "federated": 0.8, "own_1": 0.7, "own_2": 0.6, "own_3": 0.5}
        for s in (0, 1)
        for i in range(1, 8)
    ]
    assert not flaws(released.draw(grown, alone))
