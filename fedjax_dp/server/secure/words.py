"""Fixed-point words: contributions as integers modulo 2^32, whose sums cannot overflow."""

from typing import Annotated, Any, Literal, NamedTuple, get_args

import flax.struct
import jax
import jax.numpy as jnp
from annotated_types import Ge, Lt

from fedjax_dp.core import checks
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.checks import COUNT_LIMIT
from fedjax_dp.core.trees import PyTree

Rounding = Literal["nearest", "toward_zero"]
Several = Annotated[int, Ge(2), Lt(COUNT_LIMIT)]
_BITS = 32


@flax.struct.dataclass
class Words:
    """One array as unsigned words, with the type that it had; the engine adds words modulo 2^32.

    Attributes:
      values: uint32.
      dtype: name of the type that a sum is decoded to, static.
    """

    values: jax.Array
    dtype: str = flax.struct.field(pytree_node=False)


class FixedPoint(NamedTuple):
    """How floats become words: `round(2^f x)` modulo 2^32, for |x| of at most 2^k.

    Attributes:
      max_clients: n, the largest number of contributions in one sum.
      integer_bits: k; entries beyond 2^k are cut to it.
      fraction_bits: f, so that the lattice has width 2^-f.
    """

    max_clients: int
    integer_bits: int
    fraction_bits: int

    @property
    def largest(self) -> float:
        """The largest absolute value of an entry, 2^k."""
        return 2.0**self.integer_bits

    @property
    def resolution(self) -> float:
        """The width of the lattice, 2^-f."""
        return 2.0**-self.fraction_bits


@checked
def fixed_point(
    max_clients: Several, *, integer_bits: int = 4, fraction_bits: int | None = None
) -> FixedPoint:
    """Chooses an encoding whose sums of `max_clients` contributions cannot overflow.

    The modulus Q = 2^32 must be above 2 n 2^(k+f).

    Guarantee: sums of at most `max_clients` words are exact. A sum of rounded entries errs by at
    most n 2^-(f+1) in addition to what is cut off; by n 2^-f where entries are rounded toward zero.

    Args:
      max_clients: n, the largest number of contributions in one sum, at least 2.
      integer_bits: k, from -30 to 29; entries are in [-2^k, 2^k].
      fraction_bits: f; where None the largest that the modulus allows.

    Returns:
      The encoding.

    Raises:
      ValueError: if the modulus is too small.

    Source: `secure_aggregation` section 3, fixed-point field encoding.
    """
    rule = "be an integer from -30 to 29"
    checks.require(-30 <= integer_bits <= 29, "integer_bits", rule, integer_bits)
    # The largest e with 2 n 2^e < 2^32.
    exponent = _BITS - 1 - max_clients.bit_length()
    if max_clients.bit_count() > 1:
        exponent = (2 ** (_BITS - 1) // max_clients).bit_length() - 1
    most = exponent - integer_bits
    where = f"for {max_clients} clients and {integer_bits} integer bits in words of {_BITS} bits"
    if fraction_bits is None:
        checks.require(most >= 0, "integer_bits", f"be at most {exponent} {where}", integer_bits)
        return FixedPoint(max_clients, integer_bits, most)
    rule = f"be from {-integer_bits} to {most} {where}"
    checks.require(-integer_bits <= fraction_bits <= most, "fraction_bits", rule, fraction_bits)
    return FixedPoint(max_clients, integer_bits, fraction_bits)


def encode(encoding: FixedPoint, tree: PyTree, rounding: Rounding) -> tuple[PyTree, jax.Array]:
    """Encodes the arrays of a tree; also returns whether some entry was cut to the range.

    Integers of at most 32 bits are words as they are, and their sums are modulo 2^32. NaN becomes
    zero and counts as out of range.
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
        return Words(rounded.astype(jnp.int32).astype(jnp.uint32), "float32")

    words = jax.tree.map(one, tree)
    return words, jnp.any(jnp.stack(flags))


def decode(encoding: FixedPoint, words: PyTree) -> PyTree:
    """Decodes sums of words: floats rounded once to float32, integers with their sign."""

    def one(word: Words) -> jax.Array:
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
