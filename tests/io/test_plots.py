"""Pictures are of the numbers that they are given, also where some are missing."""

import warnings

import numpy as np
import pytest

from fedjax_dp.io import accuracy_and_epsilon, accuracy_by_megabytes, client_accuracies, plots

ROWS = [
    {"round": 1, "test_accuracy": 0.0, "epsilon_record": 1.0},
    {"round": 2, "epsilon_record": 1.5},
    {"round": 3, "test_accuracy": 0.5, "epsilon_record": 2.0},
]


@pytest.fixture(autouse=True)
def _no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def drawn(axes):
    return [np.column_stack(line.get_data()).tolist() for line in axes.get_lines()]


def save(figure, tmp_path):
    path = tmp_path / "deep" / "picture.png"
    plots.save(figure, path)
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n") and data.endswith(b"IEND\xaeB`\x82")


def test_accuracy_and_epsilon_by_round(tmp_path):
    figure = accuracy_and_epsilon(ROWS, "title")
    left, right = figure.axes
    assert drawn(left) == [[[1, 0.0], [3, 0.5]]], "an accuracy of zero is an accuracy"
    assert drawn(right) == [[[1, 1.0], [2, 1.5], [3, 2.0]]]
    assert left.get_title() == "title" and right.get_ylim()[0] == 0
    save(figure, tmp_path)


def test_both_units_are_told_apart(tmp_path):
    rows = [row | {"epsilon_client": 3.0} for row in ROWS]
    right = accuracy_and_epsilon(rows, "title").axes[1]
    assert drawn(right) == [[[1, 3.0], [2, 3.0], [3, 3.0]], [[1, 1.0], [2, 1.5], [3, 2.0]]]
    labels = [text.get_text() for text in right.get_legend().get_texts()]
    assert labels == ["ε of a client", "largest ε over records"]
    assert len({line.get_linestyle() for line in right.get_lines()}) == 2


@pytest.mark.parametrize("epsilon", [None, float("inf")])
def test_without_a_finite_epsilon_there_is_only_accuracy(tmp_path, epsilon):
    rows = [{"round": i, "test_accuracy": 0.5, "epsilon_record": epsilon} for i in (1, 2)]
    figure = accuracy_and_epsilon(rows, "title")
    assert len(figure.axes) == 1 and drawn(figure.axes[0]) == [[[1, 0.5], [2, 0.5]]]
    save(figure, tmp_path)
    rows = [{"round": 1, "test_accuracy": 0.5}]
    assert len(accuracy_and_epsilon(rows, "title").axes) == 1


@pytest.mark.parametrize("rows", [[], [{"round": 1}], [{"round": 1, "test_accuracy": None}]])
def test_without_an_accuracy_there_is_an_empty_picture(tmp_path, rows):
    figure = accuracy_and_epsilon(rows, "title")
    assert drawn(figure.axes[0]) == []
    save(figure, tmp_path)


def test_clients_are_sorted_and_those_without_a_number_left_out(tmp_path):
    accuracies = np.array([0.5, np.nan, 0.25, 1.0])
    figure = client_accuracies(accuracies, np.array([10, 20, 30, 40]), "title")
    axes = figure.axes[0]
    assert [bar.get_height() for bar in axes.patches] == [0.25, 0.5, 1.0]
    labels = [label.get_text() for label in axes.get_xticklabels()]
    assert labels == ["2\n30", "0\n10", "3\n40"]
    assert axes.get_lines()[0].get_ydata()[0] == pytest.approx(1.75 / 3)
    save(figure, tmp_path)


def test_no_client_may_have_a_number(tmp_path):
    figure = client_accuracies(np.full(3, np.nan), np.arange(3), "title")
    assert not figure.axes[0].patches
    save(figure, tmp_path)


def test_many_clients_are_not_named(tmp_path):
    accuracies = np.linspace(0, 1, 41)[::-1]
    axes = client_accuracies(accuracies, np.ones(41, int), "title").axes[0]
    assert [bar.get_height() for bar in axes.patches] == sorted(accuracies)
    assert axes.get_xlabel() == "clients, from worst to best"


NORMS = [
    {"round": 1, "update_norm_quantiles": [0.1, 0.2, 0.5, 0.9, 1.0], "clipped_client_share": 0.6},
    {"round": 2, "noise_stddev": 0.01},
    {"round": 3, "update_norm_quantiles": [0.0, 0.1, 0.3, 0.4, 2.0], "clipped_client_share": 0.1},
]


def test_norms_of_updates_by_round(tmp_path):
    figure = plots.update_norms(NORMS, 0.3, "title")
    top, bottom, right = figure.axes
    assert drawn(top) == [[[1, 0.5], [3, 0.3]], [[1, 0.3], [3, 0.3]]]
    assert drawn(bottom) == [[[1, 0.6], [3, 0.1]]] and drawn(right) == [[[2, 0.01]]]
    assert top.get_title() == "title"
    save(figure, tmp_path)


def test_a_clip_norm_that_adapts_is_drawn_as_it_was():
    rows = [row | {"clip_norm": 0.1 * row["round"]} for row in NORMS]
    bound = drawn(plots.update_norms(rows, 9.0, "title").axes[0])[1]
    np.testing.assert_allclose(bound, [[1, 0.1], [2, 0.2], [3, 0.3]])


def test_norms_without_clipping_or_without_anything(tmp_path):
    rows = [{"round": 1, "update_norm_quantiles": [1.0] * 5}]
    figure = plots.update_norms(rows, None, "title")
    assert len(figure.axes) == 1 and drawn(figure.axes[0]) == [[[1, 1.0]]]
    save(plots.update_norms([{"round": 1}], 0.3, "title"), tmp_path)


@pytest.mark.parametrize("name", ["clipped_client_share", "noise_stddev"])
def test_one_of_share_and_noise_alone_has_the_lower_part(name):
    rows = [{"round": 1, "update_norm_quantiles": [1.0] * 5, name: 0.5}]
    axes = plots.update_norms(rows, None, "title").axes
    assert len(axes) == 2 and drawn(axes[1]) == [[[1, 0.5]]]
    assert axes[1].get_ylabel() in ("share clipped", "noise of a coordinate")


def test_accuracy_by_budget(tmp_path):
    curves = {"a": ([2, 4], [0.5, 0.6], [0.1, 0.0]), "b": ([4], [0.7], [0.0])}
    figure = plots.accuracy_by_epsilon(curves, "title")
    (axes,) = figure.axes
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["a", "b"]
    points = [np.column_stack(c.lines[0].get_data()).tolist() for c in axes.containers]
    assert points == [[[2, 0.5], [4, 0.6]], [[4, 0.7]]]
    save(figure, tmp_path)


def test_updates_are_drawn_by_cluster_with_the_circles_of_their_mixture(tmp_path):
    features = np.array([[0.0, 0.1], [0.2, 0.1], [1.0, 1.0]])
    means, radii = np.array([[0.1, 0.1], [1.0, 1.0]]), np.array([0.1, 0.05])
    figure = plots.updates_and_mixture(features, np.array([7, 7, 3]), means, radii, "a title")
    (axes,) = figure.axes
    points = {c.get_label(): np.asarray(c.get_offsets()).tolist() for c in axes.collections}
    assert points == {"cluster 7": [[0.0, 0.1], [0.2, 0.1]], "cluster 3": [[1.0, 1.0]]}
    circles = [(*p.center, p.radius) for p in axes.patches]
    expected = [(*m, k * r) for m, r in zip(means, radii, strict=True) for k in (1, 2, 3)]
    np.testing.assert_allclose(circles, expected)
    assert axes.get_title() == "a title"
    save(figure, tmp_path)


def test_accuracy_against_what_was_sent_up_to_then(tmp_path):
    sent = [{"bytes_up": 2_000_000, "bytes_down": 1_000_000} | row for row in ROWS]
    figure = accuracy_by_megabytes(sent, "title")
    (axes,) = figure.axes
    assert drawn(axes) == [[[3, 0.0], [9, 0.5]], [[2, 0.0], [6, 0.5]]]
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert labels == ["up and down", "up"]
    save(figure, tmp_path)
    assert drawn(accuracy_by_megabytes([{"round": 1, "bytes_up": 5}], "title").axes[0]) == []
