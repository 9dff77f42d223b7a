"""Random numbers for noise, with tails that reach as far as the accounting needs.

Noise that ends early reveals a unit: one neighbour may release values that the other never does.
The draws of numeric libraries end where their uniform numbers do, at 2^-23.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from chex import PRNGKey

from fedjax_dp.core import keys
from fedjax_dp.core.backend import backend

_SIGN = np.uint32(1 << 31)
# XLA's CPU backend divides a loop among cores and vectors if its length divides well, and is ten
# times slower if not: large draws are rounded up to a multiple.
_MULTIPLE = 2048
_LARGE = 64 * _MULTIPLE
# Threefry-2x32 of 20 rounds: how far a word is rotated in each, and what the third key word is
# made with (Salmon and others 2011, table 2 and section 3.3).
_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24)) * 2 + ((13, 15, 26, 6),)
_PARITY = np.uint32(0x1BD11BDA)
# How many 32-bit words continue the tail if all bits of the number are zero.
_FURTHER_WORDS = 8
# The quantile z(p) of the upper tail, over 1 − 2p, as polynomials in w = −log(4p(1 − p)) and its
# root: for small w about 3.25, for large w about 4.5383, up to w of the second smallest p that 63
# bits give. Fitted to minimal maximal relative error (6e-9 and 5e-8) on 4,000 Chebyshev nodes; in
# the form that Giles 2012, "Approximating the erfinv function", chose for processors that compute
# side by side.
_SPLIT = 6.5
_CENTRES = (3.25, 4.5383251)
_NEAR = (
    9.0579123e-10,
    -5.4147909e-09,
    -4.1031553e-08,
    5.6488389e-07,
    -1.4568787e-06,
    -2.0926433e-05,
    2.5147582e-04,
    -9.1854758e-04,
    -8.9014172e-03,
    3.3745464e-01,
    2.3809398e00,
)
_FAR = (
    8.0912593e-07,
    -3.7064510e-06,
    2.9549615e-06,
    4.4094334e-06,
    9.7199177e-06,
    -6.7993675e-05,
    2.0424812e-04,
    -5.6849185e-04,
    3.9272159e-04,
    1.4287161e00,
    6.1991650e00,
)


def blocks(key: PRNGKey, shape: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    """Draws 64 random bits for each entry, as two words, of fewer than 2^32 entries.

    Each entry gets a whole block of the Threefry cipher, the words of the counter (i, 0): sharing
    its two words among two entries, as libraries do, computes it twice or spoils the one pass in
    which bits become numbers. All rounds are one pass, where `jax.random.bits`, on a CPU, runs a
    loop over memory: drawing is the main cost of noise. Keys of other kinds are refused.

    Source: Salmon and others 2011.
    """
    keys.require_stated(key)
    size = math.prod(shape)
    if size == 0:
        return jnp.zeros(shape, jnp.uint32), jnp.zeros(shape, jnp.uint32)
    counts = jnp.arange(_rounded(size), dtype=jnp.uint32)
    first, second = _threefry(jax.random.key_data(key), counts)
    return first[:size].reshape(shape), second[:size].reshape(shape)


def _rounded(size: int) -> int:
    return -(-size // _MULTIPLE) * _MULTIPLE if size > 16 * _MULTIPLE else size


def _threefry(key: jax.Array, counts: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Encrypts the pairs of words `(counts, 0)`."""
    schedule = (key[0], key[1], key[0] ^ key[1] ^ _PARITY)
    a, b = counts + schedule[0], schedule[1]
    for i, rotations in enumerate(_ROTATIONS, 1):
        for r in rotations:
            a = a + b
            b = a ^ ((b << np.uint32(r)) | (b >> np.uint32(32 - r)))
        a, b = a + schedule[i % 3], b + schedule[(i + 1) % 3] + np.uint32(i)
    return a, b


def normal(key: PRNGKey, shape: tuple[int, ...]) -> jax.Array:
    """Draws standard normal numbers from 63 random bits each: a sign, and 62 bits of the tail.

    If all 62 are zero, as once in 4.6·10¹⁸ numbers, the tail continues with 248 bits more, to 20.6
    standard deviations. Those are drawn once a call: two numbers of a call of n that both need them
    are equal in size, with probability n²·2^-125.
    """
    further = jnp.concatenate(blocks(keys.fold(key, 1), (_FURTHER_WORDS // 2,)))
    return normal_of(*blocks(key, shape), further)


def normal_of(first: jax.Array, second: jax.Array, further: jax.Array) -> jax.Array:
    """Turns random bits into standard normal numbers by the inverse of their distribution.

    `first` holds the sign and the 31 most significant bits of the tail, `second` the next 31 bits,
    its last bit is not read; `further` is `[words]` of 31 bits each, read if all before are zero.
    """
    upper, lower = first & ~_SIGN, second >> 1
    # Numbers are dense in the tail and at zero: each is measured from its own end.
    tail = _fixed_point(upper, lower) * 2.0**-32
    centre = (_signed(upper ^ ~_SIGN) + 0.5) * 2.0**-31
    w = -jnp.log(4 * tail * (1 - tail))
    is_near = w < _SPLIT
    t = jnp.where(is_near, w - _CENTRES[0], jnp.sqrt(w) - _CENTRES[1])
    value = jnp.zeros_like(t)
    for near, far in zip(_NEAR, _FAR, strict=True):
        value = value * t + jnp.where(is_near, np.float32(near), np.float32(far))
    value = jnp.where((upper | lower) == 0, _beyond(further >> 1), value * centre)
    return jnp.where(first < _SIGN, -value, value)


def _beyond(words: jax.Array) -> jax.Array:
    """Computes the quantile of 2^-63 times the number in (0, 1) that 31-bit words make up."""
    is_last = jnp.arange(words.shape[0]) == words.shape[0] - 1
    place = jnp.argmax((words != 0) | is_last)
    after = jnp.where(is_last, np.uint32(1 << 30), jnp.roll(words, -1))
    bits = (94 + 31 * place).astype(jnp.float32)
    depth = bits * math.log(2) - jnp.log(_fixed_point(words[place], after[place]))
    # Solves −log Φ(−z) = depth with the tail's asymptotic series, whose first term left out is
    # 2e-7 at z = 9; a step leaves an error of 1/z² < 0.013 of the one before.
    z = jnp.sqrt(2 * depth)
    for _ in range(4):
        y = 1 / (z * z)
        series = jnp.log1p(-y * (1 - 3 * y * (1 - 5 * y * (1 - 7 * y))))
        z = jnp.sqrt(2 * (depth - jnp.log(z * math.sqrt(2 * math.pi)) + series))
    return z


def _fixed_point(whole: jax.Array, fraction: jax.Array) -> jax.Array:
    """Reads two words of 31 bits as a number, in the middle of the interval that they determine."""
    return _signed(whole) + (_signed(fraction) + 0.5) * 2.0**-31


def _signed(words: jax.Array) -> jax.Array:
    """Makes numbers of words below 2^31; processors are slower if words may be larger."""
    return words.astype(jnp.int32).astype(jnp.float32)


def like(key: PRNGKey, leaves: Sequence[Any], sampler: Callable[..., jax.Array]) -> list[jax.Array]:
    """Draws float32 numbers shaped as some arrays; small ones share a draw, which compiles once."""
    shapes = [jnp.shape(leaf) for leaf in leaves]
    sizes = [math.prod(shape) for shape in shapes]
    pool = sum(size for size in sizes if size <= _LARGE)
    # The barrier keeps the draw apart from its parts, whose lengths divide as they may.
    row = jax.lax.optimization_barrier(sampler(keys.fold(key, 0), (_rounded(pool),)))
    numbers, first = [], 0
    # A compiler for GPUs that has an array in another layout would transpose the terms of a draw,
    # each on its way to memory, and not the draw.
    is_apart = backend() == "gpu"
    for index, (shape, size) in enumerate(zip(shapes, sizes, strict=True), 1):
        if size > _LARGE and _rounded(size) == size and not is_apart:
            numbers.append(sampler(keys.fold(key, index), shape))
        elif size > _LARGE:
            drawn = jax.lax.optimization_barrier(sampler(keys.fold(key, index), (_rounded(size),)))
            numbers.append(drawn[:size].reshape(shape))
        else:
            numbers.append(row[first : first + size].reshape(shape))
            first += size
    return numbers


def complements(key: PRNGKey, shape: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    """Draws u and 1 − u of 64 bits, exact however small; 32 more follow, drawn once a call."""
    high, low = blocks(key, shape)
    further = (blocks(keys.fold(key, 1), ())[0].astype(jnp.float32) + 0.5) * 2.0**-96

    def number(high: jax.Array, low: jax.Array) -> jax.Array:
        fine = (low.astype(jnp.float32) + 0.5) * 2.0**-64
        both = jnp.minimum(high.astype(jnp.float32) * 2.0**-32 + fine, 1.0)
        return jnp.where((high | low) == 0, further, both)

    return number(high, low), number(~high, ~low)


def exponential(key: PRNGKey, shape: tuple[int, ...]) -> jax.Array:
    """Draws exponential numbers of mean 1, above 0; they reach 67."""
    small, rest = complements(key, shape)
    return jnp.where(small < 0.5, -jnp.log(small), -jnp.log1p(-rest))


def laplace(key: PRNGKey, shape: tuple[int, ...]) -> jax.Array:
    """Draws Laplace numbers of scale 1; they reach 67."""
    sign_key, size_key = jax.random.split(key)
    sign = jax.random.rademacher(sign_key, shape, jnp.float32)
    return sign * exponential(size_key, shape)


def gumbel(key: PRNGKey, shape: tuple[int, ...]) -> jax.Array:
    """Draws Gumbel numbers of scale 1; they reach from −4.2 to 67."""
    return -jnp.log(exponential(key, shape))
