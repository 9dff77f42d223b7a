"""The code of every page is run, as one program each, and every command line is one that exists."""

import contextlib
import io
import pathlib
import re
import shlex
import textwrap

import pytest
from marks import telling

from fedjax_dp.cli.main import COMMANDS
from fedjax_dp.experiment import reading, validate
from fedjax_dp.experiment import run as running
from fedjax_dp.experiment.budgets import with_named_lists

ROOT = pathlib.Path(__file__).parents[1]
PAGES = sorted(path for path in ROOT.rglob("*.md") if ".venv" not in path.parts)
# The pages that show a file of the package.
FILES = {
    "write-an-algorithm.md": "fedjax_dp/algorithms/feddyn.py",
    "write-an-aggregator.md": "fedjax_dp/server/trimmed_mean.py",
}


def blocks(page: pathlib.Path, language: str) -> list[str]:
    text = page.read_text("utf-8")
    found = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return [code for kind, code in found if kind == language]


# What a page takes as given. The names that the README's round makes are among it.
ROUND = blocks(ROOT / "README.md", "python")[0]
GIVEN = {
    "auditing.md": ROUND + "participation = cohorts",
    "privacy.md": ROUND
    + """
from fedjax_dp.privacy.statement import statement as state_what_ran
statement = state_what_ran(privacy.ledgers["client"], 1e-3)
""",
    "quickstart.md": ROUND + "test = client_test = data",
    "user_level_dp.md": "import fedjax_dp, jax",
}
OWN = [page for page in PAGES if blocks(page, "python") and page.name not in FILES]


def run(page: pathlib.Path) -> str:
    """Runs all Python of a page, one block after the other; gives what it prints."""
    names: dict = {"__name__": page.stem}
    exec(GIVEN.get(page.name, ""), names)
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


@telling
@pytest.mark.parametrize("page", [p for p in OWN if p.name != "README.md"], ids=lambda p: p.stem)
def test_the_code_of_a_page_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run(page)


def command_lines(page: pathlib.Path) -> list[list[str]]:
    """The words after `fedjax-dp` in a page; what stands in brackets is a form, no line."""
    lines = "\n".join(blocks(page, "")).replace("\\\n", " ").splitlines()
    found = [re.search(r"^\S*fedjax-dp (.*)", line.split("&& ")[-1]) for line in lines]
    return [shlex.split(one[1], comments=True) for one in found if one and "[--" not in one[1]]


LINES = [(page.stem, words) for page in PAGES for words in command_lines(page)]


@pytest.mark.parametrize(("page", "words"), LINES, ids=[" ".join(words) for _, words in LINES])
def test_a_command_line_of_a_page_is_one_that_exists(page, words, monkeypatch):
    monkeypatch.chdir(ROOT)
    command, *rest = words
    assert command in COMMANDS
    if command == "run" and not {"--keys", "--resume"} & set(rest):
        path = rest.pop(0) if rest and not rest[0].startswith("--") else None
        validate.validate(with_named_lists(reading.load(path, rest)))


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


@telling
def test_the_configuration_of_ones_own_parts_runs(tmp_path, monkeypatch):
    page = ROOT / "docs" / "bring-your-own.md"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(blocks(page, "python")[0], "utf-8")
    (tmp_path / "mine.toml").write_text(blocks(page, "toml")[0], "utf-8")
    words = ("--run.rounds=2", "--privacy.record.epsilon=20", "--algorithm.name=dp_sgd")
    outcome = running.run(reading.load("mine.toml", words))
    assert outcome.summary["rounds"] == 2 and 0 <= outcome.summary["test_f1"] <= 1
