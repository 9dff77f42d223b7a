"""Your own table, in CSV, JSON Lines, Parquet or Arrow files, read by column name."""

import contextlib
import dataclasses
import datetime
import os
import pathlib
import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from fedjax_dp.core import checks, disclosure, files
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.ranges import LARGEST, SMALLEST, Decay, Seed, fits_float32
from fedjax_dp.data.datasets.base import Dataset, Encoding, Task
from fedjax_dp.data.datasets.cells import (
    MISSING_VALUES,
    Column,
    DateRule,
    Notation,
    Reading,
    Table,
    is_csv,
    without_ending,
)
from fedjax_dp.data.datasets.tabular import Numeric, in_range

_PARTS = ("train", "test")
# Numbers above it are taken to be unscaled.
LARGE_INPUT = 100
# More categories than this are taken to be record names.
_MOST_CATEGORIES = 1000
_SIZES = f"that float32 can represent, {SMALLEST:.2g} to {LARGEST:.2g}"


class Testing(NamedTuple):
    """Which rows are for testing.

    Attributes:
      split: a column that holds "train" or "test".
      test_path: a file, or a pattern, of test rows; they replace those of `split` or
        `test_fraction`, which are left out. For predictions it may lack the label; the client and
        columns that are no inputs may be absent too.
      test_fraction: the share of rows drawn for testing, in [0, 1).
      seed: chooses these rows.
    """

    split: str | None = None
    test_path: str | None = None
    test_fraction: Decay = 0.0
    seed: Seed = 0


class Gaps(NamedTuple):
    """What becomes of missing values.

    Attributes:
      missing: "refuse"; "drop" rows with a missing input; "fill" with the values in `fill`; or
        "mean", the exact mean (or most frequent category) of the training part.
      fill: for missing="fill", the value of each column with missing cells.
      missing_values: strings that stand for a missing value.
    """

    missing: Literal["refuse", "drop", "fill", "mean"] = "refuse"
    fill: Mapping[str, Any] = {}
    missing_values: Sequence[str] = MISSING_VALUES


class Coding(NamedTuple):
    """How columns become numbers.

    Attributes:
      categories: the values of categorical columns, known without the data; a string column or
        label that is not named here has those that occur in the data.
      coding: "one_hot" makes one array of numbers; "integer" makes the array "numbers", and an
        array of integers for each encoded column, for models with embeddings.
      scaling: of numbers: "none"; "range" maps `ranges` to [0, 1] and clips values outside;
        "standard" has exact mean 0 and deviation 1 over the training part.
      ranges: the lowest and the highest value of each numeric column, known without the data.
    """

    categories: Mapping[str, Sequence[str | int | float | bool]] = {}
    coding: Literal["one_hot", "integer"] = "one_hot"
    scaling: Literal["none", "range", "standard"] = "none"
    ranges: Mapping[str, Sequence[float]] = {}


class Cells(NamedTuple):
    """How text writes a table, its numbers and its dates.

    Attributes:
      separator: the ASCII character between the cells of a CSV file.
      encoding: that of CSV files, by a name that Python knows, such as "latin-1" or "utf-16".
      decimal: the decimal mark of numbers in text.
      thousands: the mark between their groups of digits; "" for none.
      dates: columns of dates, which become days: for each the date `since` which they are counted,
        in ISO format, and, where dates are text, their `format`, such as "%d.%m.%Y".
    """

    separator: str = ","
    encoding: str = "utf-8"
    decimal: Literal[".", ","] = "."
    thousands: Literal["", ",", ".", " ", "'", "_"] = ""
    dates: Mapping[str, Mapping[str, str]] = {}


@checked
def load(
    data_dir: pathlib.Path | None,
    *,
    path: str,
    label: str | Sequence[str],
    weight: str | None = None,
    client: str | None = None,
    clients_are_files: bool = False,
    features: Sequence[str] = (),
    testing: Testing = Testing(),
    task: Literal["classification", "regression"] = "classification",
    gaps: Gaps = Gaps(),
    column_coding: Coding = Coding(),
    cells: Cells = Cells(),
) -> Dataset:
    """Loads a table, one example per row.

    Numeric columns are inputs, scaled or not; string columns, and those that `categories` names,
    are encoded. Nothing is guessed: a missing value, a string in a numeric column, a number that
    float32 cannot hold, or an undeclared category is an error that names file, row and column; so
    are dates and numbers in another notation, and strings of which most occur once, unless an
    option says how to read them. Numbers are compared as numbers: 0 and 0.0 are one class.

    Guarantee: with `missing` other than "mean", `scaling` other than "standard", and `categories`
    declared for all coded columns, each example depends only on its own row and the options, and
    the guarantee of a training holds for the table. All else computed from the data is named in
    `exact_statistics`, which privacy statements repeat.

    Args:
      data_dir: where to search for a relative path that is not in the current folder.
      path: the file, ending in .csv, .tsv, .jsonl, .parquet or .arrow (.csv.gz and .jsonl.gz too),
        or a pattern such as hospitals/*.csv of several with the same columns.
      label: the column to predict, or a list of several: numbers in a regression, else labels of
        two classes each, which do not exclude each other.
      weight: the column of the weights of examples in the loss of training, numbers of at least 0;
        test rows may lack it, and evaluations do not read it.
      client: the column that names the client of each row, for the partition "natural", which is
        then the default of a run; without it a partition spreads rows over clients.
      clients_are_files: whether each file is a client. Its name is that of the file without
        suffixes or, if two would coincide, the path below the files' common folder.
      features: the input columns; all others if empty.
      testing: which rows are test data, see `Testing`.
      task: "classification" encodes labels; "regression" takes them as numbers.
      gaps: what is done about missing values, see `Gaps`.
      column_coding: how columns are read and encoded, see `Coding`.
      cells: how numbers and dates are written, see `Cells`.

    Returns:
      Inputs `[rows, features]`, float32, or a dict of arrays; labels, int32 for classes and float32
      for numbers, of test rows without labels -1 or NaN, `[rows, labels]` of several; weights as
      `example_weight`; clients' names as in the file, integers as such.

    Raises:
      ValueError: naming file, row, column, rule and value.
      ImportError: if pyarrow is not installed.

    Example:
      `load(None, path="patients.csv", label="ill", client="hospital", gaps=Gaps("drop"))`
    """
    cells, column_coding = _renamed(cells, column_coding)
    targets = [label] if isinstance(label, str) else list(label)
    checks.require(bool(targets), "label", "name at least one column", targets)
    split = testing.split
    roles: dict[str, str | None] = {
        f"label{f' {i + 1}' * (i > 0)}": name for i, name in enumerate(targets)
    }
    roles |= {"weight": weight, "client": client, "split": split}
    table, num_paths, inputs = open_table(data_dir, path, roles, features, testing, gaps, cells)
    tables = {"categories": column_coding.categories, "ranges": column_coding.ranges}
    _check_names(table, roles, features, {**tables, "fill": gaps.fill, "dates": cells.dates})
    _check_options(gaps, column_coding, testing)
    rule = "be left out if clients_are_files"
    checks.require(client is None or not clients_are_files, "client", rule, client)
    _check_inputs(
        inputs,
        features,
        inputs if task == "classification" else [*inputs, *targets],
        cells,
        column_coding,
    )
    for used in dict.fromkeys([*inputs, *filter(None, roles.values())]):
        table.columns[used].require_readable()
    # Rows to predict need neither labels nor clients, and no row of a test file needs `split`.
    num_own = int(table.starts[num_paths])
    absent = {
        name
        for name in filter(None, (*targets, weight, client))
        if num_own < table.num_rows and table.columns[name].is_missing[num_own:].all()
    }
    is_unlabelled = set(targets) <= absent
    absent -= set() if is_unlabelled else set(targets)
    for role, name in roles.items():
        if name is not None:
            rows = np.arange(num_own if name in {*absent, split} else table.num_rows)
            table.columns[name].require_present(rows, f"have a value in every row, as the {role}")
    parts = rows_of_parts(table, num_own, inputs, gaps, testing)

    coder = _Coder(table, parts, inputs, gaps, column_coding)
    names, xs = coder.inputs_of_parts()
    labelled = (parts[0], parts[1][:0]) if is_unlabelled else parts
    of_columns = [_labels(table.columns[name], labelled, task, coder) for name in targets]
    labels, classes = of_columns[0]
    made_task: Task = task
    if len(targets) > 1:
        labels = [np.stack(each, axis=1) for each in zip(*(y for y, _ in of_columns), strict=True)]
        if task == "classification":
            for name, (_, found) in zip(targets, of_columns, strict=True):
                rule = "have two classes, as one of several labels"
                disclosure.require(len(found) == 2, f"label {name!r}", rule, found)
            classes, made_task = tuple(targets), "multi_label"
    if is_unlabelled:
        unknown = np.nan if task == "regression" else -1
        shape = (len(parts[1]), *labels[0].shape[1:])
        labels[1] = np.full(shape, unknown, labels[0].dtype)
    num_files = num_paths if clients_are_files else None
    known = num_own if client in absent else table.num_rows
    ids = client_ids(table, client, num_files, known)
    train, test = ({"x": x, "y": y} for x, y in zip(xs, labels, strict=True))
    if weight is not None:
        column, is_absent = table.columns[weight], weight in absent
        train["example_weight"] = _weights(column, parts[0])
        test["example_weight"] = (
            np.ones(len(parts[1]), np.float32) if is_absent else _weights(column, parts[1])
        )
    return Dataset(
        "table",
        train,
        test,
        num_classes=len(classes),
        task=made_task,
        train_clients=None if ids is None else ids[parts[0]],
        test_clients=None if ids is None or client in absent else ids[parts[1]],
        class_names=classes,
        feature_names=names,
        origin=", ".join(table.files),
        exact_statistics=coder.exact(),
        encoding=Encoding(
            column_coding.coding,
            tuple(coder.used[name] for name in inputs),
            tuple(coder.used[name] for name in targets),
            tuple(gaps.missing_values),
        ),
    )


def cells_of_test_rows(
    data_dir: pathlib.Path | None,
    names: Sequence[str],
    *,
    path: str,
    label: str | Sequence[str],
    weight: str | None = None,
    client: str | None = None,
    features: Sequence[str] = (),
    testing: Testing = Testing(),
    gaps: Gaps = Gaps(),
    column_coding: Coding = Coding(),
    cells: Cells = Cells(),
    **unused: Any,
) -> dict[str, list[Any]]:
    """Reads columns of the test rows, in their order, as the files have them; options of `load`."""
    del unused
    targets = (label,) if isinstance(label, str) else label
    roles = dict(enumerate((*targets, weight, client, testing.split)))
    cells, _ = _renamed(cells, column_coding)
    table, num_paths, inputs = open_table(data_dir, path, roles, features, testing, gaps, cells)
    for name in names:
        disclosure.require_column("--copy", name, table.files[-1], table.columns)
    _, rows = rows_of_parts(table, int(table.starts[num_paths]), inputs, gaps, testing)
    return {name: [table.columns[name].written(int(row)) for row in rows] for name in names}


def _renamed(cells: Cells, column_coding: Coding) -> tuple[Cells, Coding]:
    """Takes `encoding` for `coding`, as it was called."""
    if cells.encoding not in ("one_hot", "integer"):
        return cells, column_coding
    old = cells.encoding
    replaced = f"encoding={old!r} is written coding={old!r}; encoding is that of text"
    warnings.warn(replaced, DeprecationWarning, stacklevel=3)
    return cells._replace(encoding="utf-8"), column_coding._replace(coding=old)  # type: ignore[arg-type]


def open_table(
    data_dir: pathlib.Path | None,
    path: str,
    roles: Mapping[Any, str | None],
    features: Sequence[str],
    testing: Testing,
    gaps: Gaps,
    cells: Cells,
) -> tuple[Table, int, list[str]]:
    """Reads the files of a table, the first of which are not test files; names the inputs."""
    paths, taken = find_files("path", path, data_dir), set(roles.values())
    test_path = testing.test_path
    tests = find_files("test_path", test_path, data_dir) if test_path is not None else []
    reading = reading_of(cells, gaps.missing_values, has_text=any(map(is_csv, (*paths, *tests))))

    def inputs_of(names: Sequence[str]) -> list[str]:
        return list(features) or [name for name in names if name not in taken]

    table = Table(paths, reading, tests, inputs_of)
    return table, len(paths), inputs_of(list(table.columns))


def find_files(name: str, path: str, data_dir: pathlib.Path | None) -> list[pathlib.Path]:
    """Finds the files of a path or pattern, in the current folder or in that of data files."""
    path = os.path.expanduser(path)
    places = [pathlib.Path(), *([] if data_dir is None else [pathlib.Path(data_dir)])]
    for place in places:
        if files.kind_of(place / path, name) != "missing":
            files.require_file(place / path, name)
            return [place / path]
    if any(mark in path for mark in "*?["):
        for place in places:
            folder = pathlib.Path(place.anchor or ".") if place == pathlib.Path() else place
            pattern = path
            if pathlib.Path(path).is_absolute():
                folder, pattern = pathlib.Path("/"), path.lstrip("/")
            if found := sorted(p for p in folder.glob(pattern) if p.is_file()):
                return found
        disclosure.require(False, name, "match files", path)
    where = " and in ".join(str(place.resolve()) for place in places)
    rule = f"be a file; there is none in {where}"
    disclosure.require(False, name, rule, path, public="be a file")
    return []


def _check_names(
    table: Table,
    roles: Mapping[str, str | None],
    features: Sequence[str],
    tables: Mapping[str, Mapping[str, Any]],
) -> None:
    """Requires that options name existing columns, each in one role."""
    named = {role: [name] for role, name in roles.items() if name is not None}
    named |= {"features": list(features)} | {option: list(of) for option, of in tables.items()}
    for option, names in named.items():
        for name in names:
            disclosure.require_column(option, name, table.files[0], table.columns)
    used = [*(name for name in roles.values() if name is not None), *features]
    twice = sorted({name for name in used if used.count(name) > 1})
    checks.require(
        not twice, "label, weight, client, split and features", "be different columns", twice
    )


def _check_options(gaps: Gaps, column_coding: Coding, testing: Testing) -> None:
    """Requires options that fit each other."""
    for named, values in column_coding.categories.items():
        markers = [value for value in values if value in gaps.missing_values]
        rule = "hold no string of missing_values, which stands for a missing value"
        checks.require(not markers, f"categories.{named}", rule, markers)
    _require_used("fill", gaps.fill, gaps.missing == "fill", "missing is 'fill'")
    _require_used(
        "ranges", column_coding.ranges, column_coding.scaling == "range", "scaling is 'range'"
    )
    split, share = testing.split, testing.test_fraction
    rule = "be only one of split and test_fraction"
    checks.require(split is None or share == 0, "the test part", rule, (split, share))


def _check_inputs(
    inputs: Sequence[str],
    features: Sequence[str],
    numeric: Sequence[str],
    cells: Cells,
    column_coding: Coding,
) -> None:
    """Requires inputs, and dates among the columns that may hold numbers."""
    checks.require(bool(inputs), "features", "name at least one column", inputs)
    # An index that a program wrote beside the columns, such as the numbers of rows.
    nameless = [name for name in inputs if not name or name.startswith("__index_level_")]
    rule = "name the inputs of a table that has a column without a name"
    checks.require(bool(features) or not nameless, "features", rule, inputs)
    unused = sorted(set(cells.dates) - (set(numeric) - set(column_coding.categories)))
    rule = "name inputs, or the label of a regression, that are not in categories"
    checks.require(not unused, "dates", rule, unused)


def _require_used(option: str, value: Any, is_used: bool, when: str) -> None:
    checks.require(not value or is_used, option, f"be given only if {when}", value)


def reading_of(cells: Cells, missing: Sequence[str], *, has_text: bool) -> Reading:
    """Checks how cells are written."""
    separator, encoding, decimal, thousands, dates = cells
    is_plain = len(separator) == 1 and separator.isascii() and separator not in '"\r\n'
    rule = "be one ASCII character, not a quote or line break"
    checks.require(is_plain, "separator", rule, separator)
    try:
        "".encode(encoding)
    except (LookupError, ValueError):
        rule = "be an encoding of text that Python knows, such as 'utf-8', 'latin-1' or 'utf-16'"
        checks.require(False, "encoding", rule, encoding)
    rule = f"differ from decimal, {decimal!r}"
    checks.require(thousands != decimal, "thousands", rule, thousands)
    rules = {name: _date_rule(f"dates.{name}", given) for name, given in dates.items()}
    for option, default in (("encoding", "utf-8"), ("separator", ",")):
        value = getattr(cells, option)
        _require_used(option, value, has_text or value == default, "a file is CSV")
    return Reading(missing, separator, encoding, Notation(decimal, thousands), rules)


def _date_rule(option: str, given: Mapping[str, str]) -> DateRule:
    """Checks how the dates of a column become numbers."""
    rule = "hold 'since' and, for dates that are text, 'format'"
    is_rule = isinstance(given, Mapping) and set(given) | {"format"} == {"since", "format"}
    checks.require(
        is_rule and all(isinstance(each, str) for each in given.values()), option, rule, given
    )
    since = None
    with contextlib.suppress(ValueError):
        since = datetime.datetime.fromisoformat(given["since"])
    rule = "be a date in ISO format without a time zone, such as '2020-01-31'"
    is_date = since is not None and since.tzinfo is None
    checks.require(is_date, f"{option}.since", rule, given["since"])
    assert since is not None
    form = given.get("format")
    if form is not None:
        has_year = False
        # `strptime` makes a pattern of a format.
        with contextlib.suppress(ValueError, re.error):
            first = datetime.datetime(2011, 12, 23, tzinfo=datetime.UTC)
            second = first.replace(year=2012)
            is_shown = first.strftime(form) != second.strftime(form)
            # A format without a year is not read at all: it has no meaning from Python 3.15 on.
            if is_shown:
                has_year = datetime.datetime.strptime(first.strftime(form), form).year == 2011
        rule = "be a format of `strptime` that reads at least a year, such as '%d.%m.%Y'"
        checks.require(has_year, f"{option}.format", rule, form)
    return DateRule(since, form)


def rows_of_parts(
    table: Table, num_own: int, inputs: Sequence[str], gaps: Gaps, testing: Testing
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the rows of both parts; those after the first `num_own` are of test files."""
    kept = np.arange(table.num_rows)
    if gaps.missing == "drop":
        kept = kept[~np.any([table.columns[name].is_missing for name in inputs], axis=0)]
        rule = "have a row without missing cells"
        checks.require(len(kept) > 0, str(table.files[0]), rule, "none")
    own, others = kept[kept < num_own], kept[kept >= num_own]
    is_test = _test_rows(table, own, testing)
    parts = own[~is_test], others if num_own < table.num_rows else own[is_test]
    disclosure.require_of_file(len(parts[0]) > 0, table.files[0], "hold training rows", "none")
    return parts


def _test_rows(table: Table, kept: np.ndarray, testing: Testing) -> np.ndarray:
    """Marks which of the kept rows are for testing, `[rows]`."""
    if testing.split is not None:
        column = table.columns[testing.split]
        for row in kept:
            if column.texts[row] not in _PARTS:
                column.refuse(int(row), "be one of train, test")
        return column.texts[kept] == "test"
    is_test, share = np.zeros(len(kept), bool), testing.test_fraction
    if share > 0:
        count, rule = round(share * len(kept)), "leave rows for training and for testing"
        checks.require(0 < count < len(kept), "test_fraction", rule, share)
        is_test[np.random.default_rng(testing.seed).permutation(len(kept))[:count]] = True
    return is_test


def _weights(column: Column, rows: np.ndarray) -> np.ndarray:
    """Returns the weights of rows, `[rows]`, float32."""
    if column.numbers is None:
        column.require_one_kind()
        column.refuse(int(rows[0]), "hold numbers, the weights of examples")
    values = np.asarray(column.numbers)[rows]
    wrong = rows[~(np.isfinite(values) & (values >= 0))]
    if len(wrong):
        column.refuse(int(wrong[0]), "be a finite weight of at least 0")
    column.require_float32(rows, values)
    return values.astype(np.float32)


def client_ids(
    table: Table, client: str | None, num_training_files: int | None, known: int
) -> np.ndarray | None:
    """Returns the client id of each known row, integers if all are; or the name of its file."""
    if num_training_files is not None:
        files = table.files[:num_training_files], table.files[num_training_files:]
        return np.repeat(_file_names(files), np.diff(table.starts))
    if client is None:
        return None
    table.columns[client].require_one_spelling(np.arange(known))
    table.columns[client].require_no_markers(np.arange(known), ", or leave the rows out")
    texts = table.columns[client].texts[:known].astype(str)
    is_whole = all(map(_is_whole, set(texts.tolist())))
    return texts.astype(np.int64) if is_whole else texts


def _file_names(parts: Sequence[Sequence[str]]) -> list[str]:
    """Names the files of training and of test rows, distinct within each part."""
    bare = [[without_ending(file) for file in part] for part in parts]
    names = [[os.path.basename(file) for file in part] for part in bare]
    if any(len(set(part)) < len(part) for part in names):
        names = []
        for part in bare:
            shared = os.path.commonpath([os.path.dirname(file) or "." for file in part] or ["."])
            names.append([pathlib.Path(os.path.relpath(file, shared)).as_posix() for file in part])
    for part, files_of_part in zip(names, parts, strict=True):
        for i, name in enumerate(part):
            others = [files_of_part[k] for k in range(i) if part[k] == name]
            rule = "be given only if file names differ in more than their suffixes"
            same_named = f"{others[0]} and {files_of_part[i]}" if others else ""
            disclosure.require(not others, "clients_are_files", rule, same_named)
    return [name for part in names for name in part]


def _is_whole(text: str) -> bool:
    is_plain = re.fullmatch(r"-?[0-9]+", text) is not None and len(text) < 19
    return is_plain and str(int(text)) == text


def _is_number(value: Any) -> bool:
    """Whether a value of an option is 0, or a finite number that float32 can represent."""
    is_real = isinstance(value, int | float | np.number)
    return is_real and abs(value) <= LARGEST and fits_float32(float(value))


@dataclasses.dataclass
class _Coder:
    """Converts columns to numbers by the chosen rules, and records the statistics that it used."""

    table: Table
    rows: tuple[np.ndarray, np.ndarray]
    inputs: Sequence[str]
    gaps: Gaps
    column_coding: Coding
    read_off: list[str] = dataclasses.field(default_factory=list)
    has_numbers: bool = False
    # By column, what `Encoding` says of it.
    used: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)

    def note(self, column: Column, *, is_exact: bool = False, **facts: Any) -> None:
        """Notes how a column is encoded."""
        noted = self.used.setdefault(column.name, {"name": column.name})
        if (date := self.table.reading.dates.get(column.name)) is not None:
            noted["dates"] = {"since": date.since.isoformat(), "format": date.format}
        exact = [*noted.pop("exact", ()), *(facts if is_exact else ())]
        noted |= facts | ({"exact": exact} if exact else {})

    def _name(self, value: Any) -> str:
        """Writes the value of an option as `Column.texts` writes that of a cell."""
        is_text = isinstance(value, str)
        notation = self.table.reading.notation if is_text else Notation()
        return notation.name(str(value).strip())

    def exact(self) -> tuple[str, ...]:
        """Names the exact statistics that entered examples, for privacy statements."""
        statistics = []
        if self.column_coding.scaling == "standard" and self.has_numbers:
            statistics.append(
                "the exact means and standard deviations of the training part that features were "
                "scaled by"
            )
        if self.gaps.missing == "mean":
            statistics.append(
                "the exact means and most frequent categories of the training part that missing "
                "cells were filled with"
            )
        if self.read_off:
            statistics.append(
                "which values occur in " + ", ".join(map(repr, self.read_off)) + ", since no "
                "categories were declared"
            )
        return tuple(statistics)

    def inputs_of_parts(self) -> tuple[tuple[str, ...], list[Any]]:
        """Encodes all inputs: the names of features, and the inputs of both parts."""
        numbers, coded = {}, {}
        for name in self.inputs:
            column = self.table.columns[name]
            if name not in self.column_coding.categories:
                column.require_one_kind()
            if name in self.column_coding.categories or column.numbers is None:
                coded[name] = self.codes(column)
            else:
                numbers[name] = self.scaled(column)
        unused = sorted(set(self.column_coding.ranges) - set(numbers))
        checks.require(not unused, "ranges", f"name columns of numbers, {sorted(numbers)}", unused)
        self.has_numbers = bool(numbers)
        return _assembled(self.inputs, numbers, coded, self.column_coding.coding)

    def _require_rule(self, column: Column) -> None:
        """Refuses missing cells without a rule, or for which the rule has no value."""
        filled = self.gaps.fill if self.gaps.missing == "fill" else ()
        if self.gaps.missing not in ("refuse", "fill") or column.name in filled:
            return
        everything = np.concatenate(self.rows)
        if not column.is_missing[everything].any():
            return
        others = [
            repr(name)
            for name in self.inputs
            if name not in (column.name, *filled)
            and self.table.columns[name].is_missing[everything].any()
        ]
        way = "or one in fill" if filled else "unless missing is 'drop', 'fill' or 'mean'"
        also = f"; so must {checks.listed(others)}" if others else ""
        column.require_present(everything, f"have a value in every row, {way}{also}")

    def scaled(self, column: Column) -> list[np.ndarray]:
        """Returns a numeric column of both parts, filled and scaled, `[rows]`, float64."""
        self._require_rule(column)
        assert column.numbers is not None
        column.require_no_dates()
        self.note(column)
        parts = [column.numbers[rows] for rows in self.rows]
        for rows, part in zip(self.rows, parts, strict=True):
            column.require_float32(rows, part)
        train = parts[0]
        if self.gaps.missing == "fill" and column.name in self.gaps.fill:
            value = self.gaps.fill[column.name]
            rule = f"be a finite number {_SIZES}"
            checks.require(_is_number(value), f"fill.{column.name}", rule, value)
            parts = [np.where(np.isnan(part), float(value), part) for part in parts]
            self.note(column, fill=float(value))
        elif self.gaps.missing == "mean":
            rule = "have a value in the training part"
            is_known = not np.isnan(train).all()
            disclosure.require(is_known, f"column {column.name!r}", rule, "none")
            mean = float(np.nanmean(train))
            parts = [np.where(np.isnan(part), mean, part) for part in parts]
            self.note(column, is_exact=True, fill=mean)
        if self.column_coding.scaling == "standard":
            shift, scale = float(np.mean(parts[0])), float(np.std(parts[0])) or 1.0
            parts = [(part - shift) / scale for part in parts]
            self.note(column, is_exact=True, mean=shift, deviation=scale)
        elif self.column_coding.scaling == "range" and not (
            column.is_boolean and column.name not in self.column_coding.ranges
        ):
            within = self._range(column.name)
            parts = [in_range(within, part) for part in parts]
            self.note(column, range=[within.low, within.high])
        ways = "; or read dates by dates, name identifiers in categories, or choose a scaling whose"
        ways += " ranges the column fills, or leave it out of features"
        column.require_apart(np.concatenate(self.rows), np.concatenate(parts), ways)
        return parts

    def _range(self, name: str) -> Numeric:
        if name not in self.column_coding.ranges:
            columns = [self.table.columns[each] for each in self.inputs]
            needed = [
                repr(column.name)
                for column in columns
                if column.name not in (*self.column_coding.ranges, *self.column_coding.categories)
                and column.numbers is not None
                and not column.is_boolean
            ]
            rule = f"hold the lowest and highest value of {', '.join(needed)}, since scaling is "
            checks.require(False, "ranges", f"{rule}'range'", dict(self.column_coding.ranges))
        bounds = self.column_coding.ranges[name]
        bounds = list(bounds) if isinstance(bounds, Sequence | np.ndarray) else [bounds]
        fits = len(bounds) == 2 and all(map(_is_number, bounds)) and bounds[0] < bounds[1]
        rule = f"be two numbers, the lower one first, {_SIZES}"
        checks.require(fits, f"ranges.{name}", rule, bounds)
        return Numeric(name, float(bounds[0]), float(bounds[1]))

    def codes(self, column: Column) -> tuple[tuple[str, ...], list[np.ndarray]]:
        """Returns the categories of a column, and the index of each cell's in both parts, int32."""
        self._require_rule(column)
        texts = column.texts
        if self.gaps.missing == "fill" and column.name in self.gaps.fill:
            fill = self._name(self.gaps.fill[column.name])
            if column.name in self.column_coding.categories:
                declared = [self._name(each) for each in self.column_coding.categories[column.name]]
                rule = (
                    f"be one of the categories that are declared for it, {checks.listed(declared)}"
                )
                checks.require(fill in declared, f"fill.{column.name}", rule, fill)
            texts = np.where(column.is_missing, fill, texts)
            self.note(column, fill=fill)
        elif self.gaps.missing == "mean":
            known = texts[self.rows[0]][~column.is_missing[self.rows[0]]]
            rule = "have a value in the training part"
            disclosure.require(len(known) > 0, f"column {column.name!r}", rule, "none")
            values, counts = np.unique(known.astype(str), return_counts=True)
            fill = str(values[np.argmax(counts)])
            texts = np.where(column.is_missing, fill, texts)
            self.note(column, is_exact=True, fill=fill)
        return self.coded(column, texts)

    def coded(self, column: Column, texts: np.ndarray) -> tuple[tuple[str, ...], list[np.ndarray]]:
        """Encodes strings by the declared categories of their column, or by those that occur."""
        used = np.concatenate(self.rows)
        if column.name in self.column_coding.categories:
            option = f"categories.{column.name}"
            values = tuple(map(self._name, self.column_coding.categories[column.name]))
            is_set = len(set(values)) == len(values) > 0
            checks.require(is_set, option, "be distinct values", values)
        else:
            column.require_one_spelling(used)
            is_input = column.name in self.inputs
            way = "leave it out of features" if is_input else "take numbers by task = 'regression'"
            column.require_categories(used, way)
            values_that_occur = set(texts[used].tolist())
            values = tuple(sorted(values_that_occur, key=_in_order))
            self.read_off.append(column.name)
            ways = f"list them in categories, or {way}"
            rule = f"have at most {_MOST_CATEGORIES} different strings; {ways}"
            fits = len(values) <= _MOST_CATEGORIES
            disclosure.require(fits, f"column {column.name!r}", rule, len(values))
        is_declared = column.name in self.column_coding.categories
        self.note(column, is_exact=not is_declared, categories=list(values))
        number = {value: i for i, value in enumerate(values)}
        for row in used:
            if texts[row] not in number:
                rule = f"be one of {checks.listed(values)}, its declared categories"
                column.refuse(int(row), rule)
        parts = [np.array([number[t] for t in texts[rows]], np.int32) for rows in self.rows]
        return values, parts


def _in_order(text: str) -> tuple[int, int, str]:
    """Sorts integers by their size, before other strings."""
    return (0, int(text), text) if _is_whole(text) else (1, 0, text)


def _assembled(
    inputs: Sequence[str],
    numbers: Mapping[str, list[np.ndarray]],
    coded: Mapping[str, tuple[tuple[str, ...], list[np.ndarray]]],
    encoding: str,
) -> tuple[tuple[str, ...], list[Any]]:
    """Joins columns: their names, and the inputs of both parts."""
    if encoding == "integer":
        clash = sorted(name for name in coded if name == "numbers" or "/" in name)
        rule = "be names without '/', and not 'numbers', with encoding='integer'"
        checks.require(not clash, "encoded columns", rule, clash)
        parts = []
        for k in range(2):
            x: dict[str, np.ndarray] = {name: codes[k] for name, (_, codes) in coded.items()}
            if numbers:
                x["numbers"] = np.stack([n[k] for n in numbers.values()], 1).astype(np.float32)
            parts.append(x)
        return (*numbers, *coded), parts
    names: list[str] = []
    blocks: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
    for name in inputs:
        if name in numbers:
            names.append(name)
            pair = [each[:, None] for each in numbers[name]]
        else:
            values, codes = coded[name]
            names += [f"{name}={value}" for value in values]
            pair = [each[:, None] == np.arange(len(values)) for each in codes]
        for block, each in zip(blocks, pair, strict=True):
            block.append(each.astype(np.float32))
    return tuple(names), [np.concatenate(block, axis=1) for block in blocks]


def _labels(
    column: Column, rows: tuple[np.ndarray, np.ndarray], task: str, coder: _Coder
) -> tuple[list[np.ndarray], tuple[str, ...]]:
    """Returns the labels of both parts, and the names of classes."""
    if task == "regression":
        known = column.numbers
        if known is None:
            column.require_one_kind()
            first = int(rows[0][0])
            column.refuse(first, "hold numbers, since task is 'regression'")
        parts = [np.asarray(known)[each] for each in rows]
        for each, part in zip(rows, parts, strict=True):
            column.require_float32(each, part)
        column.require_apart(np.concatenate(rows), np.concatenate(parts))
        coder.note(column)
        return [part.astype(np.float32) for part in parts], ()
    if column.name not in coder.column_coding.categories:
        column.require_one_kind()
    classes, codes = dataclasses.replace(coder, rows=rows).coded(column, column.texts)
    rule = "have two classes or more; task='regression' takes labels as numbers"
    disclosure.require(len(classes) > 1, f"label {column.name!r}", rule, classes)
    return codes, classes
