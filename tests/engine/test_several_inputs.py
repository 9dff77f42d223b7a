"""A model of several inputs trains to what one of a single, joined input trains to."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import later, telling

from fedjax_dp.algorithms import dp_sgd, fedavg
from fedjax_dp.clients import LocalConfig, dp_sgd_trainer, local_trainer
from fedjax_dp.data import FederatedData, full_participation, participation
from fedjax_dp.engine import ExecutionConfig, evaluator, simulation
from fedjax_dp.models import Model

SIZES = (5, 2, 9, 4)


def init(key):
    return {"w": 0.1 * jax.random.normal(key, (5, 3))}


JOINED = Model.from_functions(init, lambda p, x: x @ p["w"], loss="softmax_cross_entropy")
APART = Model.from_functions(
    init,
    lambda p, x: x["left"] @ p["w"][:2] + x["deep"]["right"] @ p["w"][2:],
    loss="softmax_cross_entropy",
)


def data_of():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(sum(SIZES), 5)).astype(np.float32)
    y = rng.integers(0, 3, sum(SIZES)).astype(np.int32)
    offsets = np.concatenate([[0], np.cumsum(SIZES)])
    joined = FederatedData({"x": x, "y": y}, offsets)
    inputs = {"left": x[:, :2], "deep": {"right": x[:, 2:]}}
    return joined, FederatedData({"x": inputs, "y": y}, offsets)


@telling
@pytest.mark.parametrize("is_private", later([True, False], but=[True]))
@pytest.mark.parametrize("placement", ["device", "host"])
def test_several_inputs_train_as_one(is_private, placement):
    numbers = LocalConfig(learning_rate=0.5, batch_size=4)
    key, losses, params = jax.random.key(0), [], []
    for model, data in zip((JOINED, APART), data_of(), strict=True):
        if is_private:
            private = numbers._replace(clip_norm=0.5, noise_multiplier=1.0)
            algorithm = dp_sgd(model, dp_sgd_trainer(model, private))
        else:
            algorithm = fedavg(model, local_trainer(model, numbers))
        cohorts = participation(full_participation(), data.num_clients)
        execution = ExecutionConfig(placement=placement, devices=None)
        made = simulation(algorithm, data, cohorts, execution)
        state, _, info = made.run(made.init(key), key, 3)
        params.append(made.federation.shared(state)["w"])
        losses.append(info.training.train_loss)
        found = evaluator(made, model, data, clients=data).clients(state)
        losses.append(found.client_loss)
    np.testing.assert_allclose(params[1], params[0], rtol=1e-5, atol=1e-6)
    for one, other in zip(losses[:2], losses[2:], strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-5)
    assert jnp.all(jnp.isfinite(params[0]))
