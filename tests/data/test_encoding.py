"""What a table says of its encoding is enough to encode its rows without the package."""

import csv
import datetime

import numpy as np
import pytest
from marks import later

from fedjax_dp.data import datasets

CSV = """\
hospital,age,seen,job,smokes,ill
north,30,03.01.2020,nurse,true,no
south,60,01.02.2020,cook,false,yes
north,41,31.12.2019,,false,no
south,,02.01.2020,cook,true,yes
north,50,05.01.2020,cook,true,yes
"""
DATES = {"seen": {"since": "2020-01-01", "format": "%d.%m.%Y"}}
DECLARED = {
    "categories": {"job": ["cook", "nurse"], "smokes": ["false", "true"], "ill": ["no", "yes"]},
    "missing": "fill",
    "fill": {"age": 44, "job": "nurse"},
}
RANGES = {"scaling": "range", "ranges": {"age": [20, 55], "seen": [-10, 40]}}
CHOICES = {
    "declared": DECLARED | RANGES,
    "unscaled": DECLARED,
    "integer": DECLARED | RANGES | {"coding": "integer"},
    "exact": {"missing": "mean", "scaling": "standard"},
    "exact, integer": {"missing": "mean", "scaling": "standard", "coding": "integer"},
}


def encoded(encoding, rows):
    """Encodes rows of text in float64 by what an encoding says: by column, `[rows, ...]`."""
    found = {}
    for column in encoding.columns:
        known = (row[column["name"]] for row in rows)
        cells = [column["fill"] if cell in encoding.missing_values else cell for cell in known]
        if "categories" in column:
            codes = [column["categories"].index(cell) for cell in cells]
            found[column["name"]] = np.array(codes)
            if encoding.coding == "one_hot":
                found[column["name"]] = np.eye(len(column["categories"]))[codes]
            continue
        if "dates" in column:
            since = datetime.datetime.fromisoformat(column["dates"]["since"])
            read = (datetime.datetime.strptime(c, column["dates"]["format"]) for c in cells)
            cells = [(each - since).days for each in read]
        values = np.array(cells, float)
        if "range" in column:
            low, high = column["range"]
            values = (np.minimum(np.maximum(values, low), high) - low) / (high - low)
        if "mean" in column:
            values = (values - column["mean"]) / column["deviation"]
        found[column["name"]] = values[:, None]
    return found


@pytest.mark.parametrize("choice", later(CHOICES, but=["exact"]))
def test_rows_are_encoded_as_the_table_says(tmp_path, choice):
    (tmp_path / "a.csv").write_text(CSV)
    options = {"path": str(tmp_path / "a.csv"), "label": "ill", "client": "hospital"}
    data = datasets.load("table", dates=DATES, **options, **CHOICES[choice])
    rows = list(csv.DictReader(CSV.splitlines()))
    found, x = encoded(data.encoding, rows), data.train["x"]
    if data.encoding.coding == "integer":
        numbers = np.concatenate([found.pop(name) for name in ("age", "seen")], axis=1)
        np.testing.assert_allclose(x["numbers"], numbers, rtol=1e-6)
        assert x.keys() - {"numbers"} == found.keys()
        for name, codes in found.items():
            np.testing.assert_array_equal(x[name], codes)
    else:
        np.testing.assert_allclose(x, np.concatenate([*found.values()], axis=1), rtol=1e-6)
    (label,) = data.encoding.labels
    names = [label["categories"][i] for i in data.train["y"]]
    assert names == [row["ill"] for row in rows]


def test_what_was_computed_from_rows_is_marked_and_can_be_left_out(tmp_path):
    (tmp_path / "a.csv").write_text(CSV)
    options = {"path": str(tmp_path / "a.csv"), "label": "ill", "features": ["age", "job"]}
    exact = datasets.load("table", **options, **CHOICES["exact"])
    ages = np.array([30, 60, 41, np.nan, 50])
    filled = np.where(np.isnan(ages), np.nanmean(ages), ages)
    age, job = exact.encoding.columns
    assert age == {
        **{"name": "age", "fill": pytest.approx(np.nanmean(ages))},
        **{"mean": pytest.approx(np.mean(filled)), "deviation": pytest.approx(np.std(filled))},
        "exact": ["fill", "mean", "deviation"],
    }
    assert job == {"name": "job", "fill": "cook", "categories": ["cook", "nurse"]} | {
        "exact": ["fill", "categories"]
    }
    left = exact.encoding.without_exact()
    assert left.columns == (
        {"name": "age", "exact": ["fill", "mean", "deviation"]},
        {"name": "job", "exact": ["fill", "categories"]},
    )
    assert left.labels == ({"name": "ill", "exact": ["categories"]},)
    declared = datasets.load("table", **options, **DECLARED, scaling="none")
    assert declared.encoding.without_exact() == declared.encoding and not declared.exact_statistics


@pytest.mark.slow
def test_a_regression_has_labels_without_categories(tmp_path):
    (tmp_path / "a.csv").write_text(CSV)
    options = {"path": str(tmp_path / "a.csv"), "label": ["age", "seen"], "task": "regression"}
    rows = CSV.replace("south,,", "south,7,").replace("2019,,", "2019,cook,")
    (tmp_path / "a.csv").write_text(rows)
    data = datasets.load("table", dates=DATES, features=["job"], **options)
    since = {"since": "2020-01-01T00:00:00", "format": "%d.%m.%Y"}
    assert data.encoding.labels == ({"name": "age"}, {"name": "seen", "dates": since})
