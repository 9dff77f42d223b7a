"""Shared parts of plots: distinct curves, legends, scales, names that fit."""

from collections.abc import Sequence
from textwrap import wrap
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from fedjax_dp.core.packages import needed_for
from fedjax_dp.io.colours import COLOURS

with needed_for("drawing", "plots"):
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

BLUE, RED = COLOURS[:2]
GREY = COLOURS[7]

MARKERS = "os^DvPX*"
_DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (2, 1.5)), (0, (7, 2, 1.5, 2)))
_WIDTHS = (4.0, 2.8, 2.0, 1.4, 1.2)
_MARKS_ON_A_CURVE = 8
_LONGEST_NAME = 24
# Letters per inch: of titles, labels, and names of clients.
_TITLE, _LABEL, _NAME = 8, 9, 16


def new_figure(height: float = 4.0, width: float = 7.0) -> Figure:
    """Makes a figure, in inches, without a window."""
    return Figure(figsize=(width, height), layout="constrained")


def draw_curve(
    axes: Axes, index: int, x: ArrayLike, y: ArrayLike, label: str, **more: Any
) -> Line2D:
    """Draws one of several curves; later ones are thinner and dashed, so that none is hidden."""
    several = len(_DASHES)
    gap = max(1, -(-len(np.asarray(x)) // _MARKS_ON_A_CURVE))
    style: dict[str, Any] = {
        "color": COLOURS[index % len(COLOURS)],
        "linestyle": _DASHES[index % several],
        "linewidth": _WIDTHS[min(index, len(_WIDTHS) - 1)],
        "marker": MARKERS[index % len(MARKERS)],
        "markersize": 5,
        "markevery": (index % gap, gap),
        "zorder": 2 + 0.01 * index,
        "label": label,
    }
    (line,) = axes.plot(x, y, **style | more)
    return line


def legend_beside(axes: Axes, title: str | None = None, columns: int = 1) -> None:
    """Puts the legend to the right of the axes."""
    if axes.get_legend_handles_labels()[0]:
        axes.legend(
            loc="upper left",
            bbox_to_anchor=(1.01, 1.0),
            borderaxespad=0.0,
            frameon=False,
            fontsize=8,
            title=title,
            title_fontsize=8,
            ncols=columns,
        )


def spread_widely(values: ArrayLike) -> bool:
    """Returns whether values above 0 differ by more than a factor of ten."""
    array = np.asarray(values, np.float64)
    known = array[np.isfinite(array) & (array > 0)]
    return known.size > 0 and float(known.max()) > 10 * float(known.min())


def log_where_wide(
    axes: Axes, which: str, values: ArrayLike, *, start: float | None = None
) -> bool:
    """Sets a log scale if values spread widely; returns whether it did."""
    if not spread_widely(values):
        return False
    array = np.asarray(values, np.float64)
    known = array[np.isfinite(array) & (array > 0)]
    (axes.set_xscale if which == "x" else axes.set_yscale)("log")
    axis = axes.xaxis if which == "x" else axes.yaxis
    if known.max() < 200 * (start or known.min()):
        # Powers of ten would label one tick or two.
        axis.set_major_locator(LogLocator(subs=(1, 3), numticks=8))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_locator(NullLocator())
    else:
        axis.set_major_locator(LogLocator(numticks=8))
    return True


def whole_ticks(axes: Axes) -> None:
    """Puts the ticks of the horizontal axis at integers."""
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def set_title(axes: Axes, title: str) -> None:
    """Writes a title, wrapped to the width of the figure."""
    figure = axes.get_figure(root=True)
    spec = axes.get_subplotspec()
    width = 1.0 if figure is None else float(figure.get_size_inches()[0])
    columns = 1 if spec is None else spec.get_gridspec().ncols
    wide = max(20, int(_TITLE * width / columns))
    axes.set_title("\n".join(line for part in title.splitlines() for line in wrap(part, wide)))


def name_places(axes: Axes, names: Sequence[str], most: int = 45) -> int:
    """Writes names at 0, 1, ..., every n-th if there are more than `most`; returns n."""
    step = max(1, -(-len(names) // most))
    places = range(0, len(names), step)
    axes.set_xticks(places, [shortened(names[i]) for i in places], fontsize=7)
    figure = axes.get_figure(root=True)
    width = 7.0 if figure is None else float(figure.get_size_inches()[0])
    longest = max((len(shortened(name)) for name in names), default=0)
    if (longest + 1) * len(places) > 0.6 * _NAME * width:
        axes.tick_params(axis="x", rotation=90)
    axes.set_xlim(-0.7, max(len(names), 1) - 0.3)
    return step


def shortened(name: str) -> str:
    """Cuts the middle out of a long name."""
    if len(name) <= _LONGEST_NAME:
        return name
    half = _LONGEST_NAME // 2
    return f"{name[:half]}…{name[1 - half :]}"


def set_lines_below(axes: Axes, *lines: str) -> None:
    """Labels the horizontal axis with several lines, each wrapped."""
    figure = axes.get_figure(root=True)
    width = 7.0 if figure is None else min(7.0, float(figure.get_size_inches()[0]))
    axes.set_xlabel("\n".join(part for line in lines for part in wrap(line, int(_LABEL * width))))


def listed(names: Sequence[str], most: int = 8) -> str:
    """Lists names, and counts those beyond the first ones."""
    shown = ", ".join(shortened(n) for n in names[:most])
    more = len(names) - most
    return f"{shown} and {more} more" if more > 0 else shown
