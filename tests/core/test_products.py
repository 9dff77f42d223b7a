"""Split products against exact arithmetic, and on a model of units that truncate."""

import functools
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mpmath import mp, mpf

from fedjax_dp.core.products import (
    EXACT,
    SPLIT,
    Arithmetic,
    computed_with,
    outer_products,
    parts,
    rounding,
)
from fedjax_dp.models import outer_products as sites

SPLIT_PRODUCTS = Arithmetic("split")


def split(x):
    """The two parts, in float64."""
    return [np.asarray(part).astype(np.float64) for part in jax.jit(parts)(np.float32(x))]


@functools.cache
def significands():
    """Every float32 number in [1, 1 + 2^-4), and every eighth up to 2."""
    digits = np.r_[0 : 2**19, 2**19 : 2**23 : 8].astype(np.uint32)
    return (digits + np.uint32(127 << 23)).view(np.float32)


def test_every_number_is_its_two_parts_but_for_the_last_digits():
    x = significands()
    high, low = split(x)
    rest = x.astype(np.float64) - high - low
    assert np.all(np.abs(low) <= 2.0**-8) and np.abs(low).max() == 2.0**-8
    assert np.all(np.abs(rest) <= 2.0**-17 * x) and np.abs(rest).max() > 0.98 * 2.0**-17


@pytest.mark.parametrize("exponent", [-100, -60, 60, 126])
def test_parts_scale_with_their_number(exponent):
    x = significands()[:: 2**7]
    scaled = split(np.ldexp(x, exponent))
    for part, one in zip(scaled, split(x), strict=True):
        np.testing.assert_array_equal(part, np.ldexp(one, exponent))


def test_numbers_whose_parts_could_vanish_are_left_out():
    for part in split([0.0, 2.0**-101, -(2.0**-126), 2.0**-149]):
        np.testing.assert_array_equal(part, 0)


@functools.cache
def hard_numbers():
    """Numbers whose lower parts and rests are nearly as large as they can be, in both signs."""
    x = significands()
    high, low = split(x)
    rest = np.abs(x - high - low)
    hard = x[(np.abs(low) > 0.98 * 2.0**-8) & (rest > 0.98 * 2.0**-17) & (x < 1.02)]
    assert len(hard) > 10
    return hard


def test_the_error_of_a_product_is_within_its_bound_which_is_nearly_reached():
    rng = np.random.default_rng(0)
    ordinary = rng.normal(size=4000).astype(np.float32)
    worst = mpf(0)
    for x in (hard_numbers()[:100], ordinary):
        y = np.concatenate([x[1:], x[:1]])
        (a, b), (c, d) = split(x), split(y)
        with mp.workprec(200):
            for i in range(len(x)):
                exact = mpf(float(x[i])) * mpf(float(y[i]))
                found = sum(mpf(u) * mpf(v) for u, v in ((a[i], c[i]), (a[i], d[i]), (b[i], c[i])))
                worst = max(worst, abs(found - exact) / abs(exact))
    assert 0.95 * SPLIT.per_product < worst <= SPLIT.per_product


def truncated(x, unit):
    return np.trunc(x / unit) * unit


def unit_sum(a, b, width, digits=24):
    """Sums products as a unit for matrices may: `width` at once, truncated to the largest of them.

    Fasi and others 2021, section 3: products are exact, the products of a step and the sum so far
    are aligned to the largest exponent, and their digits beyond those of float32 are cut off.
    """
    terms, total = np.asarray(a, np.float64) * np.asarray(b, np.float64), 0.0
    for first in range(0, len(terms), width):
        summands = np.append(terms[first : first + width], total)
        largest = np.max(np.abs(summands))
        if largest == 0:
            continue
        unit = 2.0 ** (np.floor(np.log2(largest)) - digits + 1)
        total = np.sum(truncated(summands, unit))
        if total:
            total = truncated(total, 2.0 ** (np.floor(np.log2(abs(total))) - digits + 1))
    return total


def split_sum(x, y, width):
    (a, b), (c, d) = split(x), split(y)
    high = np.float32(unit_sum(a, c, width))
    return high + (np.float32(unit_sum(a, d, width)) + np.float32(unit_sum(b, c, width)))


def hostile_sums(n, rng):
    hard = hard_numbers()
    lost = np.float32([1, *[2.0**-12 * 1.4] * (n - 1)])
    yield "lost digits", lost, lost
    yield "large parts", rng.choice(hard, n), rng.choice(hard, n)
    yield "both signs", rng.choice(hard, n), rng.choice([-1, 1], n) * rng.choice(hard, n)
    yield "ordinary", *np.float32(rng.normal(size=(2, n)))
    yield "growing", np.float32(2.0 ** rng.uniform(-20, 20, n)), rng.choice(hard, n)


def relative_error(found, x, y):
    exact = sum(Fraction(float(a)) * Fraction(float(b)) for a, b in zip(x, y, strict=True))
    scale = sum(abs(Fraction(float(a)) * Fraction(float(b))) for a, b in zip(x, y, strict=True))
    return float(abs(Fraction(float(found)) - exact) / scale)


@pytest.mark.parametrize("width", [1, 4, 16])
@pytest.mark.parametrize("n", [1, 7, 34])
def test_sums_of_units_that_truncate_are_within_the_bound(width, n):
    rng = np.random.default_rng([n, width])
    errors = {
        name: relative_error(split_sum(x, y, width), x, y)
        for _ in range(4)
        for name, x, y in hostile_sums(n, rng)
    }
    assert max(errors.values()) <= n * SPLIT.per_addition + SPLIT.per_product
    # The bound of exact products would not hold: it has to be a wider one.
    assert max(errors.values()) > n * EXACT.per_addition + EXACT.per_product
    # Nor would the one of an addition do, on units that cut off what a large number hides.
    if (n, width) == (34, 1):
        lost = unit_sum([1.0, *[2.0**-23 * 0.99] * 33], [1.0] * 34, 1)
        assert 1 + 33 * 0.99 * 2.0**-23 - lost > 33 * EXACT.per_addition


@pytest.mark.parametrize("size", [1, 34])
def test_sums_of_outer_products_are_within_the_bound_on_this_backend(size):
    rng = np.random.default_rng(size)
    hard = hard_numbers()
    rows = rng.choice(hard, (size, 1, 40)) * rng.choice([-1, 1], (size, 1, 40))
    columns = rng.choice(hard, (size, 1, 30)) * np.float32(2.0) ** rng.integers(-9, 9, (size, 1, 1))
    rows, columns = rows.astype(np.float32), columns.astype(np.float32)
    exact = np.einsum("bti,bto->io", rows.astype(np.float64), columns.astype(np.float64))
    scale = np.einsum("bti,bto->io", np.abs(rows.astype(np.float64)), np.abs(columns))
    with computed_with(SPLIT_PRODUCTS):
        found = np.asarray(jax.jit(lambda *a: outer_products(*a))(rows, columns), np.float64)
        bound = size * rounding().per_addition + rounding().per_product
    error = np.abs(found - exact) / scale
    assert np.all(error <= bound)
    # They were split.
    assert error.max() > size * EXACT.per_addition


def test_blocks_of_split_products_are_so_small_that_their_error_is_within_the_margin():
    """The whole bound, in exact arithmetic: the record's own products, and both sums' errors."""

    def moved(size, how):
        (addition, product), u = how, Fraction(1, 2**24)
        of_sum = [n * (n * Fraction(addition) + 2 * u * (how is SPLIT)) for n in (size, size - 1)]
        return Fraction(product) + sum(of_sum)

    most = Fraction(87, 100_000)
    exact_size = sites.block_size(1)
    with computed_with(SPLIT_PRODUCTS):
        size = sites.block_size(1)
        assert not sites.is_formed(1, 10, 10) and sites.is_formed(2, 10, 10)
    assert moved(size, SPLIT) <= most and moved(exact_size, EXACT) <= most
    # With the blocks of exact products the margin would not hold.
    assert moved(exact_size, SPLIT) > most
    assert SPLIT.per_addition >= 1.0156 * (2.0**-22 + 2 * 2.0**-24)


def test_three_sums_have_terms_of_little_more_than_those_of_one():
    """(1 + 2^-8)² and twice (1 + 2^-8) 2^-8, with growth of 34 roundings, is below 1.02."""
    e = Fraction(1, 2**8)
    terms = (1 + e) ** 2 + 2 * (1 + e) * e
    assert terms * (1 + 34 * Fraction(1, 2**22)) < Fraction(102, 100)


def test_products_are_exact_unless_asked():
    rows, columns = jnp.ones((3, 1, 4)), jnp.ones((3, 1, 5))
    text = str(jax.make_jaxpr(outer_products)(rows, columns))
    assert "bf16" not in text and rounding() == EXACT
    with computed_with(SPLIT_PRODUCTS):
        text = str(jax.make_jaxpr(lambda *a: outer_products(*a))(rows, columns))
    assert text.count("dot_general[") == 3 and "bf16" in text
