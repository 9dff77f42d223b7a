"""Pictures by client can be read, with 3, 40 and 400 clients, and show what they are given."""

import dataclasses
import subprocess
import sys

import numpy as np
import pytest
from drawn import flaws, texts
from marks import later, slow, telling

from fedjax_dp.data import partition, statistics
from fedjax_dp.io import client_accuracies, labels_by_client


def clients(number):
    """Sizes by a power law, a fifth of them for testing; some have no test data, one has 1."""
    sizes = (5000 * np.arange(1, number + 1) ** -1.2).astype(int) + 3
    tested = np.maximum(sizes // 5, 1)
    tested[1:number:9] = 0
    tested[2] = 1
    right = np.random.default_rng(0).binomial(tested, 0.8)
    accuracies = np.where(tested > 0, right / np.maximum(tested, 1), np.nan)
    return accuracies, sizes, tested


def names_of(number):
    return [f"hospital of St Mary {i}" for i in range(number)]


def intervals(axes):
    """Lower and upper ends, and accuracies, as drawn."""
    (bars,) = axes.containers
    points, _, (lines,) = bars.lines
    ends = np.array([segment[:, 1] for segment in lines.get_segments()])
    return ends[:, 0], ends[:, 1], points.get_ydata()


@telling
@pytest.mark.parametrize("number", [3, 40, 400])
@pytest.mark.parametrize("is_named", [True, False])
def test_nothing_overlaps(number, is_named):
    names = names_of(number) if is_named else ()
    accuracies, sizes, tested = clients(number)
    figure = client_accuracies(accuracies, sizes, tested, "a title", names=names)
    assert flaws(figure) == []
    rows = np.split(np.arange(sizes.sum()), np.cumsum(sizes)[:-1])
    figures = statistics.describe(rows, np.arange(sizes.sum()) % 7)
    figures = dataclasses.replace(figures, client_names=tuple(names))
    figure = labels_by_client(figures, title="a title")
    assert flaws(figure) == []


def test_accuracies_are_sorted_with_intervals_as_wide_as_their_test_data_are_few():
    accuracies = np.array([0.5, 1.0, 0.25, 1.0])
    figure = client_accuracies(accuracies, np.array([9, 9, 9, 9]), np.array([2, 1, 4, 1000]), "t")
    low, high, drawn = intervals(figure.axes[0])
    np.testing.assert_allclose(drawn, [0.25, 0.5, 1, 1])
    # One of one, by hand: 1/(1 + 1.96²) = 0.2065; a thousand of a thousand: 0.99617.
    np.testing.assert_allclose(low[2:], [0.2065, 0.99617], atol=1e-4)
    np.testing.assert_allclose(high[2:], 1)
    assert np.all(low[:2] < drawn[:2]) and np.all(high[:2] > drawn[:2])
    labels = [label.get_text() for label in figure.axes[1].get_xticklabels()]
    assert labels == ["2", "0", "1", "3"]
    mean = figure.axes[0].get_legend().get_texts()[0].get_text()
    assert mean == "mean of clients, 0.688"


@pytest.mark.parametrize("number", later([40, 400], but=[40], mark=telling))
def test_clients_without_test_data_are_named(number):
    accuracies, sizes, tested = clients(number)
    figure = client_accuracies(accuracies, sizes, tested, "t", names=names_of(number))
    assert flaws(figure) == []
    (words,) = [text for text, _ in texts(figure) if "without test data" in text]
    missing = np.flatnonzero(tested == 0)
    assert f"{len(missing)} without test data" in words
    for i in missing[:8]:
        assert f"St Mary {i}" in words.replace("\n", " ")
    assert (f"and {len(missing) - 8} more" in words) == (len(missing) > 8)
    (zone,) = [p for p in figure.axes[0].patches if p.get_label() == "no test data"]
    assert zone.get_extents().x1 - zone.get_extents().x0 > 0
    assert zone.get_width() == len(missing)


def test_sizes_that_differ_widely_are_all_seen():
    accuracies, sizes, tested = clients(40)
    assert sizes.max() > 10 * sizes.min()
    bottom = client_accuracies(accuracies, sizes, tested, "t").axes[1]
    assert bottom.get_yscale() == "log"
    # A bar on a logarithmic scale would begin anywhere.
    assert not bottom.patches
    training, test = (sorted(line.get_ydata()) for line in bottom.get_lines())
    assert training == sorted(sizes) and test == sorted(tested[tested > 0])
    low, high = bottom.get_ylim()
    assert 0 < low < min(test) and high > max(training)
    alike = client_accuracies(accuracies, np.full(40, 7), np.full(40, 7), "t").axes[1]
    assert alike.get_yscale() == "linear" and alike.get_ylim()[0] == 0
    assert {bar.get_y() for bar in alike.patches} == {0}


def test_no_client_may_have_test_data():
    figure = client_accuracies(np.full(3, np.nan), np.arange(3), np.zeros(3, int), "title")
    assert not figure.axes[0].containers
    assert any("3 without test data: 0, 1, 2" in text for text, _ in texts(figure))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"accuracies": np.ones(2)}, "accuracies must have one value for each size"),
        ({"test_sizes": np.ones(2)}, "test_sizes must have one value for each size"),
        ({"names": ["a"]}, "names must be 3 strings, got 1"),
    ],
)
def test_what_belongs_together_has_one_length(changed, message):
    three = {"accuracies": np.ones(3), "sizes": np.ones(3), "test_sizes": np.ones(3), "title": "t"}
    with pytest.raises(ValueError, match=message):
        client_accuracies(**three | changed)


@pytest.mark.parametrize(
    ("num_clients", "num_labels"), later([(5, 4), (300, 10), (40, 62)], but=[(5, 4)], mark=telling)
)
def test_label_shares_of_small_clients_are_as_high_as_those_of_large_ones(num_clients, num_labels):
    labels = np.random.default_rng(0).integers(0, num_labels, 6000)
    rows = partition.dirichlet(labels, num_clients, 0, alpha=0.5)
    figures = statistics.describe(rows, labels)
    figure = labels_by_client(figures, max_clients=40, title="here")
    sizes, shares, histogram = figure.axes[0], figure.axes[1], figure.axes[-1]
    order = np.argsort([-len(r) for r in rows], kind="stable")
    if num_clients > 40:
        order = order[np.linspace(0, num_clients - 1, 40).round().astype(int)]
    drawn = np.array([[bar.get_height() for bar in group] for group in shares.containers]).T
    counts = np.array([np.bincount(labels[rows[i]], minlength=num_labels) for i in order])
    np.testing.assert_allclose(drawn, counts / counts.sum(axis=1, keepdims=True))
    np.testing.assert_allclose(drawn.sum(axis=1), 1)
    tops = [bar.get_height() for bar in sizes.patches] or sizes.get_lines()[0].get_ydata()
    np.testing.assert_allclose(tops, [len(rows[i]) for i in order])
    assert sum(bar.get_height() for bar in histogram.patches) == num_clients
    assert len({tuple(group[0].get_facecolor()) for group in shares.containers}) == num_labels


def test_a_partition_without_labels_and_with_an_empty_client():
    figures = statistics.describe([np.array([0, 1]), np.arange(2, 9), np.array([], int)])
    figure = labels_by_client(dataclasses.replace(figures, client_names=("a", "b", "c")))
    assert len(figure.axes) == 2
    assert [bar.get_height() for bar in figure.axes[0].patches] == [7, 2]
    assert any("1 without examples: c" in text for text, _ in texts(figure))


def test_names_are_drawn_as_they_are_and_not_as_formulas():
    """Two signs of dollars begin and end a formula, and one that is none ends the run."""
    names = ("$\\q$", "a\nb\x1b", "pays $5 or $6")
    found = dataclasses.replace(
        statistics.describe([np.arange(3)] * 3, np.array([0, 1, 1])), client_names=names
    )
    figure = labels_by_client(found, title=None)
    figure.canvas.draw()
    drawn = {label.get_text() for axes in figure.axes for label in axes.get_xticklabels()}
    assert {r"\$\q\$", r"a\nb\x1b", r"pays \$5 or \$6"} <= drawn


@slow
def test_drawing_touches_no_global_state():
    code = (
        "import sys, numpy as np; from fedjax_dp.data import statistics as s;"
        "assert 'matplotlib' not in sys.modules;"
        "from fedjax_dp import io;"
        "io.labels_by_client(s.describe([np.arange(3)], np.arange(3)));"
        "assert 'matplotlib.pyplot' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
