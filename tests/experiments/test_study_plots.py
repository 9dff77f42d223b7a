"""Plots of studies show the numbers that they are given."""

import numpy as np
import pytest
from drawn import flaws, visible_share
from marks import later, telling

from experiments import study_plots
from fedjax_dp.io import plots


def drawn(axes):
    return {line.get_label(): np.column_stack(line.get_data()) for line in axes.get_lines()}


def test_multipliers_by_batch_size(tmp_path):
    curves = {"ε = 1": [5.15, 7.25, 10.22], "ε = 5": [1.31, 1.73, 2.35]}
    figure = study_plots.multipliers_by_batch_size([16, 32, 64], curves, "title")
    (axes,) = figure.axes
    shown = drawn(axes)
    assert list(shown) == list(curves)
    np.testing.assert_allclose(shown["ε = 5"], [[16, 1.31], [32, 1.73], [64, 2.35]])
    assert axes.get_xscale() == "log" and axes.get_title() == "title"
    plots.save(figure, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_variance_by_setting():
    values = [[1e-3, 0.1, 10.0], [2e-3, 0.2, 20.0]]
    figure = study_plots.variance_by_setting(values, [0.5, 1.0], [16, 32, 64], "title")
    axes = figure.axes[0]
    np.testing.assert_array_equal(axes.images[0].get_array(), values)
    assert [t.get_text() for t in axes.texts] == ["0.001", "0.1", "10", "0.002", "0.2", "20"]
    assert [t.get_text() for t in axes.get_xticklabels()] == ["16", "32", "64"]
    assert [t.get_text() for t in axes.get_yticklabels()] == ["0.5", "1"]
    study_plots.variance_by_setting([[1.0, 1.0]], [1], [2, 3], "all the same")


def test_weights_of_clients_from_the_heaviest_on():
    weights = {"oracle": [0.2, 0.7, 0.1], "Robust-HDP": [0.25, 0.75, 0.0]}
    (axes,) = study_plots.weights_of_clients(weights, "title").axes
    shown = drawn(axes)
    np.testing.assert_allclose(shown["oracle"][:, 1], [0.7, 0.2, 0.1])
    np.testing.assert_allclose(shown["Robust-HDP (1 of weight 0)"][:, 1], [0.75, 0.25, np.nan])
    assert [t.get_text() for t in axes.get_xticklabels()] == ["1", "0", "2"]
    (axes,) = study_plots.weights_of_clients(weights, "title", order=[2, 0, 1]).axes
    np.testing.assert_allclose(drawn(axes)["oracle"][:, 1], [0.1, 0.2, 0.7])


@pytest.mark.parametrize("number", later([3, 40, 400], but=[40], mark=telling))
def test_weights_of_any_number_of_clients_can_be_read(number):
    sizes = np.arange(1, number + 1) ** -1.2
    equal = np.ones(number) / number
    weights = {"oracle": sizes / sizes.sum(), "WeiAvg": equal, "DPFedAvg": equal}
    names = [f"hospital {i}" for i in range(number)]
    figure = study_plots.weights_of_clients(weights, "title", names=names)
    assert flaws(figure) == []
    (axes,) = figure.axes
    for line in axes.get_lines() if number != 40 else ():
        assert visible_share(figure, line) > 0.1, line.get_label()
    labels = [t.get_text() for t in axes.get_xticklabels()]
    assert labels[0] == "hospital 0" and len(labels) == -(-number // max(1, -(-number // 45)))


def test_accuracy_by_budget():
    curves = {"a": ([2, 4], [0.5, 0.6], [0.1, 0.0]), "b": ([4], [0.7], [0.0])}
    figure = study_plots.accuracy_by_epsilon(curves, "title")
    (axes,) = figure.axes
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["a", "b"]
    points = [line.get_xydata().tolist() for line in axes.get_lines() if line.get_label() in curves]
    assert points == [[[2, 0.5], [4, 0.6]], [[4, 0.7]]]
    # No bars where there is no spread.
    (bars,) = axes.containers
    segments = bars.lines[2][0].get_segments()
    np.testing.assert_allclose(segments, [[[2, 0.4], [2, 0.6]], [[4, 0.6], [4, 0.6]]])


def test_updates_are_drawn_by_cluster_with_the_circles_of_their_mixture():
    features = np.array([[0.0, 0.1], [0.2, 0.1], [1.0, 1.0]])
    means, radii = np.array([[0.1, 0.1], [1.0, 1.0]]), np.array([0.1, 0.05])
    figure = study_plots.updates_and_mixture(features, np.array([7, 7, 3]), means, radii, "a title")
    (axes,) = figure.axes
    points = {c.get_label(): np.asarray(c.get_offsets()).tolist() for c in axes.collections}
    assert points == {"cluster 7": [[0.0, 0.1], [0.2, 0.1]], "cluster 3": [[1.0, 1.0]]}
    circles = [(*p.center, p.radius) for p in axes.patches]
    expected = [(*m, k * r) for m, r in zip(means, radii, strict=True) for k in (1, 2, 3)]
    np.testing.assert_allclose(circles, expected)
    assert axes.get_title() == "a title"


def test_curves_of_many_methods_can_be_read():
    methods, rounds = [f"method {i}" for i in range(6)], list(range(1, 41))
    rising = [100 * (1 - 0.9**r) for r in rounds]
    by_epsilon = {m: ([0.25, 0.5, 1, 2, 5], rising[:5], [3] * 5) for m in methods}
    assert flaws(study_plots.accuracy_by_epsilon(by_epsilon, "a title")) == []
    by_round = {m: (rounds, rising, [3] * 40) for m in methods}
    assert flaws(study_plots.accuracy_by_round(by_round, "a title")) == []
