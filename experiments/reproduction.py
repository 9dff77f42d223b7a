"""Everything that the sources report, ours beside theirs: `python -m experiments.reproduction`.

`claims.toml` of a folder lists what its source reports. Numbers come from SQL over the folder's
files: a CSV file and a table of a Markdown page are tables under their names (the second table of a
page is "page.md#2"), and JSON files are rows of `path` and `json`, where "results/*.json" is all of
them. Beside SQLite's own functions there are `stdev` over rows, `sqrt`, `mean` and `spread` of a
text such as "81.2 ± 0.4", and the standard error `stderr(sd, n)` of a mean, or of a difference of
two, `stderr(sd1, n1, sd2, n2)`, NULL below two seeds, with its degrees of freedom, `degrees(sd, n)`
or Welch's `degrees(sd1, n1, sd2, n2)`. `printf` rounds as Python does. Where a finding has several
conditions, the margin `in_errors(margin1, error1, margin2, error2, …)` is the smallest of theirs,
each in its own standard error, and the rule's error is 1.

An `[[item]]`, a row of `rows.md`, has

- `of`, `finding`: the table, figure or section, and what the source reports there;
- `rows`: a query, with one row of the page for each of its rows, or none if nothing was run;
- `theirs`, `ours`: texts with the query's columns in braces;
- a rule: SQL on the query's columns, NULL in rows that were not run. `holds` is a condition, for
  numbers without chance. `margin` and `error` are for all others: how far our numbers lie on the
  side that the finding names, and its standard error over seeds. A margin decides if it is larger
  than the error times the 97.5 % quantile of Student's t, 12.7 for two seeds and 4.3 for three. Its
  `degrees` of freedom follow from an error that is one call of `stderr`. They are NULL, for the
  normal quantile, where the error is that of a sum or a share over many draws;
- `unclear`: SQL, why our numbers cannot decide ("at chance"), or NULL; it goes before the rule. A
  reading of ours of a word that the source does not quantify ("close") may show, and never refute;
- `reduced`: whether ours is smaller than the source's, true or an SQL condition;
- `refuted`: the evidence of the source's error, for rows where the finding does not hold;
- `size`, `command`: what ran, or would; `why`: why it is undecided or was not run; `decides`: the
  device and hours that would decide; `note`: shown with every verdict;
- `verdict`: for what has nothing to run.

A `[[claim]]`, a line of the front page, is what the source claims as a whole. It has `claim` in
place of `of` and `finding`, and a `sentence` for a reader of the source.
`python -m experiments.reproduction --claim splitting 3` runs the command of the third line of
`splitting`.

`[view]` has queries that several rows share, by name.

The other tables of `claims.toml`, `[block.NAME]`, are for blocks of the folder's README: a query,
and a line of text for each of its rows, or else the rows as a table; or the `function`, as
"module:name", that returns the block's text. A block stands between
`<!-- generated: NAME -->` and `<!-- end -->`. Blocks of the pages beside this file are `claims`,
`verdicts`, `sentences`, `summary`, `card`, and a folder's name for its rows.
"""

import argparse
import csv
import itertools
import json
import math
import pathlib
import pkgutil
import re
import shlex
import sqlite3
import statistics
import string
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from scipy import special

from experiments import card

HERE = pathlib.Path(__file__).parent
FOLDERS = (
    "splitting",
    "heterogeneous_dp",
    "clustered_dp",
    "user_level_dp",
    "secure_aggregation",
    "generalization",
    "personalization",
)
HEADER = ("of", "the source reports", "theirs", "ours", "verdict", "our size", "why", "command")
MEANINGS = {
    "shown": "our numbers show it at the source's size, or where size does not matter",
    "shown reduced": "our numbers show it with less data, fewer rounds or a smaller model",
    "refuted": "the source is in error, and the row gives the evidence",
    "undecided": "our runs cannot tell: one seed, a difference within the error band, a model at "
    "chance or not converged, a word without a number, or the opposite of the claim, at reduced "
    "size or for an unknown cause",
    "not run": "the row gives the command, the device and the hours that would decide",
    "nothing to run": "a diagram, a list of settings, or a figure known by its caption alone",
}
VERDICTS = tuple(MEANINGS)
# Rows that coincided or did not, before there were verdicts.
BEFORE = {"shown": 268, "undecided": 255, "not run": 78, "nothing to run": 9}
LEVEL = 0.95  # of the interval around a difference, which decides nothing if it contains zero
SPREAD = re.compile(r"stderr\([^()]*\)")
FILE = re.compile(r'"([^"]+?\.(?:csv|json|md))(#\d+)?"')
BLOCK = re.compile(r"(<!-- generated: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
Row = Mapping[str, Any]


class Entry(NamedTuple):
    """A row of the page."""

    of: str
    finding: str
    theirs: str
    ours: str
    verdict: str
    size: str
    why: str
    command: str


class Claim(NamedTuple):
    """A line of the front page."""

    claim: str
    theirs: str
    ours: str
    verdict: str
    command: str
    sentence: str


class Deviation:
    """Computes the standard deviation (n - 1) in SQL; of one number there is none."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def step(self, value: float) -> None:
        self.values.append(value)

    def finalize(self) -> float | None:
        return statistics.stdev(self.values) if len(self.values) > 1 else None


def standard_error(*spreads: float | None) -> float | None:
    """Computes that of a sum of independent means: a deviation and a number of seeds for each."""
    pairs = list(zip(spreads[::2], spreads[1::2], strict=True))
    if any(sd is None or n is None or n < 2 for sd, n in pairs):
        return None
    return math.sqrt(sum(sd**2 / n for sd, n in pairs))


def welch_degrees(*spreads: float | None) -> float | None:
    """Computes the degrees of freedom of that error, by Welch and Satterthwaite."""
    pairs = zip(spreads[::2], spreads[1::2], strict=True)
    if standard_error(*spreads) is None:
        return None
    variances = [(sd**2 / n, n - 1) for sd, n in pairs if sd is not None and n is not None]
    whole = sum(variance for variance, _ in variances)
    if whole == 0:
        return min(n for _, n in variances)
    return whole**2 / sum(variance**2 / n for variance, n in variances)


def quantile(degrees: float | None) -> float:
    """Returns how many standard errors the interval reaches to each side, of Student's t."""
    share = (1 + LEVEL) / 2
    return float(special.ndtri(share) if degrees is None else special.stdtrit(degrees, share))


def printed(text: str, *values: Any) -> str:
    """Fills a text as SQLite's printf does, NULL being zero, but rounds as the pages' texts do."""
    kinds = re.findall(r"%[-+ #0-9.]*([a-zA-Z])", text.replace("%%", ""))
    numbers = (
        ("" if value is None else value) if kind == "s" else float(0 if value is None else value)
        for kind, value in zip(kinds, values, strict=False)
    )
    return text % tuple(numbers)


def smallest_in_errors(*pairs: float | None) -> float | None:
    """Returns the smallest of several margins, each divided by its error, the number after it."""
    margins, errors = pairs[::2], pairs[1::2]
    known = [margin for margin in margins if margin is not None]
    if len(known) < len(margins):
        return None
    if None in errors:  # One seed: the margins are there, and decide nothing.
        return min(known)
    in_errors = (
        margin / error if error else math.copysign(math.inf, margin)
        for margin, error in zip(known, errors, strict=True)
    )
    return min(in_errors)


def _part(text: str | float | None, number: int) -> float | None:
    parts = str(text).split("±") if text is not None else []
    return _as_float(parts[number].strip()) if number < len(parts) else None


def _as_float(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


class Text(string.Formatter):
    """Fills texts with columns of a row; a dash stands for what is missing."""

    def format_field(self, value: Any, format_spec: str) -> str:
        return "–" if value is None else super().format_field(value, format_spec)

    def fill(self, text: str, row: Row) -> str:
        return self.vformat(text, (), row).replace(" ± –", "")


class Files:
    """A folder's files as tables of a database."""

    def __init__(self, folder: pathlib.Path, views: Mapping[str, str] = {}):
        self.folder = folder
        self.database = sqlite3.connect(":memory:")
        self.database.row_factory = sqlite3.Row
        self.database.create_aggregate("stdev", 1, Deviation)
        self.database.create_function("sqrt", 1, lambda x: None if x is None else math.sqrt(x))
        self.database.create_function("mean", 1, lambda text: _part(text, 0))
        self.database.create_function("spread", 1, lambda text: _part(text, 1))
        self.database.create_function("stderr", -1, standard_error)
        self.database.create_function("degrees", -1, welch_degrees)
        # SQLite's own rounds a tie such as 0.355 to another side.
        self.database.create_function("printf", -1, printed)
        self.database.create_function("in_errors", -1, smallest_in_errors)
        for name, query in views.items():
            self.rows(f"CREATE VIEW {name} AS {query}")

    def rows(self, query: str) -> list[Row]:
        """Runs a query, the files that it names having been read."""
        known = {name for (name,) in self.database.execute("SELECT name FROM sqlite_master")}
        for name, number in dict.fromkeys(FILE.findall(query)):
            if name + number not in known:
                self._add(name + number, list(self._read(name, number)))
        return [dict(row) for row in self.database.execute(query)]

    def _read(self, name: str, number: str) -> Iterator[Row]:
        paths = sorted(self.folder.glob(name))
        if not paths:
            raise SystemExit(f"{self.folder.name} has no {name}")
        for path in paths:
            text = path.read_text(encoding="utf-8")
            if path.suffix == ".json":
                # NaN and infinity, which SQL's JSON has not, become null.
                value = json.loads(text, parse_constant=lambda name: None)
                yield {"path": path.name, "json": json.dumps(value)}
            elif path.suffix == ".csv":
                lines = (line for line in text.splitlines() if not line.startswith("#"))
                for row in csv.DictReader(lines):
                    yield {key: _number(value) for key, value in row.items()}
            else:
                yield from markdown_tables(text)[int(number[1:] or 1) - 1]

    def _add(self, name: str, rows: Sequence[Row]) -> None:
        columns = ", ".join(f'"{column}"' for column in rows[0])
        self.database.execute(f'CREATE TABLE "{name}" ({columns})')
        places = ", ".join("?" for _ in rows[0])
        values = [tuple(row.values()) for row in rows]
        self.database.executemany(f'INSERT INTO "{name}" VALUES ({places})', values)


def _number(text: str) -> str | float | None:
    number = _as_float(text)
    return (text or None) if number is None else number


def markdown_tables(text: str) -> list[list[Row]]:
    """Reads all tables of a page; cells stay texts, and a second column of a name is "name (2)"."""
    tables = []
    for is_table, group in itertools.groupby(text.splitlines(), lambda x: x.startswith("|")):
        if is_table:
            header, _, *body = (
                [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in group
            )
            for i, name in enumerate(header):
                if count := header[:i].count(name):
                    header[i] = f"{name} ({count + 1})"
            tables.append([dict(zip(header, cells, strict=True)) for cells in body])
    return tables


def as_table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Writes a table of Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def read_claims(folder: str) -> dict[str, Any]:
    """Reads what a folder's source reports."""
    return tomllib.loads((HERE / folder / "claims.toml").read_text(encoding="utf-8"))


def files_of(folder: str) -> Files:
    """Opens a folder's files, with the queries that its claims share."""
    return Files(HERE / folder, read_claims(folder).get("view", {}))


def judge(item: Row, row: Row) -> tuple[str, str]:
    """Gives the verdict on a row by the rule of its item, and the reason of an undecided one."""
    if "verdict" in item:
        return item["verdict"], ""
    if row.get("_margin") is None:
        return "not run", ""
    error = row["_error"]
    if row["_unclear"] is not None:
        return "undecided", row["_unclear"]
    degrees = row["_degrees"]
    # Without an error there is no chance in the numbers, whatever the degrees of freedom.
    if error is None or (error > 0 and degrees is not None and degrees < 1):
        return "undecided", "one seed"
    if abs(row["_margin"]) <= (quantile(degrees) * error if error > 0 else 0):
        return "undecided", "within the error band"
    if row["_margin"] > 0:
        return ("shown reduced" if row["_reduced"] else "shown"), ""
    if Text().fill(item.get("refuted", ""), row).strip("– "):
        return "refuted", ""
    return "undecided", "contrary at reduced size" if row["_reduced"] else "contrary, cause unknown"


def judged(item: Row, files: Files) -> Iterator[tuple[Row, str, str]]:
    """Yields the rows of an item or a claim with their verdicts and reasons."""
    rows: list[Row] = [{}]
    if "rows" in item:
        reduced = item.get("reduced", False)
        error = item.get("error", "NULL" if "margin" in item else "0")
        degrees = f"degrees{error.removeprefix('stderr')}" if SPREAD.fullmatch(error) else "NULL"
        rule = {
            # A condition is a margin of 1 or -1 without an error.
            "_margin": item.get("margin", f"2 * ({item.get('holds', 'NULL')}) - 1"),
            "_error": error,
            "_degrees": item.get("degrees", degrees),
            "_unclear": item.get("unclear", "NULL"),
            "_reduced": reduced if isinstance(reduced, str) else str(int(reduced)),
        }
        columns = ", ".join(f"({text}) AS {name}" for name, text in rule.items())
        rows = files.rows(f"SELECT *, {columns} FROM ({item['rows']})")
        if not rows:
            raise SystemExit(f"{files.folder.name}, {item['rows']}: the query has no row")
    for row in rows:
        yield row, *judge(item, row)


def _texts(item: Row) -> dict[str, Any]:
    return {k: " ".join(v.split()) if isinstance(v, str) else v for k, v in item.items()}


def entries(folder: str) -> list[Entry]:
    """Computes the rows of the page for one source."""
    files, fill = files_of(folder), Text().fill
    written = []
    for item in map(_texts, read_claims(folder)["item"]):
        for row, verdict, reason in judged(item, files):
            has_run = verdict not in VERDICTS[4:]
            why = [item.get("note", "")]
            if verdict == "refuted":
                why.append(item["refuted"])
            elif verdict in ("undecided", "not run"):
                why += [f"{reason.capitalize()}." if reason else "", item.get("why", "")]
                why.append(f"Would decide: {item['decides']}." if "decides" in item else "")
            cells = (
                item["of"],
                item["finding"],
                item.get("theirs", ""),
                item.get("ours", "") if has_run else "",
                verdict,
                item.get("size", "") if has_run else "",
                " ".join(filter(None, why)),
            )
            command = f"`{fill(item['command'], row)}`" if "command" in item else ""
            written.append(Entry(*(fill(cell, row) for cell in cells), command))
    return written


def claims(folder: str) -> list[Claim]:
    """Computes the lines of the front page for one source."""
    files, fill = files_of(folder), Text().fill
    written = []
    for item in map(_texts, read_claims(folder).get("claim", ())):
        for row, verdict, reason in judged(item, files):
            ours = item.get("ours", "") if verdict not in VERDICTS[4:] else ""
            verdict = f"{verdict}: {reason}" if reason else verdict
            cells = item["claim"], item.get("theirs", ""), ours, verdict
            written.append(
                Claim(
                    *(fill(cell, row) for cell in cells),
                    f"`{fill(item['command'], row)}`",
                    fill(item["sentence"], row),
                )
            )
    return written


def _source(folder: str) -> str:
    return " ".join(read_claims(folder)["source"].split())


def _cells(row: Iterable[str]) -> list[str]:
    return [text.replace("|", r"\|") for text in row]


def source_table(folder: str) -> str:
    """Writes the rows of one source; sizes and commands that repeat the one above are left out."""
    lines, above = [], Entry(*[""] * 8)
    for entry in entries(folder):
        same = entry.of == above.of
        cells = entry._asdict()
        for name in ("of", "size", "command"):
            if same and cells[name] == getattr(above, name):
                cells[name] = ""
        if same and cells["why"] and cells["why"] == above.why:
            cells["why"] = "as above"
        lines.append(_cells(cells.values()))
        above = entry
    return f"{_source(folder)}.\n\n{as_table(HEADER, lines)}"


def claims_table() -> str:
    """Writes what the sources claim, theirs beside ours, and the words that repeat a line."""
    lines = []
    for folder in FOLDERS:
        for number, claim in enumerate(claims(folder), start=1):
            name = f"[{folder}]({folder}/README.md)" if number == 1 else ""
            verdict, _, _ = claim.verdict.partition(":")
            cells = _cells((claim.claim, claim.theirs, claim.ours, verdict))
            lines.append([name, *cells, f"`--claim {folder} {number}`"])
    header = ("source", "it claims", "theirs", "ours", "verdict", "command")
    return as_table(header, lines)


def sentences() -> str:
    """Writes a sentence for each claim, by source, with its verdict and command."""
    parts = []
    for folder in FOLDERS:
        lines = [f"**{folder}**: {_source(folder)}.", ""]
        for number, claim in enumerate(claims(folder), start=1):
            has_run = claim.verdict not in VERDICTS[4:]
            text = claim.sentence if has_run else f"{claim.claim}."
            lines.append(f"{number}. {text} *{claim.verdict.capitalize()}*: {claim.command}")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def repeat(folder: str, number: str) -> None:
    """Runs the command of a claim, by its line on the front page."""
    if folder not in FOLDERS:
        raise SystemExit(f"--claim must name one of {', '.join(FOLDERS)}, got {folder!r}")
    commands = {str(i): claim.command for i, claim in enumerate(claims(folder), start=1)}
    if number not in commands:
        raise SystemExit(f"--claim must be a line of {folder}, 1 to {len(commands)}, got {number}")
    print(commands[number], flush=True)
    program, *words = shlex.split(commands[number].strip("`"))
    modules = ["-m", "pytest"] if program == "pytest" else []
    done = subprocess.run([sys.executable, *modules, *words], cwd=HERE.parent)
    if done.returncode:
        raise SystemExit(done.returncode)


def _counts(folder: str) -> Counter[str]:
    return Counter(entry.verdict for entry in entries(folder))


def summary() -> str:
    """Counts verdicts by source."""
    rows: list[list[Any]] = []
    for folder in FOLDERS:
        counts = _counts(folder)
        link = f"[{folder}]({folder}/README.md)"
        rows.append([link, *(counts[verdict] for verdict in VERDICTS)])
    rows.append(["all", *(sum(row[i] for row in rows) for i in range(1, 1 + len(VERDICTS)))])
    return as_table(("folder", *VERDICTS), rows)


def verdicts() -> str:
    """Says what verdicts mean, and counts lines of the front page and rows, now and before."""
    lines = Counter(c.verdict.partition(":")[0] for folder in FOLDERS for c in claims(folder))
    rows = sum(map(_counts, FOLDERS), Counter[str]())
    body = [
        [verdict, meaning, lines[verdict], rows[verdict], BEFORE.get(verdict, "–")]
        for verdict, meaning in MEANINGS.items()
    ]
    body.append(["all", "", lines.total(), rows.total(), sum(BEFORE.values())])
    return as_table(("verdict", "meaning", "lines above", "rows", "rows before"), body)


def block(page: pathlib.Path, name: str) -> str:
    """Computes a block of a page."""
    if page.parent == HERE:
        parts = {"claims": claims_table, "verdicts": verdicts, "sentences": sentences}
        parts |= {"summary": summary, "card": card.table}
        return parts[name]() if name in parts else source_table(name)
    block_ = read_claims(page.parent.name)["block"][name]
    if "function" in block_:
        return pkgutil.resolve_name(block_["function"])()
    rows = files_of(page.parent.name).rows(block_["rows"])
    if "text" in block_:
        return "\n".join(Text().fill(block_["text"].strip("\n"), row) for row in rows)
    return as_table(list(rows[0]), [["" if x is None else x for x in r.values()] for r in rows])


def pages() -> list[pathlib.Path]:
    """Lists the pages with generated blocks."""
    return [*sorted(HERE.glob("*.md")), *sorted(HERE.glob("*/**/README.md"))]


def generate(page: pathlib.Path) -> str:
    """Writes all blocks of a page anew."""

    def replace(found: re.Match[str]) -> str:
        return f"{found[1]}\n{block(page, found[2])}\n\n{found[3]}"

    return BLOCK.sub(replace, page.read_text(encoding="utf-8"))


def main(arguments: Sequence[str] | None = None) -> None:
    """Writes all pages, or compares them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="fail where a page would change")
    parser.add_argument(
        "--claim", nargs=2, metavar=("FOLDER", "LINE"), help="first run the command of a claim"
    )
    options = parser.parse_args(arguments)
    if options.claim:
        repeat(*options.claim)
    for page in pages():
        text = generate(page)
        if text != page.read_text(encoding="utf-8"):
            if options.check:
                raise SystemExit(f"{page} is not what the files say: run it without --check")
            page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
