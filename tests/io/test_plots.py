"""Pictures are of the numbers that they are given, also where some are missing."""

import warnings

import numpy as np
import pytest
from drawn import flaws, visible_share
from matplotlib.colors import to_rgb

from fedjax_dp.io import accuracy_and_epsilon, accuracy_by_bytes, drawing, plots

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


def test_both_units_have_a_curve_each(tmp_path):
    rows = [row | {"epsilon_client": 3.0} for row in ROWS]
    right = accuracy_and_epsilon(rows, "title").axes[1]
    assert drawn(right) == [[[1, 3.0], [2, 3.0], [3, 3.0]], [[1, 1.0], [2, 1.5], [3, 2.0]]]
    labels = [text.get_text() for text in right.get_legend().get_texts()]
    assert labels == ["ε of a client", "ε of a record"]
    assert len({line.get_linestyle() for line in right.get_lines()}) == 2


def test_budgets_that_differ_are_a_band_from_the_smallest_to_the_largest():
    rows = [row | {"epsilon_record_smallest": row["epsilon_record"] / 8} for row in ROWS]
    figure = accuracy_and_epsilon(rows, "title")
    (below,) = figure.axes[1:]
    assert drawn(below) == [[[1, 1.0], [2, 1.5], [3, 2.0]], [[1, 0.125], [2, 0.1875], [3, 0.25]]]
    (band,) = below.collections
    edges = band.get_paths()[0].vertices
    for at, low, high in ((1, 0.125, 1.0), (2, 0.1875, 1.5), (3, 0.25, 2.0)):
        assert {low, high} <= set(edges[edges[:, 0] == at, 1])
    labels = [text.get_text() for text in below.get_legend().get_texts()]
    assert labels == ["ε of a record, largest", "ε of a record, smallest"]


def test_personal_models_and_the_shared_one_are_both_drawn():
    rows = [row | {"shared_test_accuracy": 0.4} for row in ROWS]
    top = accuracy_and_epsilon(rows, "title").axes[0]
    assert drawn(top) == [[[1, 0.0], [3, 0.5]], [[1, 0.4], [2, 0.4], [3, 0.4]]]
    labels = [text.get_text() for text in top.get_legend().get_texts()]
    assert labels == ["personal models", "shared model"]


ROUNDS = list(range(1, 41))
LONG = (
    "a run with a name of many words that would reach beyond its figure if they stood on one line"
)


def pictures():
    """Every picture with curves where legends and titles used to lie on them."""
    rising = [100 * (1 - 0.9**r) for r in ROUNDS]
    rows = [
        {
            "round": r,
            "test_accuracy": rising[i] / 100,
            "shared_test_accuracy": 0.9 - rising[i] / 120,
            "epsilon_record": r**0.5,
            "epsilon_client": 2.0,
            "update_norm_quantiles": [0.01, 1.0, 2.0, 3.0, 30.0],
            "clipped_client_share": 1.0,
            "noise_stddev": 0.01,
            "bytes_up": 10**6,
        }
        for i, r in enumerate(ROUNDS)
    ]
    methods = [f"method {i}" for i in range(6)]
    long = "algorithm.name = my.own.module:a_factory_of_a_long_name, training.learning_rate = 0."
    points = {f"{long}{i}": (ROUNDS, rising, [1.0] * len(rising)) for i in range(3)}
    return {
        "sweep": plots.accuracy_by(points, "ε", LONG, seeds=[3]),
        "accuracy_and_epsilon": accuracy_and_epsilon(rows, LONG),
        "accuracy_by_bytes": accuracy_by_bytes(rows, LONG),
        "update_norms": plots.update_norms(rows, 0.3, LONG),
        "epsilon_curves": plots.epsilon_curves({m: (ROUNDS, rising) for m in methods}, LONG),
    }


def test_no_texts_overlap_and_no_legend_covers_a_curve():
    for name, figure in pictures().items():
        assert flaws(figure) == [], name


def test_every_curve_has_a_style_of_its_own_with_and_without_colour():
    axes = drawing.new_figure().subplots()
    lines = [drawing.draw_curve(axes, i, [1], [1], "a") for i in range(84)]
    styles = [
        (line.get_color(), str(line._unscaled_dash_pattern), line.get_marker()) for line in lines
    ]
    grey = [(str(line._unscaled_dash_pattern), line.get_marker()) for line in lines[:28]]
    assert len(set(styles)) == 84 and len(set(grey)) == 28
    assert len({line.get_color() for line in lines[:12]}) == 12


# Linear light under a missing kind of cones. Source: Machado, Oliveira and Fernandes 2009, table 1.
BLIND = {
    "none": np.eye(3),
    "protan": [[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]],
    "deutan": [[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]],
    "tritan": [[1.256, -0.077, -0.179], [-0.078, 0.931, 0.148], [0.005, 0.691, 0.304]],
}


@pytest.mark.parametrize("kind", BLIND)
def test_ten_classes_have_colours_that_stay_apart_under_colour_blindness(kind):
    """Differences of 15 in CIELAB, where 2.3 is just noticeable; viridis in ten steps has 7."""
    codes = np.array([to_rgb(colour) for colour in drawing.AREAS])
    light = np.where(codes <= 0.04045, codes / 12.92, ((codes + 0.055) / 1.055) ** 2.4)
    to_xyz = [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    seen = np.clip(light @ np.transpose(BLIND[kind]), 0, 1) @ np.transpose(to_xyz)
    x, y, z = np.cbrt(seen / [0.9505, 1.0, 1.089]).T
    lab = np.stack([116 * y, 500 * (x - y), 200 * (y - z)], axis=1)
    apart = np.linalg.norm(lab[:, None] - lab, axis=-1)
    assert len(apart) == 10 and apart[~np.eye(10, dtype=bool)].min() > 15


def test_a_legend_above_keeps_the_size_of_the_axes():
    heights = []
    for count in (1, 9):
        curves = {f"a method with a long name {i}": ([1, 2], [1, 2]) for i in range(count)}
        figure = plots.epsilon_curves(curves, "title")
        assert flaws(figure) == []
        heights.append(figure.axes[0].get_window_extent().height)
    assert heights[1] == pytest.approx(heights[0], rel=0.1)


@pytest.mark.parametrize(
    ("seeds", "words"),
    [
        ((), ""),
        ((1, 1), "one seed"),
        ((3, 3), "band: ± 1 standard deviation, 3 seeds"),
        ((1, 3), "band: ± 1 standard deviation, 1 to 3 seeds"),
    ],
)
def test_bands_are_described_with_their_number_of_seeds(seeds, words):
    curve = ([1.0, 2.0], [0.4, 0.5], [0.1, None])
    axes = plots.accuracy_by({"a": curve}, "ε", "title", seeds=seeds).axes[0]
    assert axes.get_xlabel().replace("\n", " ") == f"ε {words}".rstrip()
    (band,) = axes.collections
    corners = band.get_paths()[0].vertices.tolist()
    assert [1.0, 0.5] in corners and [1.0, 0.30000000000000004] in corners and [2.0, 0.5] in corners


def test_curves_that_coincide_can_all_be_seen():
    same = (ROUNDS, [50 + r for r in ROUNDS])
    figure = plots.epsilon_curves({name: same for name in "abcd"}, "title")
    lines = figure.axes[0].get_lines()
    assert len({line.get_color() for line in lines}) == 4
    for line in lines:
        assert visible_share(figure, line) > 0.1, line.get_label()


def test_norms_that_differ_widely_have_a_logarithmic_scale():
    rows = [{"round": r, "update_norm_quantiles": [0.0, 0.5, 1.0, 2.0, 80.0]} for r in (1, 2)]
    top = plots.update_norms(rows, 0.3, "title").axes[0]
    assert top.get_yscale() == "log" and 0 < top.get_ylim()[0] < 0.3 and top.get_ylim()[1] > 80
    rows = [{"round": r, "update_norm_quantiles": [0.5, 0.5, 1.0, 2.0, 3.0]} for r in (1, 2)]
    top = plots.update_norms(rows, 0.4, "title").axes[0]
    assert top.get_yscale() == "linear" and top.get_ylim()[0] == 0 and top.get_ylim()[1] > 3


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


NORMS = [
    {"round": 1, "update_norm_quantiles": [0.1, 0.2, 0.5, 0.9, 1.0], "clipped_client_share": 0.6},
    {"round": 2, "noise_stddev": 0.01},
    {"round": 3, "update_norm_quantiles": [0.0, 0.1, 0.3, 0.4, 2.0], "clipped_client_share": 0.1},
]


def test_norms_of_updates_by_round(tmp_path):
    figure = plots.update_norms(NORMS, 0.3, "title")
    top, middle, bottom = figure.axes
    assert drawn(top) == [[[1, 0.5], [3, 0.3]], [[1, 0.3], [3, 0.3]]]
    assert drawn(middle) == [[[1, 0.6], [3, 0.1]]] and drawn(bottom) == [[[2, 0.01]]]
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
    assert axes[1].get_ylabel() in ("share clipped", "noise stddev\nby coordinate")


def test_accuracy_against_what_was_sent_up_to_then(tmp_path):
    sent = [{"bytes_up": 2_000_000, "bytes_down": 1_000_000} | row for row in ROWS]
    figure = accuracy_by_bytes(sent, "title")
    (axes,) = figure.axes
    assert drawn(axes) == [[[3, 0.0], [9, 0.5]], [[2, 0.0], [6, 0.5]]]
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert labels == ["up and down", "up"]
    assert axes.get_xlabel() == "MB sent"
    save(figure, tmp_path)
    few = [row | {"bytes_up": 14, "bytes_down": 14} for row in ROWS]
    (axes,) = accuracy_by_bytes(few, "title").axes
    assert axes.get_xlabel() == "bytes sent" and drawn(axes)[0] == [[28, 0.0], [84, 0.5]]
    assert drawn(accuracy_by_bytes([{"round": 1, "bytes_up": 5}], "title").axes[0]) == []
