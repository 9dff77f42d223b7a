"""Turns links between notebooks and pages into links of the site, which only Markdown pages get."""

import logging
import posixpath
import re
from typing import Any

from mkdocs.structure.files import Files

_log = logging.getLogger("mkdocs.hooks.notebooks")
_LINK = re.compile(r'href="([^":#]+\.(?:md|ipynb))(#[^"]*)?"')


def on_page_content(html: str, page: Any, files: Files, **_: Any) -> str:
    """Rewrites the links of a notebook; a missing page is a warning, which ends a strict build."""
    place = page.file.src_uri

    def rewritten(link: re.Match) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(place), link[1]))
        found = files.get_file_from_path(target)
        if found is None:
            _log.warning("%s links to %s, which is not a page", place, link[1])
            return link[0]
        return f'href="{found.url_relative_to(page.file)}{link[2] or ""}"'

    return _LINK.sub(rewritten, html) if place.endswith(".ipynb") else html
