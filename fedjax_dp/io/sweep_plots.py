"""Plots of a sweep: accuracy by ε, with bands over seeds."""

from collections.abc import Iterable, Mapping, Sequence

from fedjax_dp.core.packages import needed_for
from fedjax_dp.io import drawing

with needed_for("drawing", "plots"):
    from matplotlib.figure import Figure

# x, means, and standard deviations; a deviation of None is that of one seed.
Curve = tuple[Sequence[float], Sequence[float], Sequence[float | None]]


def accuracy_by(
    curves: Mapping[str, Curve], label: str, title: str, *, seeds: Iterable[int] = ()
) -> Figure:
    """Draws accuracy by ε or another number, with a band of one standard deviation over seeds."""
    figure = drawing.new_figure()
    axes = figure.subplots()
    for i, (name, (x, means, deviations)) in enumerate(curves.items()):
        line = drawing.draw_curve(axes, i, x, means, name)
        drawing.draw_band(axes, line, deviations)
    axes.set_ylabel("test accuracy")
    drawing.set_lines_below(axes, label, drawing.words_of_spread(seeds, "band"))
    drawing.log_where_wide(axes, "x", [v for x, _, _ in curves.values() for v in x])
    drawing.set_title(axes, title)
    axes.grid(alpha=0.25)
    drawing.legend_above(axes)
    return figure
