"""Random numbers of noise, drawn so that their tails reach as far as their accounting needs.

Noise that ends early gives a unit away: what one neighbour releases may lie where the other never
goes. The draws of a numeric library end where its uniform numbers do, at 2^-23.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from chex import PRNGKey
from jax.extend.random import threefry_2x32

_SIGN = np.uint32(1 << 31)


def bits(key: PRNGKey, shape: tuple[int, ...]) -> jax.Array:
    """Draws 32 random bits for each entry.

    A block of the Threefry cipher gives two words. `jax.random.bits` throws half of them away, so
    that arrays that are spread over devices need no words of each other; noise is drawn where it is
    added, and drawing it is what it costs. Keys of other kinds are left to `jax.random`.

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
    words = threefry_2x32(jax.random.key_data(key), jnp.arange(size, dtype=jnp.uint32))
    return words.reshape(shape)


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
    # The lower tail is where float32 numbers lie close together.
    tail = ((words & ~_SIGN).astype(jnp.float32) + 0.5) * 2.0**-32
    far = jax.scipy.special.ndtri(tail)
    return jnp.where(words < _SIGN, far, -far)


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
