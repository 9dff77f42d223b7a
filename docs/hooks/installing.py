"""How pages outside of the repository, of the site and of an index, install the package.

The pages in the repository install from a clone, which always works. Once a release is on an index,
`on-index` in pyproject.toml says so: then commands take it from there, and what stands between
`<!-- clone -->` and `<!-- end -->` is left out.
"""

import pathlib
import re
import tomllib
from typing import Any

_PROJECT = pathlib.Path(__file__).parents[2] / "pyproject.toml"
_FROM_CLONE = re.compile(r"-e '\.\[([\w,-]+)\]'")
_CLONE_ONLY = re.compile(r"<!-- clone -->\n(.*?)<!-- end -->\n+", re.DOTALL)
_SCRIPTS = re.compile(r"python -m\s(experiments|benchmarks)\b")
_NOTE = "Commands that begin with `python -m {}` are run in a clone of the repository."


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Shows the way to install, and where the commands of the page can be run."""
    return with_note(published(markdown))


def published(markdown: str, on_index: bool | None = None) -> str:
    """A page with the way to install of its readers, by default as pyproject.toml says."""
    if on_index is None:
        on_index = tomllib.loads(_PROJECT.read_text("utf-8"))["tool"]["fedjax-dp"]["on-index"]
    if not on_index:
        return _CLONE_ONLY.sub(r"\1\n", markdown)
    return _FROM_CLONE.sub(r"'fedjax-dp[\1]'", _CLONE_ONLY.sub("", markdown))


def with_note(markdown: str) -> str:
    """A page that says so at its top, if it has commands that no installation brings."""
    packages = sorted({found[1] for found in _SCRIPTS.finditer(markdown)})
    if not packages or "clone of the repository" in " ".join(markdown.split()):
        return markdown
    note = _NOTE.format("` or `python -m ".join(packages))
    title, _, rest = markdown.partition("\n") if markdown.startswith("# ") else ("", "", markdown)
    return f"{title}\n\n{note}\n\n{rest}"
