"""How many examples are computed at once follows what they take."""

import jax
import jax.numpy as jnp
import pytest
from marks import floats

from fedjax_dp.clients import batches
from fedjax_dp.clients.client_data import ClientData
from fedjax_dp.models.base import Model

pytestmark = floats

KIB = 2**10


def model_of(hidden, num_parameters=8):
    """A model whose largest value has `hidden` floats an example."""
    return Model.from_functions(
        lambda key: {"w": jnp.zeros(num_parameters)},
        lambda params, x: jnp.sum(jnp.tile(x[:, :1], (1, hidden)) * params["w"][0], axis=1),
        loss="sigmoid_binary_cross_entropy",
    )


def size_for(model, batch_size, chunk_axis=None):
    examples = {"x": jnp.zeros((10, 3)), "y": jnp.zeros(10)}
    zero = jnp.int32(0)
    client = ClientData(examples, zero, jnp.int32(10), zero, 10, chunk_axis)
    params = jax.eval_shape(model.init, jax.random.key(0))
    return batches.size_for(model, params, client, batch_size)


@pytest.fixture(autouse=True)
def _on_a_cpu(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")


@pytest.mark.parametrize(
    ("hidden_kib", "batch_size", "expected"),
    [
        # 4 MiB hold 16 examples of 256 KiB.
        (256, 16, 16),
        (256, 64, 16),
        (256, 8, 8),
        # 13 of 315 KiB; five passes of 13 compute 65 examples, eight of 8 compute 64.
        (315, 64, 8),
        (1, 500, 500),
        # Never fewer than four, however large they are.
        (4096, 20, 4),
    ],
)
def test_values_of_a_pass_fit_a_cache_and_passes_are_full(hidden_kib, batch_size, expected):
    assert size_for(model_of(hidden_kib * KIB // 4), batch_size) == expected


def test_a_large_model_is_not_added_up_more_often_than_it_must():
    # Four times 16 MiB of parameters hold 256 examples of 256 KiB.
    assert size_for(model_of(64 * KIB, num_parameters=4 * 2**20), 64) == 64


def test_examples_that_belong_together_stay_together(monkeypatch):
    model = model_of(256 * KIB)
    assert size_for(model, 64) == 4
    assert size_for(model, 64, chunk_axis="clients") == 64
    assert size_for(model._replace(mixes_examples=True), 64) == 64
    assert size_for(model._replace(buffer_keys=frozenset({"w"})), 64) == 64
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert size_for(model, 64) == 64
