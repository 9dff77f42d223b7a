"""An HTML page of one file: no script, nothing from elsewhere, every text escaped."""

import math
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from fedjax_dp.core.packages import needed_for
from fedjax_dp.io import charts

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
        f"<title>{escape(title)}</title>\n<style>{_CSS}{charts.CSS}</style>\n</head>\n"
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
