"""Continuous noise has the law that it states."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import floats, later, telling
from scipy import stats

from fedjax_dp.privacy.mechanisms import noise

pytestmark = floats

NUM_DRAWS = 300_000
LAWS = {"gaussian": (noise.add_gaussian, stats.norm), "laplace": (noise.add_laplace, stats.laplace)}


@pytest.mark.parametrize("name", later(LAWS, but=["gaussian"], mark=telling))
@pytest.mark.parametrize("scale", later([0.02, 3.7], but=[3.7]))
def test_law_accepts_the_right_scale_and_rejects_three_percent_off(name, scale):
    add, law = LAWS[name]
    tree = {"a": jnp.zeros(NUM_DRAWS // 2), "b": jnp.zeros((NUM_DRAWS // 1000, 500))}
    noised = jax.jit(add)(jax.random.key(7), tree, scale)
    draws = np.concatenate([np.asarray(x, np.float64).ravel() for x in noised.values()])
    assert stats.kstest(draws, law(scale=scale).cdf).pvalue > 1e-3
    for wrong in (0.97, 1.03):
        assert stats.kstest(draws, law(scale=wrong * scale).cdf).pvalue < 1e-6


@pytest.mark.parametrize("add", [noise.add_gaussian, noise.add_laplace])
def test_leaves_and_keys_draw_independently(add):
    tree = {"a": jnp.zeros(4000), "b": jnp.zeros(4000)}
    one = add(jax.random.key(0), tree, 1.0)
    two = add(jax.random.key(1), tree, 1.0)
    for x, y in [(one["a"], one["b"]), (one["a"], two["a"]), (one["a"], two["b"])]:
        assert stats.pearsonr(np.asarray(x), np.asarray(y)).pvalue > 1e-4


@pytest.mark.parametrize("add", [noise.add_gaussian, noise.add_laplace])
def test_no_noise_leaves_the_tree_as_it_is(add):
    tree = {"a": jnp.asarray([1.0, -2.0])}
    for scale in (0, jnp.float32(0)):
        np.testing.assert_array_equal(add(jax.random.key(0), tree, scale)["a"], tree["a"])


@pytest.mark.parametrize("add", [noise.add_gaussian, noise.add_laplace])
@pytest.mark.parametrize("scale", [np.nan, np.inf, -1.0])
def test_a_traced_scale_that_is_none_releases_zeros(add, scale):
    noised = jax.jit(add)(jax.random.key(0), {"a": jnp.ones(5)}, jnp.float32(scale))
    np.testing.assert_array_equal(noised["a"], 0)


@pytest.mark.parametrize("add", [noise.add_gaussian, noise.add_laplace])
def test_narrow_floats_are_noised_in_float32(add):
    noised = add(jax.random.key(0), jnp.zeros(100_000, jnp.bfloat16), 1.0)
    assert noised.dtype == jnp.float32
    # Draws made in bfloat16 would take a few hundred values at most.
    assert len(np.unique(noised)) > 50_000
