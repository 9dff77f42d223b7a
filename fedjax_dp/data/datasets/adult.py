"""Adult: does a person of the 1994 US census earn more than 50,000 dollars a year?"""

import pathlib

import numpy as np

from fedjax_dp.data.datasets.base import Dataset
from fedjax_dp.data.datasets.catalog import locate
from fedjax_dp.data.datasets.tabular import (
    MISSING,
    Categorical,
    Column,
    Numeric,
    Scaling,
    encode,
    exact_statistics,
    feature_names,
    read_table,
)


def _categories(name: str, values: str, *, can_miss: bool = False) -> Categorical:
    return Categorical(name, tuple(values.split()) + ((MISSING,) if can_miss else ()))


# Categories as listed in UCI's adult.names; ranges cover what the census form allows.
COLUMNS: tuple[Column, ...] = (
    Numeric("age", 0, 100),
    _categories(
        "workclass",
        "Private Self-emp-not-inc Self-emp-inc Federal-gov Local-gov State-gov Without-pay "
        "Never-worked",
        can_miss=True,
    ),
    Numeric("fnlwgt", 0, 1_500_000),
    _categories(
        "education",
        "Bachelors Some-college 11th HS-grad Prof-school Assoc-acdm Assoc-voc 9th 7th-8th 12th "
        "Masters 1st-4th 10th Doctorate 5th-6th Preschool",
    ),
    Numeric("education-num", 1, 16),
    _categories(
        "marital-status",
        "Married-civ-spouse Divorced Never-married Separated Widowed Married-spouse-absent "
        "Married-AF-spouse",
    ),
    _categories(
        "occupation",
        "Tech-support Craft-repair Other-service Sales Exec-managerial Prof-specialty "
        "Handlers-cleaners Machine-op-inspct Adm-clerical Farming-fishing Transport-moving "
        "Priv-house-serv Protective-serv Armed-Forces",
        can_miss=True,
    ),
    _categories("relationship", "Wife Own-child Husband Not-in-family Other-relative Unmarried"),
    _categories("race", "White Asian-Pac-Islander Amer-Indian-Eskimo Other Black"),
    _categories("sex", "Female Male"),
    Numeric("capital-gain", 0, 100_000),
    Numeric("capital-loss", 0, 5_000),
    Numeric("hours-per-week", 0, 100),
    _categories(
        "native-country",
        "United-States Cambodia England Puerto-Rico Canada Germany Outlying-US(Guam-USVI-etc) "
        "India Japan Greece South China Cuba Iran Honduras Philippines Italy Poland Jamaica "
        "Vietnam Mexico Portugal Ireland France Dominican-Republic Laos Ecuador Taiwan Haiti "
        "Columbia Hungary Guatemala Nicaragua Scotland Thailand Yugoslavia El-Salvador "
        "Trinadad&Tobago Peru Hong Holand-Netherlands",
        can_miss=True,
    ),
)

_CLASSES, _TEST_CLASSES = ("<=50K", ">50K"), ("<=50K.", ">50K.")


def load(
    data_dir: pathlib.Path, *, scaling: Scaling = "standard", drop_missing: bool = False
) -> Dataset:
    """Loads Adult (Kohavi 1996) with 0/1 columns for categories.

    A missing workclass, occupation or country is a separate category.

    Args:
      data_dir: the data directory.
      scaling: "standard" for zero mean and unit deviation over the training part, or "range" for
        fixed ranges that are known without the data; `tabular.encode` says what each means for
        privacy.
      drop_missing: leave out people with a missing cell, as part of the literature does.

    Returns:
      Inputs `[n, 108]`, float32, and labels (1 for more than 50,000), without natural clients.
    """
    located = locate("adult", data_dir)
    # In adult.test, labels end in a full stop.
    tables = [
        read_table(located.paths[name], COLUMNS, Categorical("income", labels), ", ")
        for name, labels in (("adult.data", _CLASSES), ("adult.test", _TEST_CLASSES))
    ]
    if drop_missing:
        tables = [table[(table != MISSING).all(axis=1)] for table in tables]
    labels = [
        (table[:, -1] == more).astype(np.int32)
        for table, (_, more) in zip(tables, (_CLASSES, _TEST_CLASSES), strict=True)
    ]
    x_train, x_test = encode(COLUMNS, tables[0][:, :-1], tables[1][:, :-1], scaling)
    return Dataset(
        "adult",
        {"x": x_train, "y": labels[0]},
        {"x": x_test, "y": labels[1]},
        num_classes=2,
        task="classification",
        class_names=_CLASSES,
        feature_names=feature_names(COLUMNS),
        origin=located.source.name,
        exact_statistics=exact_statistics(scaling),
    )
