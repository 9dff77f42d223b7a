"""KDD Cup 1999, ten per cent: network connections, normal or one of 22 attacks."""

import pathlib
from typing import Literal

import numpy as np

from fedjax_dp.core import checks
from fedjax_dp.core.ranges import Index, ProperFraction
from fedjax_dp.data.datasets.base import Dataset, stratified_split
from fedjax_dp.data.datasets.catalog import CATALOG
from fedjax_dp.data.datasets.files import locate
from fedjax_dp.data.datasets.formats import read_text

# What a connection may be, as the file spells it.
KINDS = (
    *("back.", "buffer_overflow.", "ftp_write.", "guess_passwd.", "imap.", "ipsweep.", "land."),
    *("loadmodule.", "multihop.", "neptune.", "nmap.", "normal.", "perl.", "phf.", "pod."),
    *("portsweep.", "rootkit.", "satan.", "smurf.", "spy.", "teardrop.", "warezclient."),
    "warezmaster.",
)
TEXT_COLUMNS = (1, 2, 3)
NUM_COLUMNS = 41
NORMAL = "normal."


def load(
    data_dir: pathlib.Path,
    *,
    target: Literal["attack", "kind"] = "attack",
    distinct: bool = False,
    test_fraction: ProperFraction = 0.2,
    seed: Index = 0,
) -> Dataset:
    """Loads the ten-per-cent file of KDD Cup 1999.

    Numbers have zero mean and unit deviation over the training part; protocol, service and flag
    become 0/1 columns in alphabetical order of the values in the file. The file has no test part:
    one is drawn with the same share of every class. Most rows occur many times, so that a row of
    the test part is often in the training part too, unless `distinct` is set.

    Args:
      data_dir: the data directory.
      target: "attack" for normal (0) against any attack (1), or "kind" for all 23 labels.
      distinct: keep one copy of equal rows.
      test_fraction: the share of the rows set aside for testing, in (0, 1).
      seed: which rows those are.

    Returns:
      Inputs `[n, 118]`, float32, and labels, without natural clients.

    Raises:
      MissingDataError: if the file is missing.
      ValueError: if it is damaged or an option is out of range.
    """
    checks.one_of("target", target, ("attack", "kind"))
    located = locate(CATALOG["kddcup99"], data_dir)
    (path,) = located.paths.values()
    lines = read_text(path).splitlines()
    _check_widths(lines, path)
    number_columns = [i for i in range(NUM_COLUMNS) if i not in TEXT_COLUMNS]
    try:
        numbers = np.loadtxt(lines, np.float32, delimiter=",", usecols=number_columns, ndmin=2)
    except ValueError:
        numbers = np.array([[_number(cell) for cell in line.split(",")] for line in lines])
        numbers = numbers[:, number_columns]
    is_finite = np.isfinite(numbers)
    if not is_finite.all():
        row, column = np.argwhere(~is_finite)[0]
        cell = lines[row].split(",")[number_columns[column]]
        place = f"{path}, line {row + 1}, column {number_columns[column]},"
        checks.require(False, place, "hold a finite number", cell)
    names = np.loadtxt(
        lines, dtype="U24", delimiter=",", usecols=(*TEXT_COLUMNS, NUM_COLUMNS), ndmin=2
    )
    is_known = np.isin(names[:, -1], KINDS)
    if not is_known.all():
        row = int(np.argmin(is_known))
        place = f"{path}, line {row + 1},"
        checks.require(False, place, f"end in one of {' '.join(KINDS)}", str(names[row, -1]))
    if distinct:
        first = np.sort(np.unique(lines, return_index=True)[1])
        numbers, names = numbers[first], names[first]
    kinds, kind = np.unique(names[:, -1], return_inverse=True)
    if target == "attack":
        class_names: tuple[str, ...] = ("normal", "attack")
        labels = (kinds[kind] != NORMAL).astype(np.int32)
    else:
        class_names = tuple(str(name).rstrip(".") for name in kinds)
        labels = kind.astype(np.int32)
    # A label that occurs once cannot be in both parts; such rows share one stratum.
    strata = np.where(np.bincount(kind)[kind] > 1, kind, -1)
    strata = strata if np.sum(strata == -1) != 1 else np.zeros_like(strata)
    train, test = stratified_split(strata, test_fraction, seed)
    mean = numbers[train].mean(axis=0, dtype=np.float64)
    deviation = numbers[train].std(axis=0, dtype=np.float64)
    numbers = ((numbers - mean) / np.where(deviation > 0, deviation, 1)).astype(np.float32)
    blocks, features = [numbers], [f"column_{i}" for i in number_columns]
    for i, column in enumerate(TEXT_COLUMNS):
        values, code = np.unique(names[:, i], return_inverse=True)
        blocks.append(np.eye(len(values), dtype=np.float32)[code])
        features.extend(f"column_{column}={value}" for value in values)
    x = np.concatenate(blocks, axis=1)
    return Dataset(
        "kddcup99",
        {"x": x[train], "y": labels[train]},
        {"x": x[test], "y": labels[test]},
        num_classes=len(class_names),
        task="classification",
        class_names=class_names,
        feature_names=tuple(features),
        origin=located.source.name,
    )


def _check_widths(lines: list[str], path: pathlib.Path) -> None:
    checks.require(bool(lines), str(path), "have rows", 0)
    commas = np.array([line.count(",") for line in lines])
    wrong = np.flatnonzero(commas != NUM_COLUMNS)
    if len(wrong):
        place, rule = f"{path}, line {wrong[0] + 1},", f"have {NUM_COLUMNS + 1} cells"
        checks.require(False, place, rule, int(commas[wrong[0]]) + 1)


def _number(cell: str) -> float:
    """Gives NaN for what is no number."""
    try:
        return float(cell)
    except ValueError:
        return np.nan
