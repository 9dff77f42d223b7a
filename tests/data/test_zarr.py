"""A store in chunks through TensorStore: the same data, and only the rows asked for are read."""

import jax
import numpy as np
import pytest
from marks import telling
from small_problem import make_data

from fedjax_dp import algorithms, clients, data, engine, models
from fedjax_dp.data import FederatedData, disk_arrays, store_writer


def two_stores(tmp_path):
    """The same clients as memory maps and in chunks, several of each array."""
    rng = np.random.default_rng(0)
    sizes = rng.integers(0, 9, 200)
    parts = [
        {"x": rng.normal(size=(n, 600)).astype(np.float32), "y": rng.integers(0, 9, n)}
        for n in sizes
    ]
    made = FederatedData.from_clients(parts, [f"user {i}" for i in range(200)])
    made.save(tmp_path / "maps")
    made.save_zarr(tmp_path / "chunks")
    return FederatedData.open(tmp_path / "maps"), FederatedData.open_zarr(tmp_path / "chunks")


@pytest.fixture
def rows_read(monkeypatch):
    """The number of rows of inputs of every reading; a chunk has six."""
    found = []
    whole = store_writer.StoredArray.__getitem__

    def counted(self, rows):
        read = whole(self, rows)
        found.extend([len(read)] * (read.ndim > 1))
        return read

    monkeypatch.setattr(disk_arrays, "_BLOCK_BYTES", 1 << 14)
    monkeypatch.setattr(store_writer.StoredArray, "__getitem__", counted)
    return found


def test_chunks_hold_what_memory_maps_hold(tmp_path, rows_read):
    maps, chunks = two_stores(tmp_path)
    assert rows_read == [], "opening reads no examples"
    assert len(list((tmp_path / "chunks" / "x" / "c").glob("*"))) > 1
    assert chunks.client_names == maps.client_names and chunks.examples["y"].dtype == np.int32
    cohort = [199, 3, 77, 4]
    first, second = maps.select(cohort), chunks.select(cohort)
    for name in maps.examples:
        np.testing.assert_array_equal(first.examples[name], second.examples[name])
        np.testing.assert_array_equal(maps.client(7)[name], chunks.client(7)[name])
    # And those of their chunks, to compare these.
    assert int(maps.sizes[cohort].sum()) < sum(rows_read) < maps.num_examples / 4
    for index in (np.arange(50, 58), np.array([0])):
        (a, starts), (b, others) = maps.slab(index), chunks.slab(index)
        np.testing.assert_array_equal(a["x"], b["x"])
        np.testing.assert_array_equal(starts, others)
    chunks.check_finite()
    # Other chunks are enough for other clients, whatever is in the last.
    last = max((tmp_path / "chunks" / "x" / "c").iterdir(), key=lambda path: int(path.name))
    (last / "0").write_bytes(b"no")
    np.testing.assert_array_equal(maps.client(7)["x"], chunks.client(7)["x"])
    with pytest.raises(ValueError, match=r"chunk|Expected"):
        chunks.client(199)
    assert chunks.examples["x"][:0].shape == (0, 600) and chunks.num_bytes < maps.num_bytes


def test_what_is_no_store_is_refused(tmp_path):
    made = make_data()
    made.save_zarr(tmp_path / "chunks")
    with pytest.raises(ValueError, match="place must hold nothing yet"):
        made.save_zarr(tmp_path / "chunks")
    with pytest.raises(ValueError, match="hold a store that `save_zarr` wrote"):
        FederatedData.open_zarr(tmp_path / "none")
    (tmp_path / "chunks" / "x" / "zarr.json").write_text("{}")
    with pytest.raises(ValueError, match="hold a store that `save_zarr` wrote"):
        FederatedData.open_zarr(tmp_path / "chunks")
    wide = FederatedData({"x": np.arange(3)}, [0, 3])
    wide.examples["x"][1] = 2**40
    with pytest.raises(ValueError, match="integers that int32 can represent"):
        wide.save_zarr(tmp_path / "wide")


@telling
def test_training_from_chunks_equals_that_from_memory_maps(tmp_path, rows_read):
    maps, chunks = two_stores(tmp_path)
    model = models.build("logistic_regression", data.example_structure(maps), 9)
    ends = []
    for store in (maps, chunks):
        trainer = clients.local_trainer(model, clients.LocalConfig(0.1, 4))
        algorithm = algorithms.fedavg(model, trainer)
        joining = data.participation(data.poisson(), 200, 5)
        sim = engine.simulation(algorithm, store, joining)
        state = sim.init(jax.random.key(0))
        ends.append(sim.run(state, jax.random.key(1), 3)[0])
    for one, other in zip(*map(jax.tree.leaves, ends), strict=True):
        if jax.dtypes.issubdtype(one.dtype, jax.dtypes.prng_key):
            continue
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))
    # Cohorts of 5 among 200 clients: the population is not read.
    assert sum(rows_read) < chunks.num_examples
