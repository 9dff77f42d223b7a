"""Options that a table needs, found by reading it."""

import contextlib
import datetime
import itertools
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedjax_dp.core import checks
from fedjax_dp.core.registry import grouped
from fedjax_dp.data.datasets.cells import Column, Table, guess_separator, is_csv
from fedjax_dp.data.datasets.table import (
    LARGE_INPUT,
    find_files,
    load,
    open_table,
)

# Dates without a time; the first of those that read all dates of a column is proposed.
_DAYS = (
    *("%Y-%m-%d", "%d.%m.%Y", "%d/%m/%Y", "%m/%d/%Y", "%Y/%m/%d", "%d-%m-%Y", "%m-%d-%Y"),
    *("%d.%m.%y", "%d/%m/%y", "%m/%d/%y", "%d %B %Y", "%d %b %Y", "%B %d, %Y", "%b %d, %Y"),
)
_TIMES = ("", " %H:%M", " %H:%M:%S", "T%H:%M:%S", "T%H:%M:%S%z", " %I:%M %p")
_FORMATS = tuple(day + time for time, day in itertools.product(_TIMES, _DAYS))
_SINCE = "2000-01-01"
_ROW_NUMBERS, _EMPTY = "it numbers the rows", "most of its cells are empty"
_OTHER = "it has neither numbers nor names that recur"


class Proposal(NamedTuple):
    """What a table needs besides its path, label and client.

    Attributes:
      options: those that follow from the columns.
      left_out: for each column that is no input, the reason.
      empty: the inputs with empty cells, which `missing` has to treat.
      keeps_most: whether at least half of the rows have no empty cell.
      numbers: the inputs that are numbers, dates included, which `ranges` would have to name.
      is_large: whether some of them are so large that they need scaling.
      formats: for each column of dates, the formats that read all its cells.
      read_off: the columns of which it is read off the table which categories they have.
    """

    options: dict[str, Any]
    left_out: dict[str, str]
    empty: list[str]
    keeps_most: bool
    numbers: list[str]
    is_large: bool
    formats: dict[str, list[str]]
    read_off: list[str]


def open_as_written(
    data_dir: pathlib.Path | None, options: Mapping[str, Any]
) -> tuple[Table, dict[str, Any]]:
    """Opens a table with the separator of its files; returns it with the options that it took."""
    paths, options = find_files("path", options["path"], data_dir), dict(options)
    if "separator" not in options and is_csv(paths[0]):
        mark = guess_separator(paths[0], options.get("encoding", "utf-8"))
        # Tables that are separated otherwise usually have commas in numbers.
        options |= {} if mark == "," else {"separator": mark}
        has_decimals = mark != "," and not {"decimal", "thousands"} & set(options)
        options |= {"decimal": ","} if has_decimals and _has_commas(data_dir, options) else {}
    return _opened(data_dir, options), options


def propose(table: Table, data_dir: pathlib.Path | None, options: Mapping[str, Any]) -> Proposal:
    """Finds the options that a table needs, besides those that are given."""
    given = grouped(load, options)
    coding, testing, cells = (given[name] for name in ("column_coding", "testing", "cells"))
    label = options["label"]
    targets = [label] if isinstance(label, str) else list(label)
    roles = {*targets, options.get("client"), options.get("weight"), testing.split}
    inputs = list(options.get("features", ())) or [n for n in table.columns if n not in roles]
    found: dict[str, Any] = {}
    markers = {each for name in inputs for each in _markers(table.columns[name])}
    if markers and "missing_values" not in options:
        known = given["gaps"].missing_values
        found["missing_values"] = [*known, *sorted(markers)]
        table = _opened(data_dir, {**options, **found})
    formats, left_out = dict[str, list[str]](), dict[str, str]()
    for name in inputs:
        column = table.columns[name]
        if name in coding.categories or name in cells.dates:
            continue
        fitting = _formats(column)
        if reason := _reason(column, is_date=bool(fitting) or column.is_date):
            left_out[name] = reason
        elif fitting:
            formats[name] = fitting
        elif column.is_date:
            found.setdefault("dates", {})[name] = {"since": _SINCE}
    inputs = [name for name in inputs if name not in left_out]
    checks.require(
        bool(inputs), "--data", "have a column of numbers or of recurring names", left_out
    )
    if left_out:
        found["features"] = inputs
    dated = {*formats, *found.get("dates", ()), *cells.dates}
    columns = {name: table.columns[name] for name in inputs if name not in coding.categories}
    numbers = [
        name
        for name, each in columns.items()
        if name in dated or not (each.numbers is None or each.is_boolean)
    ]
    classes = [name for name in targets if name not in coding.categories]
    if options.get("task", "classification") == "classification" and any(
        table.columns[name].numbers is not None and not _is_class(table.columns[name])
        for name in classes
    ):
        found["task"], classes = "regression", []
    is_empty = np.any([table.columns[name].is_missing for name in inputs], axis=0)
    return Proposal(
        options=found,
        left_out=left_out,
        empty=[name for name in inputs if table.columns[name].is_missing.any()],
        keeps_most=bool(np.mean(is_empty) <= 0.5),
        numbers=numbers,
        is_large=any(n in dated or _size(columns[n]) > LARGE_INPUT for n in numbers),
        formats=formats,
        read_off=[*(name for name in columns if name not in numbers), *classes],
    )


def date_rule(form: str) -> dict[str, str]:
    """Returns how dates of a format become days."""
    return {"format": form, "since": _SINCE}


def _opened(data_dir: pathlib.Path | None, options: Mapping[str, Any]) -> Table:
    given = grouped(load, options)
    roles = {i: given.get(role) for i, role in enumerate(("weight", "client"))}
    testing, gaps, cells = (given[each] for each in ("testing", "gaps", "cells"))
    return open_table(data_dir, options["path"], roles, (), testing, gaps, cells)[0]


def _has_commas(data_dir: pathlib.Path | None, options: Mapping[str, Any]) -> bool:
    """Whether more columns are numbers if a comma is the decimal mark."""
    return _num_numeric(data_dir, {**options, "decimal": ","}) > _num_numeric(data_dir, options)


def _num_numeric(data_dir: pathlib.Path | None, options: Mapping[str, Any]) -> int:
    columns = _opened(data_dir, options).columns.values()
    return sum(bool(np.all(each.is_number | each.is_missing)) for each in columns)


def _size(column: Column) -> float:
    return float(np.nanmax(np.abs(np.asarray(column.numbers)), initial=0))


def _formats(column: Column) -> list[str]:
    """Lists the formats that read all dates of a column of text, or of numbers such as 20200131."""
    forms: Sequence[str] = _FORMATS
    if not column.is_text and not np.all(column.is_number):
        return []
    if np.all(column.is_number | column.is_missing):
        with contextlib.suppress(ValueError):
            column.require_no_dates()
            return []
        forms = ["%Y%m%d"]
    values = {str(text) for text in column.texts[~column.is_missing]}
    return [form for form in forms if values and all(_reads(form, each) for each in values)]


def _reads(form: str, text: str) -> bool:
    try:
        datetime.datetime.strptime(text, form)
    except ValueError:
        return False
    return True


def _reason(column: Column, *, is_date: bool) -> str:
    """Says why a column is no input; empty if it can be one."""
    if not column.name or column.name.startswith("__index_level_"):
        return _ROW_NUMBERS
    if np.mean(column.is_missing) > 0.5:
        return _EMPTY
    if is_date:
        return ""
    rows = np.arange(len(column.is_missing))
    try:
        column.require_readable()
        column.require_one_kind()
        if column.numbers is None:
            column.require_categories(rows, "")
            return ""
        column.require_float32(rows, column.numbers)
    except ValueError:
        return _OTHER
    return _ROW_NUMBERS if len(rows) > 1 and np.all(np.diff(column.numbers) == 1) else ""


def _is_class(column: Column) -> bool:
    with contextlib.suppress(ValueError):
        column.require_categories(np.arange(len(column.is_missing)), "")
        return True
    return False


def _markers(column: Column) -> list[str]:
    return column.markers(np.flatnonzero(~column.is_missing)) if column.is_text else []
