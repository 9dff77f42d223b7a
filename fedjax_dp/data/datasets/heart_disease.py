"""Heart disease at four hospitals, which are the natural clients."""

import pathlib

import numpy as np

from fedjax_dp.core import checks
from fedjax_dp.core.ranges import ProperFraction, Seed
from fedjax_dp.data.datasets.base import Dataset, stratified_split
from fedjax_dp.data.datasets.catalog import locate
from fedjax_dp.data.datasets.tabular import (
    Categorical,
    Column,
    Numeric,
    Scaling,
    encode,
    exact_statistics,
    feature_names,
    read_table,
)

HOSPITALS = ("cleveland", "hungarian", "switzerland", "va")

# Ranges are medically plausible ones, not those of these patients.
COLUMNS: tuple[Column, ...] = (
    Numeric("age", 0, 100),
    Numeric("sex", 0, 1),
    Categorical("cp", ("1", "2", "3", "4")),
    Numeric("trestbps", 0, 220),
    Numeric("chol", 0, 600),
    Numeric("fbs", 0, 1),
    Categorical("restecg", ("0", "1", "2")),
    Numeric("thalach", 40, 220),
    Numeric("exang", 0, 1),
    Numeric("oldpeak", -3, 7),
    Categorical("slope", ("1", "2", "3")),
    Numeric("ca", 0, 3),
    Categorical("thal", ("3", "6", "7")),
)
_DEGREE = Categorical("num", ("0", "1", "2", "3", "4"))


def load(
    data_dir: pathlib.Path,
    *,
    scaling: Scaling = "standard",
    test_fraction: ProperFraction = 0.34,
    seed: Seed = 0,
) -> Dataset:
    """Loads the four heart-disease tables of UCI (Janosi et al. 1988).

    The source has no test part: one is drawn with the same share of every hospital and class. The
    share is that of FLamby's Fed-Heart-Disease, which drops patients and columns with missing cells
    while this loader keeps all 920 and fills them in, as `tabular.encode` describes. A cholesterol
    of 0, which stands for missing at Switzerland and VA, is left as it is in the files.

    Args:
      data_dir: the data directory.
      scaling: "standard" (zero mean, unit deviation over the pooled training part, missing cells
        from the same statistics) or "range" (fixed ranges, nothing learned from the data).
      test_fraction: the share of each hospital's patients set aside for testing, in (0, 1).
      seed: chooses these patients.

    Returns:
      Inputs `[n, 22]`, float32, labels (1 for any degree of disease), and the hospital's name as
      client id.
    """
    located = locate("heart_disease", data_dir)
    tables = [_read(located.paths[f"processed.{hospital}.data"]) for hospital in HOSPITALS]
    cells = np.concatenate(tables)
    hospitals = np.repeat(np.asarray(HOSPITALS), [len(table) for table in tables])
    labels = (cells[:, -1] != "0").astype(np.int32)
    strata = np.char.add(hospitals, labels.astype(str))
    train, test = stratified_split(strata, test_fraction, seed)
    x_train, x_test = encode(COLUMNS, cells[train, :-1], cells[test, :-1], scaling)
    return Dataset(
        "heart_disease",
        {"x": x_train, "y": labels[train]},
        {"x": x_test, "y": labels[test]},
        num_classes=2,
        task="classification",
        train_clients=hospitals[train],
        test_clients=hospitals[test],
        class_names=("healthy", "disease"),
        feature_names=feature_names(COLUMNS),
        origin=located.source.name,
        exact_statistics=exact_statistics(scaling),
    )


def _read(path: pathlib.Path) -> np.ndarray:
    table = read_table(path, COLUMNS, _DEGREE, ",")
    num_ill = int(np.sum(table[:, -1] != "0"))
    fits = min(num_ill, len(table) - num_ill) >= 2
    rule = "hold at least two healthy patients and two who are not"
    checks.require(fits, str(path), rule, f"{len(table) - num_ill} and {num_ill}")
    return table
