"""Gives notebooks what Markdown pages have: links of the site, and pictures with their texts."""

import json
import logging
import posixpath
import re
from html import escape
from pathlib import Path
from typing import Any

from mkdocs.structure.files import Files

_log = logging.getLogger("mkdocs.hooks.notebooks")
_LINK = re.compile(r'href="([^":#]+\.(?:md|ipynb))(#[^"]*)?"')

# What nbconvert writes for every picture: its template does not read the text of an output.
NO_TEXT = 'alt="No description has been provided for this image"'


def on_page_content(html: str, page: Any, files: Files, **_: Any) -> str:
    """Rewrites a notebook; a missing page or text is a warning, which ends a strict build."""
    place = page.file.src_uri
    if not place.endswith(".ipynb"):
        return html

    def rewritten(link: re.Match) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(place), link[1]))
        found = files.get_file_from_path(target)
        if found is None:
            _log.warning("%s links to %s, which is not a page", place, link[1])
            return link[0]
        return f'href="{found.url_relative_to(page.file)}{link[2] or ""}"'

    texts = iter(texts_of(Path(page.file.abs_src_path)))

    def described(_: re.Match) -> str:
        text = next(texts, "")
        if not text:
            _log.warning("%s has a picture without alternative text", place)
        return f'alt="{escape(text)}"'

    return re.sub(NO_TEXT, described, _LINK.sub(rewritten, html))


def texts_of(notebook: Path) -> list[str]:
    """Lists the alternative texts of the pictures that a notebook's cells have put out."""
    cells = json.loads(notebook.read_text("utf-8"))["cells"]
    outputs = [output for cell in cells for output in cell.get("outputs", ())]
    pictures = [each for each in outputs if "image/png" in each.get("data", {})]
    return [each["metadata"].get("image/png", {}).get("alt", "") for each in pictures]
