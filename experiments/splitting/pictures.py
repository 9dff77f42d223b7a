"""Draws the convex figures: one panel a problem and setting, gaps over rounds."""

import pathlib
from collections.abc import Mapping, Sequence
from textwrap import wrap
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes

from experiments.splitting.curves import METHODS
from fedjax_dp.io import drawing, plots

PROBLEMS = {"ls": "Least squares", "lr": "Logistic regression"}
# Gaps below this are drawn at it: float32 does not distinguish smaller ones.
FLOOR = 1e-12
# What each figure of the chapter shows; files have its number.
TITLES = {
    "2.2": "FedAvg with k local steps of size η",
    "2.4": "FedAvg, the last gap where η (k − 1) is the same",
    "2.5": "FedProx with steps that shrink (dotted: the average of all models so far)",
    "2.6": "FedRP with steps that shrink (dotted: the average of all models so far)",
    "2.7": "Methods where clients disagree more and more (H)",
    "2.8": "Anderson acceleration (solid: memory τ = 2, dotted: none)",
    "B.1": "Cohorts in which each client is with probability p",
    "B.2": "Mini-batches of a fifth of a client's examples",
}


class Curve(NamedTuple):
    """One curve of a panel.

    Attributes:
      label: its name.
      rounds: where gaps were kept.
      curve: `gap`, and `average` of the mean model, at each of them.
      style: properties of the line in place of those of its number.
    """

    label: str
    rounds: Sequence[int]
    curve: Mapping[str, Any]
    style: Mapping[str, Any] = {}


def draw(results: Sequence[Mapping[str, Any]], folder: pathlib.Path) -> None:
    """Draws each figure that there are curves of.

    Args:
      results: the groups of curves.
      folder: gets a PNG and a PDF file for each figure.
    """
    for name, panels in panels_of(results).items():
        columns = min(len(panels), 3 if len(panels) == 3 else 2)
        labels = [[curve.label for curve in curves] for curves in panels.values()]
        is_shared = len(panels) > 1 and labels.count(labels[0]) == len(labels)
        width = drawing.COLUMN if columns == 1 else drawing.PAGE
        figure = drawing.new_figure(3.0 * -(-len(panels) // columns) + 0.6, width)
        grid = figure.subplots(-(-len(panels) // columns), columns, squeeze=False)
        for axes, (title, curves) in zip(grid.flat, panels.items(), strict=True):
            if name == "2.4":
                _last_gaps(axes, curves)
            else:
                _gaps(axes, curves, with_averages=name in ("2.5", "2.6"))
            drawing.set_title(axes, title)
            axes.grid(alpha=0.25)
            if not is_shared:
                drawing.legend_above(axes)
        if is_shared:
            drawing.legend_below(figure, grid.flat[0], columns=2 if name == "2.8" else 3)
        figure.suptitle("\n".join(wrap(TITLES[name], int(11 * width))), fontsize=11)
        plots.save(figure, folder / f"figure_{name}.png")


def panels_of(results: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, list[Curve]]]:
    """Sorts curves into figures and their panels, by number and by title."""
    found: dict[str, dict[str, list[Curve]]] = {}
    for result in results:
        setting, figure = result["group"]["setting"], result["group"]["figure"]
        if figure not in TITLES:
            # Runs that check others.
            continue
        for label, curve in result["curves"].items():
            name, panel, style = figure, PROBLEMS[setting["problem"]], {}
            if figure == "2.2":
                panel += " by local steps" if label.startswith("k") else ", k = 10"
            elif figure == "2.5":
                method, _, label = label.partition(", ")
                name, label = "2.5" if method == "FedProx" else "2.6", label.replace("_", " ")
            elif figure == "2.7":
                panel += drawing.with_powers(f"\nH = {4 * result['H']:.2e}")
            elif figure == "2.8":
                style = _of_method(label, is_plain=not setting["memory"])
                label += ", τ = 2" if setting["memory"] else ""
            elif figure == "B.1":
                panel += f", p = {setting['participation']:g}"
            curves = found.setdefault(name, {}).setdefault(panel, [])
            curves.append(Curve(label, result["rounds"], curve, style))
    return found


def _of_method(method: str, is_plain: bool) -> dict[str, Any]:
    """Gives a method one colour and mark; without acceleration it is dotted."""
    i = list(METHODS).index(method)
    style = {"color": drawing.COLOURS[i], "marker": drawing.MARKERS[i]}
    return style | ({"linestyle": ":", "linewidth": 1.5} if is_plain else {"linestyle": "-"})


def _gaps(axes: Axes, curves: Sequence[Curve], with_averages: bool) -> None:
    """Draws gaps over rounds, and those of the averages of all models so far where asked for."""
    for i, (label, rounds, curve, style) in enumerate(curves):
        at = np.array(rounds) + 1
        gaps = np.maximum(curve["gap"], FLOOR)
        line = drawing.draw_curve(axes, i, at, gaps, label, markersize=4, **style)
        if with_averages:
            # Dots of each curve stand in the gaps of the others.
            dots = (1.5 * i, (1.5, 1.5 * (len(curves) - 1)))
            axes.plot(at, curve["average"], color=line.get_color(), linestyle=dots, linewidth=1.5)
    axes.set(xscale="log", yscale="log", xlabel="round", ylabel="gap to the minimum")


def _last_gaps(axes: Axes, curves: Sequence[Curve]) -> None:
    """Draws the last gap by the number of local steps, a line for each η (k − 1)."""
    lines: dict[str, list[tuple[int, float]]] = {}
    for label, _, curve, _ in curves:
        k, line = label.split(", ")
        lines.setdefault(line, []).append((int(k.removeprefix("k = ")), curve["gap"][-1]))
    for i, (line, points) in enumerate(lines.items()):
        steps, gaps = zip(*sorted(points), strict=True)
        drawing.draw_curve(axes, i, steps, gaps, drawing.with_powers(line), markevery=1)
    axes.set(xscale="log", yscale="log", xlabel="local steps k", ylabel="last gap to the minimum")
