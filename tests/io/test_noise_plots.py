"""Pictures of noise show the numbers that they are given."""

import numpy as np
import pytest
from drawn import flaws, visible_share
from marks import later, telling

from fedjax_dp.io import noise_plots, plots


def drawn(axes):
    return {line.get_label(): np.column_stack(line.get_data()) for line in axes.get_lines()}


def test_multipliers_by_batch_size(tmp_path):
    curves = {"ε = 1": [5.15, 7.25, 10.22], "ε = 5": [1.31, 1.73, 2.35]}
    figure = noise_plots.multipliers_by_batch_size([16, 32, 64], curves, "title")
    (axes,) = figure.axes
    shown = drawn(axes)
    assert list(shown) == list(curves)
    np.testing.assert_allclose(shown["ε = 5"], [[16, 1.31], [32, 1.73], [64, 2.35]])
    assert axes.get_xscale() == "log" and axes.get_title() == "title"
    plots.save(figure, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_variance_by_setting():
    values = [[1e-3, 0.1, 10.0], [2e-3, 0.2, 20.0]]
    figure = noise_plots.variance_by_setting(values, [0.5, 1.0], [16, 32, 64], "title")
    axes = figure.axes[0]
    np.testing.assert_array_equal(axes.images[0].get_array(), values)
    assert [t.get_text() for t in axes.texts] == ["0.001", "0.1", "10", "0.002", "0.2", "20"]
    assert [t.get_text() for t in axes.get_xticklabels()] == ["16", "32", "64"]
    assert [t.get_text() for t in axes.get_yticklabels()] == ["0.5", "1"]
    noise_plots.variance_by_setting([[1.0, 1.0]], [1], [2, 3], "all the same")


def test_weights_of_clients_from_the_heaviest_on():
    weights = {"oracle": [0.2, 0.7, 0.1], "Robust-HDP": [0.25, 0.75, 0.0]}
    (axes,) = noise_plots.weights_of_clients(weights, "title").axes
    shown = drawn(axes)
    np.testing.assert_allclose(shown["oracle"][:, 1], [0.7, 0.2, 0.1])
    np.testing.assert_allclose(shown["Robust-HDP (1 of weight 0)"][:, 1], [0.75, 0.25, np.nan])
    assert [t.get_text() for t in axes.get_xticklabels()] == ["1", "0", "2"]
    (axes,) = noise_plots.weights_of_clients(weights, "title", order=[2, 0, 1]).axes
    np.testing.assert_allclose(drawn(axes)["oracle"][:, 1], [0.1, 0.2, 0.7])


@pytest.mark.parametrize("number", later([3, 40, 400], but=[40], mark=telling))
def test_weights_of_any_number_of_clients_can_be_read(number):
    sizes = np.arange(1, number + 1) ** -1.2
    equal = np.ones(number) / number
    weights = {"oracle": sizes / sizes.sum(), "WeiAvg": equal, "DPFedAvg": equal}
    names = [f"hospital {i}" for i in range(number)]
    figure = noise_plots.weights_of_clients(weights, "title", names=names)
    assert flaws(figure) == []
    (axes,) = figure.axes
    for line in axes.get_lines() if number != 40 else ():
        assert visible_share(figure, line) > 0.1, line.get_label()
    labels = [t.get_text() for t in axes.get_xticklabels()]
    assert labels[0] == "hospital 0" and len(labels) == -(-number // max(1, -(-number // 45)))
