"""Fixed ranges learn nothing from the data; exact scaling says what it learns."""

import tracemalloc

import numpy as np
import pytest

from fedjax_dp.data import datasets
from fedjax_dp.data.datasets import base, public_tables, tabular

RNG = np.random.default_rng(3)


def heart_row(age, cholesterol, degree):
    return f"{age},1,4,130,{cholesterol},0,0,150,0,1.5,2,0,3,{degree}"


def write_heart(folder, first_age=50):
    (folder / "heart_disease").mkdir(exist_ok=True)
    for i, hospital in enumerate(("cleveland", "hungarian", "switzerland", "va")):
        ages = [40 + 5 * i + j for j in range(8)]
        ages[0] = first_age if i == 0 else ages[0]
        rows = [heart_row(age, 200 + age, j % 2) for j, age in enumerate(ages)]
        path = folder / "heart_disease" / f"processed.{hospital}.data"
        path.write_text("\n".join(rows) + "\n")


def write_connections(folder, first_bytes=100, service="http"):
    (folder / "kddcup99").mkdir(exist_ok=True)
    rows = []
    for i in range(12):
        numbers = ["0"] * 38
        numbers[1] = str(first_bytes if i == 0 else 10**i)
        words = ["tcp", service if i == 0 else ("http", "smtp")[i % 2], "SF"]
        rows.append(",".join([numbers[0], *words, *numbers[1:], ("normal.", "smurf.")[i % 2]]))
    (folder / "kddcup99" / "kddcup.data_10_percent").write_text("\n".join(rows) + "\n")


def changed_rows(name, scaling, folder, write, **change):
    """Counts the training rows that change with one record of the files."""
    write(folder)
    before = datasets.load(name, folder, scaling=scaling)
    write(folder, **change)
    after = datasets.load(name, folder, scaling=scaling)
    parts = [np.concatenate([d.train["x"], d.test["x"]]) for d in (before, after)]
    return int(np.sum(np.any(parts[0] != parts[1], axis=1))), before


@pytest.mark.parametrize(
    "name, write, change",
    [
        ("heart_disease", write_heart, {"first_age": 90}),
        ("kddcup99", write_connections, {"first_bytes": 5_000_000}),
        ("kddcup99", write_connections, {"service": "unheard_of"}),
    ],
)
def test_a_fixed_range_lets_a_record_change_its_own_row_alone(tmp_path, name, write, change):
    ranged, data = changed_rows(name, "range", tmp_path, write, **change)
    assert ranged == 1 and data.exact_statistics == ()
    assert data.train["x"].min() >= 0 and data.train["x"].max() <= 1
    assert len(data.feature_names) == data.train["x"].shape[1]


def test_exact_scaling_lets_a_record_change_every_row_and_declares_its_statistics(tmp_path):
    moved, data = changed_rows("heart_disease", "standard", tmp_path, write_heart, first_age=90)
    assert moved > 20
    (said,) = data.exact_statistics
    assert "exact means and standard deviations" in said and "most frequent" in said


def test_unpublished_services_have_no_column_in_a_fixed_range(tmp_path):
    write_connections(tmp_path, service="unheard_of")
    data = datasets.load("kddcup99", tmp_path, scaling="range")
    assert data.train["x"].shape[1] == 38 + 3 + 66 + 11
    # Published values stand in the order that they would have in the file.
    services = [n.partition("=")[2] for n in data.feature_names if n.startswith("column_2=")]
    assert services == sorted(services) and "unheard_of" not in services
    x = np.concatenate([data.train["x"], data.test["x"]])
    of_service = [n.startswith("column_2=") for n in data.feature_names]
    assert sorted(x[:, of_service].sum(axis=1)) == [0, *[1] * 11]


def test_amounts_of_any_magnitude_are_scaled_by_their_logarithm():
    column = tabular.Numeric("bytes", 0, 2**32, is_log=True)
    values = np.array([0, 2**16 - 1, 2**32, 2**40, -5, np.nan])
    found = tabular.in_range(column, values)
    assert found[[0, 2, 3, 4, 5]].tolist() == [0, 1, 1, 0, 0.5]
    assert found[1] == pytest.approx(0.5, abs=1e-9)
    plain = tabular.in_range(tabular.Numeric("age", 20, 120), np.array([70.0, 10, 130]))
    assert plain.tolist() == [0.5, 0, 1]


def test_every_number_of_a_connection_has_a_range():
    assert set(public_tables._RANGES) == set(public_tables.NUMBER_COLUMNS)
    assert all(column.low == 0 < column.high for column in public_tables._RANGES.values())


def within(x, norm):
    y = np.zeros(len(x), np.int64)
    data = datasets.Dataset("own", {"x": x, "y": y}, {"x": x[:2], "y": y[:2]}, 2, "classification")
    return datasets.within_norm(data, norm)


def test_inputs_are_scaled_down_to_a_norm_each_by_itself():
    """x · min(1, norm/‖x‖) in float64, and never longer than the norm in float32."""
    x = (RNG.normal(size=(400, 3, 2)) * RNG.choice([0.05, 5.0, 1e18], size=(400, 1, 1))).astype(
        "f4"
    )
    x[0] = 0
    found = within(x, 0.7)
    lengths = np.linalg.norm(np.float64(x).reshape(400, -1), axis=1)
    expected = np.float64(x) * np.minimum(1, 0.7 / np.maximum(lengths, 1e-9))[:, None, None]
    np.testing.assert_allclose(found.train["x"], expected, rtol=3e-6)
    assert found.train["x"].dtype == np.float32 and found.exact_statistics == ()
    assert np.linalg.norm(np.float64(found.train["x"]).reshape(400, -1), axis=1).max() <= 0.7
    np.testing.assert_array_equal(found.train["x"][lengths < 0.69], x[lengths < 0.69])
    np.testing.assert_array_equal(found.test["x"], found.train["x"][:2])
    # Another record changes no row but its own.
    x[5] *= -3
    assert np.any(within(x, 0.7).train["x"] != found.train["x"], axis=(1, 2)).sum() == 1


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("shape", [(7,), (7, 5), (7, 2, 3), (1, 40)])
def test_inputs_scaled_a_few_at_a_time_are_those_scaled_at_once(shape, dtype, monkeypatch):
    """Rows beyond what is scaled at once, in the last part, and longer than it."""
    x = (3 * RNG.normal(size=shape)).astype(dtype)
    given = x.copy()
    monkeypatch.setattr(base, "_SCALED_NUMBERS", 16)
    found = within(x, 2.0).train["x"]
    rows = np.float64(x).reshape(len(x), -1)
    longest = np.sqrt((rows * rows).sum(1))
    expected = rows / np.maximum(1, longest / 2)[:, None]
    np.testing.assert_allclose(found.reshape(rows.shape), expected, rtol=2e-6)
    assert found.dtype == dtype and found.shape == shape
    np.testing.assert_array_equal(x, given)


def test_scaling_to_a_norm_needs_little_memory_beside_its_result():
    x = RNG.normal(size=(40_000, 64)).astype(np.float32)
    y = np.zeros(len(x), np.int64)
    data = datasets.Dataset("own", {"x": x, "y": y}, {"x": x[:2], "y": y[:2]}, 2, "classification")
    tracemalloc.start()
    try:
        datasets.within_norm(data, 1.0)
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # 10 MB of result, and parts of 8 MB; in float64 the whole has 20 MB.
    assert most < x.nbytes + 30e6


@pytest.mark.parametrize(
    "x",
    [np.ones((4, 2), np.uint8), np.ones((4, 2), np.float16), {"a": np.ones((4, 2), np.float32)}],
)
def test_inputs_without_a_norm_are_refused(x):
    y = np.zeros(4, np.int64)
    data = datasets.Dataset("own", {"x": x, "y": y}, {"x": x, "y": y}, 2, "classification")
    with pytest.raises(ValueError, match="inputs of own must be one array of float32 in memory"):
        datasets.within_norm(data, 1.0)
