"""What a client does to its update before it leaves."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_dp.clients import (
    PublicClient,
    UpdateContext,
    add_client_noise,
    cast,
    clip_update,
    keep_largest,
    scale_update,
)

CLIENT = PublicClient(jnp.int32(3), jnp.int32(0), limit=3)
CONTEXT = UpdateContext(None, None, CLIENT, None, jax.random.key(0))
DELTA = {"a": jnp.array([[3.0, -1.0], [0.5, -4.0]]), "b": jnp.array([2.0])}


def test_clip_update_bounds_the_norm():
    clipped = clip_update(1.0)(DELTA, CONTEXT)
    norm = np.sqrt(sum(np.sum(np.square(x)) for x in jax.tree.leaves(clipped)))
    np.testing.assert_allclose(norm, 1.0, rtol=1e-6)
    bad = {"a": jnp.array([jnp.nan]), "b": jnp.array([1.0])}
    assert all(np.all(x == 0) for x in jax.tree.leaves(clip_update(1.0)(bad, CONTEXT)))


def test_client_noise_has_its_scale():
    zeros = {"a": jnp.zeros((100, 100)), "b": jnp.zeros(7)}
    noise = np.asarray(add_client_noise(0.3)(zeros, CONTEXT)["a"]) / 0.3
    assert abs(noise.std() - 1) < 4 / np.sqrt(2 * noise.size)
    assert abs(noise.mean()) < 4 / np.sqrt(noise.size)


@pytest.mark.parametrize("share, kept", [(1.0, 4), (0.5, 2), (0.25, 1), (0.01, 1)])
def test_keep_largest_keeps_that_many_in_each_layer(share, kept):
    sparse = np.asarray(keep_largest(share)(DELTA, CONTEXT)["a"]).ravel()
    order = np.argsort(-np.abs(np.asarray(DELTA["a"]).ravel()))
    expected = np.zeros(4)
    expected[order[:kept]] = np.asarray(DELTA["a"]).ravel()[order[:kept]]
    np.testing.assert_array_equal(sparse, expected)


def test_keep_largest_breaks_ties_so_that_the_number_is_exact():
    sparse = keep_largest(0.5)({"a": jnp.ones(10)}, CONTEXT)["a"]
    assert np.count_nonzero(sparse) == 5


def test_keep_largest_fills_up_with_the_first_of_those_that_tie_for_the_last_places():
    delta = {"a": jnp.array([2.0, -3.0, 2.0, 1.0, -2.0, 2.0])}
    sparse = keep_largest(0.5)(delta, CONTEXT)["a"]
    np.testing.assert_array_equal(sparse, [2.0, -3.0, 2.0, 0.0, 0.0, 0.0])


def test_cast_rounds_and_keeps_the_type():
    out = cast(jnp.bfloat16)({"a": jnp.array([1.0 + 2**-12, 2.0])}, CONTEXT)["a"]
    assert out.dtype == jnp.float32
    np.testing.assert_array_equal(out, [1.0, 2.0])


def test_scale_update():
    np.testing.assert_allclose(scale_update(-2.0)(DELTA, CONTEXT)["b"], [-4.0])


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: clip_update(0.0), "clip_norm must be positive"),
        (lambda: add_client_noise(-1.0), "stddev must be at least 0"),
        (lambda: keep_largest(0.0), r"share must lie in \(0, 1\]"),
        (lambda: keep_largest(1.5), r"share must lie in \(0, 1\]"),
    ],
)
def test_bad_numbers_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
