"""Convolutions of clients that have kernels of their own, by kernels of our own."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from lowering_checks import assert_close, normal, primitives, value_and_pullback
from marks import later

from fedjax_dp.core.products import EXACT, Arithmetic, computed_with
from fedjax_dp.models.cost import cost_of
from fedjax_dp.models.lowering import kernels, lower, tpu

EXACTLY = (lax.Precision.HIGHEST, lax.Precision.HIGHEST)
VALID = ((0, 0), (0, 0))
# Images, kernels, padding.
CASES = {
    "valid": ((2, 2, 7, 9, 3), (3, 3, 3, 5), VALID),
    "same, odd, large": ((2, 3, 9, 6, 2), (5, 5, 2, 3), ((2, 2), (2, 2))),
    "same, even kernel": ((3, 2, 6, 5, 4), (2, 4, 4, 3), ((0, 1), (1, 2))),
    "pointwise": ((2, 2, 5, 5, 3), (1, 1, 3, 4), VALID),
    "cropped": ((2, 2, 8, 9, 2), (3, 2, 2, 3), ((-1, 0), (2, -3))),
    "wider than padded": ((2, 1, 3, 17, 2), (3, 3, 2, 2), ((2, 2), (2, 2))),
}


def sums(x, w, g, padding):
    """Convolves in float64, tap by tap; returns the result and the gradients of input and kernel.

    Zeros are inserted or entries left out at the edges, as `padding` says.
    """
    x, w, g = (np.asarray(a, np.float64) for a in (x, w, g))
    (up, down), (left, right) = padding
    high, wide = x.shape[2:4]
    around = np.zeros((*x.shape[:2], high + 99, wide + 99, x.shape[4]))
    around[:, :, 40 : 40 + high, 40 : 40 + wide] = x
    window = slice(40 - up, 40 + high + down), slice(40 - left, 40 + wide + right)
    padded = around[:, :, *window]
    height, width = w.shape[1:3]
    rows, columns = padded.shape[2] - height + 1, padded.shape[3] - width + 1
    out = np.zeros((*x.shape[:2], rows, columns, w.shape[4]))
    of_padded, of_kernel = np.zeros_like(around), np.zeros_like(w)
    g = np.zeros_like(out) if g.shape != out.shape else g
    for i in range(height):
        for j in range(width):
            seen = padded[:, :, i : i + rows, j : j + columns]
            out += np.einsum("cnhwi,cio->cnhwo", seen, w[:, i, j])
            of_kernel[:, i, j] = np.einsum("cnhwi,cnhwo->cio", seen, g)
            to = of_padded[:, :, *window][:, :, i : i + rows, j : j + columns]
            to += np.einsum("cnhwo,cio->cnhwi", g, w[:, i, j])
    return out, of_padded[:, :, 40 : 40 + high, 40 : 40 + wide], of_kernel


def refuse(*_, **__):
    raise AssertionError("not by the kernel")


# Pieces of few rows, too.
PIECES = [(case, rows) for case in CASES for rows in (1024, 32)]


@pytest.mark.parametrize(
    ("case", "rows"),
    later(
        PIECES, but=[("same, even kernel", 32)], soon=[("same, odd, large", 32), ("cropped", 1024)]
    ),
)
def test_kernels_for_a_tpu_are_within_the_rounding_of_float32_sums(case, rows, monkeypatch):
    monkeypatch.setattr(tpu, "_MOST_ROWS", rows)
    shape, kernel, padding = CASES[case]
    x, w = normal(0, shape), normal(1, (shape[0], *kernel))
    g = normal(2, sums(x, w, np.zeros(()), padding)[0].shape)
    options = {"precision": EXACTLY, "otherwise": refuse, "interpret": True}
    around = tuple((k - 1 - a, k - 1 - b) for k, (a, b) in zip(kernel, padding, strict=False))

    @jax.jit
    def computed(x, w, g):
        return (
            tpu.convolve(x, w, padding=padding, **options),
            tpu.convolve(g, jnp.swapaxes(w[:, ::-1, ::-1], 3, 4), padding=around, **options),
            tpu.kernel_gradient(x, g, padding=padding, **options),
        )

    found = computed(x, w, g)
    sizes = sums(*map(np.abs, (x, w, g)), padding)
    terms = kernel[0] * kernel[1] * kernel[2], kernel[0] * kernel[1] * kernel[3]
    for one, exact, size, n in zip(
        found, sums(x, w, g, padding), sizes, (*terms, g[0, ..., 0].size), strict=True
    ):
        assert one.shape == exact.shape
        assert np.all(np.abs(one - exact) <= n * EXACT.per_addition * size)


def conv(x, w, padding="VALID", numbers=("NHWC", "HWIO", "NHWC"), **options):
    return lax.conv_general_dilated(
        x, w, **{"window_strides": (1, 1)} | options, padding=padding, dimension_numbers=numbers
    )


def by_kernels(fn):
    def lowered(*args):
        with computed_with(Arithmetic(convolutions="kernel")):
            return lower(fn)(*args)

    return lowered


LAYOUTS = {"last": ("NHWC", "HWIO", "NHWC"), "first": ("NCHW", "OIHW", "CNHW")}


@pytest.mark.parametrize("channels", later(LAYOUTS, but=["first"]))
def test_clients_and_their_records_have_the_gradients_of_the_primitive(channels, monkeypatch):
    monkeypatch.setattr(kernels, "_FEWEST_CHANNELS", 1)
    plain = functools.partial(conv, padding="SAME", numbers=LAYOUTS[channels])
    shapes = [(2, 5, 6, 3), (3, 2, 3, 4)]
    if channels == "first":
        shapes = [(2, 3, 5, 6), (4, 3, 3, 2)]
    x, w = normal(0, (3, 2, *shapes[0])), normal(1, (3, *shapes[1]))

    def gradients(fn):
        def one(x, w):
            out = jax.eval_shape(fn, x, w)
            return value_and_pullback(fn, (x, w), normal(2, out.shape))

        # Records share the kernel of their client.
        return jax.jit(jax.vmap(jax.vmap(one, (0, None))))

    found = by_kernels(plain)
    assert kernels.NAME in primitives(gradients(found), x, w)
    assert_close(gradients(found)(x, w), gradients(plain)(x, w))

    # Differentiated as a whole, and twice.
    def curved(fn):
        def total(x, w):
            return jnp.sum(jax.vmap(jax.vmap(fn, (0, None)))(x, w) ** 3)

        def along(x, w):
            return jax.jvp(jax.grad(total, (0, 1)), (x, w), (x, w))

        return jax.jit(along)

    assert_close(curved(found)(x, w), curved(plain)(x, w))


def test_the_operations_of_a_step_are_those_of_the_primitive():
    x, w = jnp.ones((3, 2, 6, 7, 16)), jnp.ones((3, 3, 2, 16, 17))

    def step(fn):
        return jax.grad(lambda w, x: jnp.sum(fn(x, w) ** 2), (0, 1))

    found = cost_of(jax.vmap(step(by_kernels(conv))), w, x).operations
    # Those of the primitive are counted for one client.
    assert found == 3 * cost_of(step(conv), w[0], x[0]).operations > 0


@pytest.mark.parametrize(
    ("channels", "options"),
    [
        ((16, 15), {}),
        ((16, 16), {"window_strides": (2, 2)}),
        ((16, 16), {"lhs_dilation": (2, 1), "padding": VALID}),
        ((16, 16), {"rhs_dilation": (1, 2)}),
        ((32, 16), {"feature_group_count": 2}),
        ((16, 16), {"precision": "BF16_BF16_F32_X3"}),
        ((16, 16), {"preferred_element_type": jnp.float32}),
    ],
)
def test_what_kernels_cannot_compute_stays_as_it_was(channels, options):
    inputs, outputs = channels
    groups = options.get("feature_group_count", 1)
    x = jnp.ones((2, 6, 6, inputs), jnp.bfloat16)
    w = jnp.ones((3, 3, inputs // groups, outputs), x.dtype)
    fn = functools.partial(conv, **options)
    assert kernels.NAME not in primitives(by_kernels(fn), x, w)
    assert kernels.NAME in primitives(by_kernels(conv), x, jnp.ones((3, 3, inputs, 16), x.dtype))


@pytest.mark.parametrize(
    ("clients", "width", "is_ours"), [(3, 6, True), (1, 6, False), (3, 600, False)]
)
def test_programs_for_tpus_have_kernels_where_clients_have_their_own_and_fit(
    clients, width, is_ours
):
    x = jax.ShapeDtypeStruct((clients, 2, width, width, 16), jnp.float32)
    w = jax.ShapeDtypeStruct((clients, 3, 3, 16, 16), jnp.float32)

    def step(x, w):
        fn = jax.vmap(jax.grad(lambda w, x: jnp.sum(by_kernels(conv)(x, w) ** 2)))
        return fn(w, x)

    text = jax.jit(step).trace(x, w).lower(lowering_platforms=("tpu",)).as_text()
    assert ("tpu_custom_call" in text) == is_ours
    assert ("stablehlo.convolution" in text) == (not is_ours)


@pytest.mark.parametrize(
    ("examples", "size", "is_whole"), [(1, 20, True), (2, 20, False), (1, 60, False)]
)
def test_compilers_compute_operands_in_kernels_without_loops_alone(examples, size, is_whole):
    x = jax.ShapeDtypeStruct((2, examples, size, size, 16), jnp.float32)
    w = jax.ShapeDtypeStruct((2, 3, 3, 16, 16), jnp.float32)
    found = tpu.tiling_of(x, w, x, ((1, 1), (1, 1)))
    # All examples in a step of the program, or an image in several pieces.
    assert found.examples == examples and (found.rows == size) == (size == 20)
    assert tpu._params("parallel", x, found).allow_input_fusion[0] == is_whole
