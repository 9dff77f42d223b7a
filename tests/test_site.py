"""The site builds without a warning, and its reference has every public name."""

import csv
import importlib.util
import json
import pathlib
import re
import subprocess
import sys
from html import unescape
from types import SimpleNamespace

import pytest
from marks import slow, telling

ROOT = pathlib.Path(__file__).parents[1]


def hook(name: str):
    """A hook of the site, by its file: its name is that of other modules too."""
    pytest.importorskip("mkdocs", reason="the extra `nightly` installs it")
    place = ROOT / "docs" / "hooks" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"site_{name}", place)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@telling
def test_the_site_builds_strictly_and_has_every_public_name(tmp_path):
    """A broken link, an anchor that is not there or a page outside the navigation is a warning."""
    reference = hook("reference")
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    built = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert not built.returncode, built.stderr
    found = set()
    for page in (tmp_path / "reference" / "api").rglob("*.html"):
        found |= set(re.findall(r'id="(fedjax_dp[\w.]*)"', page.read_text("utf-8")))
    missing = {path for paths in reference.public_names() for path in paths} - found
    assert not missing
    listed = (tmp_path / "reference" / "configuration" / "index.html").read_text("utf-8")
    assert all(f'id="{key}"' in listed for key, *_ in reference.describe())


def test_tables_of_pages_have_what_is_registered():
    generated = hook("reference").generated
    texts = [page.read_text("utf-8") for page in sorted((ROOT / "docs/reference").glob("*.md"))]
    assert sum("<!-- generated" in text for text in texts) == 2
    for text in texts:
        assert generated(text) == text


@slow
def test_what_the_reference_says_is_returned_is_a_type():
    """Text before a colon would stand in its place."""
    griffe = pytest.importorskip("griffe", reason="the extra `nightly` installs it")
    options = {"returns_multiple_items": False, "returns_named_value": False}
    package = griffe.load(
        "fedjax_dp", search_paths=[ROOT], docstring_parser="google", docstring_options=options
    )
    found, members = [], [package]
    while members:
        one = members.pop()
        if one.is_module or one.is_class:
            members += [m for m in one.members.values() if not m.is_alias]
        elif one.is_function and one.docstring:
            parts = [part for part in one.docstring.parsed if part.kind.value == "returns"]
            found += [(one, each) for part in parts for each in part.value]
    assert len(found) > 300
    assert not [one.path for one, each in found if str(each.annotation) != str(one.annotation)]


_NAME = r"[^\W\d_][\w’'-]+"


def test_the_page_on_speed_has_figures_that_were_measured():
    with (ROOT / "benchmarks/results/peers.csv").open(encoding="utf-8") as file:
        rows = [
            (row["workload"], row["implementation"], float(row["ms_per_client"]))
            for row in csv.DictReader(file)
        ]
    results = json.loads((ROOT / "benchmarks/results/cpu.json").read_text("utf-8"))["results"]
    overheads = {row["name"]: row["dp_overhead"] for row in results}
    page = (ROOT / "benchmarks/speed.md").read_text("utf-8")
    lines = [line.split("|")[1:-1] for line in page.splitlines() if re.match(r"\| W\d", line)]
    assert {name for name, *_ in rows} == {cells[0].partition(":")[0].strip() for cells in lines}
    names = {"pfl": "pfl-research", "drjax": "DrJAX", "fedjax": "FedJAX", "flower": "Flower"}
    for about, own, other, ratio, overhead in lines:
        workload = about.partition(":")[0].strip()
        (measured,) = (ms for name, who, ms in rows if (name, who) == (workload, "ours"))
        least, who = min((ms, who) for name, who, ms in rows if name == workload and who != "ours")
        who = names.get(who, "PyTorch" if who == "opacus plain" else "Opacus")
        figure, package = other.strip().split(", ")
        assert (float(own), float(figure), package) == (
            float(f"{measured:.3g}"),
            float(f"{least:.3g}"),
            who,
        )
        assert float(ratio) == round(measured / least, 2)
        assert float(overhead.strip() or 0) == round(overheads[workload] or 0, 2)


# Before a year: "Li and others", "Wang, Balle and Kasiviswanathan", 'Goodfellow, "A title",'.
_CITED = re.compile(rf"({_NAME}(?:(?:,|,? and) {_NAME})*)(?: et al\.)?(?:, \"[^\"]+\",)? \(?$")


@telling
def test_every_source_that_is_cited_by_author_and_year_is_in_the_bibliography():
    reference = hook("reference")
    known = {
        (re.split(" and |,", source["author"])[0].split()[-1], source.get("year"))
        for source in reference.sources().values()
    }
    found, missing = set(), set()
    for page in (*(ROOT / "fedjax_dp").rglob("*.py"), *ROOT.glob("[de]*/**/*.md")):
        text = re.sub(r"\s+(# )?", " ", page.read_text("utf-8"))
        for year in re.finditer(r"\b(?:18|19|20)\d\d\b", text):
            before = _CITED.search(text[max(0, year.start() - 160) : year.start()])
            words = re.findall(_NAME, before[1]) if before else []
            if words and words[0][0].isupper() and not words[-1].isupper() and words != ["Cup"]:
                of_text = {(word, year[0]) for word in words}
                (found if of_text & known else missing).update(of_text)
    assert len(found & known) > 90 and not missing, missing


def test_every_picture_of_a_page_or_notebook_is_described_in_words():
    pages = [ROOT / "README.md", *ROOT.glob("[bde]*/**/*.md")]
    texts = [text for page in pages for text in _PICTURES.findall(page.read_text("utf-8"))]
    hooked = hook("notebooks")
    for notebook in sorted(ROOT.glob("docs/**/*.ipynb")):
        texts += hooked.texts_of(notebook)
        described = hooked.texts_of(notebook)
        assert notebook.read_text("utf-8").count('"image/png": "') == len(described)
        file = SimpleNamespace(src_uri=notebook.name, abs_src_path=str(notebook))
        html = hooked.on_page_content(
            f"<img {hooked.NO_TEXT}>" * len(described), SimpleNamespace(file=file), None
        )
        assert [unescape(text) for text in re.findall('alt="([^"]*)"', html)] == described
    assert len(texts) > 25 and min(len(text.split()) for text in texts) > 3


_PICTURES = re.compile(r"!\[([^\]]*)\]\(")


@telling
def test_links_into_the_repository_become_links_of_the_site_or_names():
    repository = hook("repository")
    pages = {"how-to/data.md", "benchmarks/README.md", "experiments/lora/README.md"}

    def relinked(text, page):
        return repository.relinked(text, page, pages)

    inside = "[a](data.md#b) [c](https://x.org/d.md) ![e](../images/e.png)"
    assert relinked(inside, "how-to/models.md") == inside
    assert relinked("[a](../../benchmarks/README.md#b)", "how-to/data.md") == (
        "[a](../benchmarks/README.md#b)"
    )
    assert relinked("[a](../../docs/how-to/data.md)", "experiments/lora/README.md") == (
        "[a](../../how-to/data.md)"
    )
    assert relinked("[a](../../README.md)", "how-to/data.md") == "a (`README.md`)"
    # A link to nothing stays for the strict build to refuse.
    broken = "[a](../../benchmarks/none.md)"
    assert relinked(broken, "how-to/data.md") == broken
