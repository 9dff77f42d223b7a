"""The mean loss of a model over a client."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import make_model, theta_of
from oracles import logistic

from fedjax_dp.clients import ClientData, mean_loss


@pytest.mark.parametrize("block_size", [1, 3, 7, 128])
@pytest.mark.parametrize("size", [0, 1, 6, 7])
def test_mean_loss_whatever_the_block(block_size, size):
    model = make_model()
    params = model.init(jax.random.key(3))
    rng = np.random.default_rng(0)
    # Rows behind the client's own belong to others and must not enter.
    x = rng.normal(size=(30, 3)).astype(np.float32)
    x[4 + size :] = np.nan
    y = rng.integers(0, 2, 30).astype(np.float32)
    client = ClientData(
        {"x": jnp.asarray(x), "y": jnp.asarray(y)}, jnp.int32(4), jnp.int32(size), jnp.int32(0), 9
    )
    got = jax.jit(lambda p: mean_loss(model, p, client, block_size=block_size))(params)
    own = slice(4, 4 + size)
    losses = logistic.losses(theta_of(params), x[own].astype(float), y[own])
    np.testing.assert_allclose(got, losses.mean() if size else 0.0, rtol=1e-5)
