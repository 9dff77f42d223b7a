"""Plots of a run and of a sweep: accuracy, ε, traffic, simulated time, update norms."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.packages import needed_for
from fedjax_dp.io import drawing
from fedjax_dp.io.drawing import save as save

with needed_for("drawing", "plots"):
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# The suffix of a metric that is the least over clients or records.
_SMALLEST = "_smallest"
# Rounds, or other positions, and the values of a metric there.
_Points = list[tuple[float, float]]
# x, means, and standard deviations; a deviation of None is that of one seed.
Curve = tuple[Sequence[float], Sequence[float], Sequence[float | None]]


@checked
def accuracy_and_epsilon(rows: list[dict[str, Any]], title: str) -> Figure:
    """Draws test accuracy and the ε spent by round.

    Args:
      rows: the metrics, as `read_metrics` returns them. With `shared_test_accuracy`, which makes
        `test_accuracy` that of personal models, both are drawn. Different budgets of clients
        give a band from `epsilon_UNIT_smallest` to `epsilon_UNIT`.
      title: the title.

    Returns:
      The figure; without ε if the run has none that is finite.
    """
    metrics = {name.removesuffix(_SMALLEST) for row in rows for name in row}
    curves = {name: _known(rows, name) for name in sorted(metrics) if name.startswith("epsilon_")}
    curves = {name: points for name, points in curves.items() if points}
    figure = drawing.new_figure(4.8 if curves else 3.2)
    parts = figure.subplots(1 + bool(curves), sharex=True, squeeze=False)[:, 0]
    top, bottom = parts[0], parts[-1]
    shared = _known(rows, "shared_test_accuracy")
    accuracies = {"personal models" if shared else "test accuracy": _known(rows, "test_accuracy")}
    for i, (label, points) in enumerate((accuracies | {"shared model": shared}).items()):
        if points:
            drawing.draw_curve(top, i, *_columns(points), label)
    drawing.set_title(top, title)
    _accuracy_axis(top)
    if shared:
        drawing.legend_above(top)
    for i, (name, points) in enumerate(curves.items()):
        _epsilon(bottom, i, name.removeprefix("epsilon_"), points, _known(rows, name + _SMALLEST))
    if curves:
        bottom.set_ylabel("ε spent")
        bottom.set_ylim(bottom=0)
        drawing.legend_above(bottom)
    _finish_rounds(parts)
    return figure


def _accuracy_axis(axes: Axes) -> None:
    axes.set(ylabel="test accuracy", ylim=(-0.02, 1.02))


def _finish_rounds(parts: np.ndarray) -> None:
    """Adds grids to all axes, and labels the lowest, which share their rounds."""
    for axes in parts:
        axes.grid(alpha=0.25)
    parts[-1].set_xlabel("round")
    drawing.integer_ticks(parts[-1])


def _columns(points: _Points) -> tuple[list[float], list[float]]:
    """Splits points into positions and values."""
    return [x for x, _ in points], [y for _, y in points]


def _epsilon(axes: Axes, index: int, unit: str, largest: _Points, smallest: _Points) -> None:
    """Draws ε of a unit of privacy: a curve, or a band if budgets differ."""
    whose = "of a client" if unit == "client" else f"of a {unit}"
    colour = drawing.COLOURS[1 + index]
    if not smallest:
        drawing.draw_curve(axes, index, *_columns(largest), f"ε {whose}", color=colour)
        return
    low, high = dict(smallest), dict(largest)
    rounds = [x for x in high if x in low]
    lows = [low[x] for x in rounds]
    drawing.draw_curve(axes, index, *_columns(largest), f"ε {whose}, largest", color=colour)
    line = drawing.draw_curve(axes, index + 1, rounds, lows, f"ε {whose}, smallest", color=colour)
    highs = [high[x] for x in rounds]
    axes.fill_between(rounds, lows, highs, color=line.get_color(), alpha=0.2, linewidth=0)


@checked
def accuracy_by_megabytes(rows: list[dict[str, Any]], title: str) -> Figure:
    """Draws test accuracy against the traffic so far.

    Args:
      rows: the metrics, as `read_metrics` returns them, with `bytes_up` and `bytes_down` in every
        row; else there is no curve.
      title: the title.

    Returns:
      The figure; a curve for the upload and one for both directions, in MB of 10⁶ bytes.
    """
    figure = drawing.new_figure()
    axes = figure.subplots()
    up = np.cumsum([row.get("bytes_up") or 0 for row in rows]) / 1e6
    both = up + np.cumsum([row.get("bytes_down") or 0 for row in rows]) / 1e6
    measured = dict(_known(rows, "test_accuracy"))
    is_measured = np.array([row["round"] in measured for row in rows], bool)
    values = list(measured.values())
    if values and all("bytes_up" in row for row in rows):
        drawing.draw_curve(axes, 0, both[is_measured], values, "up and down")
        drawing.draw_curve(axes, 1, up[is_measured], values, "up")
    axes.set_xlabel("MB sent")
    axes.set_xlim(left=0)
    _accuracy_axis(axes)
    drawing.finish(axes, title)
    return figure


@checked
def accuracy_by_seconds(rows: list[dict[str, Any]], title: str) -> Figure:
    """Draws test accuracy against simulated seconds.

    Args:
      rows: the metrics of a run with a clock, as `read_metrics` returns them; a row without
        `simulated_seconds` has no point.
      title: the title.

    Returns:
      The figure; a curve for `test_accuracy`, and one for the shared model if that is another.
    """
    figure = drawing.new_figure()
    axes = figure.subplots()
    is_personal = any("shared_test_accuracy" in row for row in rows)
    labels = {"test_accuracy": "personal models" if is_personal else "test accuracy"}
    for i, (name, label) in enumerate((labels | {"shared_test_accuracy": "shared model"}).items()):
        if points := _known(rows, name, by="simulated_seconds"):
            drawing.draw_curve(axes, i, *_columns(points), label)
    axes.set_xlabel("simulated seconds")
    _accuracy_axis(axes)
    drawing.finish(axes, title, has_legend=len(axes.get_lines()) > 1)
    return figure


def _known(rows: list[dict[str, Any]], name: str, by: str = "round") -> _Points:
    """Selects the rounds in which a metric is measured and finite, by another metric."""
    known = [row for row in rows if all(_is_finite(row.get(metric)) for metric in (by, name))]
    return [(row[by], row[name]) for row in known]


def _is_finite(value: Any) -> bool:
    return value is not None and bool(np.isfinite(value))


def update_norms(rows: list[dict[str, Any]], clip_norm: float | None, title: str) -> Figure:
    """Draws update norms before clipping, the share clipped, and the noise, by round."""
    measured = [row for row in rows if row.get("update_norm_quantiles") is not None]
    below = {
        "share clipped": _known(rows, "clipped_client_share"),
        "noise stddev\nby coordinate": _known(rows, "noise_stddev"),
    }
    below = {label: points for label, points in below.items() if points}
    figure = drawing.new_figure(3.4 + 1.2 * len(below))
    heights = (2.5, *[1] * len(below))
    parts = figure.subplots(len(heights), sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    _norms(parts[0], measured, _bounds(rows, measured, clip_norm))
    drawing.set_title(parts[0], title)
    drawing.legend_above(parts[0])
    for axes, (label, points) in zip(parts[1:], below.items(), strict=True):
        axes.plot(*_columns(points), color=drawing.BLUE if "share" in label else drawing.RED)
        axes.set_ylabel(label)
        axes.set_ylim(*((-0.05, 1.05) if "share" in label else (0, None)))
    _finish_rounds(parts)
    return figure


def _bounds(
    rows: list[dict[str, Any]], measured: list[dict[str, Any]], clip_norm: float | None
) -> _Points:
    """Returns the clip norm by round: from the rows, else one number for all."""
    bounds = _known(rows, "clip_norm")
    if not bounds and clip_norm is not None and measured:
        bounds = [(measured[0]["round"], clip_norm), (measured[-1]["round"], clip_norm)]
    return bounds


def _norms(axes: Axes, measured: list[dict[str, Any]], bounds: _Points) -> None:
    """Draws norms as bands, on a logarithmic scale if they spread widely."""
    axes.set_ylabel("L2 norm of an update")
    least = 0.0
    if measured:
        rounds = [row["round"] for row in measured]
        norms = np.array([row["update_norm_quantiles"] for row in measured], dtype=float).T
        # Updates may be 0: only values above 0 determine the scale.
        seen = np.concatenate([norms.ravel(), [value for _, value in bounds]])
        if drawing.log_where_wide(axes, "y", seen):
            least = float(np.min(seen[seen > 0])) / 1.5
            norms = np.maximum(norms, least)
        axes.fill_between(
            rounds, norms[0], norms[4], color=drawing.BLUE, alpha=0.15, label="least to largest"
        )
        axes.fill_between(
            rounds, norms[1], norms[3], color=drawing.BLUE, alpha=0.3, label="10 % to 90 %"
        )
        axes.plot(rounds, norms[2], color=drawing.BLUE, label="median")
    if bounds:
        axes.plot(*_columns(bounds), color=drawing.RED, linestyle="--", label="clip norm")
    axes.set_ylim(bottom=least)


def epsilon_curves(
    curves: Mapping[str, tuple[Sequence[int], Sequence[float]]], title: str
) -> Figure:
    """Draws ε over rounds for several settings: `{name: (rounds, epsilons)}`."""
    figure = drawing.new_figure()
    axes = figure.subplots()
    for i, (name, (rounds, spent)) in enumerate(curves.items()):
        drawing.draw_curve(axes, i, rounds, spent, name)
    axes.set(xlabel="round", ylabel="ε")
    if not drawing.log_where_wide(axes, "y", [s[-1] for _, s in curves.values() if len(s)]):
        axes.set_ylim(bottom=0)
    drawing.integer_ticks(axes)
    drawing.finish(axes, title)
    return figure


def accuracy_by(
    curves: Mapping[str, Curve], label: str, title: str, *, seeds: Iterable[int] = ()
) -> Figure:
    """Draws accuracy by ε or another number, with a band of one standard deviation over seeds.

    Curves are in order of x, whose name is `label`; `seeds` are those that points are means of.
    """
    figure = drawing.new_figure()
    axes = figure.subplots()
    for i, (name, (x, means, deviations)) in enumerate(curves.items()):
        line = drawing.draw_curve(axes, i, x, means, name)
        drawing.draw_band(axes, line, deviations)
    axes.set_ylabel("test accuracy")
    drawing.set_lines_below(axes, label, drawing.words_of_spread(seeds, "band"))
    drawing.log_where_wide(axes, "x", [v for x, _, _ in curves.values() for v in x])
    drawing.finish(axes, title)
    return figure
