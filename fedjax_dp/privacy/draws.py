"""Random numbers of noise, drawn so that their tails reach as far as their accounting needs.

Noise that ends early gives a unit away: what one neighbour releases may lie where the other never
goes. The draws of a numeric library end where its uniform numbers do, at 2^-23.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from chex import PRNGKey

from fedjax_dp.core import keys

_SIGN = np.uint32(1 << 31)
# XLA's CPU backend divides a loop among cores and vectors where its length divides well, and is ten
# times slower where it does not: large draws are rounded up to a multiple.
_MULTIPLE = 2048
_LARGE = 64 * _MULTIPLE
# Threefry-2x32 of 20 rounds: how far a word is rotated in each, and what the third key word is
# made with (Salmon and others 2011, table 2 and section 3.3).
_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24)) * 2 + ((13, 15, 26, 6),)
_PARITY = np.uint32(0x1BD11BDA)
# The quantile z(p) of the upper tail, over 1 − 2p, as polynomials in w = −log(4p(1 − p)) and its
# root: for small w about 2.5, for large w about 3.4358, up to w of the smallest p that 32 bits
# give. Fitted to least largest relative error (9e-8) on 4,000 Chebyshev nodes; in the form that
# Giles 2012, "Approximating the erfinv function", chose for processors that compute side by side.
_SPLIT = 5.0
_CENTRES = (2.5, 3.4357679)
_NEAR = (
    0.0,
    4.0354635e-08,
    4.8610394e-07,
    -4.9905652e-06,
    -6.2179929e-06,
    3.0915020e-04,
    -1.7730101e-03,
    -5.9081712e-03,
    3.4880266e-01,
    2.1233137e00,
)
_FAR = (
    6.4026310e-05,
    -3.5509186e-06,
    -4.6460069e-04,
    9.0792472e-04,
    -1.1588068e-03,
    1.8246981e-03,
    -3.3795391e-03,
    5.2497396e-03,
    1.4240035e00,
    4.6256013e00,
)


def bits(key: PRNGKey, shape: tuple[int, ...]) -> jax.Array:
    """Draws 32 random bits for each entry.

    A block of the Threefry cipher gives two words. `jax.random.bits` throws half of them away, so
    that arrays that are spread over devices need no words of each other, and on a CPU runs the
    rounds as a loop over memory, so that it compiles fast. Noise is drawn where it is added, and
    drawing it is what it costs: here both words are used, and all rounds are one pass. The words
    are those of `jax.extend.random.threefry_2x32`, of the rounded length where it is rounded. Keys
    of other kinds are left to `jax.random`.

    Args:
      key: used for this draw and nothing else.
      shape: of the result.

    Returns:
      uint32.

    Source: Salmon and others 2011, "Parallel Random Numbers: As Easy as 1, 2, 3".
    """
    size = math.prod(shape)
    if size == 0 or "threefry" not in str(jax.random.key_impl(key)):
        return jax.random.bits(key, shape, jnp.uint32)
    half = _rounded(size) // 2
    words = _threefry(jax.random.key_data(key), jnp.arange(half, dtype=jnp.uint32), half)
    return jnp.concatenate(words)[:size].reshape(shape)


def _rounded(size: int) -> int:
    multiple = _MULTIPLE if size > 16 * _MULTIPLE else 2
    return -(-size // multiple) * multiple


def _threefry(key: jax.Array, first: jax.Array, offset: int) -> tuple[jax.Array, jax.Array]:
    """Encrypts the pairs of words `(first, first + offset)`."""
    schedule = (key[0], key[1], key[0] ^ key[1] ^ _PARITY)
    a, b = first + schedule[0], first + np.uint32(offset) + schedule[1]
    for i, rotations in enumerate(_ROTATIONS, 1):
        for r in rotations:
            a = a + b
            b = a ^ ((b << np.uint32(r)) | (b >> np.uint32(32 - r)))
        a, b = a + schedule[i % 3], b + schedule[(i + 1) % 3] + np.uint32(i)
    return a, b


def normal(key: PRNGKey, shape: tuple[int, ...], dtype: Any = jnp.float32) -> jax.Array:
    """Draws standard normal numbers from 32 random bits each: a sign, and 31 bits of the tail.

    They reach 6.33 standard deviations, beyond which one in 4·10⁹ true draws lies.

    Args:
      key: used for this draw and nothing else.
      shape: of the result.
      dtype: of the result, float32 or better.

    Returns:
      The numbers.
    """
    return normal_of(bits(key, shape)).astype(dtype)


def normal_of(words: jax.Array) -> jax.Array:
    """Turns random bits into standard normal numbers by the inverse of their distribution.

    Args:
      words: uint32, any shape.

    Returns:
      The numbers, float32.
    """
    # The tail is where float32 numbers lie close together.
    tail = ((words & ~_SIGN).astype(jnp.float32) + 0.5) * 2.0**-32
    w = -jnp.log(4 * tail * (1 - tail))
    is_near = w < _SPLIT
    t = jnp.where(is_near, w - _CENTRES[0], jnp.sqrt(w) - _CENTRES[1])
    value = jnp.zeros_like(t)
    for near, far in zip(_NEAR, _FAR, strict=True):
        value = value * t + jnp.where(is_near, np.float32(near), np.float32(far))
    value = value * (1 - 2 * tail)
    return jnp.where(words < _SIGN, -value, value)


def like(key: PRNGKey, leaves: Sequence[Any], sampler: Callable[..., jax.Array]) -> list[jax.Array]:
    """Draws numbers of the shapes of some arrays.

    Small arrays are parts of one draw, which compiles once; large ones have a draw each, which is
    cut only where its length divides badly.

    Args:
      key: used for this draw and nothing else.
      leaves: arrays, or what has their shapes.
      sampler: one of this module.

    Returns:
      The numbers, float32.
    """
    shapes = [jnp.shape(leaf) for leaf in leaves]
    sizes = [math.prod(shape) for shape in shapes]
    pool = sum(size for size in sizes if size <= _LARGE)
    # The barrier keeps the draw apart from its parts, whose lengths divide as they may.
    row = jax.lax.optimization_barrier(sampler(keys.fold(key, 0), (_rounded(pool),)))
    numbers, first = [], 0
    for index, (shape, size) in enumerate(zip(shapes, sizes, strict=True), 1):
        if size > _LARGE and _rounded(size) == size:
            numbers.append(sampler(keys.fold(key, index), shape))
        elif size > _LARGE:
            own = jax.lax.optimization_barrier(sampler(keys.fold(key, index), (_rounded(size),)))
            numbers.append(own[:size].reshape(shape))
        else:
            numbers.append(row[first : first + size].reshape(shape))
            first += size
    return numbers


def complements(key: PRNGKey, shape: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    """Draws a uniform number and what it lacks to 1, each exact to rounding however small it is.

    Args:
      key: used for this draw and nothing else.
      shape: of the results.

    Returns:
      `(u, 1 − u)`, float32, each at least 2^-65.
    """
    high, low = bits(key, (2, *shape))

    def number(high: jax.Array, low: jax.Array) -> jax.Array:
        fine = (low.astype(jnp.float32) + 0.5) * 2.0**-64
        return jnp.minimum(high.astype(jnp.float32) * 2.0**-32 + fine, 1.0)

    return number(high, low), number(~high, ~low)


def exponential(key: PRNGKey, shape: tuple[int, ...], dtype: Any = jnp.float32) -> jax.Array:
    """Draws exponential numbers of mean 1; they reach 45.

    Args:
      key: used for this draw and nothing else.
      shape: of the result.
      dtype: of the result, float32 or better.

    Returns:
      The numbers, above 0.
    """
    small, rest = complements(key, shape)
    return jnp.where(small < 0.5, -jnp.log(small), -jnp.log1p(-rest)).astype(dtype)


def laplace(key: PRNGKey, shape: tuple[int, ...], dtype: Any = jnp.float32) -> jax.Array:
    """Draws Laplace numbers of scale 1; they reach 45.

    Args:
      key: used for this draw and nothing else.
      shape: of the result.
      dtype: of the result, float32 or better.

    Returns:
      The numbers.
    """
    sign_key, size_key = jax.random.split(key)
    sign = jax.random.rademacher(sign_key, shape, jnp.float32)
    return (sign * exponential(size_key, shape)).astype(dtype)


def gumbel(key: PRNGKey, shape: tuple[int, ...], dtype: Any = jnp.float32) -> jax.Array:
    """Draws Gumbel numbers of scale 1; they reach from −3.8 to 45.

    Args:
      key: used for this draw and nothing else.
      shape: of the result.
      dtype: of the result, float32 or better.

    Returns:
      The numbers.
    """
    return -jnp.log(exponential(key, shape)).astype(dtype)
