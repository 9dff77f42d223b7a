"""Turns tables of text cells into numbers, in one of two stated ways."""

import dataclasses
import pathlib
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np

from fedjax_dp.core import checks
from fedjax_dp.data.datasets.formats import read_text

Scaling = Literal["standard", "range"]
SCALINGS = ("standard", "range")

MISSING = "?"


@dataclasses.dataclass(frozen=True)
class Numeric:
    """Describes a column of numbers.

    Attributes:
      name: the column.
      low: the smallest plausible value, known without looking at the data.
      high: the largest plausible value, known without looking at the data.
    """

    name: str
    low: float
    high: float


@dataclasses.dataclass(frozen=True)
class Categorical:
    """Describes a column of categories.

    Attributes:
      name: the column.
      values: all categories; where "?" is among them, a missing cell is a category of its own.
      can_miss: whether a file may have "?" there.
    """

    name: str
    values: tuple[str, ...]
    can_miss: bool = True


Column = Numeric | Categorical


def read_table(
    path: pathlib.Path,
    columns: Sequence[Column],
    *,
    separator: str = ",",
    clean: Callable[[str], str] = str.strip,
) -> np.ndarray:
    """Reads a text file of rows, and checks every cell.

    Args:
      path: the file; its empty lines, and those that begin with "|", are no rows.
      columns: what each row holds, from left to right.
      separator: what stands between cells.
      clean: is applied to every line.

    Returns:
      Cells as text, `[rows, columns]`.

    Raises:
      ValueError: naming file, line, column, rule and cell.
    """
    lines = enumerate(map(clean, read_text(path).splitlines()), start=1)
    numbered = [(i, line.split(separator)) for i, line in lines if line and line[0] != "|"]
    checks.require(bool(numbered), str(path), "have rows", 0)
    for i, row in numbered:
        rule = f"have {len(columns)} cells"
        checks.require(len(row) == len(columns), f"{path}, line {i},", rule, len(row))
    cells = np.asarray([row for _, row in numbered])
    for j, column in enumerate(columns):
        is_known, rule = _known(column, cells[:, j])
        if not is_known.all():
            wrong = int(np.argmin(is_known))
            place = f"{path}, line {numbered[wrong][0]}, column {column.name!r},"
            checks.require(False, place, rule, str(cells[wrong, j]))
    return cells


def _known(column: Column, cells: np.ndarray) -> tuple[np.ndarray, str]:
    """Tells which cells are of a column, and what that means in words."""
    if isinstance(column, Categorical):
        values = (*column.values, *([MISSING] if column.can_miss else []))
        return np.isin(cells, values), f"hold one of {', '.join(values)}"
    try:
        is_number = np.isfinite(np.where(cells == MISSING, "0", cells).astype(np.float64))
    except ValueError:
        is_number = np.array([_is_finite(cell) for cell in cells])
    return is_number, f"hold a finite number or {MISSING!r}"


def _is_finite(cell: str) -> bool:
    try:
        return cell == MISSING or bool(np.isfinite(float(cell)))
    except ValueError:
        return False


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
        if isinstance(column, Numeric):
            blocks.append(_numeric(column, train[:, i], test[:, i], scaling))
        else:
            blocks.append(_categorical(column, train[:, i], test[:, i], scaling))
    return (
        np.concatenate([block for block, _ in blocks], axis=1),
        np.concatenate([block for _, block in blocks], axis=1),
    )


def _numeric(
    column: Numeric, train: np.ndarray, test: np.ndarray, scaling: str
) -> tuple[np.ndarray, np.ndarray]:
    parts = [_parse_numbers(column.name, cells) for cells in (train, test)]
    if scaling == "standard":
        shift, scale, fill = float(np.nanmean(parts[0])), float(np.nanstd(parts[0])) or 1.0, 0.0
    else:
        shift, scale, fill = column.low, column.high - column.low, 0.5
        parts = [np.clip(part, column.low, column.high) for part in parts]
    scaled = [np.nan_to_num((part - shift) / scale, nan=fill) for part in parts]
    return scaled[0].astype(np.float32)[:, None], scaled[1].astype(np.float32)[:, None]


def _parse_numbers(name: str, cells: np.ndarray) -> np.ndarray:
    try:
        return np.where(cells == MISSING, "nan", cells).astype(np.float64)
    except ValueError as error:
        raise ValueError(f"column {name!r} must hold numbers or {MISSING!r}: {error}") from error


def _categorical(
    column: Categorical, train: np.ndarray, test: np.ndarray, scaling: str
) -> tuple[np.ndarray, np.ndarray]:
    values = np.asarray(column.values)
    hits = [cells[:, None] == values for cells in (train, test)]
    for cells, hit in zip((train, test), hits, strict=True):
        unknown = ~hit.any(axis=1) & (cells != MISSING)
        checks.require(
            not unknown.any(),
            f"column {column.name!r}",
            f"hold one of {', '.join(column.values)}",
            str(cells[np.argmax(unknown)]),
        )
    if scaling == "standard" and MISSING not in column.values:
        frequent = int(np.argmax(hits[0].sum(axis=0)))
        for hit in hits:
            hit[~hit.any(axis=1), frequent] = True
    return hits[0].astype(np.float32), hits[1].astype(np.float32)
