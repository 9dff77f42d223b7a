"""Integers modulo 2^64 on devices without such a type: limbs of 16 bits that can be added up."""

import jax
import jax.numpy as jnp

from fedjax_dp.core import checks

# The most integers in one sum of limbs: 2^16 (2^16 - 1) and a carry are below 2^32.
MOST = 2**16
_BITS, _MASK = 16, 2**16 - 1


def check_words(argument: str, word_bits: int, num_clients: int) -> None:
    """Refuses words of 64 bits that too many clients would send."""
    rule = f"be 32 for rounds of {num_clients} clients, more than {MOST}"
    checks.require(word_bits == 32 or num_clients <= MOST, argument, rule, word_bits)


def split(low: jax.Array, high: jax.Array) -> jax.Array:
    """Splits integers, given as two halves of 32 bits, into limbs, `[4, ...]`, the lowest first."""
    return jnp.stack([low & _MASK, low >> _BITS, high & _MASK, high >> _BITS])


def joined(limbs: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Joins limbs, or sums of at most `MOST` limbs, to two halves, modulo 2^64."""
    second = limbs[1] + (limbs[0] >> _BITS)
    third = limbs[2] + (second >> _BITS)
    fourth = limbs[3] + (third >> _BITS)
    return (limbs[0] & _MASK) | (second << _BITS), (third & _MASK) | (fourth << _BITS)


def of_floats(x: jax.Array) -> jax.Array:
    """Splits whole numbers in float32, below 2^63 in absolute value, exactly."""
    size = jnp.abs(x)
    high = jnp.floor(size * 2.0**-32)
    low = (size - high * 2.0**32).astype(jnp.uint32)
    return split(*_negated_if(x < 0, low, high.astype(jnp.uint32)))


def to_floats(limbs: jax.Array) -> jax.Array:
    """Converts sums of limbs, from -2^63 to 2^63 - 1, to float32, rounded once to nearest even."""
    low, high = joined(limbs)
    is_negative = high >> 31 == 1
    low, high = _negated_if(is_negative, low, high)
    # The 32 bits from the first 1 on. To round them to 24, it matters of the bits that follow only
    # whether any is 1: the last of the 32 is then 1.
    shift = jnp.minimum(jax.lax.clz(high), 31)
    top = (high << shift) | (low >> 1 >> (31 - shift))
    top |= (low << shift != 0).astype(jnp.uint32)
    power = jax.lax.bitcast_convert_type((127 + 32 - shift) << 23, jnp.float32)
    size = jnp.where(high == 0, low.astype(jnp.float32), top.astype(jnp.float32) * power)
    return jnp.where(is_negative, -size, size)


def _negated_if(
    condition: jax.Array, low: jax.Array, high: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Takes the negative modulo 2^64 where a condition holds."""
    negative = ~high + (low == 0).astype(high.dtype)
    return jnp.where(condition, -low, low), jnp.where(condition, negative, high)
