"""Server steps: the aggregate is a negative gradient, whatever the optimiser."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_dp.server import apply_aggregate

PARAMS = {"w": jnp.array([1.0, -2.0])}
AGGREGATE = {"w": jnp.array([0.5, 0.25])}


def test_sgd_of_rate_one_adds_the_aggregate():
    optimizer = optax.sgd(1.0)
    _, params = apply_aggregate(optimizer, optimizer.init(PARAMS), PARAMS, AGGREGATE)
    np.testing.assert_allclose(params["w"], [1.5, -1.75])


def test_state_is_carried():
    optimizer = optax.sgd(1.0, momentum=0.5)
    state, params = optimizer.init(PARAMS), PARAMS
    for _ in range(2):
        state, params = apply_aggregate(optimizer, state, params, AGGREGATE)
    np.testing.assert_allclose(params["w"], [1 + 0.5 + 0.75, -2 + 0.25 + 0.375])


@pytest.mark.parametrize("optimizer", [optax.sgd(1.0), optax.adam(0.1)])
def test_parameter_types_are_preserved(optimizer):
    params = {"w": PARAMS["w"].astype(jnp.bfloat16)}
    _, after = apply_aggregate(optimizer, optimizer.init(params), params, AGGREGATE)
    assert after["w"].dtype == jnp.bfloat16
