"""Integers modulo 2^64 in four limbs of 16 bits, by Python's integers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import floats
from oracles.floats import nearest

from fedjax_dp.core import sums
from fedjax_dp.server.secure import fixed_point, masks, words

pytestmark = floats

Q = 2**64


def some_integers():
    """From -2^63 to 2^63 - 1: of all lengths, halfway between two floats, and just beside."""
    rng = np.random.default_rng(0)
    edges = [s * (2**e + d) for e in range(63) for d in (-1, 0, 1) for s in (1, -1)]
    plain = [int(rng.integers(2**63)) >> int(rng.integers(63)) for _ in range(1000)]
    halfway = [(2 * int(rng.integers(2**23, 2**24)) + 1) << e for e in range(39) for _ in range(9)]
    beside = [n + d for n in halfway for d in (-1, 0, 1)]
    signed = [s * n for n in plain + beside for s in (1, -1)]
    return [-(2**63), 2**63 - 1, *edges, *signed]


def limbs_of(integers):
    return np.array([[n % Q >> 16 * i & 0xFFFF for n in integers] for i in range(4)], np.uint32)


def integers_of(split):
    return [sum(int(limb) << 16 * i for i, limb in enumerate(column)) % Q for column in split.T]


def test_integers_are_rounded_once_to_floats_and_floats_are_integers_exactly():
    integers = some_integers()
    found = np.asarray(jax.jit(words.floats_of_limbs)(limbs_of(integers)))
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, np.array([float(nearest(n)) for n in integers]))
    whole = found[np.abs(found) < 2**63]
    split = np.asarray(jax.jit(words.limbs_of_floats)(whole))
    np.testing.assert_array_equal(split, limbs_of([int(x) for x in whole]))


def test_lines_are_added_and_subtracted_modulo_2_to_the_64_and_to_the_32():
    rng = np.random.default_rng(1)
    wide = [n % Q for n in some_integers()]
    other = [wide[i] for i in rng.permutation(len(wide))]
    narrow, more = rng.integers(2**32, size=(2, 5), dtype=np.uint32)

    def line(integers, array):
        return masks.flat({"a": array, "w": words.Words(limbs_of(integers), "float32", 64)})

    a, b = line(wide, narrow), line(other, more)
    back = masks.shaped(a, {"a": narrow, "w": words.Words(limbs_of(wide), "float32", 64)})
    np.testing.assert_array_equal(back["w"].values, limbs_of(wide))
    np.testing.assert_array_equal(back["a"], narrow)
    for sign, found in ((1, a + b), (-1, a - b)):
        found = masks.shaped(found, back)
        by_hand = [x + sign * y for x, y in zip(wide, other, strict=True)]
        np.testing.assert_array_equal(found["w"].values, limbs_of(by_hand))
        by_hand = [(int(x) + sign * int(y)) % 2**32 for x, y in zip(narrow, more, strict=True)]
        np.testing.assert_array_equal(found["a"], by_hand)


def test_each_half_of_a_word_has_a_word_of_the_stream_of_its_own():
    """No two are alike of 2^14, of which a pair is with probability 2^-5 if they are random."""
    line = masks.Line(*(jnp.zeros(n, jnp.uint32) for n in (2**13, 2**12, 2**12)))
    drawn = jnp.concatenate(jax.tree.leaves(masks.mask(jnp.uint32([1, 2]), line)))
    assert len(np.unique(drawn)) == len(drawn) == 2**14


@pytest.mark.parametrize("bits", [32, 64])
@pytest.mark.parametrize("count", [2, 3, 2**16 - 1, 2**16])
def test_the_largest_sums_do_not_overflow(count, bits):
    """All clients send the largest entry, or the smallest, or the last of the lattice below 0."""
    encoding = fixed_point(count, integer_bits=5, word_bits=bits)
    entries = np.array([32.0, -32.0, -encoding.resolution, encoding.resolution], np.float32)
    coded, was_cut = words.encode(encoding, entries, "nearest")
    each = jax.tree.map(lambda x: jnp.broadcast_to(x, (count, *x.shape)), coded)
    found = words.decode(encoding, sums.value(sums.over_first_axis(each)))
    assert not was_cut
    by_hand = [nearest(count * round(float(x) / encoding.resolution)) for x in entries]
    np.testing.assert_array_equal(np.float64(found) / encoding.resolution, by_hand)
    # One client more of the largest would be too many for the next finer lattice.
    assert 2 * count * 2 ** (5 + encoding.fraction_bits + 1) >= 2**bits


@pytest.mark.parametrize("rounding", ["nearest", "toward_zero"])
@pytest.mark.parametrize(
    ("integer_bits", "fraction_bits"), [(2, 8), (0, 40), (61, -20), (-62, 123), (30, 31), (61, -61)]
)
def test_floats_are_words_as_in_exact_arithmetic(integer_bits, fraction_bits, rounding):
    encoding = fixed_point(2, integer_bits=integer_bits, fraction_bits=fraction_bits, word_bits=64)
    rng = np.random.default_rng(2)
    x = rng.choice([-1, 1], 2000) * rng.uniform(1, 2, 2000)
    x = np.float32(np.ldexp(x, integer_bits - 1 - rng.integers(0, 63, 2000)))
    x[:4] = 2.0**integer_bits, -(2.0**integer_bits), 0.0, encoding.resolution / 2
    coded, was_cut = jax.jit(lambda x: words.encode(encoding, x, rounding))(x)
    assert not was_cut
    by_hand = np.rint if rounding == "nearest" else np.trunc
    exact = [int(n) for n in by_hand(np.ldexp(np.float64(x), fraction_bits))]
    assert integers_of(np.asarray(coded.values)) == [n % Q for n in exact]
    decoded = np.float64(words.decode(encoding, coded))
    np.testing.assert_array_equal(decoded, np.ldexp(np.float64(exact), -fraction_bits))
