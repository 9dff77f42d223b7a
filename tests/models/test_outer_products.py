"""Norms of sums of outer products against float64, with and without forming the sums."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_dp.models import outer_products

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


@pytest.mark.parametrize("shape", SHAPES)
def test_norms_are_those_of_the_sums_even_where_rows_cancel(shape):
    rows, columns = factors(*shape)
    norms = np.asarray(jax.jit(outer_products.norms)(rows, columns), np.float64)
    expected, scale = exact(rows, columns), lengths(rows, columns)
    # A norm that is too small would let a record through; one that is too large by ten roundings of
    # the factors does no harm.
    assert np.all(norms >= expected * (1 - 1e-6))
    assert np.all(norms <= expected * (1 + 1e-5) + 1e-6 * scale)
    np.testing.assert_allclose(norms[:3], expected[:3], rtol=5e-6)


def test_gram_matrices_of_the_factors_would_not_do():
    rows, columns = factors(16, 300, 40)
    squares = jnp.einsum("bsi,bti->bst", rows, rows) * jnp.einsum("bsi,bti->bst", columns, columns)
    naive = np.sqrt(np.maximum(np.asarray(squares, np.float64).sum((1, 2)), 0))
    expected = exact(rows, columns)
    assert np.any(naive < 0.99 * expected)


def test_norms_under_vmap_inside_a_loop():
    rows, columns = factors(16, 30, 40)

    def summed(rows, columns):
        def body(i, total):
            return total + outer_products.norms(rows, columns)

        return jax.lax.fori_loop(0, 3, body, jnp.zeros(9))

    pair = np.stack([rows, rows[::-1]]), np.stack([columns, columns[::-1]])
    norms = jax.jit(jax.vmap(summed))(*pair)
    expected = 3 * exact(rows, columns)
    scale = 3 * lengths(rows, columns)
    assert np.all(np.abs(norms[0] - expected) <= 1e-5 * expected + 3e-6 * scale)
    np.testing.assert_allclose(norms[1], norms[0][::-1], rtol=1e-5, atol=1e-6 * scale.max())


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_has_no_finite_norm(bad):
    rows, columns = factors(16, 30, 40)
    for spoiled in (0, 1):
        pair = [rows.copy(), columns.copy()]
        pair[spoiled][0, 3, 2] = bad
        norms = np.asarray(outer_products.norms(*pair))
        assert not np.isfinite(norms[0]) and np.all(np.isfinite(norms[1:]))


@pytest.mark.parametrize("shape", SHAPES)
def test_matrices_put_the_fewer_entries_first(shape):
    rows, columns = factors(*shape)
    matrices = outer_products.matrices(rows, columns)
    expected = np.einsum("bti,bto->bio", rows.astype(np.float64), columns.astype(np.float64))
    if shape[2] < shape[1]:
        expected = np.swapaxes(expected, 1, 2)
    scale = lengths(rows, columns)[:, None, None]
    assert np.all(np.abs(matrices - expected) <= 1e-6 * scale)


def test_matrices_of_few_rows_and_many_entries_are_not_formed():
    assert not outer_products.is_formed(1, 5, 5)
    assert outer_products.is_formed(196, 400, 32)
    assert outer_products.is_formed(1024, 576, 64)
    if jax.default_backend() == "cpu":
        assert not outer_products.is_formed(16, 4608, 512)
