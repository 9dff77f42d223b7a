"""Examples that are stored as rows of bits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import telling

from fedjax_dp.algorithms import fedavg
from fedjax_dp.clients import LocalConfig, local_trainer
from fedjax_dp.clients.client_data import ClientData, Rows
from fedjax_dp.core.backend import traced_for
from fedjax_dp.data import FederatedData, participants, sampling
from fedjax_dp.engine.execution.compile import simulation
from fedjax_dp.engine.facts import examples_of
from fedjax_dp.engine.layout import ExecutionConfig
from fedjax_dp.models import Model

_FLOATS = [0.0, -0.0, 1e-45, -np.inf, np.nan, 0.1]


def _client(examples):
    return ClientData(examples, jnp.int32(2), jnp.int32(3), jnp.int32(0), 3)


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        (np.float32, (28, 28)),
        (np.float64, (128,)),
        (np.uint8, (8, 16)),
        (np.int32, (7, 14, 1)),
        (np.float16, (8, 16)),
    ],
)
def test_rows_read_as_the_examples(kind, shape):
    rng = np.random.default_rng(0)
    array = rng.integers(0, 200, (6, *shape)).astype(kind)
    if np.issubdtype(kind, np.floating):
        array.reshape(6, -1)[3, : len(_FLOATS)] = _FLOATS
    rows = Rows.of(array)
    assert isinstance(rows, Rows) and rows.shape == array.shape
    assert rows.bits.shape[1] % 128 == 0
    indices = jnp.asarray([[0, 2, 1], [2, 2, 0]])
    found = jax.jit(lambda held: _client(held).gather(indices))({"x": rows})["x"]
    expected = array.astype(jax.dtypes.canonicalize_dtype(kind))[2 + np.asarray(indices)]
    assert found.dtype == expected.dtype
    assert np.asarray(found).tobytes() == expected.tobytes()


@pytest.mark.parametrize("shape", [(), (3,), (90,), (130,)])
def test_what_would_be_mostly_padding_stays(shape):
    array = np.zeros((4, *shape), np.float32)
    assert Rows.of(array) is array


def _population():
    rng = np.random.default_rng(1)
    x = rng.normal(size=(40, 112)).astype(np.float32)
    y = rng.integers(0, 3, 40).astype(np.int32)
    return FederatedData({"x": x, "y": y}, np.arange(0, 41, 8))


@pytest.mark.parametrize(("kind", "reads", "is_rows"), [
    ("tpu", 0.5, True), ("tpu", 2.0, False), ("gpu", 0.5, False), ("cpu", 0.5, False),
])  # fmt: skip
def test_where_examples_are_rows(kind, reads, is_rows):
    data = _population()
    with traced_for(kind):
        held = examples_of(data, data).stored(reads)
    for split in (held, held.validation):
        assert isinstance(split.arrays["x"], Rows) == is_rows
        assert isinstance(split.arrays["y"], np.ndarray)


@telling
def test_rounds_read_rows_as_examples(monkeypatch):
    data = _population()
    model = Model.from_functions(
        lambda key: {"w": 0.3 * jax.random.normal(key, (112, 3))},
        lambda params, x: x @ params["w"],
        loss="softmax_cross_entropy",
        name="linear",
    )

    def run():
        with traced_for("tpu"):
            made = simulation(
                fedavg(model, local_trainer(model, LocalConfig(batch_size=3))),
                data,
                participants.participation(sampling.fixed_size(), 5, 1),
                ExecutionConfig(rounds_per_call=2, devices=None),
            )
            key = jax.random.key(1)
            state, _, _ = made.run(made.init(key), key, 2)
            return [np.asarray(leaf) for leaf in jax.tree.leaves(state.server)]

    read, gather = [], Rows.__getitem__
    monkeypatch.setattr(Rows, "__getitem__", lambda *of: read.append(1) or gather(*of))
    found = run()
    assert read
    monkeypatch.setattr(Rows, "of", lambda array: array)
    for mine, other in zip(found, run(), strict=True):
        np.testing.assert_array_equal(mine, other)
