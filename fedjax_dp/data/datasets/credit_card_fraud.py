"""Credit card fraud (ULB): transactions of two days, of which few are fraudulent."""

import pathlib

import numpy as np

from fedjax_dp.core import checks, files
from fedjax_dp.core.ranges import ProperFraction, Seed
from fedjax_dp.data.datasets.base import Dataset, stratified_split
from fedjax_dp.data.datasets.catalog import locate
from fedjax_dp.data.datasets.formats import read_bytes
from fedjax_dp.data.datasets.tabular import (
    SCALINGS,
    Numeric,
    Scaling,
    exact_statistics,
    in_range,
    is_number,
)

_TWO_DAYS = 172_800
# Ranges that do not depend on the rows: the table holds two days in seconds; amounts have any order
# of magnitude; the published components are principal components of unknown units.
COLUMNS = (
    Numeric("Time", 0, _TWO_DAYS),
    *(Numeric(f"V{i}", -50, 50) for i in range(1, 29)),
    Numeric("Amount", 0, 100_000, is_log=True),
)
HEADER = (*(column.name for column in COLUMNS), "Class")
_CLASSES = ("genuine", "fraudulent")


def load(
    data_dir: pathlib.Path,
    *,
    scaling: Scaling = "standard",
    test_fraction: ProperFraction = 0.25,
    seed: Seed = 0,
) -> Dataset:
    """Loads the table of credit card transactions (Dal Pozzolo and others 2015).

    The file has no test part: one is drawn with the same share of both classes.

    Args:
      scaling: "standard" for zero mean and unit deviation over the training part, or "range" for
        fixed ranges that are known without the data.
      test_fraction: the share of the rows set aside for testing, in (0, 1).
      seed: chooses these rows.

    Returns:
      Inputs `[n, 30]`, float32, and labels (1 for fraud), without natural clients.
    """
    checks.one_of("scaling", scaling, SCALINGS)
    located = locate("credit_card_fraud", data_dir)
    (path,) = located.paths.values()
    table = _read(path)
    x, labels = table[:, :-1], table[:, -1].astype(np.int32)
    train, test = stratified_split(labels, test_fraction, seed)
    if scaling == "range":
        x = np.stack([in_range(c, own) for c, own in zip(COLUMNS, x.T, strict=True)], axis=1)
    else:
        deviation = x[train].std(axis=0)
        x = (x - x[train].mean(axis=0)) / np.where(deviation > 0, deviation, 1)
    x = x.astype(np.float32)
    return Dataset(
        "credit_card_fraud",
        {"x": x[train], "y": labels[train]},
        {"x": x[test], "y": labels[test]},
        num_classes=2,
        task="classification",
        class_names=_CLASSES,
        feature_names=HEADER[:-1],
        origin=located.source.name,
        exact_statistics=exact_statistics(scaling),
    )


def _read(path: pathlib.Path) -> np.ndarray:
    """Reads all columns, `[rows, 31]`, float64."""
    lines = list(files.lines(files.as_text(read_bytes(path), path)))
    header = _cells(lines[0][1]) if lines else []
    rule = "begin with a line of the columns Time, V1 to V28, Amount and Class"
    checks.require(tuple(header) == HEADER, str(path), rule, ",".join(header[:4]))
    rows = lines[1:]
    checks.require(bool(rows), str(path), "hold rows", "none")
    for number, line in rows:
        width = line.count(",") + 1
        rule = f"have {len(HEADER)} columns"
        checks.require(width == len(HEADER), files.at_line(path, number), rule, width)
    try:
        # Classes are in quotation marks in the published file.
        table = np.loadtxt(
            [line for _, line in rows], delimiter=",", quotechar='"', comments=None, ndmin=2
        )
    except ValueError as error:
        raise _first_bad_cell(path, rows) from error
    if not np.isfinite(table).all() or np.abs(table).max() > np.finfo(np.float32).max:
        raise _first_bad_cell(path, rows)
    wrong = np.flatnonzero(~np.isin(table[:, -1], (0, 1)))
    if len(wrong):
        place = f"{files.at_line(path, rows[wrong[0]][0])}, column 'Class'"
        checks.require(False, place, "hold 0 or 1", table[wrong[0], -1])
    count = int(table[:, -1].sum())
    rule = "hold at least two rows of each class"
    checks.require(2 <= count <= len(table) - 2, str(path), rule, (len(table) - count, count))
    return table


def _cells(line: str) -> list[str]:
    return [cell.strip('"') for cell in line.split(",")]


def _first_bad_cell(path: pathlib.Path, rows: list[tuple[int, str]]) -> ValueError:
    """Finds the first cell that is not a number; slow, so only for an error."""
    for number, line in rows:
        for name, cell in zip(HEADER, _cells(line), strict=True):
            if not is_number(cell):
                place = f"{files.at_line(path, number)}, column {name!r}"
                return ValueError(f"{place} must hold a number, got {cell!r}")
    return ValueError(f"{path} must hold numbers")
