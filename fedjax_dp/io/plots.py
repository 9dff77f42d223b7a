"""Plots of a run by round: accuracy, ε, update norms."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.packages import needed_for
from fedjax_dp.io import drawing
from fedjax_dp.io.figure_files import save as save

with needed_for("drawing", "plots"):
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# The suffix of a metric that is the least over clients or records.
_SMALLEST = "_smallest"


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
    names = {name.removesuffix(_SMALLEST) for row in rows for name in row if _is_epsilon(name)}
    curves = {name: spent for name in sorted(names) if (spent := _known(rows, name))}
    figure = drawing.new_figure(4.8 if curves else 3.2)
    parts = figure.subplots(1 + bool(curves), sharex=True, squeeze=False)[:, 0]
    top, bottom = parts[0], parts[-1]
    shared = _known(rows, "shared_test_accuracy")
    label = "personal models" if shared else "test accuracy"
    for i, (name, measured) in enumerate(
        ((label, _known(rows, "test_accuracy")), ("shared model", shared))
    ):
        if measured:
            drawing.draw_curve(top, i, *_columns(measured), name)
    top.set(ylabel="test accuracy", ylim=(-0.02, 1.02))
    drawing.set_title(top, title)
    if shared:
        drawing.legend_above(top)
    for i, (name, spent) in enumerate(curves.items()):
        _epsilon(bottom, i, name.removeprefix("epsilon_"), spent, _known(rows, name + _SMALLEST))
    if curves:
        bottom.set_ylabel("ε spent")
        bottom.set_ylim(bottom=0)
        drawing.legend_above(bottom)
    for axes in parts:
        axes.grid(alpha=0.25)
    bottom.set_xlabel("round")
    drawing.integer_ticks(bottom)
    return figure


def _is_epsilon(name: str) -> bool:
    return name.startswith("epsilon_")


def _columns(points: list[tuple[int, float]]) -> tuple[list[int], list[float]]:
    """Splits points into positions and values."""
    return [at for at, _ in points], [value for _, value in points]


def _epsilon(
    axes: Axes,
    index: int,
    unit: str,
    largest: list[tuple[int, float]],
    smallest: list[tuple[int, float]],
) -> None:
    """Draws ε of a unit of privacy: a curve, or a band if budgets differ."""
    whose = "of a client" if unit == "client" else f"of a {unit}"
    colour = drawing.COLOURS[1 + index]
    if not smallest:
        drawing.draw_curve(axes, index, *_columns(largest), f"ε {whose}", color=colour)
        return
    low = dict(smallest)
    rounds = [at for at, _ in largest if at in low]
    high = [value for at, value in largest if at in low]
    lows = [low[at] for at in rounds]
    drawing.draw_curve(axes, index, *_columns(largest), f"ε {whose}, largest", color=colour)
    line = drawing.draw_curve(axes, index + 1, rounds, lows, f"ε {whose}, smallest", color=colour)
    axes.fill_between(rounds, lows, high, color=line.get_color(), alpha=0.2, linewidth=0)


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
    axes.set(xlabel="MB sent", ylabel="test accuracy", ylim=(-0.02, 1.02))
    axes.set_xlim(left=0)
    drawing.set_title(axes, title)
    axes.grid(alpha=0.25)
    drawing.legend_above(axes)
    return figure


def _known(rows: list[dict[str, Any]], name: str) -> list[tuple[int, float]]:
    """Selects the rounds in which a metric is measured and finite."""
    return [
        (row["round"], row[name])
        for row in rows
        if row.get(name) is not None and np.isfinite(row[name])
    ]


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
    for axes in parts:
        axes.grid(alpha=0.25)
    parts[-1].set_xlabel("round")
    drawing.integer_ticks(parts[-1])
    return figure


def _bounds(
    rows: list[dict[str, Any]], measured: list[dict[str, Any]], clip_norm: float | None
) -> list[tuple[int, float]]:
    """Returns the clip norm by round: from the rows, else one number for all."""
    bounds = _known(rows, "clip_norm")
    if not bounds and clip_norm is not None and measured:
        bounds = [(measured[0]["round"], clip_norm), (measured[-1]["round"], clip_norm)]
    return bounds


def _norms(axes: Axes, measured: list[dict[str, Any]], bounds: list[tuple[int, float]]) -> None:
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
    drawing.set_title(axes, title)
    drawing.integer_ticks(axes)
    axes.grid(alpha=0.25)
    drawing.legend_above(axes)
    return figure
