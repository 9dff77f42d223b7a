"""HTML pages as tests read them: balanced tags, and the points of their charts."""

import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser

VOID = {"meta", "br", "hr", "input"}


class Page(HTMLParser):
    """Reads a page; fails where a tag is not closed."""

    def __init__(self, html: str):
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.texts: list[str] = []
        self._open: list[str] = []
        self.feed(html)
        self.close()
        assert not self._open, self._open

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        if self._open and self._open[-1] != "style":
            self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())

    def all(self, tag: str) -> list[dict[str, str]]:
        return [attrs for name, attrs in self.tags if name == tag]


def charts(html: str) -> dict[str, "Chart"]:
    """The charts of a page by title."""
    figures = re.findall(r"<figure>.*?</figure>", html, re.DOTALL)
    found = [Chart(ET.fromstring(figure)) for figure in figures]
    return {chart.title: chart for chart in found}


class Chart:
    """A chart whose places are turned into values by its ticks alone."""

    def __init__(self, figure: ET.Element):
        self.title = figure.findtext("figcaption")
        picture = figure.find("svg")
        self.said = picture.get("aria-label")
        self.legend = ["".join(item.itertext()) for item in figure.iter("li")]
        numbers = [t for t in picture.iter("text") if re.fullmatch(r"-?[\d.]+(e[+-]\d+)?", t.text)]
        across = [
            (float(t.get("x")), float(t.text)) for t in numbers if t.get("text-anchor") == "middle"
        ]
        # A label is 4 below the middle of its line.
        up = [
            (float(t.get("y")) - 4, float(t.text)) for t in numbers if t.get("text-anchor") == "end"
        ]
        self.ticks = [value for _, value in across], [value for _, value in up]
        to_x, to_y = line_through(across), line_through(up)
        self.curves = [
            [tuple(map(float, pair.split(","))) for pair in line.get("points").split()]
            for line in picture.iter("polyline")
        ]
        self.curves = [[(to_x(x), to_y(y)) for x, y in curve] for curve in self.curves]
        self.limits = [
            to_y(float(line.get("y1")))
            for line in picture.iter("line")
            if line.get("class") == "limit"
        ]


def line_through(pairs):
    (a, u), (b, v) = pairs[0], pairs[-1]
    if a == b:
        return lambda place: u
    return lambda place: u + (place - a) * (v - u) / (b - a)
