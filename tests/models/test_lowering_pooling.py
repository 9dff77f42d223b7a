"""Lowered window reductions against the primitives themselves, ties and padding included."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from lowering_checks import REPLACED, assert_close, normal, primitives, run, value_and_pullback
from marks import later, telling

from fedjax_dp.models.lowering import lower

REDUCTIONS = {"max": (lax.max, -jnp.inf), "min": (lax.min, jnp.inf), "sum": (lax.add, 0.0)}


def pool(x, kind, **params):
    reducer, init = REDUCTIONS[kind]
    return lax.reduce_window(x, init, reducer, **params)


@st.composite
def windows(draw):
    """Draws the parameters of a window reduction that the primitive can differentiate."""
    ndim = draw(st.integers(1, 3))

    def per_dim(elements):
        return tuple(draw(elements) for _ in range(ndim))

    shape = per_dim(st.integers(3, 9))
    params = {
        "window_dimensions": per_dim(st.integers(1, 3)),
        "window_strides": per_dim(st.integers(1, 4)),
        "padding": per_dim(st.tuples(st.integers(0, 2), st.integers(0, 2))),
    }
    return shape, params


def check_pool(case, kind, has_ties):
    shape, params = case
    rng = np.random.default_rng(0)
    # A few whole numbers only, so that most windows hold their extreme value more than once.
    x = rng.integers(0, 3, shape).astype(np.float32) if has_ties else normal(0, shape)
    plain = functools.partial(pool, kind=kind, **params)
    cotangent = normal(2, jax.eval_shape(plain, x).shape)

    def both(x, cotangent):
        return [value_and_pullback(fn, (x,), cotangent) for fn in (lower(plain), plain)]

    assert_close(*run(both, x, cotangent))


ANY_POOL = (windows(), st.sampled_from(list(REDUCTIONS)), st.booleans())


@pytest.mark.parametrize("count", later([6, 50], soon=[6]))
def test_any_pool_matches_the_primitive_in_value_and_gradient(count):
    any_of = settings(max_examples=count, deadline=None, derandomize=True)
    any_of(given(*ANY_POOL)(check_pool))()


@pytest.mark.parametrize("kind", later(REDUCTIONS, but=["max"]))
@pytest.mark.parametrize(
    "window",
    [
        {"window_dimensions": (40, 1), "window_strides": (1, 1)},
        {"window_dimensions": (20, 1), "window_strides": (20, 1)},
        {"window_dimensions": (18, 2), "window_strides": (3, 1)},
    ],
    ids=["global", "tiled", "overlapping"],
)
def test_long_windows_match_the_primitive(kind, window):
    x = np.random.default_rng(0).integers(0, 9, (40, 6)).astype(np.float32)
    plain = functools.partial(pool, kind=kind, padding="VALID", **window)
    cotangent = normal(2, jax.eval_shape(plain, x).shape)
    actual, expected = (
        run(functools.partial(value_and_pullback, fn), (x,), cotangent)
        for fn in (lower(plain), plain)
    )
    assert_close(actual, expected)


@pytest.mark.parametrize("kind", REDUCTIONS)
def test_dilated_windows_and_inputs_match_the_primitive(kind):
    x = normal(0, (7, 8))
    plain = functools.partial(
        pool,
        kind=kind,
        window_dimensions=(2, 3),
        window_strides=(1, 2),
        padding=((1, 0), (2, 1)),
        base_dilation=(2, 1),
        window_dilation=(1, 2),
    )
    np.testing.assert_allclose(lower(plain)(x), plain(x), rtol=1e-6)


@pytest.mark.parametrize("dtype", [np.int32, np.uint8])
@pytest.mark.parametrize("kind", ["max", "min"])
def test_integers_are_pooled_exactly(kind, dtype):
    info = np.iinfo(dtype)
    x = np.random.default_rng(0).integers(info.min, info.max, (6, 6), dtype, endpoint=True)
    reducer = REDUCTIONS[kind][0]
    init = dtype(info.min if kind == "max" else info.max)

    def plain(x):
        return lax.reduce_window(x, init, reducer, (3, 2), (2, 2), "SAME")

    np.testing.assert_array_equal(lower(plain)(x), plain(x))


def test_a_value_that_is_not_a_number_reaches_the_pool_even_when_differentiated():
    x = np.array([1.0, np.nan, 2.0, 3.0], np.float32)
    lowered = lower(functools.partial(pool, kind="max", **PAIRS))
    expected = [np.nan, 3.0]
    np.testing.assert_array_equal(lowered(x), expected)
    np.testing.assert_array_equal(jax.vjp(lowered, x)[0], expected)


PAIRS = {"window_dimensions": (2,), "window_strides": (2,), "padding": "VALID"}


@telling
def test_sums_of_narrow_numbers_are_taken_in_float32():
    x = jnp.full((16,), 1.0 + 2**-7, jnp.bfloat16)
    params = {"window_dimensions": (16,), "window_strides": (1,), "padding": "VALID"}
    summed = lower(functools.partial(pool, kind="sum", **params))(x)
    assert summed.dtype == jnp.bfloat16
    assert float(summed[0]) == 16 * (1.0 + 2**-7)


LAYERS = {
    "max": lambda x: nn.max_pool(x, (2, 2), (2, 2)),
    "max, overlapping": lambda x: nn.max_pool(x, (3, 3), (2, 2), "SAME"),
    "min": lambda x: nn.min_pool(x, (2, 2), (1, 1)) if hasattr(nn, "min_pool") else x,
    "average": lambda x: nn.avg_pool(x, (3, 3), (2, 2), "SAME", count_include_pad=False),
    "average, all": lambda x: nn.avg_pool(x, x.shape[1:3]),
}


@telling
@pytest.mark.parametrize("name", LAYERS)
def test_layers_match_and_leave_no_window_primitive(name):
    layer = LAYERS[name]
    x = np.random.default_rng(0).integers(0, 4, (3, 2, 8, 8, 2)).astype(np.float32)

    def gradients(layer):
        return jax.vmap(jax.value_and_grad(lambda x: jnp.sum(jnp.sin(layer(x)))))

    assert_close(gradients(lower(layer))(x), gradients(layer)(x))
    assert not REPLACED & primitives(gradients(lower(layer)), x)
    # Without ties: the primitive's tangent, unlike its gradient, takes any of equal entries.
    distinct, tangent = normal(1, x.shape), normal(2, x.shape)
    actual, expected = (
        jax.jvp(jax.vmap(f), (distinct,), (tangent,)) for f in (lower(layer), layer)
    )
    assert_close(actual, expected)


@telling
def test_derivatives_taken_before_the_rewrite_are_replaced_too():
    x, tangent = normal(0, (1, 6, 6, 2)), normal(1, (1, 6, 6, 2))
    layer = LAYERS["max, overlapping"]

    def gradient(x):
        return jax.grad(lambda x: jnp.sum(jnp.sin(layer(x))))(x)

    def pushforward(x, tangent):
        return jax.jvp(layer, (x,), (tangent,))[1]

    assert_close(lower(gradient)(x), gradient(x))
    assert_close(lower(pushforward)(x, tangent), pushforward(x, tangent))
    assert not REPLACED & primitives(lower(gradient), x)
    assert not REPLACED & primitives(lower(pushforward), x, tangent)
