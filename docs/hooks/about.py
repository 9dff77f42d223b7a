"""Shows which version the site is about, and how to cite it; typesets formulas."""

import pathlib
from typing import Any

import yaml
from mkdocs.structure.files import File, Files

import fedjax_dp

# What pages of notebooks load too.
_MATHJAX = (
    '<script async src="https://cdn.jsdelivr.net/npm/mathjax@4.1.3/tex-mml-chtml.js"></script>'
)
_CITATION = pathlib.Path(__file__).parents[2] / "CITATION.cff"


def on_config(config: Any) -> Any:
    """Puts the version below every page."""
    config.copyright = f"fedjax_dp {fedjax_dp.__version__}, Apache-2.0"
    return config


def on_post_page(output: str, **_: Any) -> str:
    """Loads MathJax where a page has formulas."""
    has_formulas = 'class="arithmatex"' in output
    return output.replace("</body>", f"{_MATHJAX}</body>") if has_formulas else output


def on_files(files: Files, config: Any) -> Files:
    """Adds the page on citing."""
    files.append(File.generated(config, "reference/citing.md", content=citing()))
    return files


def citing() -> str:
    """The page on citing, from the citation file of the repository."""
    cited = yaml.safe_load(_CITATION.read_text("utf-8"))
    authors = " and ".join(f"{{{author['name']}}}" for author in cited["authors"])
    entry = {
        "author": authors,
        "title": f"{{{cited['title']}}}",
        "version": cited["version"],
        "note": f"Licence: {cited['license']}",
    }
    fields = "".join(f"  {name} = {{{value}}},\n" for name, value in entry.items())
    return (
        f"# Citing\n\nThis site describes version {fedjax_dp.__version__}. {cited['message']}\n\n"
        f"```bibtex\n@software{{fedjax_dp,\n{fields}}}\n```\n\n"
        "The folder of a run has the citations of its methods in `privacy.bib`. "
        "Their sources are in the [bibliography](bibliography.md)."
    )
