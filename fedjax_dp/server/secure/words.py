"""Contributions as words modulo 2^32 or 2^64 in compiled rounds."""

from typing import Any, Literal, get_args

import flax.struct
import jax
import jax.numpy as jnp

from fedjax_dp.core import checks
from fedjax_dp.core.trees import PyTree
from fedjax_dp.server.fixed_point import FixedPoint
from fedjax_dp.server.secure import limbs

Rounding = Literal["nearest", "toward_zero"]


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
            return Words(limbs.of_floats(rounded), "float32", 64)
        return Words(rounded.astype(jnp.int32).astype(jnp.uint32), "float32")

    words = jax.tree.map(one, tree)
    return words, jnp.any(jnp.stack(flags))


def decode(encoding: FixedPoint, words: PyTree) -> PyTree:
    """Decodes sums of words: floats rounded once to float32, integers with their sign."""

    def one(word: Words) -> jax.Array:
        if word.bits == 64:
            return limbs.to_floats(word.values) * encoding.resolution
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
