"""Pictures of simulated time are of the numbers that they are given."""

import numpy as np
import pytest
from drawn import flaws

from fedjax_dp.engine import compute_seconds, latencies, round_times
from fedjax_dp.io import accuracy_by_seconds, round_chart

ROWS = [
    {"round": 1, "simulated_seconds": 2.0, "test_accuracy": 0.25},
    {"round": 2, "simulated_seconds": 4.5},
    {"round": 3, "simulated_seconds": 6.0, "test_accuracy": 0.5},
    {"round": 4, "test_accuracy": 0.75},
]


def curves(axes):
    return [np.column_stack(line.get_data()).tolist() for line in axes.get_lines()]


def test_accuracy_is_drawn_where_both_are_known():
    (axes,) = accuracy_by_seconds(ROWS, "a run").axes
    assert curves(axes) == [[[2.0, 0.25], [6.0, 0.5]]] and axes.get_legend() is None
    rows = [row | {"shared_test_accuracy": 0.1} for row in ROWS]
    (axes,) = accuracy_by_seconds(rows, "a run").axes
    assert curves(axes)[1] == [[2.0, 0.1], [4.5, 0.1], [6.0, 0.1]]
    assert [t.get_text() for t in axes.get_legend().get_texts()] == [
        "personal models",
        "shared model",
    ]
    assert curves(accuracy_by_seconds([], "a run").axes[0]) == []


def test_a_chart_of_a_round_has_a_bar_for_each_message():
    """By hand: down 1 and 2 s, work 3 and 4, up 5 and 6; the second is late; the third is away."""
    table = [[0, 1, 2], [5, 0, 9], [6, 9, 0]]
    places = latencies(["s", "a", "b"], table, ["a", "b", "a"], "s")
    work = compute_seconds(3, per_round=[3.0, 4.0, 1.0])
    times = round_times(places, work, deadline=10.0, server_seconds=2.0, active=[True, True, False])
    figure = round_chart(times, ["first", "second", "third"], "a round")
    (axes,) = figure.axes
    bars = {}
    for bar in axes.patches:
        line = round(bar.get_y() + bar.get_height() / 2)
        bars.setdefault(line, []).append((bar.get_x(), bar.get_x() + bar.get_width()))
    assert {line: sorted(found) for line, found in bars.items()} == {
        0: [(0, 1), (1, 4), (4, 9), (12, 13)],
        1: [(0, 2), (2, 6), (6, 12), (12, 14)],
    }
    assert [bar.get_hatch() for bar in axes.patches].count("////") == 1
    assert sorted(line.get_xdata()[0] for line in axes.get_lines()) == [10, 12]
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert set(labels) == {
        *("broadcast", "local work", "update", "late update", "next broadcast"),
        *("sum closed", "new model"),
    }
    assert len(labels) == len(set(labels))
    assert not flaws(figure)
    with pytest.raises(ValueError, match="names must name each of the 3 clients"):
        round_chart(times, ["first"], "a round")
