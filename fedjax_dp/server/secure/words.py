"""Contributions as words modulo 2^32 or 2^64, these in limbs of 16 bits, in compiled rounds."""

from typing import Any, Literal, get_args

import flax.struct
import jax
import jax.numpy as jnp

from fedjax_dp.core import checks
from fedjax_dp.core.trees import PyTree
from fedjax_dp.server.fixed_point import FixedPoint

Rounding = Literal["nearest", "toward_zero"]
# The most integers in one sum of limbs: 2^16 (2^16 - 1) and a carry are below 2^32.
MOST_IN_SUM = 2**16
_LIMB, _MASK = 16, 2**16 - 1


@flax.struct.dataclass
class Words:
    """One array as unsigned words and the type that it had; the engine adds uint32 modulo 2^32."""

    # As uint32; of words of 64 bits four limbs of 16 bits, `[4, ...]`, the lowest first, whose sums
    # hold the carries too.
    values: jax.Array
    # Name of the type that a sum is decoded to, static.
    dtype: str = flax.struct.field(pytree_node=False)
    bits: int = flax.struct.field(pytree_node=False, default=32)  # Of a word, static.


def encode(encoding: FixedPoint, tree: PyTree, rounding: Rounding) -> tuple[PyTree, jax.Array]:
    """Encodes the arrays of a tree; also returns whether some entry was cut to the range.

    Integers of at most 32 bits are words as they are, and their sums are modulo 2^32, whatever the
    words of floats. NaN becomes zero and counts as out of range.
    """
    checks.one_of("rounding", rounding, get_args(Rounding))
    flags = [jnp.bool_(False)]

    def one(x: Any) -> Words:
        x = jnp.asarray(x)
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return Words(_of_integers(x), _integer_type(x.dtype))
        x = x.astype(jnp.float32)
        flags.append(~jnp.all(jnp.abs(x) <= encoding.largest))
        x = jnp.clip(jnp.where(jnp.isnan(x), 0.0, x), -encoding.largest, encoding.largest)
        scaled = x * 2.0**encoding.fraction_bits
        rounded = jnp.round(scaled) if rounding == "nearest" else jnp.trunc(scaled)
        if encoding.word_bits == 64:
            return Words(limbs_of_floats(rounded), "float32", 64)
        return Words(rounded.astype(jnp.int32).astype(jnp.uint32), "float32")

    words = jax.tree.map(one, tree)
    return words, jnp.any(jnp.stack(flags))


def decode(encoding: FixedPoint, words: PyTree) -> PyTree:
    """Decodes sums of words: floats rounded once to float32, integers with their sign."""

    def one(word: Words) -> jax.Array:
        if word.bits == 64:
            return floats_of_limbs(word.values) * encoding.resolution
        if word.dtype == "uint32":
            return word.values
        centred = word.values.astype(jnp.int32)
        if word.dtype == "int32":
            return centred
        return centred.astype(jnp.float32) * encoding.resolution

    return jax.tree.map(one, words, is_leaf=is_words)


def is_words(x: Any) -> bool:
    """Checks for a node of words."""
    return isinstance(x, Words)


def bits_of(encoding: FixedPoint, dtype: Any) -> int:
    """Returns the bits of the words that an array of this type becomes."""
    return encoding.word_bits if jnp.issubdtype(dtype, jnp.floating) else 32


def _integer_type(dtype: Any) -> str:
    return "uint32" if jnp.issubdtype(dtype, jnp.unsignedinteger) else "int32"


def _of_integers(x: jax.Array) -> jax.Array:
    is_narrow = x.dtype == jnp.bool_ or (
        jnp.issubdtype(x.dtype, jnp.integer) and x.dtype.itemsize <= 4
    )
    rule = "have leaves of floats, or of integers of at most 32 bits"
    checks.require(is_narrow, "contributions", rule, str(x.dtype))
    # Through int32, so that a negative number of few bits keeps its sign modulo 2^32.
    if jnp.issubdtype(x.dtype, jnp.signedinteger):
        x = x.astype(jnp.int32)
    return x.astype(jnp.uint32)


def check_words(argument: str, word_bits: int, num_clients: int) -> None:
    """Refuses words of 64 bits that too many clients would send."""
    rule = f"be 32 for rounds of {num_clients} clients, more than {MOST_IN_SUM}"
    checks.require(word_bits == 32 or num_clients <= MOST_IN_SUM, argument, rule, word_bits)


def split_limbs(low: jax.Array, high: jax.Array) -> jax.Array:
    """Splits integers, given as two halves of 32 bits, into limbs, `[4, ...]`, the lowest first."""
    return jnp.stack([low & _MASK, low >> _LIMB, high & _MASK, high >> _LIMB])


def joined_limbs(limbs: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Joins limbs, or sums of at most `MOST_IN_SUM` limbs, to two halves, modulo 2^64."""
    second = limbs[1] + (limbs[0] >> _LIMB)
    third = limbs[2] + (second >> _LIMB)
    fourth = limbs[3] + (third >> _LIMB)
    return (limbs[0] & _MASK) | (second << _LIMB), (third & _MASK) | (fourth << _LIMB)


def limbs_of_floats(x: jax.Array) -> jax.Array:
    """Splits whole numbers in float32, below 2^63 in absolute value, exactly."""
    size = jnp.abs(x)
    high = jnp.floor(size * 2.0**-32)
    low = (size - high * 2.0**32).astype(jnp.uint32)
    return split_limbs(*_negated_if(x < 0, low, high.astype(jnp.uint32)))


def floats_of_limbs(limbs: jax.Array) -> jax.Array:
    """Converts sums of limbs, from -2^63 to 2^63 - 1, to float32, rounded once to nearest even."""
    low, high = joined_limbs(limbs)
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
