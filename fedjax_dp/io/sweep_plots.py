"""Plots of a sweep: accuracy by ε, with bands over seeds."""

from collections.abc import Mapping, Sequence

import numpy as np

from fedjax_dp.core.packages import needed_for
from fedjax_dp.io import drawing

with needed_for("drawing", "plots"):
    from matplotlib.figure import Figure

# x, means, and standard deviations; a deviation of None is that of one seed.
Curve = tuple[Sequence[float], Sequence[float], Sequence[float | None]]


def accuracy_by(curves: Mapping[str, Curve], label: str, title: str) -> Figure:
    """Draws accuracy by ε or another number, with a band of one standard deviation over seeds.

    Args:
      curves: by name, in order of x.
      label: the name of x.
      title: the title.

    Returns:
      The figure.
    """
    figure = drawing.new_figure()
    axes = figure.subplots()
    for i, (name, (x, means, deviations)) in enumerate(curves.items()):
        line = drawing.draw_curve(axes, i, x, means, name)
        mean, width = np.asarray(means), np.asarray([d or 0.0 for d in deviations])
        axes.fill_between(
            x, mean - width, mean + width, color=line.get_color(), alpha=0.12, linewidth=0
        )
    axes.set(xlabel=label, ylabel="test accuracy")
    drawing.log_where_wide(axes, "x", [v for x, _, _ in curves.values() for v in x])
    drawing.set_title(axes, title)
    axes.grid(alpha=0.25)
    drawing.legend_beside(axes)
    return figure
