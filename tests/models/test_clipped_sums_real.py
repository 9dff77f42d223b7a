"""Clipped sums of real images against `vmap(grad)` in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import telling

from fedjax_dp.clients import LocalConfig
from fedjax_dp.clients.gradients import clipped
from fedjax_dp.data.datasets import load
from fedjax_dp.models import registry


@telling
@pytest.mark.needs_data("mnist")
@pytest.mark.parametrize("clip_norm", [3.0, 1e6])
def test_clipped_sums_of_images_agree_with_float64(clip_norm, data_dir):
    images = load("mnist", data_dir).train
    batch = {name: np.asarray(array[:48]) for name, array in images.items()}
    shapes = {"x": jax.ShapeDtypeStruct(batch["x"].shape[1:], jnp.float32)}
    model = registry.build("thesis_cnn", shapes, 10)
    params = jax.jit(model.init)(jax.random.key(0))
    config = LocalConfig(clip_norm=clip_norm, noise_multiplier=0.0, batch_size=48)
    rule = clipped(model)
    is_real = jnp.arange(48) != 5
    ours = jax.jit(lambda p: rule.micro_batch(p, batch, is_real, None, config).gradient)(params)

    def loss(p, example):
        return model.losses(p, jax.tree.map(lambda a: a[None], example), is_training=True)[0][0]

    with jax.enable_x64(True):
        wide = jax.tree.map(lambda a: jnp.asarray(np.asarray(a), jnp.float64), params)
        data = batch | {"x": jnp.asarray(batch["x"], jnp.float64)}
        each = jax.jit(jax.vmap(jax.grad(loss), (None, 0)))(wide, data)
        each = jax.tree.map(np.asarray, each)
    norms = np.sqrt(sum((g.reshape(48, -1) ** 2).sum(1) for g in jax.tree.leaves(each)))
    factors = np.minimum(1, clip_norm / norms) * np.asarray(is_real)
    assert np.any(norms > 3.0)
    exact = jax.tree.map(lambda g: np.tensordot(factors, g, 1), each)
    pairs = list(zip(jax.tree.leaves(ours), jax.tree.leaves(exact), strict=True))
    gap = np.sqrt(sum(np.sum((np.asarray(a, np.float64) - b) ** 2) for a, b in pairs))
    size = np.sqrt(sum(np.sum(b**2) for _, b in pairs))
    print(clip_norm, gap / size)
    assert gap <= 1e-6 * size
