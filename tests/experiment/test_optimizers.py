"""Optimisers by name, with options, against their recursions in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_dp.experiment import load_config
from fedjax_dp.experiment.components.optimizers import local_optimizer, optimizer_numbers
from fedjax_dp.experiment.schema.constraints import ConfigError

RATE, STEPS = 0.1, 5


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("momentum", [None, 0.6])
def test_weight_decay_pulls_weights_before_momentum(momentum, nesterov):
    """Loss `(w - 1)² / 2` with a penalty of `0.3 w² / 2`, whose gradient momentum averages too."""
    options = {"weight_decay": 0.3, "nesterov": nesterov}
    options |= {} if momentum is None else {"momentum": momentum}
    numbers = optimizer_numbers(options)
    assert numbers["weight_decay"] == 0.3
    made = local_optimizer("sgd", options)(jnp.float32(RATE), **numbers)
    w = {"a": jnp.array([3.0, -2.0]), "b": jnp.float32(0.5)}
    state, by_hand, velocity = made.init(w), np.array([3.0, -2.0, 0.5]), np.zeros(3)
    for _ in range(STEPS):
        gradient = jax.tree.map(lambda x: x - 1, w)
        updates, state = made.update(gradient, state, w)
        w = jax.tree.map(jnp.add, w, updates)
        pulled = (by_hand - 1) + 0.3 * by_hand
        velocity = (momentum or 0.0) * velocity + pulled
        is_ahead = nesterov and momentum is not None
        by_hand = by_hand - RATE * (pulled + momentum * velocity if is_ahead else velocity)
    np.testing.assert_allclose([*w["a"], w["b"]], by_hand, rtol=1e-6)


def test_weight_decay_is_a_key_of_sgd():
    words = ["--training.optimizer_options.weight_decay=1e-5"]
    assert load_config(None, words).training.optimizer_options == {"weight_decay": 1e-5}
    with pytest.raises(ConfigError, match=r"weight_decay must be at least 0, got -1"):
        load_config(None, ["--training.optimizer_options.weight_decay=-1"])
