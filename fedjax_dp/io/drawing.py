"""Shared parts of plots: sizes, curves, bands, legends, scales, names that fit; their files."""

import functools
import os
import pathlib
import re
from collections.abc import Iterable, Sequence
from textwrap import wrap
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from fedjax_dp.core import checks
from fedjax_dp.core.foreign_text import in_plot
from fedjax_dp.core.packages import needed_for
from fedjax_dp.io.page import COLOURS

with needed_for("drawing", "plots"):
    import matplotlib
    from fontTools import subset
    from matplotlib.axes import Axes
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.backends.backend_pdf import FigureCanvasPdf
    from matplotlib.figure import Figure
    from matplotlib.font_manager import FontProperties, findfont
    from matplotlib.lines import Line2D
    from matplotlib.text import Text
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator
    from PIL import Image

BLUE, RED = COLOURS[:2]
GREY = COLOURS[7]
# Of areas side by side. Source: Petroff 2021, "Accessible color sequences for data visualization",
# ten colours, which stay apart under simulated colour blindness.
AREAS = (
    *("#3f90da", "#ffa90e", "#bd1f01", "#94a4a2", "#832db6"),
    *("#a96b59", "#e76300", "#b9ac70", "#717581", "#92dadd"),
)

# Widths in inches: texts of 10 points become 6.6 in a column of 8 cm; a page is 17.8 cm wide.
COLUMN, PAGE = 4.8, 7.0
# The numbers of colours, marks and dashes make all of the first 84 curves differ.
MARKERS = "os^DvPX"
_DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (2, 1.5)), (0, (7, 2, 1.5, 2)))
_WIDTHS = (2.8, 2.2, 1.7, 1.2, 1.0)
_MARKS_ON_A_CURVE = 8
_LONGEST_NAME = 24
_MOST_NUMBERS = 10
# Letters per inch: of titles, labels, names of clients, and legends.
_TITLE, _LABEL, _NAME, _LEGEND = 10, 9, 16, 13
# What an entry of a legend takes beside its letters, in inches, and its height in points.
_SAMPLE, _LINE = 0.65, 13.0
_SHORTEST_LINE = 10
_DOTS_PER_INCH = 200
_RAISED = str.maketrans("0123456789-", "⁰¹²³⁴⁵⁶⁷⁸⁹⁻")
_FONT = "DejaVu Sans"
# Latin and Greek, punctuation and superscripts, arrows and operators.
_CHARACTERS = frozenset(
    map(chr, (*range(0x20, 0x250), *range(0x370, 0x400), *range(0x2010, 0x2300)))
)


def new_figure(height: float = 3.2, width: float = COLUMN) -> Figure:
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
        "markersize": 4.5,
        "markevery": (index % gap, gap),
        "zorder": 2 + 0.01 * index,
        "label": in_plot(label),
    }
    (line,) = axes.plot(x, y, **style | more)
    return line


def draw_points(
    axes: Axes, names: Sequence[str], values: Sequence[float], deviations: Sequence[float | None]
) -> None:
    """Draws a point for each name, one below the other, with a deviation on both sides."""
    places = np.arange(len(names))
    errors = [d or 0.0 for d in deviations]
    bars: dict[str, Any] = {"fmt": "o", "color": BLUE, "ecolor": GREY, "capsize": 3}
    axes.errorbar(values, places, xerr=errors if any(errors) else None, **bars)
    lines = ["\n".join(wrap(in_plot(name), _LONGEST_NAME)) or name for name in names]
    axes.set_yticks(places, lines, fontsize=9)
    axes.set_ylim(len(names) - 0.5, -0.5)


def draw_band(axes: Axes, line: Line2D, deviations: Sequence[float | None]) -> None:
    """Draws a band of one standard deviation on both sides of a curve; None is no deviation."""
    x, y = (np.asarray(values, float) for values in line.get_data())
    width = np.asarray([d or 0.0 for d in deviations])
    axes.fill_between(x, y - width, y + width, color=line.get_color(), alpha=0.15, linewidth=0)


def words_of_spread(seeds: Iterable[int], mark: str) -> str:
    """Describes the bands or bars over such numbers of seeds; nothing if there are no seeds."""
    least, most = min(seeds := list(seeds), default=0), max(seeds, default=0)
    if most < 2:
        return "one seed" if most else ""
    number = f"{most}" if least == most else f"{least} to {most}"
    return f"{mark}: ± 1 standard deviation, {number} seeds"


def legend_above(axes: Axes) -> None:
    """Puts the legend between the axes and their title, in as many columns as fit."""
    handles, labels = axes.get_legend_handles_labels()
    if not labels:
        return
    width = _width(axes) - 0.6
    columns = int(width / (_SAMPLE + max(map(len, labels)) / _LEGEND))
    columns = min(max(1, columns), len(labels))
    labels = _wrapped(labels, width / columns)
    axes.legend(
        handles,
        labels,
        loc="lower left",
        bbox_to_anchor=(0.0, 1.0),
        borderaxespad=0.2,
        borderpad=0.1,
        frameon=False,
        fontsize=9,
        ncols=columns,
        columnspacing=1.2,
        handlelength=2.8,
        labelspacing=0.2,
    )
    lines = _num_lines(labels, columns)
    axes.set_title(axes.get_title(), fontsize=11, pad=8 + _LINE * lines)
    figure, spec = axes.get_figure(root=True), axes.get_subplotspec()
    if figure is not None and (spec is None or spec.is_first_col()):
        _grow(figure, lines)


def legend_below(figure: Figure, axes: Axes, columns: int) -> None:
    """Puts one legend for all axes, made of one of them, below a figure."""
    handles, labels = axes.get_legend_handles_labels()
    labels = _wrapped(labels, float(figure.get_size_inches()[0]) / columns)
    _grow(figure, _num_lines(labels, columns))
    figure.legend(
        handles,
        labels,
        loc="outside lower center",
        frameon=False,
        fontsize=9,
        ncols=columns,
        handlelength=2.8,
    )


def finish(axes: Axes, title: str, *, has_legend: bool = True) -> None:
    """Adds the title, a grid, and the legend between axes and title."""
    set_title(axes, title)
    axes.grid(alpha=0.25)
    if has_legend:
        legend_above(axes)


def _wrapped(labels: Sequence[str], width: float) -> list[str]:
    """Breaks the labels of a legend into lines, for entries of a width in inches."""
    letters = max(_SHORTEST_LINE, int((width - _SAMPLE) * _LEGEND))
    return ["\n".join(wrap(label, letters)) or label for label in labels]


def _num_lines(labels: Sequence[str], columns: int) -> int:
    """Counts the lines of a legend, which matplotlib fills by column."""
    count = -(-len(labels) // columns)
    heights = [label.count("\n") + 1 for label in labels]
    return max(sum(heights[i : i + count]) for i in range(0, len(labels), count))


def _grow(figure: Figure, lines: int) -> None:
    """Makes room for lines of a legend, so that the axes keep their size."""
    figure.set_figheight(float(figure.get_size_inches()[1]) + _LINE * lines / 72)


def legend_beside(axes: Axes, title: str) -> None:
    """Puts the legend to the right of the axes, in the order of what is stacked there."""
    if axes.get_legend_handles_labels()[0]:
        axes.legend(
            loc="upper left",
            bbox_to_anchor=(1.01, 1.0),
            borderaxespad=0.0,
            frameon=False,
            fontsize=9,
            title=title,
            title_fontsize=9,
            reverse=True,
        )


def is_wide_range(values: ArrayLike) -> bool:
    """Returns whether values above 0 differ by more than a factor of ten."""
    known = _above_zero(values)
    return known.size > 0 and float(known.max()) > 10 * float(known.min())


def _above_zero(values: ArrayLike) -> np.ndarray:
    array = np.asarray(values, np.float64)
    return array[np.isfinite(array) & (array > 0)]


def log_where_wide(axes: Axes, which: str, values: ArrayLike) -> bool:
    """Sets a log scale if values spread widely; returns whether it did."""
    if not is_wide_range(values):
        return False
    known = _above_zero(values)
    (axes.set_xscale if which == "x" else axes.set_yscale)("log")
    axis = axes.xaxis if which == "x" else axes.yaxis
    if known.max() < 200 * known.min():
        # Powers of ten would label one tick or two.
        axis.set_major_locator(LogLocator(subs=(1, 3), numticks=8))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_locator(NullLocator())
    else:
        axis.set_major_locator(LogLocator(numticks=8))
    return True


def tick_numbers(axes: Axes, numbers: Sequence[float]) -> None:
    """Writes the numbers themselves under the axis where they spread widely and are few."""
    few = sorted({float(f"{x:.3g}") for x in numbers})
    if min(few) > 0 and log_where_wide(axes, "x", numbers) and len(few) <= _MOST_NUMBERS:
        axes.set_xticks(few, [f"{x:g}" for x in few])
        axes.xaxis.set_minor_locator(NullLocator())


def integer_ticks(axes: Axes) -> None:
    """Puts the ticks of the horizontal axis at integers."""
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def set_title(axes: Axes, title: str) -> None:
    """Writes a title, wrapped to the width of the figure."""
    wide = max(20, int(_TITLE * _width(axes)))
    lines = (in_plot(line) for part in title.splitlines() for line in wrap(part, wide))
    axes.set_title("\n".join(lines), fontsize=11)


def _width(axes: Axes) -> float:
    """Returns the inches of a figure that axes have, with their labels and legend."""
    figure, spec = axes.get_figure(root=True), axes.get_subplotspec()
    width = COLUMN if figure is None else float(figure.get_size_inches()[0])
    if spec is None:
        return width
    grid = spec.get_gridspec()
    shares = np.asarray(grid.get_width_ratios() or [1] * grid.ncols, float)
    return width * float(shares[spec.colspan.start] / shares.sum())


def name_places(axes: Axes, names: Sequence[str], most: int = 45) -> int:
    """Writes names at 0, 1, ..., every n-th if there are more than `most`; returns n."""
    step = max(1, -(-len(names) // most))
    named = range(0, len(names), step)
    axes.set_xticks(named, [shortened(names[i]) for i in named], fontsize=7)
    figure = axes.get_figure(root=True)
    width = COLUMN if figure is None else float(figure.get_size_inches()[0])
    longest = max((len(shortened(name)) for name in names), default=0)
    if (longest + 1) * len(named) > 0.6 * _NAME * width:
        axes.tick_params(axis="x", rotation=90)
    axes.set_xlim(-0.7, max(len(names), 1) - 0.3)
    return step


def shortened(name: str) -> str:
    """Cuts the middle out of a long name, which is drawn as it is and not as a formula."""
    if len(name) <= _LONGEST_NAME:
        return in_plot(name)
    half = _LONGEST_NAME // 2
    return in_plot(f"{name[:half]}…{name[1 - half :]}")


def with_powers(text: str) -> str:
    """Writes 5e-06 in a text as 5 × 10⁻⁶."""

    def raised(number: re.Match[str]) -> str:
        return f"{number[1]} × 10{str(int(number[2])).translate(_RAISED)}"

    return re.sub(r"(\d)e([+-]?\d+)\b", raised, text)


def set_lines_below(axes: Axes, *lines: str) -> None:
    """Labels the horizontal axis with several lines, each wrapped."""
    wide = int(_LABEL * _width(axes))
    axes.set_xlabel("\n".join(part for line in lines for part in wrap(line, wide)))


def listed(names: Sequence[str], most: int = 8) -> str:
    """Lists names, and counts those beyond the first ones."""
    shown = ", ".join(shortened(n) for n in names[:most])
    more = len(names) - most
    return f"{shown} and {more} more" if more > 0 else shown


def save(figure: Figure, path: str | pathlib.Path) -> None:
    """Saves a figure as PNG and as PDF with TrueType fonts; equal figures give equal bytes."""
    path = pathlib.Path(path)
    checks.require(path.suffix in (".png", ".pdf"), "path", "end in .png or .pdf", str(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.dpi = _DOTS_PER_INCH
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    image = Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB")
    # A palette takes a third of the bytes, and less time.
    image = image.quantize(256, method=Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
    image.putpalette([255 if level == 254 else level for level in image.getpalette() or ()])
    image.save(path.with_suffix(".png"), dpi=(_DOTS_PER_INCH, _DOTS_PER_INCH))
    # The layout of the PNG serves the PDF too.
    figure.set_layout_engine("none")
    _use_small_font(figure)
    with matplotlib.rc_context({"pdf.fonttype": 42}):
        FigureCanvasPdf(figure).print_pdf(path.with_suffix(".pdf"), metadata={"CreationDate": None})


def _use_small_font(figure: Figure) -> None:
    """Sets texts in the small font where it has their characters."""
    usual = FontProperties()
    if findfont(usual) != findfont(_FONT):
        return
    for text in figure.findobj(Text):
        font, shown = text.get_fontproperties(), text.get_text()
        if shown and _kind(font) == _kind(usual) and _CHARACTERS.issuperset(shown):
            font.set_file(_small_font())


def _kind(font: FontProperties) -> tuple[object, ...]:
    """Returns what a font is besides its size; `findfont` takes a millisecond for each size."""
    return font.get_family(), font.get_style(), font.get_weight(), font.get_file()


@functools.cache
def _small_font() -> str:
    """Writes a font of the usual characters; embedding the whole one takes 0.1 s a figure."""
    path = pathlib.Path(matplotlib.get_cachedir(), f"fedjax_dp-{matplotlib.__version__}.ttf")
    if not path.is_file():
        options = subset.Options(layout_features=["kern"], glyph_names=True)
        options.drop_tables += ["FFTM"]
        font = subset.load_font(findfont(_FONT), options)
        subsetter = subset.Subsetter(options)
        subsetter.populate(text="".join(sorted(_CHARACTERS)))
        subsetter.subset(font)
        # Other processes may write it at the same time.
        unfinished = path.with_suffix(f".{os.getpid()}")
        font.save(unfinished)
        unfinished.replace(path)
    return str(path)
