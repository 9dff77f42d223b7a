"""Running sums against float64, in every order, and where plain sums go astray."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import floats, telling

from fedjax_dp.core import sums
from fedjax_dp.core.backend import traced_for


def _one_by_one(x):
    def body(i, total):
        return sums.add(total, x[i])

    return jax.lax.fori_loop(0, len(x), body, sums.zeros_like(x[0]))


def _in_parts(x):
    return sums.merge(_one_by_one(x[: len(x) // 3]), _one_by_one(x[len(x) // 3 :]))


@pytest.mark.parametrize("size", [1, 84, 85, 86, 170, 1001])
def test_long_sums_err_by_their_largest_block(size):
    x = np.random.default_rng(0).normal(size=(size, 7)).astype(np.float32)
    found = np.asarray(jax.jit(lambda x: sums.value(sums.over_first_axis(x)))(x), np.float64)
    exact = x.astype(np.float64).sum(0)
    assert np.all(np.abs(found - exact) <= 4.4e-4 * np.abs(x).max() + 6e-8 * np.abs(exact))


@telling
def test_blocks_of_accelerators_leave_nothing_over_where_they_are_large():
    """As they are computed for accelerators, here by this machine."""
    blocks = {50: 50, 85: 85, 86: 43, 101: 85, 1020: 85, 1024: 64}
    with traced_for("gpu"):
        assert {count: sums._block(count) for count in blocks} == blocks
        for count in blocks:
            test_long_sums_err_by_their_largest_block(count)


@pytest.mark.parametrize("way", [_one_by_one, _in_parts])
def test_what_roundings_lose_is_kept(way):
    x = np.random.default_rng(0).normal(size=(1001, 7)).astype(np.float32) * 1e3
    x[0], x[-1] = 1e9, -1e9
    exact = x.astype(np.float64).sum(0)
    found = np.asarray(jax.jit(lambda x: sums.value(way(x)))(x), np.float64)
    np.testing.assert_allclose(found, exact, rtol=1e-6)
    assert np.abs(np.asarray(jnp.sum(x, 0)) - exact).max() > 1e-4 * np.abs(exact).max()


@pytest.mark.parametrize("way", [_one_by_one, _in_parts])
def test_running_sums_have_the_bits_of_accelerators(way):
    """There their parts are two arrays; both are computed by this machine."""
    x = np.random.default_rng(1).normal(size=(301, 5)).astype(np.float32)
    x *= 10.0 ** np.arange(-40, 40, 16, dtype=np.float32)
    x[7, :3] = np.inf, np.nan, -np.inf

    def parts(x):
        return sums.parts(way(x))

    ours = jax.jit(parts)(x)
    with traced_for("gpu"):
        theirs = jax.jit(lambda x: parts(x))(x)
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(one, other)


@floats
def test_what_is_added_is_rounded_before():
    """A compiler that fuses a product into one of several passes does not round it there."""
    rng = np.random.default_rng(2)
    x = rng.normal(size=(20, 4096)).astype(np.float32)
    weights = rng.uniform(0.1, 1, 20).astype(np.float32)

    @jax.jit
    def added(x, weights, counts, num):
        def body(i, total):
            weighed = jnp.where(counts[i], weights[i] * x[i], 0.0)
            return sums.merge(total, sums.over_first_axis(weighed[None]))

        return sums.parts(jax.lax.fori_loop(0, num, body, sums.zeros_like(x[0])))

    parts = added(x, weights, np.ones(20, bool), 20)
    found = sum(np.asarray(part, np.float64) for part in parts)
    exact = np.sum(weights[:, None] * x, axis=0, dtype=np.float64)
    assert np.all(np.abs(found - exact) <= 20 * 2.0**-47 * np.sum(np.abs(x), axis=0))


def test_a_cpu_adds_in_one_pass():
    """Its compiler fuses nothing that has two results."""

    x = jnp.zeros(4096)
    program = jax.jit(sums.add).lower(sums.zeros_like(x), x).compile().as_text()
    assert program.count("[4096]{0} fusion(") == 1


def test_a_number_moves_a_long_sum_by_itself():
    """Plain sums of numbers just past a power of two round all that follow otherwise."""
    x = np.full(30_000, 2.0**-10 * (0.5 + 1e-4), np.float32)
    x[0] = 2.0**13 - 16
    without = x.copy()
    x[1], without[1] = 16, 0

    @jax.jit
    def both(x):
        plain = jax.lax.fori_loop(0, len(x), lambda i, total: total + x[i], jnp.float32(0))
        return plain, sums.value(_one_by_one(x))

    pairs = zip(both(x), both(without), strict=True)
    plain, ours = (float(a) - float(b) for a, b in pairs)
    assert abs(plain - 16) > 10
    assert abs(ours - 16) <= 2.0**-9


def test_whole_numbers_wrap_around_as_they_do():
    x = np.array([[2**31 - 1, 5], [1, 7]], np.int32)
    total = sums.value(sums.add(sums.over_first_axis(x), jnp.array([0, 1], jnp.int32)))
    np.testing.assert_array_equal(total, np.array([-(2**31), 13], np.int32))
    assert total.dtype == jnp.int32
