"""Shows on the site what the repository has outside `docs/`: experiments and benchmarks."""

import os
import pathlib
import re
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = pathlib.Path(__file__).parents[2]
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^()\s#]+)(#[^()\s]*)?\)")


def on_config(config: Any) -> Any:
    """Puts the pages in `results/` of a study after its page in the navigation."""
    config.nav = [
        {title: _with_results(pages)} for part in config.nav for title, pages in part.items()
    ]
    return config


def _with_results(pages: list[Any]) -> list[Any]:
    """The pages of a section, with those in the folder `results/` beside each."""
    found = []
    for page in pages:
        title, place = next(iter(page.items())) if isinstance(page, dict) else ("", page)
        folder = ROOT / str(place).removesuffix("README.md") / "results"
        results = sorted(folder.rglob("*.md"))
        named = [{_title(p.relative_to(folder)): p.relative_to(ROOT).as_posix()} for p in results]
        found.append({title: [place, *named]} if named else page)
    return found


def _title(path: pathlib.Path) -> str:
    """The title of a page of results, from its folders and its name."""
    return ", ".join(path.with_suffix("").parts).replace("_", " ")


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages of `experiments/` and `benchmarks/`, and the pictures that any page shows."""
    for folder in ("docs", "experiments", "benchmarks"):
        for page in sorted((ROOT / folder).rglob("*.md")):
            links = _LINK.finditer(page.read_text("utf-8"))
            shown = [(page.parent / link[3]).resolve() for link in links if link[1]]
            for path in (page, *filter(pathlib.Path.is_file, shown)):
                place = path.relative_to(ROOT).as_posix()
                if not place.startswith("docs/") and not files.get_file_from_path(place):
                    files.append(File.generated(config, place, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, files: Files, **_: Any) -> str:
    """Turns links between `docs/` and the rest of the repository into links of the site."""
    return relinked(markdown, page.file.src_uri, {file.src_uri for file in files})


def relinked(markdown: str, page: str, pages: set[str]) -> str:
    """Rewrites links of a page that leave its folder; of a file without a page the name remains."""
    outside = page.startswith(("experiments/", "benchmarks/"))
    folder = os.path.dirname(page if outside else f"docs/{page}")

    def rewritten(link: re.Match) -> str:
        image, text, target, anchor = link.groups()
        path = os.path.normpath(os.path.join(folder, target))
        if "://" in target or not (outside or not path.startswith("docs/")):
            return link[0]
        place = path.removeprefix("docs/")
        if place in pages:
            place = os.path.relpath(place, os.path.dirname(page) or ".")
            return f"{image}[{text}]({place}{anchor or ''})"
        return f"{text} (`{path}`)" if (ROOT / path).exists() else link[0]

    return _LINK.sub(rewritten, markdown)
