"""Pages whose code is run, as one program each, and whose code is that of the package."""

import contextlib
import io
import pathlib
import re
import textwrap

import pytest

ROOT = pathlib.Path(__file__).parents[1]
# The pages that show a file of the package.
FILES = {
    "write-an-algorithm.md": "fedjax_dp/algorithms/feddyn.py",
    "write-an-aggregator.md": "fedjax_dp/server/trimmed_mean.py",
}


def blocks(page: pathlib.Path, language: str) -> list[str]:
    text = page.read_text("utf-8")
    found = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return [code for kind, code in found if kind == language]


def run(page: pathlib.Path) -> str:
    """Runs all Python of a page, one block after the other; gives what it prints."""
    names: dict = {"__name__": page.stem}
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        for number, code in enumerate(blocks(page, "python")):
            exec(compile(code, f"{page.name}, block {number}", "exec"), names)
    return printed.getvalue()


def test_the_round_of_the_readme_runs():
    loss, epsilon = run(ROOT / "README.md").split("{")
    assert "nan" not in loss and "client" in epsilon


@pytest.mark.parametrize("page", FILES)
def test_a_page_that_writes_a_part_runs_and_prints_what_it_says(page):
    printed = run(ROOT / "docs" / page)
    assert printed.splitlines() == blocks(ROOT / "docs" / page, "")[-1].splitlines()


@pytest.mark.parametrize("page", FILES)
def test_a_page_shows_what_is_in_the_repository(page):
    shown = blocks(ROOT / "docs" / page, "python")
    source = (ROOT / FILES[page]).read_text("utf-8")
    of_the_file = [code for code in shown if re.search(r"^(class|def) ", code, re.MULTILINE)]
    assert of_the_file and all(code.strip() in source for code in of_the_file)
    tests = [path.read_text("utf-8") for path in (ROOT / "tests").rglob("*.py")]
    for code in blocks(ROOT / "docs" / page, "py"):
        for part in code.strip().split("\n\n\n"):
            indented = textwrap.indent(part, " " * 4)
            assert any(part in text or indented in text for text in tests), part
