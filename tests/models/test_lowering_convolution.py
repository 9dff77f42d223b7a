"""Lowered convolutions against the primitive itself, in values and derivatives."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from fedjax_dp.models.lowering import lower


def _assert_close(actual, expected, rtol=1e-5):
    """Compares whole arrays: the largest difference against the largest entry."""
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert a.shape == e.shape and a.dtype == e.dtype
        a, e = np.asarray(a, np.float64), np.asarray(e, np.float64)
        if e.size:
            assert np.abs(a - e).max() <= rtol * max(np.abs(e).max(), 1e-6)


def _normal(seed, shape, dtype=np.float32):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


@st.composite
def convolutions(draw):
    """Draws shapes and parameters of a convolution with a result that is not empty."""
    ndim = draw(st.integers(1, 3))

    def per_dim(elements):
        return [draw(elements) for _ in range(ndim)]

    kernel = per_dim(st.integers(1, 3))
    sizes = per_dim(st.integers(1, 6))
    strides = per_dim(st.integers(1, 3))
    lhs_dilation = per_dim(st.sampled_from([1, 1, 2, 3]))
    rhs_dilation = per_dim(st.sampled_from([1, 1, 2]))
    padding = []
    for n, k, ld, rd in zip(sizes, kernel, lhs_dilation, rhs_dilation, strict=True):
        low, high = draw(st.integers(-1, 3)), draw(st.integers(-1, 3))
        dilated, window = (n - 1) * ld + 1, (k - 1) * rd + 1
        high += max(0, window - (dilated + low + high))
        padding.append((low, high))
    feature_groups, batch_groups = draw(st.sampled_from([(1, 1), (1, 1), (2, 1), (3, 1), (1, 2)]))
    per_group = draw(st.integers(1, 3))
    outputs = feature_groups * batch_groups * draw(st.integers(1, 3))
    batch = batch_groups * draw(st.integers(1, 2))
    spec = draw(st.permutations(range(ndim + 2)))
    kernel_spec = draw(st.permutations(range(ndim + 2)))
    out_spec = draw(st.permutations(range(ndim + 2)))
    lhs, rhs = [0] * (ndim + 2), [0] * (ndim + 2)
    for position, size in zip(spec, [batch, per_group * feature_groups, *sizes], strict=True):
        lhs[position] = size
    for position, size in zip(kernel_spec, [outputs, per_group, *kernel], strict=True):
        rhs[position] = size
    params = {
        "window_strides": strides,
        "padding": padding,
        "lhs_dilation": lhs_dilation,
        "rhs_dilation": rhs_dilation,
        "dimension_numbers": lax.ConvDimensionNumbers(
            tuple(spec), tuple(kernel_spec), tuple(out_spec)
        ),
        "feature_group_count": feature_groups,
        "batch_group_count": batch_groups,
    }
    return tuple(lhs), tuple(rhs), params


@settings(max_examples=60, deadline=None, derandomize=True)
@given(convolutions())
def test_matches_the_primitive_in_value_and_gradient(case):
    lhs_shape, rhs_shape, params = case
    conv = functools.partial(lax.conv_general_dilated, **params)
    x, w = _normal(0, lhs_shape), _normal(1, rhs_shape)
    plain, pullback = jax.vjp(conv, x, w)
    lowered, lowered_pullback = jax.vjp(lower(conv), x, w)
    _assert_close(lowered, plain)
    cotangent = _normal(2, plain.shape)
    _assert_close(lowered_pullback(cotangent), pullback(cotangent))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_narrow_inputs_are_accumulated_in_float32(dtype):
    x, w = _normal(0, (2, 9, 9, 64), dtype), _normal(1, (3, 3, 64, 8), dtype)

    def conv(x, w):
        return lax.conv_general_dilated(
            x, w, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    exact = conv(x.astype(jnp.float32), w.astype(jnp.float32))
    actual = lower(conv)(x, w)
    assert actual.dtype == dtype
    rounding = float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(
        actual.astype(jnp.float32), exact, rtol=rounding, atol=rounding * 1e-2
    )
    wide = functools.partial(
        lax.conv_general_dilated,
        window_strides=(1, 1),
        padding="VALID",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        preferred_element_type=jnp.float32,
    )
    _assert_close(lower(wide)(x, w), exact)
