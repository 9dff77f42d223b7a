"""Draws the convex figures: one panel a problem, gaps over rounds."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure


def draw(results: Sequence[Mapping[str, Any]], folder: pathlib.Path) -> None:
    """Draws each figure that there are curves of.

    Args:
      results: the groups of curves.
      folder: gets a PNG file for each figure.
    """
    by_figure: dict[str, dict[str, list[Any]]] = {}
    for result in results:
        group = result["group"]
        panel = group["setting"]["problem"].upper()
        if group["figure"] == "2.7":
            panel = f"LS, H = {4 * result['H']:.3g}"
        for label, curve in result["curves"].items():
            figure = group["figure"].split()[0]
            if figure == "2.5":
                method, _, label = label.partition(", ")
                figure = "2.5" if method == "FedProx" else "2.6"
            panels = by_figure.setdefault(figure, {})
            if group["figure"] == "B.1":
                label = f"{label}, {group['setting']['participation']:g}"
            if group["setting"]["memory"] and group["figure"] == "2.8":
                label = f"{label}, τ = 2"
            panels.setdefault(panel, []).append((label, result["rounds"], curve))
    for figure, panels in by_figure.items():
        drawn = Figure(figsize=(6 * len(panels), 4.5), layout="constrained")
        for axes, (panel, curves) in zip(
            np.atleast_1d(drawn.subplots(1, len(panels))), panels.items(), strict=True
        ):
            _panel(axes, figure, curves)
            axes.set_title(f"Figure {figure}, {panel}")
        drawn.savefig(folder / f"figure_{figure}.png", dpi=80)


def _panel(axes: Any, figure: str, curves: Sequence[Any]) -> None:
    if figure == "2.4":
        lines: dict[str, list[Any]] = {}
        for label, _, curve in curves:
            k, line = label.split(", ")
            lines.setdefault(line, []).append((int(k[4:]), curve["gap"][-1]))
        for line, points in lines.items():
            axes.plot(*zip(*sorted(points), strict=True), marker="o", label=line)
        axes.set_xlabel("k")
    else:
        for label, rounds, curve in curves:
            at = np.array(rounds) + 1
            (drawn,) = axes.plot(at, np.maximum(curve["gap"], 1e-12), label=label)
            if figure in ("2.5", "2.6"):
                axes.plot(at, curve["average"], color=drawn.get_color(), linestyle=":")
        axes.set_xlabel("rounds")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_ylabel("gap at the end" if figure == "2.4" else "gap")
    axes.legend(fontsize="x-small")
