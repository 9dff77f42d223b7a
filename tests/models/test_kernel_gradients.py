"""Gradients of kernels for single examples as accelerators form them, against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import floats, later, telling

from fedjax_dp.core.backend import traced_for
from fedjax_dp.models import outer_products
from fedjax_dp.models.per_example import per_example

pytestmark = floats
_NUM_EXAMPLES = 3


def _exact(kernel, x, strides, padding):
    """Convolves in float64, and returns a function from cotangents to the kernel's gradient."""
    wide = [(max(low, 0), max(high, 0)) for low, high in [*padding, (0, 0)]]
    x = np.pad(np.asarray(x, np.float64), wide)
    ends = zip(x.shape, padding, strict=False)
    x = x[tuple(slice(max(-low, 0), size - max(-high, 0)) for size, (low, high) in ends)]
    sizes = kernel.shape[:-2]
    counts = [(n - k) // s + 1 for n, k, s in zip(x.shape, sizes, strides, strict=False)]
    rows = []
    for at in np.ndindex(*counts):
        spans = [slice(i * s, i * s + k) for i, s, k in zip(at, strides, sizes, strict=True)]
        rows.append(x[tuple(spans)].reshape(-1))
    patches = np.stack(rows)
    outputs = patches @ np.asarray(kernel, np.float64).reshape(-1, kernel.shape[-1])
    return outputs, lambda cotangents: (patches.T @ cotangents).reshape(kernel.shape)


_CASES = [
    # Kernel, input, strides, padding: as models have them; odd; cropped; one entry; one dimension.
    ((5, 5, 3, 4), (8, 9, 3), (1, 1), ((2, 2), (2, 2))),
    ((3, 3, 3, 5), (9, 9, 3), (2, 2), ((1, 1), (1, 1))),
    ((3, 2, 2, 3), (10, 7, 2), (3, 2), ((0, 2), (1, 0))),
    ((2, 3, 2, 3), (7, 8, 2), (1, 1), ((-1, 2), (3, 0))),
    ((1, 1, 4, 3), (6, 6, 4), (2, 2), ((0, 0), (0, 0))),
    ((3, 4, 5), (11, 4), (2,), ((1, 1),)),
]


@pytest.mark.parametrize("kind", ["tpu", "gpu"])
@pytest.mark.parametrize(
    ("kernel_shape", "shape", "strides", "padding"), later(_CASES, but=[_CASES[2]], mark=telling)
)
def test_norms_and_sums_of_native_convolutions(kernel_shape, shape, strides, padding, kind):
    rng = np.random.default_rng(0)
    kernel = rng.normal(size=kernel_shape).astype(np.float32)
    xs = rng.normal(size=(_NUM_EXAMPLES, *shape)).astype(np.float32)
    weights = np.array([0.5, 0.0, 2.0], np.float32)
    spatial = "HW"[: len(strides)]
    numbers = (f"N{spatial}C", f"{spatial}IO", f"N{spatial}C")

    def loss_fn(params, x):
        out = jax.lax.conv_general_dilated(
            x[None], params["kernel"], strides, padding, dimension_numbers=numbers
        )
        return jnp.sum(out**2) / 2

    with traced_for(kind), jax.default_matmul_precision("highest"):

        @jax.jit
        def ours(params, xs):
            found = per_example(loss_fn, params, xs)
            return found.norms["kernel"], found.weighted_sum({"kernel": weights})["kernel"]

        norms, total = ours({"kernel": kernel}, xs)
    exact = [_exact(kernel, x, strides, padding) for x in xs]
    gradients = np.stack([gradient(outputs) for outputs, gradient in exact])
    lengths = np.sqrt((gradients.reshape(_NUM_EXAMPLES, -1) ** 2).sum(1))
    np.testing.assert_allclose(norms, lengths, rtol=1e-3)
    assert np.all(np.asarray(norms) >= lengths * (1 - 1e-5))
    expected = np.tensordot(weights, gradients, 1)
    np.testing.assert_allclose(total, expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())


@telling
@pytest.mark.parametrize("kind", ["tpu", "gpu"])
def test_a_deep_layer_stays_factors_and_a_wide_image_is_formed(kind):
    """ResNet-18's last layers move a tenth as factors; its first have too many rows."""
    with traced_for(kind):
        assert not outer_products.is_formed(16, 9 * 512, 512)
        assert outer_products.is_formed(64, 9 * 256, 256)
        assert outer_products.is_formed(1024, 9 * 64, 64)


@telling
def test_factors_by_the_library_have_the_norms_of_what_they_are():
    rng = np.random.default_rng(1)
    rows = jnp.asarray(rng.normal(size=(4, 6, 40)), jnp.float32)
    columns = jnp.asarray(rng.normal(size=(4, 6, 9)), jnp.float32)
    # Rows that nearly cancel, and some without rank.
    columns = columns.at[1, 5].set(-jnp.sum(columns[1, :5], 0)).at[2].set(columns[2, :1])
    with traced_for("gpu"):
        found = jax.jit(outer_products.factors)(rows, columns)
    products = np.einsum("bti,bto->bio", np.asarray(rows, np.float64), np.asarray(columns))
    parts = found.scale[:, None, None] * jnp.einsum("bti,bto->bio", found.rows, found.columns)
    np.testing.assert_allclose(parts, products, rtol=1e-3, atol=1e-4)
    lengths = np.sqrt((products**2).sum((1, 2)))
    assert np.all(np.asarray(found.norms) >= lengths * (1 - 1e-5))
    np.testing.assert_allclose(found.norms, lengths, rtol=2e-2)
