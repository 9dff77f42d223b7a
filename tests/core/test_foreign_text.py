"""Names of foreign origin are shown as they are, and do nothing where they are read."""

import csv
import io

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from fedjax_dp.core.foreign_text import in_csv, in_latex, in_markdown, in_plot, visible

HOSTILE = (
    "North\n\n# Certified: ε = 0.1",
    "a | b |\n| c | 0.01 |",
    "\x1b[2J\x1b[1;31mred",
    "<script>alert(1)</script>",
    "[here](http://a.example) ![x](y)",
    "**bold** _soft_ `code` ~~gone~~ &lt; $5$",
    "back\\slash \\| pipe",
    "abc\u202edcba\u2028next\x9b1m\r",
    "\ud800",
)


@pytest.mark.parametrize("name", HOSTILE)
def test_a_name_is_one_cell_of_a_markdown_table(name):
    cell = in_markdown(name)
    html = (
        MarkdownIt("commonmark", {"html": True})
        .enable(["table", "strikethrough"])
        .render(f"| client | ε |\n|---|---|\n| {cell} | 1 |\n| next | 2 |\n")
    )
    assert html.count("<tr>") == 3 and html.count("<td>") == 4
    inside = html.partition("<td>")[2].partition("</td>")[0]
    assert "<" not in inside
    shown = inside.replace("&lt;", "<").replace("&gt;", ">").replace("&quot;", '"')
    assert shown.replace("&amp;", "&") == visible(name)


@settings(max_examples=50, deadline=None)
@given(st.text())
def test_no_text_has_a_control_left(name):
    for written in (visible(name), in_markdown(name), in_latex(name), in_csv(name), in_plot(name)):
        assert written.isprintable() or not any(ord(c) < 32 or c in "\x7f\x9b" for c in written)
        assert len(written.splitlines()) <= 1
    laid_out = visible(f"a\tb\n{name}", keeps_lines=True)
    assert laid_out.startswith("a\tb\n") and "\x1b" not in laid_out and "\r" not in laid_out


def test_usual_names_stay_as_they_are():
    for name in ("ward_1", "St. Mary's", "Zürich-Süd", "می‌خواهم", "東京", "a,b"):
        assert visible(name) == in_markdown(name) == in_csv(name) == in_plot(name) == name


@pytest.mark.parametrize("name", ["=1+1", "+cmd|' /C calc'!A0", "-2+3", "@SUM(A1)", "\t=1", " =1"])
def test_no_cell_is_a_formula(name):
    text = io.StringIO()
    csv.writer(text).writerow([in_csv(name)])
    (cell,) = next(csv.reader(io.StringIO(text.getvalue())))
    assert cell.lstrip()[0] == "'" or cell.startswith("\\t")
    assert [in_csv(number) for number in ("-0.5", "+3", "1e-5")] == ["-0.5", "+3", "1e-5"]
