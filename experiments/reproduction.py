"""Everything that the sources report, ours beside theirs: `python -m experiments.reproduction`.

`claims.toml` of a folder lists what its source reports. Numbers come from SQL over the folder's
files: a CSV file and a table of a Markdown page are tables under their names (the second table of a
page is "page.md#2"), and JSON files are rows of `path` and `json`, where "results/*.json" is all of
them. An entry has

- `of`, `finding`: the table, figure or section, and what the source reports there;
- `rows`: a query, with one row of the page for each of its rows, or none if nothing was run;
- `theirs`, `ours`: texts with the query's columns in braces; `holds`: an SQL condition on them, and
  null in rows that were not run;
- `size`, `command`: what ran, or would; `why`: where it does not hold or was not run;
- `note`: shown with every verdict; `verdict`: for what has nothing to run.

The other tables of `claims.toml`, `[block.NAME]`, are for blocks of the folder's README: a query,
and a line of text for each of its rows, or else the rows as a table. A block stands between
`<!-- generated: NAME -->` and `<!-- end -->`.
"""

import argparse
import csv
import itertools
import json
import math
import pathlib
import re
import sqlite3
import statistics
import string
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

HERE = pathlib.Path(__file__).parent
PAGE = HERE / "README.md"
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
VERDICTS = ("holds", "does not hold", "not run", "nothing to run")
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


class Deviation:
    """Computes the standard deviation (n - 1) in SQL; of one number there is none."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def step(self, value: float) -> None:
        self.values.append(value)

    def finalize(self) -> float | None:
        return statistics.stdev(self.values) if len(self.values) > 1 else None


class Text(string.Formatter):
    """Fills texts with columns of a row; a dash stands for what is missing."""

    def format_field(self, value: Any, format_spec: str) -> str:
        return "–" if value is None else super().format_field(value, format_spec)

    def fill(self, text: str, row: Row) -> str:
        return self.vformat(text, (), row).replace(" ± –", "")


class Files:
    """A folder's files as tables of a database."""

    def __init__(self, folder: pathlib.Path):
        self.folder = folder
        self.database = sqlite3.connect(":memory:")
        self.database.row_factory = sqlite3.Row
        self.database.create_aggregate("stdev", 1, Deviation)
        self.database.create_function("sqrt", 1, math.sqrt)

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
    try:
        return float(text)
    except ValueError:
        return text or None


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


def entries(folder: str) -> list[Entry]:
    """Computes the rows of the page for one source."""
    files, fill = Files(HERE / folder), Text().fill
    found = []
    for item in read_claims(folder)["item"]:
        text = {key: " ".join(value.split()) for key, value in item.items()}
        rows: list[Row] = [{}]
        if "rows" in item:
            query = f"SELECT *, ({item.get('holds', 'NULL')}) AS is_held FROM ({item['rows']})"
            rows = files.rows(query)
            if not rows:
                raise SystemExit(f"{folder}, {item['of']}: the query has no row")
        for row in rows:
            verdict = text.get("verdict", "not run")
            if row.get("is_held") is not None:
                verdict = "holds" if row["is_held"] else "does not hold"
            why = [text.get("note", "")] + ([text.get("why", "")] if verdict != "holds" else [])
            cells = (
                text["of"],
                text["finding"],
                text.get("theirs", ""),
                text.get("ours", "") if verdict in VERDICTS[:2] else "",
                verdict,
                text.get("size", "") if verdict in VERDICTS[:2] else "",
                " ".join(filter(None, why)),
            )
            command = f"`{fill(text['command'], row)}`" if "command" in item else ""
            found.append(Entry(*(fill(cell, row) for cell in cells), command))
    return found


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
        lines.append([text.replace("|", r"\|") for text in cells.values()])
        above = entry
    source = " ".join(read_claims(folder)["source"].split())
    return f"{source}.\n\n{as_table(HEADER, lines)}"


def summary() -> str:
    """Counts verdicts by source."""
    rows: list[list[Any]] = []
    for folder in FOLDERS:
        counts = Counter(entry.verdict for entry in entries(folder))
        link = f"[{folder}]({folder}/README.md)"
        rows.append([link, *(counts[verdict] for verdict in VERDICTS)])
    rows.append(["all", *(sum(row[i] for row in rows) for i in range(1, 1 + len(VERDICTS)))])
    return as_table(("folder", *VERDICTS), rows)


def block(page: pathlib.Path, name: str) -> str:
    """Computes a block of a page."""
    if page == PAGE:
        return summary() if name == "summary" else source_table(name)
    claims = read_claims(page.parent.name)["block"][name]
    rows = Files(page.parent).rows(claims["rows"])
    if "text" in claims:
        return "\n".join(Text().fill(claims["text"].strip("\n"), row) for row in rows)
    return as_table(list(rows[0]), [["" if x is None else x for x in r.values()] for r in rows])


def generate(page: pathlib.Path) -> str:
    """Writes all blocks of a page anew."""

    def replace(found: re.Match[str]) -> str:
        return f"{found[1]}\n{block(page, found[2])}\n\n{found[3]}"

    return BLOCK.sub(replace, page.read_text(encoding="utf-8"))


def main(arguments: Sequence[str] | None = None) -> None:
    """Writes all pages, or compares them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="fail where a page would change")
    check = parser.parse_args(arguments).check
    for page in sorted(HERE.rglob("README.md")):
        text = generate(page)
        if text != page.read_text(encoding="utf-8"):
            if check:
                raise SystemExit(f"{page} is not what the files say: run it without --check")
            page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
