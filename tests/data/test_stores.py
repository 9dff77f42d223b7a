"""Stores as a data set: what was saved is read, from memory maps and chunks, and only as needed."""

import dataclasses
import json

import numpy as np
import pytest

from fedjax_dp.data import FederatedData, datasets, partition, store_writer
from fedjax_dp.data.datasets import Dataset
from fedjax_dp.data.disk_arrays import DiskArray, is_on_disk

FORMATS = {"npy": FederatedData.save, "zarr": FederatedData.save_zarr}


def make_dataset(num_clients=6):
    """Examples in random order of clients, whose names do not sort as their numbers do."""
    rng = np.random.default_rng(0)
    owner = rng.permutation(np.repeat(np.arange(num_clients), 4))
    x, y = rng.normal(size=(len(owner), 3)).astype(np.float32), rng.integers(0, 5, len(owner))
    test = {"x": x[:7], "y": y[:7]}
    return Dataset(
        "mine",
        {"x": x, "y": y},
        test,
        5,
        "classification",
        train_clients=np.array([f"ward {10 - i}" for i in owner]),
        test_clients=np.array(["ward 10", "new"])[[0, 1, 1, 0, 0, 0, 1]],
        class_names=tuple("abcde"),
        exact_statistics=("the mean of x",),
    )


def natural(found):
    """The store of natural clients that a configuration makes."""
    clients = partition.natural(found.train_clients)
    return FederatedData.from_indices(found.train, clients, found.client_names[: len(clients)])


@pytest.mark.parametrize("form", FORMATS)
def test_a_data_set_is_stored_with_what_describes_it(tmp_path, form, monkeypatch):
    given = make_dataset()
    datasets.save(given, tmp_path / "mine", format=form)
    found = datasets.load("store", tmp_path, path="mine")
    for name in ("num_classes", "task", "class_names", "exact_statistics"):
        assert getattr(found, name) == getattr(given, name)
    for part in ("train", "test"):
        ids = getattr(given, f"{part}_clients")
        order = np.argsort(ids, kind="stable")
        assert is_on_disk(getattr(found, part)["x"])
        for name, array in getattr(given, part).items():
            np.testing.assert_array_equal(getattr(found, part)[name], array[order])
        names = np.array(found.client_names)[getattr(found, f"{part}_clients")]
        assert names.tolist() == ids[order].tolist()
    # A store is converted into one of the other format, without reading an array at once.
    other = "npy" if form == "zarr" else "zarr"
    with monkeypatch.context() as patched:
        patched.setattr(DiskArray, "__array__", None)
        datasets.save(found, tmp_path / "again", format=other)
    again = datasets.load("store", tmp_path, path=str(tmp_path / "again"))
    np.testing.assert_array_equal(again.train["x"], found.train["x"])
    assert again.client_names == found.client_names and type(again) is Dataset


@pytest.mark.parametrize("form", FORMATS)
def test_a_store_by_itself_keeps_its_clients(tmp_path, form):
    rng = np.random.default_rng(1)
    names = ["user 2", "user 10", "a", "user 3"]
    parts = [{"x": rng.normal(size=(n, 2)).astype(np.float32), "y": np.arange(n)} for n in (3, 1)]
    made = FederatedData.from_clients([*parts, *parts], names)
    FORMATS[form](made, tmp_path / "mine")
    FORMATS[form](made, tmp_path / "test")
    options = {"path": "mine", "num_classes": 3}
    found = datasets.load("store", tmp_path, test_path="test", **options)
    store = natural(found)
    assert store.sizes.tolist() == [3, 1, 3, 1] and store.client_names == tuple(names)
    assert is_on_disk(store.examples["x"])
    np.testing.assert_array_equal(store.examples["x"], made.examples["x"])
    np.testing.assert_array_equal(found.test["y"], made.examples["y"])
    few = natural(datasets.load("store", tmp_path, max_clients=2, **options))
    assert few.client_names == ("user 2", "user 10") and is_on_disk(few.examples["x"])
    np.testing.assert_array_equal(few.examples["x"], made.examples["x"][:4])
    assert few.client(1)["y"].tolist() == [0]


def test_rows_on_disk_are_read_when_they_are_indexed(tmp_path, monkeypatch):
    made = FederatedData({"x": np.arange(40, dtype=np.float32).reshape(20, 2)}, [0, 8, 20])
    made.save_zarr(tmp_path / "chunks")
    store = FederatedData.open(tmp_path / "chunks")
    asked = []
    whole = store_writer.StoredArray._read
    monkeypatch.setattr(
        store_writer.StoredArray,
        "_read",
        lambda self, rows: asked.append(rows) or whole(self, rows),
    )
    kept, apart = partition.split_clients([np.arange(8), np.arange(8, 20)], 0, test_fraction=0.25)
    train = FederatedData.from_indices(store.examples, kept)
    again = FederatedData.from_indices(train.examples, [np.arange(4, 9), np.array([1])])
    assert not asked and train.num_examples == 15 and is_on_disk(again.examples["x"])
    x, rows = made.examples["x"], np.concatenate(kept)[[4, 5, 6, 7, 8, 1]]
    np.testing.assert_array_equal(again.client(1)["x"], x[rows[5:]])
    # Once to compare their chunk.
    assert asked[0] == slice(0, 20) and [x.tolist() for x in asked[1:]] == [rows[5:].tolist()]
    np.testing.assert_array_equal(again.select([1, 0]).examples["x"][1:], x[rows[:5]])
    np.testing.assert_array_equal(train.slab(np.array([1]))[0]["x"][:9], x[kept[1]])
    held_out, apart = FederatedData.from_indices(store.examples, apart), np.concatenate(apart)
    np.testing.assert_array_equal(held_out.examples["x"][::2], x[apart[::2]])
    held_out.check_finite()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"path": "none"}, r"path must be the folder of a store; there is none at none or "),
        ({"path": "mine/train/offsets.npy"}, "path must be a folder"),
        ({"path": "."}, r"path must hold a store: dataset.json of a finished .* or offsets.npy"),
        ({"path": "mine", "num_classes": 5}, "num_classes must be left out, since .*dataset.json"),
        ({"path": "mine/train"}, "num_classes must be given, the number of classes"),
        ({"path": "mine/train", "num_classes": 5, "task": "regression"}, "num_classes must be 0"),
        ({"path": "mine/train", "num_classes": 5, "test_path": "no"}, "test_path must be the fold"),
    ],
)
def test_what_is_no_store_is_refused(tmp_path, options, message):
    datasets.save(make_dataset(), tmp_path / "mine")
    with pytest.raises(ValueError, match=message):
        datasets.load("store", tmp_path, **options)


def test_damage_and_what_cannot_be_stored_are_refused(tmp_path):
    given = make_dataset()
    with pytest.raises(ValueError, match="the data set must name clients; mine has none"):
        datasets.save(dataclasses.replace(given, train_clients=None), tmp_path / "mine")
    with pytest.raises(ValueError, match="format must be"):
        datasets.save(given, tmp_path / "mine", format="hdf5")
    assert not list(tmp_path.iterdir())
    datasets.save(given, tmp_path / "mine")
    with pytest.raises(ValueError, match="directory must be empty"):
        datasets.save(given, tmp_path / "mine")
    file = tmp_path / "mine" / "dataset.json"
    facts = json.loads(file.read_text())
    # A file that was written by hand has none.
    del facts["sha256"]
    for change, message in (
        ({"num_classes": "5"}, "num_classes in .*dataset.json must be a int"),
        ({"task": "guessing"}, "task in .*dataset.json must be"),
        ({"class_names": [1]}, "class_names in .*dataset.json must be a list"),
        ({"more": 1}, "dataset.json must describe a data set by task"),
    ):
        file.write_text(json.dumps(facts | change))
        with pytest.raises(ValueError, match=message):
            datasets.load("store", tmp_path, path="mine")
    file.write_text(json.dumps(facts))
    array = tmp_path / "mine" / "train" / "x.npy"
    array.write_bytes(array.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"x\.npy must hold .* bytes, as its header says|intact"):
        datasets.load("store", tmp_path, path="mine")
