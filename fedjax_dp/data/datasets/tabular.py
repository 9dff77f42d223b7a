"""Turns tables of text cells into numbers, in one of two stated ways."""

import dataclasses
import pathlib
import re
from collections.abc import Sequence
from typing import Literal

import numpy as np

from fedjax_dp.core import checks, files

Scaling = Literal["standard", "range"]
SCALINGS = ("standard", "range")
# Scalings that enter exact figures of the training part into every example.
EXACT_SCALINGS = ("standard",)

MISSING = "?"

_LARGEST = float(np.finfo(np.float32).max)
_NUMBER = re.compile(r"[-+]?([0-9]+[.]?[0-9]*|[.][0-9]+)([eE][-+]?[0-9]+)?")


@dataclasses.dataclass(frozen=True)
class Numeric:
    """Describes a column of numbers.

    Attributes:
      name: the column.
      low: the smallest plausible value, known without looking at the data.
      high: the largest plausible value, known without looking at the data.
      is_log: whether a fixed range is that of log(1 + value - low), for amounts of any order of
        magnitude.
    """

    name: str
    low: float
    high: float
    is_log: bool = False


@dataclasses.dataclass(frozen=True)
class Categorical:
    """Describes a column of categories.

    Attributes:
      name: the column.
      values: all categories; where "?" is among them, a missing cell is a category of its own.
    """

    name: str
    values: tuple[str, ...]


Column = Numeric | Categorical


def exact_statistics(scaling: str) -> tuple[str, ...]:
    """Names the exact figures of the training part that a scaling enters into every example.

    Args:
      scaling: "standard" or "range".

    Returns:
      The figures in words, which a privacy statement repeats; empty for a fixed range.
    """
    if scaling not in EXACT_SCALINGS:
        return ()
    return (
        "the exact means and standard deviations of the training part that features were scaled "
        "by, and its most frequent categories where cells were missing",
    )


def feature_names(columns: Sequence[Column]) -> tuple[str, ...]:
    """Names the input columns that `encode` makes.

    Args:
      columns: what the table holds.

    Returns:
      The name of a numeric column, and `column=value` for each category.
    """
    names: list[str] = []
    for column in columns:
        if isinstance(column, Numeric):
            names.append(column.name)
        else:
            names.extend(f"{column.name}={value}" for value in column.values)
    return tuple(names)


def encode(
    columns: Sequence[Column], train: np.ndarray, test: np.ndarray, scaling: str
) -> tuple[np.ndarray, np.ndarray]:
    """Encodes categories as 0/1 columns, scales numbers and fills in missing cells.

    "standard" subtracts the mean of the known training values and divides by their standard
    deviation (1 where that is 0); a missing number becomes the mean, a missing category the most
    frequent one of the training part. "range" maps `low` to 0 and `high` to 1, cuts what lies
    outside, puts a missing number in the middle, and leaves the columns of a missing category at 0.

    Guarantee: "range" learns nothing from the data, so the privacy of a training on the result is
    that of the training alone. "standard" uses exact statistics of the pooled training part, which
    no privacy statement of a later training covers.

    Args:
      columns: what the table holds, from left to right.
      train: training cells, `[train rows, columns]`, text.
      test: test cells, `[test rows, columns]`, text.
      scaling: "standard" or "range".

    Returns:
      Training and test inputs, `[rows, features]`, float32.

    Raises:
      ValueError: if a cell is no number or no known category, or `scaling` is unknown.
    """
    checks.one_of("scaling", scaling, SCALINGS)
    blocks = []
    for i, column in enumerate(columns):
        for cells in (train, test):
            _require_cells(column, cells[:, i])
        if isinstance(column, Numeric):
            blocks.append(_numeric(column, train[:, i], test[:, i], scaling))
        else:
            blocks.append(_categorical(column, train[:, i], test[:, i], scaling))
    return (
        np.concatenate([block for block, _ in blocks], axis=1),
        np.concatenate([block for _, block in blocks], axis=1),
    )


def read_table(
    path: pathlib.Path, columns: Sequence[Column], target: Categorical, separator: str
) -> np.ndarray:
    """Reads a text file of rows whose last cell is the target.

    Args:
      path: the file; empty lines, and a first line that starts with "|", are no rows.
      columns: what its other cells hold, from left to right.
      target: what the last cell holds; it is never missing.
      separator: what stands between cells.

    Returns:
      Cells, `[rows, columns + 1]`, text.

    Raises:
      ValueError: naming file, line, rule and cell, if a row has another number of cells, a cell is
        none of its column, or there are no rows.
    """
    width = len(columns) + 1
    numbers, rows = [], []
    for number, line in files.lines(files.read_text(path)):
        if number > 1 or not line.startswith("|"):
            # Some write 1.0 where others write 1.
            row = [cell.removesuffix(".0") for cell in line.split(separator)]
            is_whole = len(row) == width
            rule = f"have {width} columns, parted by {separator!r}"
            checks.require(is_whole, files.at_line(path, number), rule, len(row))
            rows.append(row)
            numbers.append(number)
    checks.require(bool(rows), str(path), "hold rows", "none")
    table = np.asarray(rows)
    for i, column in enumerate((*columns, target)):
        _require_cells(column, table[:, i], path, numbers, can_miss=column is not target)
    return table


def _require_cells(
    column: Column,
    cells: np.ndarray,
    path: pathlib.Path | None = None,
    lines: Sequence[int] = (),
    *,
    can_miss: bool = True,
) -> None:
    """Requires cells that a column can hold, naming the line where there is a file."""
    if isinstance(column, Numeric):
        is_known, rule = np.vectorize(is_number, otypes=[bool])(cells), "numbers"
    else:
        is_known, rule = np.isin(cells, column.values), f"one of {', '.join(column.values)}"
    if can_miss:
        is_known |= cells == MISSING
    if not is_known.all():
        row = int(np.argmin(is_known))
        place = "" if path is None else files.at_line(path, lines[row]) + ", "
        either = f" or {MISSING!r}" if can_miss and isinstance(column, Numeric) else ""
        checks.require(
            False, f"{place}column {column.name!r}", f"hold {rule}{either}", str(cells[row])
        )


def is_number(cell: str) -> bool:
    """Tells whether a cell is a number as people write it, and one that a float32 holds.

    Args:
      cell: the text.

    Returns:
      False for other texts, "nan" and "inf" among them.
    """
    is_plain = _NUMBER.fullmatch(cell) is not None
    return is_plain and abs(float(cell)) <= _LARGEST


def _numeric(
    column: Numeric, train: np.ndarray, test: np.ndarray, scaling: str
) -> tuple[np.ndarray, np.ndarray]:
    parts = [np.where(cells == MISSING, "nan", cells).astype(np.float64) for cells in (train, test)]
    if scaling == "standard":
        shift, scale = float(np.nanmean(parts[0])), float(np.nanstd(parts[0])) or 1.0
        scaled = [np.nan_to_num((part - shift) / scale, nan=0.0) for part in parts]
    else:
        scaled = [in_range(column, part) for part in parts]
    return scaled[0].astype(np.float32)[:, None], scaled[1].astype(np.float32)[:, None]


def in_range(column: Numeric, values: np.ndarray) -> np.ndarray:
    """Maps the fixed range of a column to [0, 1], and cuts what lies outside.

    Guarantee: each value depends on itself and on the column's public range alone.

    Args:
      column: the column, with its range.
      values: its numbers, of any shape; NaN where one is missing.

    Returns:
      Numbers in [0, 1] of the same shape, float64; 0.5 for a missing one.
    """
    above = np.clip(np.asarray(values, np.float64), column.low, column.high) - column.low
    width = column.high - column.low
    share = np.log1p(above) / np.log1p(width) if column.is_log else above / width
    return np.nan_to_num(share, nan=0.5)


def _categorical(
    column: Categorical, train: np.ndarray, test: np.ndarray, scaling: str
) -> tuple[np.ndarray, np.ndarray]:
    values = np.asarray(column.values)
    hits = [cells[:, None] == values for cells in (train, test)]
    if scaling == "standard" and MISSING not in column.values:
        frequent = int(np.argmax(hits[0].sum(axis=0)))
        for hit in hits:
            hit[~hit.any(axis=1), frequent] = True
    return hits[0].astype(np.float32), hits[1].astype(np.float32)
