"""Converts tables of strings to numbers, by one of two documented scalings."""

import dataclasses
import math
import pathlib
from collections.abc import Sequence
from typing import Literal

import numpy as np

from fedjax_dp.core import checks, files
from fedjax_dp.data.arrays import NUMBER

Scaling = Literal["standard", "range"]
SCALINGS = ("standard", "range")
# Scalings that put exact figures of the training part into every example.
EXACT_SCALINGS = ("standard",)

MISSING = "?"

_LARGEST = float(np.finfo(np.float32).max)


@dataclasses.dataclass(frozen=True)
class Numeric:
    """A column of numbers with a public range, in log(1 + value - low) if `is_log`."""

    name: str
    low: float
    high: float
    is_log: bool = False


@dataclasses.dataclass(frozen=True)
class Categorical:
    """A column of categories; with "?" among `values`, a missing cell is one of them."""

    name: str
    values: tuple[str, ...]


Column = Numeric | Categorical


def exact_statistics(scaling: str) -> tuple[str, ...]:
    """Names the exact figures that a scaling puts into every example, for privacy statements."""
    if scaling not in EXACT_SCALINGS:
        return ()
    return (
        "the exact means and standard deviations of the training part that features were scaled "
        "by, and its most frequent categories for missing cells",
    )


def feature_names(columns: Sequence[Column]) -> tuple[str, ...]:
    """Names the input columns that `encode` makes: a number's own name, else `column=value`."""
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
    """Encodes categories as 0/1 columns, scales numbers and fills in missing cells; float32.

    "standard" subtracts the mean of the known training values and divides by their standard
    deviation (1 if that is 0); a missing number becomes the mean, a missing category the most
    frequent one of the training part. "range" maps `low` to 0 and `high` to 1, clips values
    outside, puts a missing number in the middle, and leaves the columns of a missing category at 0.

    Guarantee: "range" learns nothing from the data, so the privacy of a training on the result is
    that of the training alone. "standard" uses exact statistics of the pooled training part, which
    no privacy statement of a later training covers.
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
    """Reads rows of text cells, `[rows, columns + 1]`, whose last cell is the target."""
    width = len(columns) + 1
    numbers, rows = [], []
    for number, line in files.lines(files.read_text(path)):
        if number > 1 or not line.startswith("|"):
            # Some files write 1.0 for 1.
            row = [cell.removesuffix(".0") for cell in line.split(separator)]
            is_whole = len(row) == width
            rule = f"have {width} columns, separated by {separator!r}"
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
    """Requires cells that a column can hold; names the line of a file."""
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
    """Whether a cell is a plain decimal number that float32 holds, so not NaN or infinity."""
    return is_finite(cell) and abs(float(cell)) <= _LARGEST


def is_finite(cell: str) -> bool:
    """Whether a cell is a plain decimal number, without what Python adds, such as 1_000."""
    return NUMBER.fullmatch(cell) is not None and math.isfinite(float(cell))


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
    """Maps a column's public range to [0, 1] and clips each value outside; 0.5 for NaN."""
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
