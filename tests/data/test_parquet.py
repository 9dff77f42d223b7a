"""Parquet files and Hugging Face tables that become stores without being loaded whole."""

import tracemalloc

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fedjax_dp.data import FederatedData, datasets, partition
from fedjax_dp.data.disk_arrays import SelectedRows


def write(path, columns, row_group_size=None):
    pq.write_table(pa.table(columns), path, row_group_size=row_group_size)
    return path


def unsorted(num_rows=1000, num_clients=7):
    """Columns whose clients alternate at random, over several row groups."""
    rng = np.random.default_rng(3)
    return {
        "user": rng.integers(0, num_clients, num_rows),
        "pixels": rng.normal(size=(num_rows, 2, 3)),
        "age": rng.integers(0, 99, num_rows).astype(np.int16),
        "label": rng.integers(0, 5, num_rows),
    }


def as_columns(rows):
    return {name: array.tolist() if array.ndim > 1 else array for name, array in rows.items()}


@pytest.fixture
def parts(tmp_path):
    """Two files of 600 and 400 rows, in row groups of 70."""
    rows = unsorted()
    for i, part in enumerate((slice(0, 600), slice(600, None))):
        own = {name: array[part] for name, array in rows.items()}
        write(tmp_path / f"part-{i}.parquet", as_columns(own), row_group_size=70)
    return tmp_path / "part-*.parquet", rows


def assert_grouped(data, rows, columns, ids):
    assert data.client_names == tuple(str(i) for i in ids)
    for i, client in enumerate(ids):
        own = data.client(i)
        for name, column in columns.items():
            expected = rows[column][rows["user"] == client]
            np.testing.assert_array_equal(own[name], expected.astype(own[name].dtype))


@pytest.mark.parametrize("batch_size", [33, 4096])
def test_unsorted_files_are_grouped_by_client(tmp_path, parts, batch_size):
    path, rows = parts
    columns = {"x": "pixels", "y": "label", "age": "age"}
    data = FederatedData.from_parquet(
        path, "user", columns, directory=tmp_path / "store", batch_size=batch_size
    )
    assert_grouped(data, rows, columns, range(7))
    kinds = {name: array.dtype.name for name, array in data.examples.items()}
    assert kinds == {"x": "float32", "y": "int32", "age": "int16"}
    assert all(isinstance(array, np.memmap) for array in data.examples.values())
    again = FederatedData.open(tmp_path / "store")
    np.testing.assert_array_equal(again.offsets, data.offsets)


def test_columns_by_default_side_by_side_and_ids_as_text(tmp_path):
    columns = {"who": ["b", "a", "b"], "n": [1, 2, 3], "f": [0.5, 1.5, 2.5], "is": [True] * 3}
    path = write(tmp_path / "t.parquet", columns)
    every = FederatedData.from_parquet(path, "who", directory=tmp_path / "one")
    assert every.client_names == ("a", "b") and sorted(every.examples) == ["f", "is", "n"]
    assert every.examples["n"].tolist() == [2, 1, 3] and every.examples["is"].dtype == bool
    chosen = {"x": ["n", "f"], "y": "is"}
    beside = FederatedData.from_parquet(path, "who", chosen, directory=tmp_path / "two")
    assert beside.examples["x"].tolist() == [[2, 1.5], [1, 0.5], [3, 2.5]]
    names = np.asarray(columns["who"])
    coded = pa.DictionaryArray.from_arrays([1, 0, 1], ["a", "b"])
    path = write(tmp_path / "coded.parquet", {"who": coded, "n": [1, 2, 3]})
    third = FederatedData.from_parquet(path, "who", directory=tmp_path / "three")
    assert third.client_names == tuple(np.unique(names))


def test_lists_of_several_lengths_are_padded(tmp_path):
    columns = {"who": [1, 0, 1], "words": [[5, 6], [], [7, 8, 9]], "next": [[6], [], [8, 9]]}
    path = write(tmp_path / "t.parquet", columns)
    padding = {"words": [4, 0], "next": [2, -1]}
    chosen = {"x": "words", "y": "next"}
    data = FederatedData.from_parquet(
        path, "who", chosen, directory=tmp_path / "store", padding=padding
    )
    assert data.examples["x"].tolist() == [[0, 0, 0, 0], [5, 6, 0, 0], [7, 8, 9, 0]]
    assert data.examples["y"].tolist() == [[-1, -1], [6, -1], [8, 9]]


INTS = pa.array([1, 2, 3])


@pytest.mark.parametrize(
    ("column", "options", "message"),
    [
        ([1, None, 3], {}, r"t.parquet, column 'x', must hold no nulls, got 1, the first in row 1"),
        ([[1], [2], [3, None]], {"padding": {"x": [2, 0]}}, "no nulls, got 1, the first in row 2"),
        ([[1], [2], [3, 4]], {}, "got 1 in the first and 2 in row 2; nearest valid choice: padd"),
        ([[1], [2], [3, 4, 5]], {"padding": {"x": [2, 0]}}, "at most 2 numbers.* got '3 in row 2'"),
        ([[1], [2], [3]], {"padding": {"x": [2, 0.5]}}, "must be a value of type int64, got 0.5"),
        ([[1], [2], [3]], {"padding": {"x": [0, 0]}}, "be a length of at least 1 and a value"),
        ([[1], [2], [3]], {"padding": {"z": [1, 0]}}, "padding must be one of"),
        (["a", "b", "c"], {}, r"column 'x', must hold numbers, Booleans, or lists of them"),
        (INTS.cast(pa.int32()).cast(pa.date32()), {}, "must hold numbers"),
        ([1, 2, 2**40], {}, r"hold integers that int32 can represent"),
        ([1, 2, 3], {"columns": {"x": "z"}}, "columns must be one of"),
        ([[1], [2], [3]], {"columns": {"x": ["x", "n"]}}, "hold one number in each row, to stand"),
    ],
)
def test_what_is_no_number_is_refused_with_file_and_row(tmp_path, column, options, message):
    path = write(tmp_path / "t.parquet", {"who": [0, 1, 1], "x": column, "n": INTS})
    with pytest.raises(ValueError, match=message):
        FederatedData.from_parquet(path, "who", directory=tmp_path / "store", **options)
    with pytest.raises(ValueError, match=r"offsets\.npy"):
        FederatedData.open(tmp_path / "store")


def test_files_and_folders_are_checked_first(tmp_path):
    good = write(tmp_path / "a.parquet", {"who": [0, 1], "x": [1, 2]})

    def refused(message, path, client="who"):
        with pytest.raises((ValueError, FileNotFoundError), match=message):
            FederatedData.from_parquet(path, client, directory=tmp_path / "store")

    other = write(tmp_path / "b.parquet", {"who": [0, 1], "x": [1.0, 2.0]})
    refused(r"b.parquet, column 'x', must be int64, as in .*a.parquet, got 'double'", [good, other])
    short = write(tmp_path / "c.parquet", {"who": [0, 1]})
    refused(r"column of .*c.parquet", [good, short])
    refused("client_column must be one of", good, client="whom")
    refused("path must match files", str(tmp_path / "none-*.parquet"))
    refused("path must be", tmp_path / "none.parquet")
    for name, ids in (("null", [0, None]), ("real", [0.5, 1.5])):
        path = write(tmp_path / f"{name}.parquet", {"who": ids, "x": [1, 2]})
        refused("column 'who', must hold (no nulls|integers or strings)", path)
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 no")
    refused("must be an intact Parquet file", tmp_path / "broken.parquet")
    (tmp_path / "store").mkdir(exist_ok=True)
    (tmp_path / "store" / "mine.txt").write_text("")
    refused("directory must be empty, or not exist yet, got .*mine.txt", good)


def test_memory_is_that_of_a_batch(tmp_path):
    """8 MB of examples in 32 row groups: neither Arrow nor NumPy may hold a quarter of them."""
    num_rows, width = 8192, 256
    numbers = np.random.default_rng(0).normal(size=num_rows * width).astype(np.float32)
    x = pa.FixedSizeListArray.from_arrays(pa.array(numbers), width)
    ids = np.arange(num_rows) % 50
    path = write(tmp_path / "t.parquet", {"who": ids, "x": x}, row_group_size=256)
    usual = pa.default_memory_pool()
    pool = pa.proxy_memory_pool(usual)
    pa.set_memory_pool(pool)
    tracemalloc.start()
    try:
        data = FederatedData.from_parquet(path, "who", directory=tmp_path / "s", batch_size=256)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        pa.set_memory_pool(usual)
    whole = numbers.nbytes
    assert peak < whole / 4 and pool.max_memory() < whole / 4
    np.testing.assert_array_equal(data.client(7)["x"], numbers.reshape(num_rows, -1)[7::50])


def test_huggingface_tables_are_written_in_batches(tmp_path, monkeypatch):
    import datasets as hf

    rows = unsorted(200)
    table = hf.Dataset.from_dict(as_columns(rows)).with_format("numpy")
    columns = {"x": "pixels", "y": "label"}
    whole = FederatedData.from_huggingface(table, "user", columns)
    for i, source in enumerate((table, table.to_iterable_dataset())):
        data = FederatedData.from_huggingface(
            source, "user", columns, directory=tmp_path / str(i), batch_size=32
        )
        assert data.client_names == whole.client_names
        np.testing.assert_array_equal(data.offsets, whole.offsets)
        for name in columns:
            np.testing.assert_array_equal(data.examples[name], whole.examples[name])
    ragged = hf.Dataset.from_dict({"who": [0, 1], "x": [[1], [2, 3]]})
    padded = FederatedData.from_huggingface(ragged, "who", padding={"x": [3, -1]})
    assert padded.examples["x"].tolist() == [[1, -1, -1], [2, 3, -1]]


def test_a_data_set_of_parquet_files_is_written_once_and_stays_on_disk(
    tmp_path, parts, monkeypatch
):
    path, rows = parts
    options = {"path": str(path), "client": "user", "x": ["pixels"], "y": "label"}
    data = datasets.load("parquet", tmp_path, num_classes=5, test_path=str(path), **options)
    order = np.argsort(rows["user"], kind="stable")
    np.testing.assert_array_equal(data.train["y"], rows["label"][order])
    names = np.array(data.client_names)[data.train_clients]
    np.testing.assert_array_equal(names.astype(np.int64), rows["user"][order])
    assert isinstance(data.train["x"], np.memmap) and data.num_classes == 5
    monkeypatch.setattr(FederatedData, "from_parquet", None)
    again = datasets.load("parquet", tmp_path, num_classes=5, **options)
    np.testing.assert_array_equal(again.train["x"], data.train["x"])
    assert len(again.test["y"]) == 0
    # The rows of the partition are those of the store, which is not copied.
    clients = partition.natural(again.train_clients)
    store = FederatedData.from_indices(again.train, clients)
    assert isinstance(store.examples["x"], np.memmap) and store.num_clients == 7
    # In another order, and a part of them, they are not copied either.
    turned = FederatedData.from_indices(again.train, clients[:1:-1])
    assert isinstance(turned.examples["x"], SelectedRows)
    rows_of = np.concatenate(clients[:1:-1])
    np.testing.assert_array_equal(turned.examples["x"], np.asarray(again.train["x"])[rows_of])
    np.testing.assert_array_equal(turned.client(2)["y"], np.asarray(again.train["y"])[clients[4]])
    with pytest.raises(ValueError, match="num_classes must be given"):
        datasets.load("parquet", tmp_path, **options)
    with pytest.raises(ValueError, match="num_classes must be 0"):
        datasets.load("parquet", tmp_path, task="regression", num_classes=5, **options)
    for changed in ({"x": ["pixels", "label"]}, {"weight": "user"}):
        with pytest.raises(ValueError, match="weight and client must be different columns"):
            datasets.load("parquet", tmp_path, num_classes=5, **options | changed)


def test_tables_that_stream_from_functions_are_read(tmp_path):
    import datasets as hf

    rows = {"user": ["b", "a", "b"], "x": [1.0, 2.0, 3.0], "y": [0, 1, 0]}
    table = hf.Dataset.from_dict(rows)

    def generated():
        yield from (dict(zip(rows, row, strict=True)) for row in zip(*rows.values(), strict=True))

    streams = (
        table.to_iterable_dataset().map(lambda row: row),
        hf.IterableDataset.from_generator(generated),
    )
    for i, stream in enumerate(streams):
        place = tmp_path / str(i)
        data = FederatedData.from_huggingface(stream, "user", directory=place, batch_size=2)
        assert data.client_names == ("b", "a") and data.examples["x"].tolist() == [1, 3, 2]
        with pytest.raises(ValueError, match="client_column must be one of user, x, y"):
            FederatedData.from_huggingface(stream, "who", directory=place)
        with pytest.raises(ValueError, match="directory must be given for a table that streams"):
            FederatedData.from_huggingface(stream, "user")


@pytest.mark.parametrize("second", [["b", "b", "a"], ["a", "a", "a"], ["a", "b"], ["a", "b", "c"]])
def test_a_table_that_changes_between_two_readings_is_refused(tmp_path, second):
    import datasets as hf

    readings = iter([["a", "a", "b"], second])
    changing = hf.IterableDataset.from_generator(
        lambda: ({"user": user, "x": 1.0} for user in next(readings)),
        features=hf.Features({"user": hf.Value("string"), "x": hf.Value("float32")}),
    )
    with pytest.raises(ValueError, match="have the same clients and examples each time"):
        FederatedData.from_huggingface(changing, "user", directory=tmp_path / "store")


def test_what_is_no_table_of_numbers_is_refused_with_the_way_out(tmp_path):
    import datasets as hf

    rows = {"user": ["b", "a"], "x": ["one", "two"], "y": [0, 1]}
    table = hf.Dataset.from_dict(rows)
    image = {"user": ["b"], "x": [{"bytes": b"", "path": None}], "y": [0]}
    parts = ({}, {"directory": tmp_path / "store"})
    for options in parts:
        for given, message in (
            (hf.DatasetDict(train=table), r"table must be one part of the data: table\['train'\]"),
            (rows, r"table must be one part of the data"),
            ([rows], "table must be a table of the `datasets` library"),
            (table, "column 'x', must hold numbers.*number labels.*class_encode_column"),
        ):
            with pytest.raises(ValueError, match=message.replace("'x',", "'x',?")):
                FederatedData.from_huggingface(given, "user", **options)
    images = hf.Dataset.from_dict(image).cast_column("x", hf.Image())
    with pytest.raises(ValueError, match=r"column 'x' must hold.*images and sounds as li"):
        FederatedData.from_huggingface(images, "user", **parts[1])


@pytest.mark.parametrize(
    ("values", "found"),
    [(np.array([1.0, 1e300]), "1e.300"), (np.array([1, 2**64 - 1], np.uint64), 2**64 - 1)],
)
def test_numbers_beyond_32_bits_are_refused_in_every_reading(tmp_path, values, found):
    import datasets as hf

    path = write(tmp_path / "t.parquet", {"user": [0, 1], "x": values, "y": [0, 1]})
    table = hf.Dataset.from_dict({"user": [0, 1], "x": values, "y": [0, 1]})
    for i, columns in enumerate(({"x": "x", "y": "y"}, {"x": ["x"], "y": "y"})):
        rule = rf"'?x'?\]? must hold (numbers|integers) that .* can represent.*got {found}"
        if values.dtype == np.float64 or i == 0:
            with pytest.raises(ValueError, match=rule):
                FederatedData.from_parquet(path, "user", columns, directory=tmp_path / str(i))
    with pytest.raises(ValueError, match=rule):
        FederatedData.from_huggingface(table, "user", {"x": "x", "y": "y"})


@pytest.mark.parametrize(("kind", "value"), [(pa.float32(), 1e300), (pa.bool_(), 5)])
def test_padding_that_a_type_cannot_hold_is_refused(tmp_path, kind, value):
    lists = pa.array([[1], [0, 1]], pa.list_(pa.int8())).cast(pa.list_(kind))
    path = write(tmp_path / "t.parquet", {"user": [0, 1], "x": lists})
    with pytest.raises(ValueError, match="padding of column 'x' must be a value of"):
        FederatedData.from_parquet(
            path, "user", directory=tmp_path / "store", padding={"x": [2, value]}
        )
