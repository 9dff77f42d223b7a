"""No damage of a store is silent: opening or reading names it, or changes nothing that is read."""

import os
import shutil

import numpy as np
import pytest
from damage import KINDS, damage
from marks import telling

from fedjax_dp.data import FederatedData, disk_arrays, store_writer


def a_store():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(600, 1024)).astype(np.float32)
    y = rng.integers(0, 3, 600)
    return FederatedData({"x": x, "more/y": y}, np.array([0, 200, 300, 600]), ("a", "b", "c"))


def rows_of(data):
    return {name: np.asarray(array[:]).tobytes() for name, array in data.examples.items()}


def assert_named_or_harmless(whole, folder, path, kind, rng):
    expected = FederatedData.open(whole)
    shutil.copytree(whole, folder)
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    rest = [p for p in files if p != folder / path]
    damage(folder / path, kind, rest[rng.integers(len(rest))], rng)
    try:
        found = FederatedData.open(folder)
        same = rows_of(found) == rows_of(expected), found.client_names == expected.client_names
        # Names that were lost show as such.
        assert same[0] and (same[1] or "digests.json" in str(path)), (path, kind)
    except (ValueError, OSError) as error:
        assert str(folder) in str(error), error
    shutil.rmtree(folder)


@pytest.fixture(params=["npy", "npy by blocks", "zarr"])
def stored(request, tmp_path, monkeypatch):
    if request.param == "zarr":
        pytest.importorskip("tensorstore")
        a_store().save_zarr(tmp_path / "store")
    else:
        a_store().save(tmp_path / "store")
        if request.param == "npy by blocks":
            monkeypatch.setattr(disk_arrays, "AT_OPEN", 0)
    return tmp_path / "store"


def test_what_is_damaged_in_a_store_is_named(stored, tmp_path):
    """A damage of each kind to every file."""
    rng = np.random.default_rng(3)
    for path in sorted(p.relative_to(stored) for p in stored.rglob("*") if p.is_file()):
        for kind in KINDS[:4]:
            assert_named_or_harmless(stored, tmp_path / "copy", path, kind, rng)


@telling
def test_a_hundred_damages_of_a_store_are_named(stored, tmp_path):
    rng = np.random.default_rng(4)
    files = sorted(p.relative_to(stored) for p in stored.rglob("*") if p.is_file())
    for number in range(100):
        path = files[rng.integers(len(files))]
        kind = KINDS[number % len(KINDS)]
        assert_named_or_harmless(stored, tmp_path / "copy", path, kind, rng)


def test_only_what_is_read_is_compared(tmp_path, monkeypatch):
    """Of a large array, each block once, when a row of it is first read."""
    monkeypatch.setattr(disk_arrays, "AT_OPEN", 0)
    a_store().save(tmp_path)
    file = tmp_path / "x.npy"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    found = FederatedData.open(tmp_path).examples["x"]
    expected = a_store().examples["x"]
    np.testing.assert_array_equal(found[np.array([0, 300, 5])], expected[[0, 300, 5]])
    np.testing.assert_array_equal(found[10:20], expected[10:20])
    with pytest.raises(ValueError, match=r"x\.npy must be as it was written, .* rows 512 to 599"):
        found[590:600]
    with pytest.raises(ValueError, match="rows 512 to 599"):
        found[np.array([0, -1])]


def test_a_store_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    """By itself too, whose rows are read while it is written."""
    a_store().save(tmp_path)
    ones = {"x": np.ones((2, 3), np.float32), "more/y": np.ones(2, np.float32)}
    other = FederatedData(ones, np.array([0, 1, 2]))
    with monkeypatch.context() as patched:

        def full(*_):
            raise OSError("the disk is full")

        patched.setattr(store_writer, "finish", full)
        with pytest.raises(OSError, match="full"):
            other.save(tmp_path)
    assert rows_of(FederatedData.open(tmp_path)) == rows_of(a_store())
    FederatedData.open(tmp_path).save(tmp_path)
    assert rows_of(FederatedData.open(tmp_path)) == rows_of(a_store())
    assert not (tmp_path / store_writer.SAVING).exists()
    with monkeypatch.context() as patched:
        patched.setattr(store_writer.pathlib.Path, "replace", full)
        with pytest.raises(OSError, match="full"):
            a_store().save(tmp_path)
    with pytest.raises(ValueError, match=r"must hold a file offsets\.npy"):
        FederatedData.open(tmp_path)


def test_files_without_digests_are_read_as_they_are(tmp_path):
    a_store().save(tmp_path)
    os.remove(tmp_path / "digests.json")
    file = tmp_path / "x.npy"
    array = np.load(file)
    np.save(file, array + 1)
    np.testing.assert_array_equal(FederatedData.open(tmp_path).examples["x"][:], array + 1)
