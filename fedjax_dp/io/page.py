"""An HTML page of one file, with line charts as SVG: no script, every text escaped."""

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

from fedjax_dp.core.decimals import rounded_down, shown
from fedjax_dp.core.packages import needed_for

with needed_for("a report", "cli"):
    from markdown_it import MarkdownIt

# Headings, tables, code and emphasis alone: a text can bring no link, image or markup of its own.
_MARKDOWN = MarkdownIt("zero").enable(["heading", "table", "backticks", "emphasis", "escape"])
# Lets a browser refuse what a page should never have.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_CSS = """
:root{color-scheme:light dark;--line:#d0d5da;--soft:#f3f5f7;--yes:#00704f;--no:#b3261e}
@media(prefers-color-scheme:dark){:root{--line:#43494f;--soft:#1f2327;--yes:#4fd1a5;--no:#ff8a80}}
*{box-sizing:border-box}
body{font:16px/1.5 system-ui,sans-serif;margin:0 auto;max-width:76rem;padding:1rem}
h1{font-size:1.6rem;line-height:1.25;margin:.5rem 0;overflow-wrap:anywhere}
h2{font-size:1.25rem;margin:2rem 0 .5rem;border-bottom:1px solid var(--line)}
h3{font-size:1.05rem;margin:1.25rem 0 .5rem}h4{margin:1rem 0 .25rem}
p,li{overflow-wrap:anywhere}td,th{overflow-wrap:break-word}p{max-width:52rem}
nav ul{display:flex;flex-wrap:wrap;gap:.25rem 1rem;list-style:none;padding:0}
.state{font-size:1.1rem;font-weight:600}.mark{font-size:.875rem;margin:.25rem 0 .75rem}
.mark b{color:var(--no)}.mark.public b,.mark.covered b{color:var(--yes)}
.notice{border:1px solid var(--line);border-left:.35rem solid var(--no);padding:.5rem .75rem}
.notice.public,.notice.covered{border-left-color:var(--yes)}
.charts{display:grid;gap:1.25rem;
grid-template-columns:repeat(auto-fill,minmax(min(100%,21rem),1fr))}
figure{margin:0;min-width:0}.charts>.wide{align-self:start;margin-top:1.5rem}figcaption{font-weight:600}
figure>svg{display:block;width:100%;height:auto}
.legend{display:flex;flex-wrap:wrap;gap:.1rem .9rem;list-style:none;margin:.25rem 0;padding:0;
font-size:.875rem}.legend svg{width:28px;height:8px;margin-right:.35rem;vertical-align:middle}
.wide{overflow-x:auto;max-width:100%}
table{border-collapse:collapse;font-variant-numeric:tabular-nums}
th,td{border:1px solid var(--line);padding:.25rem .6rem;text-align:left;vertical-align:top}
thead th{background:var(--soft)}tbody th{font-weight:500}
pre{background:var(--soft);padding:.75rem;overflow-x:auto;font-size:.875rem}
summary{cursor:pointer;font-weight:600}
"""


# Around what is wider than a small screen: it scrolls within the page, by keyboard too.
_OPEN, _CLOSE = '<div class="wide" tabindex="0" role="region" aria-label="table">', "</div>"


def document(title: str, body: str, refresh: float | None = None) -> str:
    """Returns a page; `refresh` has the browser read it again after so many seconds."""
    again = f'<meta http-equiv="refresh" content="{math.ceil(refresh)}">\n' if refresh else ""
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n{again}'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_CSS}{_CHART_CSS}</style>\n</head>\n"
        f"<body>\n{body}</body>\n</html>\n"
    )


def table(heads: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Returns a table with a header for each column and each row."""
    top = "".join(f'<th scope="col">{escape(head)}</th>' for head in heads)
    lines = [
        f'<tr><th scope="row">{escape(str(first))}</th>'
        + "".join(f"<td>{escape(str(cell))}</td>" for cell in rest)
        + "</tr>"
        for first, *rest in rows
    ]
    body = f"<thead><tr>{top}</tr></thead><tbody>{''.join(lines)}</tbody>"
    return f"{_OPEN}<table>{body}</table>{_CLOSE}\n"


def paragraph(text: str, kind: str = "") -> str:
    """Returns a paragraph of plain text; `kind` is its class."""
    return f'<p class="{kind}">{escape(text)}</p>\n' if kind else f"<p>{escape(text)}</p>\n"


def items(texts: Iterable[str]) -> str:
    """Returns a list of plain texts."""
    return f"<ul>{''.join(f'<li>{escape(text)}</li>' for text in texts)}</ul>\n"


def code(text: str, label: str) -> str:
    """Returns a text as it is, below a label that opens it."""
    return folded(f'<pre tabindex="0">{escape(text)}</pre>', label)


def folded(content: str, label: str) -> str:
    """Hides content below a label that opens it."""
    return f"<details><summary>{escape(label)}</summary>\n{content}</details>\n"


def markdown(text: str) -> str:
    """Renders headings one level lower, tables, code and emphasis; all else is plain text."""
    tokens = _MARKDOWN.parse(text)
    for token in tokens:
        if token.type in ("heading_open", "heading_close"):
            token.tag = f"h{int(token.tag[1:]) + 1}"
        if token.type == "th_open":
            token.attrSet("scope", "col")
    html = _MARKDOWN.renderer.render(tokens, _MARKDOWN.options, {})
    return str(html.replace("<table>", f"{_OPEN}<table>").replace("</table>", f"</table>{_CLOSE}"))


Point = tuple[float, float]
# Of plots too. The first eight are distinct for colour-blind readers (Okabe and Ito 2008).
COLOURS = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#E69F00",
    "#56B4E9",
    "#000000",
    "#8C8C8C",
    "#6A51A3",
    "#8B5A2B",
    "#7F8C1A",
    "#B0185B",
)
# Size in units of the drawing, and the margins: left, right, top, bottom.
_WIDTH, _HEIGHT = 400, 230
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 12, 10, 40
# Longer curves are thinned, and each point of a shorter one is marked.
_MOST_POINTS, _MARKED = 400, 30
_DASHES = ("none", "7 3", "2 3", "9 3 2 3")
# The curves that have a style of their own; black would be invisible on a dark page.
_STYLES = 6

_CHART_CSS = "\n".join(
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
    """Draws curves, and limits as dashed lines, as an HTML figure; "" without any point."""
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
