"""The table of credit card fraud in its published form: numbers, scalings, and bad files."""

import numpy as np
import pytest

from fedjax_dp.data import datasets
from fedjax_dp.data.datasets.catalog import MissingDataError

HEADER = ",".join(f'"{name}"' for name in ("Time", *(f"V{i}" for i in range(1, 29)), "Amount"))
HEADER += ',"Class"'


def rows_of(count=40, seed=0):
    rng = np.random.default_rng(seed)
    numbers = np.column_stack(
        [np.arange(count), rng.normal(size=(count, 28)), rng.uniform(0, 300, count).round(2)]
    )
    return numbers, (np.arange(count) % 4 == 0).astype(int)


def write(folder, lines):
    (folder / "credit_card_fraud").mkdir(exist_ok=True)
    path = folder / "credit_card_fraud" / "creditcard.csv"
    path.write_text("\n".join(lines) + "\n", "utf-8")
    return path


def lines_of(numbers, labels):
    cells = [
        [*(repr(float(n)) for n in row), f'"{label}"']
        for row, label in zip(numbers, labels, strict=True)
    ]
    return [HEADER, *(",".join(row) for row in cells)]


def test_a_published_table_is_read_and_scaled(tmp_path):
    numbers, labels = rows_of()
    write(tmp_path, lines_of(numbers, labels))
    loaded = datasets.load("credit_card_fraud", tmp_path, test_fraction=0.25)
    assert loaded.train["x"].shape == (30, 30) and loaded.test["x"].shape == (10, 30)
    assert np.sum(loaded.train["y"]) + np.sum(loaded.test["y"]) == labels.sum()
    assert loaded.class_names == ("genuine", "fraudulent") and loaded.feature_names[29] == "Amount"
    np.testing.assert_allclose(loaded.train["x"].mean(axis=0), 0, atol=1e-5)
    np.testing.assert_allclose(loaded.train["x"].std(axis=0), 1, atol=1e-5)
    # By fixed ranges a row depends on itself alone: times tell which row it was.
    ranged = datasets.load("credit_card_fraud", tmp_path, scaling="range")
    row = np.rint(ranged.test["x"][0, 0] * 172_800).astype(int)
    expected = (numbers[row, 1:29] + 50) / 100
    np.testing.assert_allclose(ranged.test["x"][0, 1:29], expected, atol=1e-6)
    amount = np.log1p(numbers[row, 29]) / np.log1p(100_000)
    assert ranged.test["x"][0, 29] == pytest.approx(amount, abs=1e-6)
    assert ranged.test["y"][0] == labels[row] and not ranged.exact_statistics


def damaged(what):
    numbers, labels = rows_of()
    lines = lines_of(numbers, labels)
    if what == "empty":
        return []
    if what == "header":
        return [lines[0].replace("Amount", "Sum"), *lines[1:]]
    if what == "no rows":
        return lines[:1]
    if what == "short":
        lines[3] = lines[3].rpartition(",")[0]
    if what == "word":
        lines[2] = lines[2].replace(lines[2].split(",")[5], "often", 1)
    if what == "nan":
        lines[2] = lines[2].replace(lines[2].split(",")[5], "nan", 1)
    if what == "class":
        lines[4] = lines[4].rpartition(",")[0] + ',"2"'
    if what == "one class":
        lines = lines_of(numbers, np.zeros_like(labels))
    return lines


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("empty", "must begin with a line of the columns"),
        ("header", "must begin with a line of the columns"),
        ("no rows", "must hold rows"),
        ("short", "line 4 must have 31 columns, got 30"),
        ("word", "line 3, column 'V5' must hold a number, got 'often'"),
        ("nan", "line 3, column 'V5' must hold a number, got 'nan'"),
        ("class", "line 5, column 'Class' must hold 0 or 1, got 2.0"),
        ("one class", "must hold at least two rows of each class"),
    ],
)
def test_a_bad_file_is_named_with_its_place(tmp_path, what, message):
    write(tmp_path, damaged(what))
    with pytest.raises(ValueError, match=r"creditcard\.csv") as error:
        datasets.load("credit_card_fraud", tmp_path)
    assert message in str(error.value)


def test_a_missing_file_is_explained(tmp_path):
    with pytest.raises(MissingDataError, match=r"kaggle\.com/datasets/mlg-ulb/creditcardfraud"):
        datasets.load("credit_card_fraud", tmp_path)
