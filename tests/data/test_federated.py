"""The flat ragged store: constructors, disk, errors, a million clients."""

import json
import os
import pathlib
import socket
import subprocess
import sys
import textwrap

import numpy as np
import pytest

from fedjax_dp.data import clusters, partition, statistics, store_writer
from fedjax_dp.data.federated import FederatedData, example_structure, nested
from fedjax_dp.data.store_writer import write_store


def make_clients(sizes=(3, 0, 5, 1)):
    rng = np.random.default_rng(0)
    return [
        {"x": rng.normal(size=(n, 2, 2)).astype(np.float32), "y": np.arange(n) + 10 * i}
        for i, n in enumerate(sizes)
    ]


def assert_holds(data, clients):
    assert data.num_clients == len(clients)
    for i, client in enumerate(clients):
        got = data.client(i)
        assert got.keys() == client.keys()
        for name in client:
            np.testing.assert_array_equal(got[name], client[name])


def test_from_clients():
    clients = make_clients()
    data = FederatedData.from_clients(clients, ["a", "b", "c", "d"])
    assert_holds(data, clients)
    assert data.num_examples == 9 and data.client_names == ("a", "b", "c", "d")
    assert repr(data) == "FederatedData(4 clients, 9 examples, x: float32 [2, 2], y: int64 [])"
    np.testing.assert_array_equal(data.sizes, [3, 0, 5, 1])
    np.testing.assert_array_equal(data.offsets, [0, 3, 3, 8, 9])
    np.testing.assert_array_equal(data.client_of_example, [0, 0, 0, 2, 2, 2, 2, 2, 3])
    assert data.num_bytes == 9 * (16 + 8)
    structure = example_structure(data)
    assert structure["x"].shape == (2, 2) and structure["x"].dtype == np.float32


@pytest.mark.parametrize("keep_order", [False, True])
@pytest.mark.parametrize("ids", [[7, 3, 7, 9, 3, 7], ["b", "c", "b", "a", "c", "b"]])
def test_from_a_column_of_client_ids(ids, keep_order):
    x = np.arange(6.0)
    data = FederatedData.from_client_ids({"x": x}, ids, keep_order=keep_order)
    order = list(dict.fromkeys(ids)) if keep_order else sorted(set(ids))
    assert data.client_names == tuple(str(name) for name in order)
    assert_holds(data, [{"x": x[np.array(ids) == name]} for name in order])


def test_from_rows_of_a_pool():
    pool = {"x": np.arange(5.0)}
    data = FederatedData.from_indices(pool, [[4, 0], [], [1, 3, 2]], ["p", "q", "r"])
    assert_holds(data, [{"x": np.array(v)} for v in ([4.0, 0.0], [], [1.0, 3.0, 2.0])])


def test_from_a_hugging_face_table():
    datasets = pytest.importorskip("datasets")
    table = datasets.Dataset.from_dict(
        {
            "writer": ["w2", "w1", "w2"],
            "pixels": [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]],
            "label": [0, 1, 2],
        }
    )
    data = FederatedData.from_huggingface(table, "writer", {"x": "pixels", "y": "label"})
    assert data.client_names == ("w2", "w1")
    np.testing.assert_array_equal(data.client(0)["x"], [[1.0, 2.0], [5.0, 6.0]])
    np.testing.assert_array_equal(data.client(1)["y"], [1])
    every_column = FederatedData.from_huggingface(table, "writer")
    assert set(every_column.examples) == {"pixels", "label"}
    with pytest.raises(ValueError, match=r"client_column must be one of .* did you mean 'writer'"):
        FederatedData.from_huggingface(table, "writr")
    with pytest.raises(ValueError, match=r"columns must be one of .* did you mean 'pixels'"):
        FederatedData.from_huggingface(table, "writer", {"x": "pixel"})


def test_select_copies_clients_in_the_order_given():
    clients = make_clients()
    data = FederatedData.from_clients(clients, list("abcd"))
    part = data.select([3, 1, 0])
    assert_holds(part, [clients[i] for i in (3, 1, 0)])
    assert part.client_names == ("d", "b", "a")
    part.examples["y"][0] = -1
    assert data.client(3)["y"][0] == 30


@pytest.mark.parametrize("names", [(), ("ä", "b c", "d", "e")])
def test_saved_store_opens_as_memory_maps(tmp_path, names):
    clients = make_clients()
    data = FederatedData.from_clients(clients, names)
    data.save(tmp_path / "store")
    opened = FederatedData.open(tmp_path / "store")
    assert all(isinstance(array, np.memmap) for array in opened.examples.values())
    assert_holds(opened, clients)
    assert_holds(opened.select([2, 0]), [clients[2], clients[0]])
    assert opened.client_names == names


def test_saving_replaces_a_store_whole(tmp_path):
    """Names of an earlier store must not end up on the clients of this one."""
    FederatedData.from_clients(make_clients(), list("abcd")).save(tmp_path)
    FederatedData.from_clients(make_clients((2, 2, 1, 1))).save(tmp_path)
    opened = FederatedData.open(tmp_path)
    assert opened.client_names == ()
    assert_holds(opened, make_clients((2, 2, 1, 1)))


def test_saving_beside_files_of_others_is_refused(tmp_path):
    """Opened again, they would be taken for arrays of the store."""
    np.save(tmp_path / "z.npy", np.zeros(3))
    with pytest.raises(ValueError, match=r"directory must hold no other .npy files.*z.npy"):
        FederatedData.from_clients(make_clients()).save(tmp_path)
    with pytest.raises(ValueError, match="examples must name no array 'offsets'"):
        FederatedData({"offsets": np.zeros(2)}, np.array([0, 2])).save(tmp_path / "other")


def test_opening_a_folder_that_is_not_a_store_names_what_is_missing(tmp_path):
    with pytest.raises(ValueError, match=r"directory must hold a file offsets\.npy"):
        FederatedData.open(tmp_path)
    np.save(tmp_path / "offsets.npy", np.array([0, 2]))
    with pytest.raises(ValueError, match="examples must hold at least one array"):
        FederatedData.open(tmp_path)


@pytest.mark.parametrize(
    "examples, offsets, names, message",
    [
        ({}, [0, 1], (), "examples must hold at least one array"),
        ({"x": np.zeros(3)}, [0], (), "offsets must be one-dimensional, start at 0"),
        ({"x": np.zeros(3)}, [0, 2, 1, 3], (), "offsets must never decrease"),
        ({"x": np.zeros(3)}, [0, 2], (), r"examples\['x'\] must have 2 rows"),
        ({"x": np.zeros(2), "y": np.zeros(3)}, [0, 2], (), r"examples\['y'\] must have 2 rows"),
        ({"x": np.zeros(2)}, [0, 2], ("a", "b"), "client_names must name all 1 clients or none"),
    ],
)
def test_inconsistent_stores_are_refused(examples, offsets, names, message):
    with pytest.raises(ValueError, match=message):
        FederatedData(examples, np.array(offsets), names)


@pytest.mark.parametrize(
    "form, given, message",
    [
        ("clients", [[]], "clients must hold at least one client"),
        ("clients", [[{"x": [1]}, {"y": [1]}]], r"clients\[1\] must name \['x'\]"),
        ("clients", [[{"x": [1, 2], "y": [1]}]], r"clients\[0\] must have arrays of one length"),
        ("client_ids", [{"x": np.zeros(3)}, [1, 2]], r"must have one row for each of the 2 client"),
        ("client_ids", [{"x": np.zeros(0)}, []], "client_ids must name at least one client"),
        ("indices", [{"x": np.zeros(3)}, []], "clients must hold at least one client"),
        ("indices", [{"x": np.zeros(3)}, [[0, -1]]], r"clients\[0\] must name rows in \[0, 3\)"),
    ],
)
def test_bad_arguments_are_refused(form, given, message):
    with pytest.raises(ValueError, match=message):
        getattr(FederatedData, f"from_{form}")(*given)


@pytest.mark.parametrize("index", [-1, 4])
def test_clients_that_do_not_exist_are_refused(index):
    data = FederatedData.from_clients(make_clients())
    with pytest.raises(ValueError, match=r"index must be in \[0, 4\)"):
        data.client(index)
    with pytest.raises(ValueError, match=r"clients must be in \[0, 4\)"):
        data.select([0, index])


def test_what_is_not_finite_is_named():
    clients = make_clients()
    FederatedData.from_clients(clients).check_finite()
    clients[2]["x"][1, 0, 1] = np.nan
    clients[3]["x"][0] = np.inf
    with pytest.raises(ValueError, match=r"'x'.* in 2 rows, the first at row 4 \(client 2\)"):
        FederatedData.from_clients(clients).check_finite()


MILLION = textwrap.dedent(
    """
    import json, pathlib, sys
    import jax, jax.numpy as jnp, numpy as np
    from fedjax_dp.algorithms import scaffold
    from fedjax_dp.clients import LocalConfig, local_trainer
    from fedjax_dp.data import participants, sampling
    from fedjax_dp.data.federated import FederatedData
    from fedjax_dp.engine import simulation
    from fedjax_dp.models.base import Model

    def peak():
        # The peak that `resource` reports is at least what the starting process held.
        status = pathlib.Path("/proc/self/status").read_text().split()
        return int(status[status.index("VmHWM:") + 1]) / 2**20

    before = peak()
    data = FederatedData.open(sys.argv[1])
    opened = peak() - before
    model = Model.from_functions(
        lambda key: {"w": jnp.zeros(20), "b": jnp.zeros(())},
        lambda params, x: x @ params["w"] + params["b"],
        loss="sigmoid_binary_cross_entropy",
    )
    trainer = local_trainer(model, LocalConfig(learning_rate=0.5, batch_size=10, num_epochs=1))
    algorithm = scaffold(model, trainer, num_clients=data.num_clients)
    sampler = sampling.poisson(capacity=1200)
    sim = simulation(algorithm, data, participants.participation(sampler, data.num_clients, 1000))
    key = jax.random.key(0)
    state, record, info = sim.run(sim.init(key), key, 10)
    touched = np.unique(record.clients)
    touched = touched[touched >= 0]
    moved = np.flatnonzero(np.any(np.asarray(state.clients["w"]) != 0, axis=1))
    print(json.dumps({
        "clients": data.num_clients,
        "opened": opened,
        "gib": peak(),
        "participants": record.num_drawn.tolist(),
        "overflow": record.overflow.tolist(),
        "examples": info.training.num_examples.tolist(),
        "loss": info.training.train_loss.tolist(),
        "rows_follow_cohorts": bool(np.array_equal(touched, moved)),
        "traces": sim.num_traces(),
    }))
    """
)


def write_population(directory, num_clients, size, num_features=20, block=50_000):
    """Writes a store piece by piece, as a population larger than memory must be."""
    rows = num_clients * size
    directory.mkdir()
    np.save(directory / "offsets.npy", np.arange(num_clients + 1) * size)
    opened = {
        name: np.lib.format.open_memmap(
            directory / f"{name}.npy", mode="w+", dtype=np.float32, shape=shape
        )
        for name, shape in (("x", (rows, num_features)), ("y", (rows,)))
    }
    rng = np.random.default_rng(0)
    for start in range(0, rows, block * size):
        part = slice(start, min(rows, start + block * size))
        x = rng.random((part.stop - part.start, num_features), dtype=np.float32) - 0.5
        opened["x"][part] = x
        opened["y"][part] = x[:, 0] + x[:, 1] > 0
    for array in opened.values():
        array.flush()


def run_on_disk(directory):
    done = subprocess.run(
        [sys.executable, "-c", MILLION, str(directory)],
        capture_output=True,
        text=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        cwd=pathlib.Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.skipif(not pathlib.Path("/proc/self/status").exists(), reason="reads memory on Linux")
def test_a_million_clients_on_disk(tmp_path):
    """20 examples each: opened without being read, trained in cohorts of a thousand."""
    try:
        write_population(tmp_path / "store", 1_000_000, 20)
        measured = run_on_disk(tmp_path / "store")
    finally:
        for path in (tmp_path / "store").glob("*.npy"):
            path.unlink()
    print(measured)
    assert measured["clients"] == 1_000_000
    # 1.6 GiB of examples are on disk.
    assert measured["opened"] < 0.1
    assert measured["gib"] < 4
    assert all(800 < n <= 1200 for n in measured["participants"]) and not any(measured["overflow"])
    assert measured["examples"] == [20 * n for n in measured["participants"]]
    assert measured["loss"][-1] < measured["loss"][0]
    assert measured["rows_follow_cohorts"] and measured["traces"] == 1


def hf_table(columns):
    return pytest.importorskip("datasets").Dataset.from_dict(columns)


def test_huggingface_columns_become_arrays_of_their_shape():
    rng = np.random.default_rng(0)
    cells = rng.normal(size=(5, 2, 3))
    columns = {
        "who": ["b", "a", "b", "a", "c"],
        "grid": cells.tolist(),
        "count": [1, 2, 3, 4, 5],
        "is_new": [True, False, True, True, False],
    }
    table = hf_table(columns)
    data = FederatedData.from_huggingface(table, "who")
    order = [0, 2, 1, 3, 4]
    assert data.client_names == ("b", "a", "c")
    np.testing.assert_array_equal(data.examples["grid"], cells[order].astype(np.float32))
    assert data.examples["grid"].dtype == np.float32 and data.examples["count"].dtype == np.int64
    assert data.examples["is_new"].tolist() == [True, True, False, True, False]
    # Rows that a table picks or mixes are those that are read.
    some = FederatedData.from_huggingface(table.select([4, 1]), "who")
    assert some.client_names == ("c", "a") and some.examples["count"].tolist() == [5, 2]


@pytest.mark.parametrize(
    ("column", "message"),
    [
        ([1.0, None, 3.0], "column 'x' must hold no nulls, got 1, the first in row 1"),
        ([[1.0, 2.0], [3.0], [4.0, 5.0]], "lists of one length, got 2 in the first and 1 in row 1"),
        ([[1.0], [2.0], [None]], "column 'x' must hold no nulls, got 1, the first in row 2"),
        ([[[1], [2]], [[1], [2]], [[1], [2, 3]]], "got 1 in the first and 2 in row 2"),
    ],
)
def test_huggingface_columns_with_holes_are_named(column, message):
    table = hf_table({"who": [0, 1, 1], "x": column})
    with pytest.raises(ValueError, match=message):
        FederatedData.from_huggingface(table, "who")
    with pytest.raises(ValueError, match="column 'who' must hold no nulls"):
        FederatedData.from_huggingface(hf_table({"who": [0, None], "x": [1, 2]}), "who")


def test_inputs_of_several_arrays_are_kept_under_their_paths(tmp_path):
    ids, mask = np.arange(12).reshape(6, 2), np.ones((6, 2), np.int8)
    examples = {"x": {"ids": ids, "deep": {"mask": mask}}, "y": np.arange(6)}
    data = FederatedData(examples, [0, 2, 6], ("a", "b"))
    assert list(data.examples) == ["x/ids", "x/deep/mask", "y"]
    second = data.client(1)
    np.testing.assert_array_equal(second["x"]["ids"], ids[2:])
    np.testing.assert_array_equal(second["x"]["deep"]["mask"], mask[2:])
    assert example_structure(data)["x"]["ids"].shape == (2,)
    data.save(tmp_path / "store")
    opened = FederatedData.open(tmp_path / "store")
    assert {k: v.tolist() for k, v in opened.examples.items()} == {
        k: v.tolist() for k, v in data.examples.items()
    }
    again = FederatedData.from_clients([data.client(0), data.client(1)])
    np.testing.assert_array_equal(again.examples["x/ids"], ids)
    by_id = FederatedData.from_client_ids(examples, [1, 0, 1, 0, 1, 0])
    np.testing.assert_array_equal(by_id.examples["x/ids"], ids[[1, 3, 5, 0, 2, 4]])
    rows = FederatedData.from_indices(examples, [[5], [0, 1]])
    np.testing.assert_array_equal(rows.examples["x/ids"], ids[[5, 0, 1]])
    with pytest.raises(ValueError, match="must nest nothing in 'x'"):
        nested({"x": ids, "x/ids": ids})


MASK = np.array([False, True, True, False])


@pytest.mark.parametrize(
    "given",
    [
        MASK,
        MASK.tolist(),
        [1.7],
        [1.0],
        np.array([1.0]),
        ["1"],
        [[1]],
        [[1], 2],
        [-1],
        [4],
        [None],
        [],
    ],
)
def test_what_lists_no_clients_is_refused(given):
    data = FederatedData.from_clients(make_clients())
    with pytest.raises(ValueError, match="offsets must be integers"):
        FederatedData({"y": np.arange(2)}, [0, [2]])
    with pytest.raises(ValueError, match="clients must"):
        data.select(given)
    with pytest.raises(ValueError, match="clients must"):
        data.slab(given)
    with pytest.raises(ValueError, match="clients must be one or more, ascending"):
        data.slab(np.array([2, 1]))
    assert data.select(np.flatnonzero(MASK)).sizes.tolist() == [0, 5]
    for index in (True, np.True_, 1.0, 1.5, -1, 4):
        with pytest.raises(ValueError, match="index must"):
            data.client(index)


@pytest.mark.parametrize("rows", [[MASK], [[0.5, 1.0, 2.0, 3.0]], [[0, 1, 2, -1]], [[0, 4]]])
def test_what_lists_no_rows_is_refused(rows):
    pool = {"x": np.zeros((4, 2, 2, 1)), "y": np.arange(4)}
    for call in (
        lambda: FederatedData.from_indices(pool, rows),
        lambda: statistics.describe(rows, pool["y"]),
        lambda: clusters.shift_clusters(pool, rows, np.array([1]), shift="label", num_classes=4),
    ):
        with pytest.raises(ValueError, match=r"clients\[0\] must (list rows as int|name rows in)"):
            call()
    for cluster in (0.7, True, -1):
        with pytest.raises(ValueError, match="clusters must"):
            clusters.shift_clusters(pool, [[0]], np.array([cluster]), shift="label", num_classes=4)


def test_equal_numbers_are_one_client_and_missing_ones_are_none(tmp_path):
    x = {"x": np.arange(3)}
    for ids in (np.array([1.0, 2.0, 1.0]), [1, 2.0, 1.0], np.array([1, 2, 1])):
        assert FederatedData.from_client_ids(x, ids).client_names == ("1", "2")
    texts = ["1", "1.0", "2"], ["01", "1", "2"], ["1e3", "1000", "2"]
    for ids in ([1.0, np.inf, 2.0], [1.0, np.nan, 2.0], *texts):
        with pytest.raises(ValueError, match="client_ids must"):
            FederatedData.from_client_ids(x, ids)
    for ids in texts:
        with pytest.raises(ValueError, match="client_ids must write each number in one way"):
            partition.natural(np.array(ids))
        with pytest.raises(ValueError, match="client ids must write each number in one way"):
            write_store(tmp_path / ids[0], [np.array(ids)], [(np.array(ids), x)])
    # Not all are numbers, so none is.
    assert FederatedData.from_client_ids(x, ["1e3", "1000", "2f"]).num_clients == 3


@pytest.mark.parametrize(
    "names", [["a", "b", "a"], ["", "", "c"], ["é", "e\u0301", "c"], ["1", "1.0", "2"]]
)
def test_clients_of_one_name_are_refused(tmp_path, names):
    """Each would be a unit of privacy of its own, with the whole epsilon."""
    pool = {"x": np.arange(3.0)}
    parts = [{"x": np.ones(1)}] * 3
    stored = tmp_path / "old"
    FederatedData.from_clients(parts, ("a", "b", "c")).save(stored)
    (stored / "client_names.txt").write_text("\n".join(names) + "\n", "utf-8")
    (stored / "digests.json").unlink()
    for call in (
        lambda: FederatedData(pool, [0, 1, 2, 3], tuple(names)),
        lambda: FederatedData.from_clients(parts, names),
        lambda: FederatedData.from_indices(pool, [[0], [1], [2]], names),
        lambda: FederatedData.open(stored),
    ):
        with pytest.raises(ValueError, match=r"client_names must (be different|write)|fit the arr"):
            call()


def test_names_of_one_client_in_two_encodings_are_refused(tmp_path):
    ids, x = np.array(["é", "e\u0301"]), {"x": np.arange(2)}
    for call in (
        lambda: FederatedData.from_client_ids(x, ids),
        lambda: partition.natural(ids),
        lambda: write_store(tmp_path, [ids], [(ids, x)]),
    ):
        with pytest.raises(ValueError, match=r"client.ids must be different"):
            call()


def test_one_client_or_record_does_not_become_two_units():
    pool = {"x": np.zeros((4, 2, 2, 1)), "y": np.arange(4)}
    data = FederatedData.from_indices(pool, [[0], [1], [2, 3]])
    with pytest.raises(
        ValueError, match=r"different, since a repeated client .*from_clients.*\[1\]"
    ):
        data.select([1, 0, 1])
    for rows, found in ([[0, 1], [1, 2]], "client 0 and in client 1"), ([[2, 2]], "0 and in cl"):
        with pytest.raises(ValueError, match=rf"clients must .*once \(from_clients .*{found}"):
            FederatedData.from_indices(pool, rows)
    with pytest.raises(ValueError, match=r"clients\[0\] must hold each row once"):
        clusters.shift_clusters(pool, [[2, 2]], np.array([1]), shift="label", num_classes=4)
    rows = [[0, 1], [1, 2]]
    copies = [{name: array[own] for name, array in pool.items()} for own in rows]
    assert FederatedData.from_clients(copies).sizes.tolist() == [2, 2]


NAMES = "../x", "/x", "x/../y", "x//y", "", ".", "x\\y", "x\0", "x\ny"


@pytest.mark.parametrize("name", NAMES)
def test_names_of_arrays_do_not_lead_out_of_a_store(tmp_path, name):
    with pytest.raises(ValueError, match="a name in examples must be a name"):
        FederatedData({name: np.zeros(1)}, [0, 1])
    batch = (np.zeros(1, int), {name: np.zeros(1)})
    with pytest.raises(ValueError, match="a name in columns must be a name"):
        write_store(tmp_path / "npy", [batch[0]], [batch])
    place = tmp_path / "zarr"
    FederatedData({"x": np.zeros(1)}, [0, 1]).save_zarr(place)
    index = json.loads((place / "store.json").read_text())
    # With one it would be damaged.
    del index["sha256"]
    (place / "store.json").write_text(json.dumps({**index, "arrays": [name]}))
    with pytest.raises(ValueError, match=r"a name in store\.json must be a name"):
        FederatedData.open_zarr(place)
    assert [path.name for path in tmp_path.iterdir() if path != place] == ["npy"]


def test_a_store_that_does_not_answer_is_named(monkeypatch):
    monkeypatch.setattr(store_writer, "_ANSWER_SECONDS", 0.01)
    with socket.create_server(("127.0.0.1", 0)) as server:
        for port in (server.getsockname()[1], 1):
            with pytest.raises(ValueError, match=r"127.* must answer within 0\.01 seconds"):
                FederatedData.open(f"http://127.0.0.1:{port}/notes")
    with pytest.raises(ValueError, match="must be a place that can be written to"):
        FederatedData({"x": np.zeros(1)}, [0, 1]).save_zarr("http://127.0.0.1:1/notes")
