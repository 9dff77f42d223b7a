"""Lowered convolutions against the primitive itself, in values and derivatives."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from lowering_checks import REPLACED, assert_close, normal, primitives, run, value_and_pullback
from marks import later, telling

from fedjax_dp.models.cost import cost_of
from fedjax_dp.models.lowering import lower, narrow

LAYOUTS = {1: ("NWC", "WIO", "NWC"), 2: ("NHWC", "HWIO", "NHWC"), 3: ("NDHWC", "DHWIO", "NDHWC")}


def conv(x, w, strides=1, padding="VALID", **params):
    """Convolves with channels last."""
    ndim = x.ndim - 2
    return lax.conv_general_dilated(
        x, w, (strides,) * ndim, padding, dimension_numbers=LAYOUTS[ndim], **params
    )


@st.composite
def convolutions(draw):
    """Draws shapes and parameters of any convolution whose result is not empty."""
    ndim = draw(st.integers(1, 3))

    def per_dim(elements):
        return [draw(elements) for _ in range(ndim)]

    kernel = per_dim(st.integers(1, 3))
    sizes = per_dim(st.integers(1, 6))
    strides = per_dim(st.integers(1, 3)) if draw(st.booleans()) else [1] * ndim
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
    specs = [tuple(draw(st.permutations(range(ndim + 2)))) for _ in range(3)]
    lhs, rhs = [0] * (ndim + 2), [0] * (ndim + 2)
    for position, size in zip(specs[0], [batch, per_group * feature_groups, *sizes], strict=True):
        lhs[position] = size
    for position, size in zip(specs[1], [outputs, per_group, *kernel], strict=True):
        rhs[position] = size
    params = {
        "window_strides": strides,
        "padding": padding,
        "lhs_dilation": lhs_dilation,
        "rhs_dilation": rhs_dilation,
        "dimension_numbers": lax.ConvDimensionNumbers(*specs),
        "feature_group_count": feature_groups,
        "batch_group_count": batch_groups,
    }
    return tuple(lhs), tuple(rhs), params


def check_convolution(case):
    lhs_shape, rhs_shape, params = case
    plain = functools.partial(lax.conv_general_dilated, **params)
    args = normal(0, lhs_shape), normal(1, rhs_shape)
    cotangent = normal(2, jax.eval_shape(plain, *args).shape)

    found = run(functools.partial(value_and_pullback, lower(plain)), args, cotangent)
    # In float64: in float32, XLA 0.10.2 computes the derivative of a convolution wrongly on CPUs
    # for some shapes, such as inputs (2, 2, 1), kernel (3, 2, 3), padding (3, 1).
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: np.asarray(x, np.float64), (args, cotangent))
        exact = run(functools.partial(value_and_pullback, plain), *wide)
        exact = jax.tree.map(lambda x: np.asarray(x, np.float32), exact)
    assert_close(found, exact)


@pytest.mark.parametrize("count", later([6, 60], soon=[6]))
def test_any_convolution_matches_the_primitive_in_value_and_gradients(count):
    any_of = settings(max_examples=count, deadline=None, derandomize=True)
    any_of(given(convolutions())(check_convolution))()


CASES = {
    "first layer": ((2, 9, 9, 1), (3, 3, 1, 4), {}),
    "tiled": ((2, 8, 9, 32), (3, 3, 32, 33), {}),
    "tiled, same": ((1, 8, 7, 34), (3, 3, 34, 32), {"padding": "SAME"}),
    "tiled, large backwards": ((5, 13, 15, 32), (3, 3, 32, 33), {"padding": ((2, -1), (0, 3))}),
    "narrow": ((2, 8, 7, 4), (5, 5, 4, 3), {"padding": ((2, 3), (-1, 3))}),
    "strided, same": ((2, 9, 9, 3), (3, 3, 3, 4), {"strides": 2, "padding": "SAME"}),
    "pointwise": ((2, 5, 5, 6), (1, 1, 6, 3), {}),
    "pointwise strided": ((2, 5, 5, 3), (1, 1, 3, 6), {"strides": 2}),
    "depthwise": ((2, 6, 6, 4), (3, 3, 1, 8), {"feature_group_count": 4}),
    "grouped": ((2, 6, 6, 4), (3, 3, 2, 6), {"feature_group_count": 2}),
    "dilated": ((2, 9, 9, 2), (3, 3, 2, 3), {"rhs_dilation": (2, 3)}),
    "transposed": (
        (2, 4, 4, 2),
        (3, 3, 2, 3),
        {"lhs_dilation": (2, 2), "padding": ((1, 2), (2, 1))},
    ),
    "cropped": ((2, 8, 8, 2), (2, 2, 2, 3), {"padding": ((-1, -2), (1, -1))}),
    "one dimension": ((2, 9, 3), (4, 3, 5), {"strides": 3}),
    "three dimensions": ((1, 4, 5, 6, 2), (2, 3, 2, 2, 3), {}),
}


def case(name):
    lhs_shape, rhs_shape, params = CASES[name]
    w = normal(1, rhs_shape) / np.sqrt(np.prod(rhs_shape[:-1], dtype=np.float32))
    return functools.partial(conv, **params), normal(0, lhs_shape), w


# Patches, rows and groups; tiles, the largest programs, are left to the telling tests.
QUICK = ("narrow", "strided, same", "grouped")


@telling
@pytest.mark.parametrize("name", CASES)
def test_every_derivative_matches_the_primitive(name):
    plain, x, w = case(name)

    def derivatives(conv, x, w, dx, dw):
        def loss(x, w):
            return jnp.sum(jnp.sin(conv(x, w)))

        gradient = jax.grad(loss, (0, 1))
        return {
            "value": conv(x, w),
            "tangent": jax.jvp(conv, (x, w), (dx, dw))[1],
            "gradient": gradient(x, w),
            "hessian product": jax.jvp(gradient, (x, w), (dx, dw))[1],
            "reverse over reverse": jax.grad(
                lambda x, w: sum(jnp.vdot(g, d) for g, d in zip(gradient(x, w), (dx, dw)))  # noqa: B905
            )(x, w),
        }

    args = x, w, normal(2, x.shape), normal(3, w.shape)
    both = jax.jit(lambda *args: [derivatives(f, *args) for f in (lower(plain), plain)])
    assert_close(*both(*args))


@pytest.mark.parametrize("name", later(CASES, but=[*QUICK, "tiled"], mark=telling))
def test_no_convolution_is_left_in_any_derivative(name):
    plain, x, w = case(name)
    lowered = lower(plain)

    def loss(w, x):
        return jnp.sum(jnp.sin(lowered(x, w)))

    ws, xs = jnp.stack([w, w]), jnp.stack([x, x])
    per_client = jax.vmap(jax.value_and_grad(loss, (0, 1)))
    per_example = jax.vmap(jax.grad(lambda w, x: loss(w, x[None])), (None, 0))
    assert not REPLACED & primitives(per_client, ws, xs)
    assert not REPLACED & primitives(per_example, w, x)
    assert not REPLACED & primitives(lambda w, x: jax.jvp(loss, (w, x), (w, x)), w, x)
    assert not REPLACED & primitives(jax.hessian(lambda w: loss(w, x)), w)


BATCHED = ["tiled", "narrow", "strided, same", "depthwise", "grouped", "transposed"]
BATCHES = [*itertools.product(BATCHED, [(0, None), (None, 0), (2, -1)])]


@telling
@pytest.mark.parametrize(("name", "axes"), [*BATCHES, ("tiled, large backwards", (2, -1))])
def test_batches_of_inputs_and_of_kernels_match_a_loop(name, axes):
    plain, x, w = case(name)

    def batched(array, axis, seed):
        if axis is None:
            return array
        return np.stack([array, normal(seed, array.shape), 2 * array], axis)

    xs, ws = batched(x, axes[0], 4), batched(w, axes[1], 5)

    def entry(array, axis, i):
        return array if axis is None else np.take(array, i, axis)

    def gradients(conv):
        return jax.grad(lambda x, w: jnp.sum(jnp.sin(conv(x, w))), (0, 1))

    actual = run(jax.vmap(gradients(lower(plain)), axes), xs, ws)
    singles = [(entry(xs, axes[0], i), entry(ws, axes[1], i)) for i in range(3)]
    expected = [jax.jit(gradients(plain))(*pair) for pair in singles]
    assert_close(actual, jax.tree.map(lambda *leaves: jnp.stack(leaves), *expected))
    # The gradient of a batch, where an array that is not batched sums over it.
    total = run(gradients(jax.vmap(lower(plain), axes)), xs, ws)
    for got, each, axis in zip(total, actual, axes, strict=True):
        assert_close(got, each.sum(0) if axis is None else jnp.moveaxis(each, 0, axis))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_narrow_inputs_are_accumulated_in_float32(dtype):
    x, w = normal(0, (2, 9, 9, 64)).astype(dtype), normal(1, (3, 3, 64, 8)).astype(dtype)
    exact = conv(x.astype(np.float32), w.astype(np.float32))
    narrow = lower(conv)(x, w)
    assert narrow.dtype == dtype
    rounding = float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(narrow.astype(np.float32), exact, rtol=rounding, atol=1e-3)
    wide = lower(functools.partial(conv, preferred_element_type=jnp.float32))(x, w)
    assert_close(wide, exact)


@telling
@pytest.mark.parametrize("groups", [1, 4])
def test_narrow_gradients_preserve_their_type_and_match(groups):
    x, w = normal(0, (2, 6, 6, 8)), normal(1, (3, 3, 8 // groups, 8))
    cotangent = normal(2, (2, 4, 4, 8))
    grouped = functools.partial(conv, feature_group_count=groups)
    narrow = [jnp.asarray(a, jnp.bfloat16) for a in (x, w, cotangent)]
    wide = [a.astype(jnp.float32) for a in narrow]
    _, actual = value_and_pullback(lower(grouped), narrow[:2], narrow[2])
    _, exact = value_and_pullback(grouped, wide[:2], wide[2])
    # One rounding of every product, or of sums of them, and one of the result, add up to this.
    _, magnitudes = value_and_pullback(grouped, [abs(a) for a in wide[:2]], abs(wide[2]))
    for a, e, magnitude in zip(actual, exact, magnitudes, strict=True):
        assert a.dtype == jnp.bfloat16
        assert np.all(abs(a.astype(np.float32) - e) <= 2 * 2**-8 * magnitude)


@telling
@pytest.mark.parametrize("groups", [1, 2])
def test_sums_over_the_kernel_are_taken_in_float32(groups):
    # Sixteen times a number of eight bits: exact, unless partial sums are rounded to eight bits.
    number = 1 + 2**-7
    x = jnp.full((1, 31, 2), number, jnp.bfloat16)
    w = jnp.full((16, 2 // groups, 2), 1 / (2 // groups), jnp.bfloat16)
    lowered = lower(functools.partial(conv, feature_group_count=groups))
    out, pullback = jax.vjp(lambda x: lowered(x, w), x)
    np.testing.assert_array_equal(out.astype(np.float32), 16 * number)
    (gradient,) = pullback(jnp.full(out.shape, number, jnp.bfloat16))
    assert float(gradient[0, 15, 0]) == 16 * number


def test_integers_are_convolved_exactly():
    rng = np.random.default_rng(0)
    x = rng.integers(-9, 9, (2, 6, 6, 3), np.int32)
    w = rng.integers(-9, 9, (3, 3, 3, 4), np.int32)
    np.testing.assert_array_equal(lower(conv)(x, w), conv(x, w))


@telling
@pytest.mark.parametrize("name", ["strided, same", "tiled", "tiled, large backwards", "narrow"])
def test_float64_agrees_to_float64_precision(name):
    with jax.enable_x64(True):
        plain, *args = case(name)
        args = [a.astype(np.float64) for a in args]
        cotangent = normal(2, jax.eval_shape(plain, *args).shape, np.float64)
        actual = value_and_pullback(lower(plain), args, cotangent)
        expected = value_and_pullback(plain, args, cotangent)
        assert actual[0].dtype == np.float64
        assert_close(actual, expected, rtol=1e-13)


def test_tiles_are_as_exact_as_patches_and_multiply_less():
    x, w = normal(0, (4, 18, 18, 64)), normal(1, (3, 3, 64, 64))
    compiled = jax.jit(lower(conv)).lower(x, w).compile()
    direct = 2 * 4 * 16 * 16 * 9 * 64 * 64
    assert compiled.cost_analysis()["flops"] < direct / 1.5
    with jax.enable_x64(True):
        exact = np.asarray(conv(x.astype(np.float64), w.astype(np.float64)))
    rounding = np.finfo(np.float32).eps * np.abs(exact).max()
    assert np.abs(compiled(x, w) - exact).max() < 4 * rounding


@telling
def test_gradients_by_large_tiles_multiply_less_and_round_little_more():
    x, w = normal(0, (4, 16, 16, 64)), normal(1, (3, 3, 64, 64))
    cotangent, plain = normal(2, x.shape), functools.partial(conv, padding="SAME")
    compiled = jax.jit(lambda *args: value_and_pullback(lower(plain), args, cotangent)[1])
    actual = compiled(x, w)
    direct = 2 * x.size * 9 * 64
    assert compiled.lower(x, w).compile().cost_analysis()["flops"] < 2 * direct / 2.5
    rounded = jax.jit(lambda *args: value_and_pullback(plain, args, cotangent)[1])(x, w)
    with jax.enable_x64(True):
        args = [a.astype(np.float64) for a in (x, w)]
        _, exact = value_and_pullback(plain, args, cotangent.astype(np.float64))
    for a, r, e in zip(actual, rounded, map(np.asarray, exact), strict=True):
        error, of_direct = (np.linalg.norm(np.asarray(v) - e) for v in (a, r))
        assert error < 5 * of_direct
        assert error < 2e-6 * np.linalg.norm(e)


@telling
@pytest.mark.skipif(jax.default_backend() != "cpu", reason="fusion of the CPU backend")
def test_both_gradients_of_tiles_read_what_is_computed_once():
    """The input of the convolution, and the tiles of the cotangent."""

    def loss(w, x):
        return jnp.sum(jnp.sin(lower(conv)(jnp.tanh(x), w)))

    def text(*argnums):
        def step(_, arrays):
            gradients = dict(zip(argnums, jax.grad(loss, argnums)(*arrays), strict=True))
            return tuple(a - gradients.get(i, 0) for i, a in enumerate(arrays))

        steps = jax.jit(lambda *arrays: lax.fori_loop(0, 3, step, arrays))
        return (
            steps.lower(normal(0, (3, 3, 32, 32)), normal(1, (2, 18, 18, 32))).compile().as_text()
        )

    both, of_kernel, of_input = text(0, 1), text(0), text(1)
    num_loops = [text.count(" while(") for text in (both, of_kernel, of_input)]
    # Beside the six lines of tiles: the loop of steps, and input and output of the convolution.
    assert num_loops[0] <= num_loops[1] + num_loops[2] - 6 - 3
    assert of_kernel.count(" tanh(") == 1


def test_the_gradients_of_a_narrow_convolution_hold_patches_of_rows_alone():
    plain, x, w = case("narrow")
    assert narrow.NAME in primitives(lower(plain), x, w)
    cotangent = normal(2, jax.eval_shape(plain, x, w).shape)
    patches = cotangent[..., 0].size * w[..., 0].size * 4
    assert cost_of(lower(plain), x, w).largest_bytes == patches
    for of_one, primal in ((lambda x: lower(plain)(x, w), x), (lambda w: lower(plain)(x, w), w)):
        gradient = jax.linear_transpose(of_one, primal)
        assert cost_of(gradient, cotangent).largest_bytes < patches / 2


def test_a_transposed_convolution_multiplies_no_zeros():
    x, w = normal(0, (1, 8, 8, 4)), normal(1, (4, 4, 4, 4))
    upsample = functools.partial(conv, padding=((3, 3), (3, 3)), lhs_dilation=(4, 4))
    compiled = jax.jit(lower(upsample)).lower(x, w).compile()
    useful = 2 * 8 * 8 * 4 * 4 * 4 * 4
    with_zeros = useful * 4 * 4
    assert compiled.cost_analysis()["flops"] < with_zeros / 4
