"""Norms of sums of outer products against float64, with and without forming the sums."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import floats, telling

from fedjax_dp.models import outer_products

pytestmark = floats

SHAPES = [(16, 300, 40), (16, 40, 300), (64, 200, 128), (3, 5, 7), (1, 9, 4), (20, 6, 5)]


def factors(num_rows, inputs, outputs, seed=0):
    rng = np.random.default_rng(seed)
    rows = np.maximum(rng.normal(size=(9, num_rows, inputs)), 0)
    columns = rng.normal(size=(9, num_rows, outputs))
    # Scales far apart; one outer product alone; nothing at all; equal rows.
    rows[1] *= 1e-12
    columns[2] *= 1e12
    columns[3, 1:] = 0
    columns[4] = 0
    rows[5] = rows[5, :1]
    # Rows that cancel one another: nearly, and to the last digit.
    rows[6] = rows[6, :1] + 1e-3 * rng.normal(size=(num_rows, inputs))
    columns[6] -= columns[6].mean(0) * (num_rows > 1)
    rows[7] = rows[7, :1]
    columns[7] -= columns[7].mean(0) * (num_rows > 1)
    return rows.astype(np.float32), columns.astype(np.float32)


def exact(rows, columns):
    products = np.einsum("bti,bto->bio", rows.astype(np.float64), columns.astype(np.float64))
    return np.sqrt((products**2).sum((1, 2)))


def lengths(rows, columns):
    squares = [(a.astype(np.float64) ** 2).sum((1, 2)) for a in (rows, columns)]
    return np.sqrt(squares[0] * squares[1])


def amount(found):
    """What factors amount to, in float64, with the sum of the norms of their outer products."""
    rows, columns, scale = (np.asarray(x, np.float64) for x in found[:3])
    products = np.einsum("bti,bto->bio", rows, columns) * scale[:, None, None]
    separate = np.linalg.norm(rows, axis=2) * np.linalg.norm(columns, axis=2)
    return products, separate.sum(1) * scale


@pytest.mark.parametrize(
    "shape", SHAPES[2:5] + [pytest.param(s, marks=telling) for s in SHAPES[:2] + SHAPES[5:]]
)
def test_factors_amount_to_the_sums_and_norms_bound_them(shape):
    rows, columns = factors(*shape)
    found = jax.jit(outer_products.factors)(rows, columns)
    products, separate = amount(found)
    expected = np.einsum("bti,bto->bio", rows.astype(np.float64), columns.astype(np.float64))
    scale = lengths(rows, columns)[:, None, None]
    assert np.all(np.abs(products - expected) <= 1e-6 * scale)
    norms, exactly = np.asarray(found.norms, np.float64), np.linalg.norm(products, axis=(1, 2))
    # A norm that is too small would let a record through; one that is a little too large does no
    # harm, and no order of summation makes more of the factors than √T of it.
    assert np.all(norms >= exactly * (1 - 1e-6))
    assert np.all(separate <= norms * np.sqrt(shape[0]) * (1 + 1e-6))
    if shape[0] <= min(shape[1:]):
        np.testing.assert_allclose(norms[:3], exact(rows, columns)[:3], rtol=1e-3)
    # The fewer entries come first in matrices that are formed.
    matrices = outer_products.matrices(rows, columns)
    expected = np.swapaxes(expected, 1, 2) if shape[2] < shape[1] else expected
    assert np.all(np.abs(matrices - expected) <= 1e-6 * scale)


def test_norms_of_float64_are_those_of_the_sums():
    """The room for rounding is that of the type; references in float64 are compared exactly."""
    rows, columns = (a.astype(np.float64) for a in factors(16, 300, 40))
    with jax.enable_x64(True):
        norms = np.asarray(jax.jit(outer_products.factors)(rows, columns).norms)
    assert norms.dtype == np.float64
    np.testing.assert_allclose(norms[:3], exact(rows, columns)[:3], rtol=1e-11)


@pytest.mark.parametrize(("num_rows", "inputs", "outputs"), [(16, 300, 40), (4, 5000, 3)])
def test_squared_norms_leave_room_for_additions_in_any_order(num_rows, inputs, outputs):
    """Sums of n numbers err by up to n roundings in the worst order, in both Gram matrices."""
    left, right = jnp.ones((1, num_rows, inputs)), jnp.ones((1, num_rows, outputs))
    bound, _ = outer_products._squared_norms(left, right)
    exactly = float(num_rows**2 * inputs * outputs)
    room = (inputs + outputs) * 2.0**-24
    assert exactly * (1 + room) <= float(bound[0]) <= exactly * (1 + 2 * room + 1e-5)


def test_factors_of_floats_at_the_edges():
    """Squares that vanish or overflow, and a Gram matrix that rounding takes below zero."""
    rows, columns = factors(16, 300, 40)
    rows[0], columns[0] = rows[0] * 1e-25, columns[0] * 1e25
    rows[1], columns[1] = rows[1] * 1e32, columns[1] * 1e-30
    rows[2, :, 0], columns[2] = 1e30, np.sign(columns[2]) * 1e-30
    found = jax.jit(outer_products.factors)(rows, columns)
    norms = np.asarray(found.norms, np.float64)
    assert all(np.all(np.isfinite(np.asarray(x))) for x in (found.rows, found.columns))
    usable = np.isfinite(norms)
    with np.errstate(over="ignore", invalid="ignore"):
        products, _ = amount(found)
    assert np.all(usable[:3])
    exactly = np.linalg.norm(products[usable], axis=(1, 2))
    assert np.all(norms[usable] >= exactly * (1 - 1e-6))


@pytest.mark.parametrize(("num_rows", "largest"), [(1, 85), (16, 10), (64, 4), (500, 1), (600, 0)])
def test_the_order_of_a_sum_in_blocks_matters_by_less_than_a_thousandth(num_rows, largest):
    def error(size):
        return 6e-8 * size * num_rows * np.sqrt(num_rows) * (2 * size - 1)

    assert outer_products.block_size(num_rows) == largest
    assert error(largest) <= 8.7e-4 < error(largest + 1)


@telling
def test_a_total_of_many_examples_is_rounded_once():
    rng = np.random.default_rng(3)
    rows = rng.normal(size=(3000, 1, 30)).astype(np.float32)
    columns = np.ones((3000, 1, 1), np.float32)
    total = np.asarray(jax.jit(outer_products.total)(rows, columns), np.float64)
    expected = rows.astype(np.float64).sum((0, 1))[:, None]
    np.testing.assert_allclose(total, expected, atol=2e-5)


def test_gram_matrices_of_the_factors_would_not_do():
    rows, columns = factors(16, 300, 40)
    squares = jnp.einsum("bsi,bti->bst", rows, rows) * jnp.einsum("bsi,bti->bst", columns, columns)
    naive = np.sqrt(np.maximum(np.asarray(squares, np.float64).sum((1, 2)), 0))
    expected = exact(rows, columns)
    assert np.any(naive < 0.99 * expected)


@telling
def test_factors_under_vmap_inside_a_loop():
    rows, columns = factors(16, 30, 40)

    def summed(rows, columns):
        def body(i, total):
            found = outer_products.factors(rows, columns)
            return total + outer_products.total(
                found.rows, found.columns * found.scale[:, None, None]
            )

        return jax.lax.fori_loop(0, 3, body, jnp.zeros((30, 40)))

    pair = np.stack([rows, rows[::-1]])[:, :2], np.stack([columns, columns[::-1]])[:, :2]
    totals = np.asarray(jax.jit(jax.vmap(summed))(*pair), np.float64)
    for total, left, right in zip(totals, *pair, strict=True):
        expected = 3 * np.einsum("bti,bto->io", left.astype(np.float64), right.astype(np.float64))
        np.testing.assert_allclose(total, expected, atol=1e-5 * lengths(left, right).sum())


@telling
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_has_no_finite_norm(bad):
    rows, columns = factors(16, 30, 40)
    for spoiled in (0, 1):
        pair = [rows.copy(), columns.copy()]
        pair[spoiled][0, 3, 2] = bad
        norms = np.asarray(outer_products.factors(*pair).norms)
        assert not np.isfinite(norms[0]) and np.all(np.isfinite(norms[1:]))


def test_matrices_of_few_rows_and_many_entries_are_not_formed():
    assert not outer_products.is_formed(1, 5, 5)
    assert outer_products.is_formed(196, 400, 32)
    assert outer_products.is_formed(1024, 576, 64)
    if jax.default_backend() == "cpu":
        assert not outer_products.is_formed(16, 4608, 512)
