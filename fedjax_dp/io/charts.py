"""Line charts as SVG text, which take their colours from the page and need no library."""

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import NamedTuple

from fedjax_dp.core.decimals import rounded_down, shown

Point = tuple[float, float]
# Of plots too. Distinct for colour-blind readers (Okabe and Ito 2008).
COLOURS = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#E69F00",
    "#56B4E9",
    "#000000",
    "#8C8C8C",
)
# Size in units of the drawing, and the margins: left, right, top, bottom.
_WIDTH, _HEIGHT = 400, 230
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 12, 10, 40
# Longer curves are thinned, and each point of a shorter one is marked.
_MOST_POINTS, _MARKED = 400, 30
_DASHES = ("none", "7 3", "2 3", "9 3 2 3")
# The curves that have a style of their own; black would be invisible on a dark page.
_STYLES = 6

CSS = "\n".join(
    [
        # Earlier curves are wider, so that none is hidden.
        ".curve{fill:none;stroke-width:2;stroke-linejoin:round}.dot{stroke:none}",
        ".curve.c0{stroke-width:3.5}.curve.c1{stroke-width:2.5}",
        ".limit{stroke:currentColor;stroke-width:1.5;stroke-dasharray:5 4}",
        ".grid{stroke:currentColor;opacity:.15}svg text{fill:currentColor;font-size:12px}",
        *(
            f".c{i}{{stroke:{COLOURS[i]};stroke-dasharray:{_DASHES[i % len(_DASHES)]}}}"
            f".dot.c{i}{{fill:{COLOURS[i]}}}"
            for i in range(_STYLES)
        ),
    ]
)


class Axis(NamedTuple):
    """An axis of a chart, labelled with the quantity and its unit."""

    label: str
    # The ends; None for those of the data.
    low: float | None = None
    high: float | None = None
    # Whether ticks are at integers only.
    is_whole: bool = False


def line_chart(
    title: str,
    curves: Mapping[str, Sequence[Point]],
    x: Axis,
    y: Axis,
    limits: Mapping[str, float] = {},
) -> str:
    """Draws curves, and limits as dashed lines, as an HTML figure; "" without any point.

    It has a title, a description for screen readers, and a legend of the curves with points.
    """
    drawn = {label: _thinned(points) for label, points in curves.items() if points}
    if not drawn:
        return ""
    across = _Scale.of([p[0] for c in drawn.values() for p in c], x, _LEFT, _WIDTH - _RIGHT)
    values = [p[1] for c in drawn.values() for p in c] + list(limits.values())
    up = _Scale.of(values, y, _HEIGHT - _BOTTOM, _TOP)
    parts = [*_axes(across, up), *_labels(x, y)]
    for value in limits.values():
        parts.append(_line("limit", _LEFT, up.at(value), _WIDTH - _RIGHT, up.at(value)))
    for i, points in enumerate(drawn.values()):
        parts += _curve(i % _STYLES, [(across.at(px), up.at(py)) for px, py in points])
    description = escape(_described(title, y.label, curves, limits))
    picture = f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{description}">'
    legend = _legend(list(drawn), list(limits))
    return (
        f"<figure><figcaption>{escape(title)}</figcaption>\n{picture}"
        + "".join(parts)
        + f"</svg>{legend}</figure>\n"
    )


class _Scale(NamedTuple):
    """Maps values to coordinates of the drawing, with ticks at round numbers."""

    low: float
    high: float
    start: float
    end: float
    ticks: list[float]

    @staticmethod
    def of(values: Sequence[float], axis: Axis, start: float, end: float) -> "_Scale":
        low = min(values) if axis.low is None else axis.low
        high = max(values) if axis.high is None else axis.high
        if low >= high:
            # One value alone is in the middle.
            low, high = low - (abs(low) / 2 or 0.5), high + (abs(high) / 2 or 0.5)
        rough = (high - low) / 6
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(m * power for m in (1, 2, 4, 5, 10) if m * power >= rough * (1 - 1e-9))
        step = max(step, 1.0) if axis.is_whole else step
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
        return _Scale(low, high, start, end, [i * step for i in range(first, last + 1)])

    def at(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return self.start + min(1.0, max(0.0, share)) * (self.end - self.start)


def _thinned(points: Sequence[Point]) -> list[Point]:
    """Keeps the least and the largest value of each part of a long curve, and both ends."""
    if len(points) <= _MOST_POINTS:
        return list(points)
    size = -(-2 * len(points) // _MOST_POINTS)
    kept = {points[0], points[-1]}
    for start in range(0, len(points), size):
        part = points[start : start + size]
        kept |= {min(part, key=lambda p: p[1]), max(part, key=lambda p: p[1])}
    return sorted(kept)


def _line(kind: str, x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _text(x: float, y: float, anchor: str, content: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{more}>{escape(content)}</text>'


def _axes(across: _Scale, up: _Scale) -> list[str]:
    parts = []
    for tick in up.ticks:
        parts.append(_line("grid", _LEFT, up.at(tick), _WIDTH - _RIGHT, up.at(tick)))
        parts.append(_text(_LEFT - 6, up.at(tick) + 4, "end", f"{tick:.6g}"))
    for tick in across.ticks:
        parts.append(_line("grid", across.at(tick), _TOP, across.at(tick), _HEIGHT - _BOTTOM))
        parts.append(_text(across.at(tick), _HEIGHT - _BOTTOM + 16, "middle", f"{tick:.6g}"))
    return parts


def _labels(x: Axis, y: Axis) -> list[str]:
    middle = (_TOP + _HEIGHT - _BOTTOM) / 2
    turned = f' transform="rotate(-90 11 {middle:.1f})"'
    across = _text((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 6, "middle", x.label)
    return [across, _text(11, middle, "middle", y.label, turned)]


def _curve(style: int, points: Sequence[Point]) -> list[str]:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    marked = points if len(points) <= _MARKED else ()
    dots = [f'<circle class="dot c{style}" cx="{x:.1f}" cy="{y:.1f}" r="3"/>' for x, y in marked]
    return [f'<polyline class="curve c{style}" points="{path}"/>', *dots]


def _legend(labels: Sequence[str], limits: Sequence[str]) -> str:
    """Lists labels beside a sample of their lines; nothing for one curve alone."""
    if len(labels) + len(limits) < 2:
        return ""
    kinds = [f"curve c{i % _STYLES}" for i in range(len(labels))] + ["limit"] * len(limits)
    samples = [
        f'<li><svg viewBox="0 0 28 8" aria-hidden="true">{_line(kind, 0, 4, 28, 4)}</svg>'
        f"{escape(label)}</li>"
        for kind, label in zip(kinds, [*labels, *limits], strict=True)
    ]
    return f'<ul class="legend">{"".join(samples)}</ul>'


def _described(
    title: str, name: str, curves: Mapping[str, Sequence[Point]], limits: Mapping[str, float]
) -> str:
    """Describes a chart in words: the ends of its curves, and its limits."""
    parts = [
        f"{label} from {shown(name, points[0][1])} at {points[0][0]:.6g} to "
        f"{shown(name, points[-1][1])} at {points[-1][0]:.6g}"
        for label, points in curves.items()
        if points
    ]
    parts += [f"{label} {rounded_down(value)}" for label, value in limits.items()]
    return f"{title}: {'; '.join(parts)}"
