"""Pages of figures are what the files beside them say, and their commands are ones that exist."""

import argparse
import itertools
import math
import pathlib
import re
import runpy
import shlex
import sys

import pytest
from marks import telling

from experiments import card, reproduction, sweep
from experiments.clustered_dp.grid import points
from fedjax_dp.experiment import load_config
from fedjax_dp.experiment.assembly.assemble import checked_config
from fedjax_dp.experiment.components.numbers_by_client import with_named_lists
from fedjax_dp.experiment.reading import validate
from fedjax_dp.experiment.studies.sweep import loaded

ROOT = pathlib.Path(__file__).parents[2]
PAGES = reproduction.pages()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: f"{page.parent.name}/{page.stem}")
def test_a_page_is_what_the_files_beside_it_say(page):
    """Every file that a page's numbers come from is there too: a missing one is an error."""
    assert page.read_text("utf-8") == reproduction.generate(page), "run experiments.reproduction"


def name_of(item):
    return item.get("claim") or f"{item['of']}: {item['finding']}"


@pytest.mark.parametrize("folder", reproduction.FOLDERS)
def test_an_entry_has_a_reason_and_its_figures_come_from_files(folder):
    claims = reproduction.read_claims(folder)
    for item in [*claims["item"], *claims.get("claim", ())]:
        name = name_of(item)
        rules = item.keys() & {"holds", "margin"}
        assert ("ours" in item) == bool(rules) and len(rules) <= 1, name
        assert ("margin" in item) == ("error" in item), name
        # Degrees of freedom are those of `stderr`, or given.
        error = item.get("error", "NULL")
        is_spread = reproduction.SPREAD.fullmatch(error) is not None
        assert ("degrees" in item) == (error != "NULL" and not is_spread), name
        needed = {"rows", "theirs", "command"} | ({"size"} if "of" in item else {"sentence"})
        assert not rules or item.keys() >= needed, (name, needed - item.keys())
        # What is in braces is read from a file.
        typed = re.sub(r"\{[^}]*\}", "", item.get("ours", ""))
        assert not re.search(r"\d\.\d", typed), name
    for entry in reproduction.entries(folder):
        assert entry.verdict in reproduction.VERDICTS
        assert entry.why or entry.verdict in ("shown", "shown reduced", "nothing to run"), entry


# Figures of a run that nothing is kept of, or of a paper that is quoted.
NOT_KEPT = {
    "deployment": {".628", ".817", ".872", ".558", ".808", ".867", ".04", ".61", ".80"}
    | {"6.482462905382097"},
    "personalization": {"46.2", "44.8", "48.1", "11.6"},
}
DECIMAL = re.compile(r"(?<![\w.,])\d*\.\d+(?!\w)")
FILES = (".csv", ".json", ".md", ".py", ".toml")


FOLDERS = [page for page in PAGES if page.parent != reproduction.HERE]


@pytest.mark.parametrize("page", FOLDERS, ids=lambda page: page.parent.name)
def test_a_decimal_that_is_typed_into_a_page_is_in_a_file_of_its_folder(page):
    """Covers decimal fractions outside blocks, not whole numbers: those are mostly settings."""
    folder = page.parent
    files = [path for path in folder.rglob("*") if path.suffix in FILES and path != page]
    texts = [path.read_text("utf-8") for path in files]
    if folder.name in reproduction.FOLDERS:
        texts.append(reproduction.source_table(folder.name))
    known = {float(n) for text in texts for n in re.findall(r"\d*\.\d+(?:e-?\d+)?|\d+", text)}
    prose = reproduction.BLOCK.sub("", page.read_text("utf-8"))
    prose = re.sub(r"(?ms)^```.*?^```|`[^`]*`|\]\([^)]*\)", "", prose)
    typed = {number for number in DECIMAL.findall(prose) if float(number) not in known}
    assert typed == NOT_KEPT.get(folder.name, set())


class Read(Exception):
    """The words of a command have been read."""


def commands():
    """Those of all entries and of the card."""
    of_entries = {
        entry.command.strip("`")
        for folder in reproduction.FOLDERS
        for entry in [*reproduction.entries(folder), *reproduction.claims(folder)]
        if entry.command
    }
    return sorted(of_entries | {command.text for command in card.commands()})


def read_words(command, monkeypatch, tmp_path):
    """Runs a command until its words have been read; of a sweep also one point's configuration."""
    original = argparse.ArgumentParser.parse_args

    def parse_args(self, args=None, namespace=None):
        options = original(self, args, namespace)
        if hasattr(options, "methods"):
            words = options.epsilons or [], options.seeds[:1], options.set
            for point in points(ROOT / options.config, options.methods, *words):
                checked_config(point.config)
        raise Read

    def run(study, grid, *_, **options):
        assert grid, "no point"
        checked_config(loaded(study, grid[0]))
        raise Read

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_args)
    monkeypatch.setattr(sweep, "sweep", run)
    # Variables of the environment come before the program.
    program, *words = itertools.dropwhile(lambda word: "=" in word, shlex.split(command))
    if program == "pytest":
        assert (ROOT / words[-1]).is_file()
    elif program == "fedjax-dp":
        name, file, *rest = words
        assert name == "run"
        validate.validate(with_named_lists(load_config(ROOT / file, rest)))
    else:
        assert (program, words[0]) == ("python", "-m"), command
        monkeypatch.setattr(sys, "argv", words[1:])
        monkeypatch.chdir(tmp_path)
        (tmp_path / "experiments").symlink_to(ROOT / "experiments")
        with pytest.raises(Read):
            runpy.run_module(words[1], run_name="__main__", alter_sys=False)


@telling
def test_every_command_of_the_page_is_read_to_its_last_word(monkeypatch, tmp_path):
    for number, command in enumerate(commands()):
        folder = tmp_path / str(number)
        folder.mkdir()
        with monkeypatch.context() as patch:
            read_words(command, patch, folder)
    wrong = "python -m experiments.user_level_dp.grids lambda --algorithms.name=fedavg"
    with monkeypatch.context() as patch, pytest.raises(SystemExit, match="algorithms"):
        read_words(wrong, patch, tmp_path)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A source with a file of each kind."""
    (tmp_path / "source" / "results").mkdir(parents=True)
    files = {
        "claims.toml": """
source = "A source"
[view]
runs = '''SELECT method, value FROM "results/runs.csv" '''
means = '''SELECT method, avg(value) AS mean FROM runs GROUP BY method'''
[[item]]
of = "Table {place:g}"
finding = "{method}"
rows = '''SELECT p.*, p.value AS printed, avg(o.value) AS ours, stdev(o.value) AS spread,
  count(o.value) AS n FROM "printed.csv" p
  LEFT JOIN "results/runs.csv" o ON o.method = p.method GROUP BY p.method'''
theirs = "{printed:.1f}"
ours = "{ours:.2f} ± {spread:.2f}"
margin = "ours - printed + 1"
error = "stderr(spread, n)"
unclear = "CASE WHEN ours < 50 THEN 'at chance' END"
reduced = "printed > 85"
size = "small"
why = "too small"
decides = "one device, 3 hours"
[[item]]
of = "Figure"
finding = "two | three"
rows = '''SELECT json_extract(json, '$.a') AS a, (SELECT mean(cell) FROM "results/page.md#2") AS b,
  (SELECT spread(cell) FROM "results/page.md#2") AS c
  FROM "results/*.json" WHERE json_extract(json, '$.b') IS NULL'''
ours = "{a:g} and {b:g} ± {c:g}"
holds = "a < b"
refuted = "by algebra"
[[item]]
of = "Diagram"
finding = "arrows"
verdict = "nothing to run"
[[claim]]
claim = "A is best"
rows = '''SELECT mean AS a FROM means WHERE method = 'A' '''
theirs = "far"
ours = "{a:.1f}"
holds = "a > 80"
reduced = true
command = "run {a:.0f}"
sentence = "A reaches {a:.1f}."
[block.both]
rows = '''SELECT method, value FROM runs'''
[block.line]
rows = '''SELECT count(*) AS runs FROM "results/runs.csv" '''
text = "There are {runs} runs."
""",
        "printed.csv": "# a comment\nplace,method,value\n1,A,90\n1,B,80\n1,C,70\n",
        "results/runs.csv": "method,value\nA,89.95\nA,90.05\nB,78\n",
        "results/one.json": '{"a": 1, "b": NaN}',
        "results/page.md": "| x |\n|---|\n| 7 |\n\n| cell |\n|---|\n| 2 ± 1 |\n",
        "README.md": "<!-- generated: both -->\n<!-- end -->\n"
        "<!-- generated: line -->\nold\n<!-- end -->\n",
        "../rows.md": "<!-- generated: source -->\n<!-- end -->\n",
    }
    for name, text in files.items():
        (tmp_path / "source" / name).write_text(text, "utf-8")
    monkeypatch.setattr(reproduction, "HERE", tmp_path)
    monkeypatch.setattr(reproduction, "FOLDERS", ("source",))
    return tmp_path / "source"


def test_numbers_come_from_files_and_verdicts_from_rules(folder):
    a, b, c, figure, diagram = reproduction.entries("source")
    assert a[:5] == ("Table 1", "A", "90.0", "90.00 ± 0.07", "shown reduced") and a.why == ""
    assert b[:5] == ("Table 1", "B", "80.0", "78.00", "undecided")
    assert b.why == "One seed. too small Would decide: one device, 3 hours."
    assert c[:5] == ("Table 1", "C", "70.0", "", "not run") and c.size == ""
    assert figure[3:5] == ("1 and 2 ± 1", "shown")
    assert diagram.verdict == "nothing to run"
    assert r"two \| three" in reproduction.source_table("source")
    claim = ("A is best", "far", "90.0", "shown reduced", "`run 90`", "A reaches 90.0.")
    assert reproduction.claims("source") == [claim]
    line = "| [source](source/README.md) | A is best | far | 90.0 | shown reduced |"
    assert f"{line} `--claim source 1` |" in reproduction.claims_table()
    assert "1. A reaches 90.0. *Shown reduced*: `run 90`" in reproduction.sentences()
    assert "| all | 1 | 1 | 0 | 1 | 1 | 1 |" in reproduction.summary()
    meaning = reproduction.MEANINGS["shown reduced"]
    assert f"| shown reduced | {meaning} | 1 | 1 | – |" in reproduction.verdicts()


@pytest.mark.parametrize(
    ("values", "verdict", "reason"),
    [
        # Two values that differ by 2 have the standard error 1, and the band is 12.706 of these.
        # Of three values that differ by √3 it is 4.303. The margin is their mean less 79.
        ((90.8, 92.8), "shown", ""),
        ((90.6, 92.6), "undecided", "Within the error band."),
        ((65.4, 67.4), "undecided", "Within the error band."),
        ((65.2, 67.2), "undecided", "Contrary, cause unknown."),
        ((83.4 - 3**0.5, 83.4, 83.4 + 3**0.5), "shown", ""),
        ((83.2 - 3**0.5, 83.2, 83.2 + 3**0.5), "undecided", "Within the error band."),
        ((10.0, 10.1), "undecided", "At chance."),
    ],
)
def test_a_difference_decides_beyond_the_interval_of_student(folder, values, verdict, reason):
    lines = "".join(f"B,{value}\n" for value in values)
    (folder / "results" / "runs.csv").write_text(f"method,value\n{lines}", "utf-8")
    entry = reproduction.entries("source")[1]
    assert entry.verdict == verdict and entry.why.startswith(reason)


def test_degrees_of_freedom_are_those_of_welch(folder):
    """Of equal errors they add up; where one error is far larger, they are its own."""
    query = "SELECT degrees(2, 3) AS a, degrees(1, 3, 1, 3) AS b, degrees(9, 3, 1e-6, 9) AS c"
    (row,) = reproduction.Files(folder).rows(query + ", degrees(1, 1) AS d, degrees(0, 3) AS e")
    assert row["a"] == pytest.approx(2) and row["b"] == pytest.approx(4)
    assert row["c"] == pytest.approx(2) and row["d"] is None and row["e"] == 2
    assert [round(reproduction.quantile(n), 3) for n in (2, None)] == [4.303, 1.96]


def test_texts_and_tables_round_alike(folder):
    (row,) = reproduction.Files(folder).rows("SELECT printf('%.2f and %d %%', 0.355, NULL) AS text")
    assert row["text"] == f"{0.355:.2f} and 0 %"


@pytest.mark.parametrize(
    ("pairs", "smallest"),
    [
        ((6.0, 2.0, 1.0, 0.1), 3.0),
        ((-1.0, 0.5, 9.0, 1.0), -2.0),
        ((-1.0, 0.0, 9.0, 1.0), -math.inf),
        ((2.0, None, 1.0, 0.5), 1.0),  # One seed.
        ((None, 1.0, 1.0, 1.0), None),  # Not run.
    ],
)
def test_of_several_margins_the_smallest_in_its_own_error_decides(folder, pairs, smallest):
    values = ", ".join("NULL" if number is None else str(number) for number in pairs)
    (row,) = reproduction.Files(folder).rows(f"SELECT in_errors({values}) AS smallest")
    assert row["smallest"] == smallest


def test_what_the_source_is_wrong_about_has_evidence(folder):
    (folder / "results" / "one.json").write_text('{"a": 3, "b": NaN}', "utf-8")
    entry = reproduction.entries("source")[3]
    assert (entry.verdict, entry.why) == ("refuted", "by algebra")
    (folder / "results" / "runs.csv").write_text("method,value\nA,80\nA,80.1\n", "utf-8")
    entry = reproduction.entries("source")[0]
    assert entry.why.startswith("Contrary at reduced size.")


def test_blocks_of_a_page_are_written_and_nothing_else(folder, capsys):
    page = folder / "README.md"
    with pytest.raises(SystemExit, match="not what the files say"):
        reproduction.main(["--check"])
    reproduction.main([])
    reproduction.main(["--check"])
    text = page.read_text("utf-8")
    assert "| A | 89.95 |\n| A | 90.05 |" in text and "There are 3 runs." in text
    assert "old" not in text and text.endswith("<!-- end -->\n")


def test_a_line_of_the_front_page_runs_its_command(folder, capfd):
    claims = folder / "claims.toml"
    text = claims.read_text("utf-8").replace('"run {a:.0f}"', '"python -c print({a:.0f}+1)"')
    claims.write_text(text, "utf-8")
    reproduction.main(["--claim", "source", "1"])
    assert capfd.readouterr().out.splitlines() == ["`python -c print(90+1)`", "91"]
    claims.write_text(text.replace("print", "exit"), "utf-8")
    with pytest.raises(SystemExit) as ended:
        reproduction.main(["--claim", "source", "1"])
    assert ended.value.code == 91
    with pytest.raises(SystemExit, match="a line of source, 1 to 1, got 2"):
        reproduction.main(["--claim", "source", "2"])
    with pytest.raises(SystemExit, match="one of source, got 'other'"):
        reproduction.main(["--claim", "other", "1"])


def test_a_missing_file_is_an_error(folder):
    (folder / "results" / "page.md").unlink()
    with pytest.raises(SystemExit, match=r"source has no results/page\.md"):
        reproduction.entries("source")
