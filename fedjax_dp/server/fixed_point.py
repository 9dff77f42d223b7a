"""Fixed-point numbers as words modulo a power of two, whose sums cannot overflow."""

from typing import Annotated, Literal, NamedTuple

import numpy as np
from annotated_types import Ge, Lt

from fedjax_dp.core import checks
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.checks import COUNT_LIMIT

Several = Annotated[int, Ge(2), Lt(COUNT_LIMIT)]


class FixedPoint(NamedTuple):
    """How floats become words: `round(2^f x)` modulo 2^w, for |x| of at most 2^k.

    Its functions are for float64 on the host; `secure.masked` encodes float32 in compiled rounds.

    Attributes:
      max_clients: n, the largest number of contributions in one sum.
      integer_bits: k.
      fraction_bits: f, so that the lattice has width 2^-f.
      word_bits: w, 32 or 64.
    """

    max_clients: int
    integer_bits: int
    fraction_bits: int
    word_bits: int = 32

    @property
    def largest(self) -> float:
        """The largest absolute value of an entry, 2^k."""
        return 2.0**self.integer_bits

    @property
    def resolution(self) -> float:
        """The width of the lattice, 2^-f."""
        return 2.0**-self.fraction_bits

    def encode(self, values: np.ndarray) -> np.ndarray:
        """Encodes numbers as words.

        Args:
          values: numbers of at most 2^k in absolute value, of any shape.

        Returns:
          Unsigned integers of w bits, of the same shape.

        Raises:
          ValueError: for numbers that are too large, or not finite.
        """
        largest = np.max(np.abs(values), initial=0.0)
        is_inside = bool(largest <= self.largest)
        rule = f"be at most 2^{self.integer_bits} in absolute value"
        checks.require(is_inside, "values", rule, float(largest))
        scaled = np.rint(np.ldexp(np.asarray(values, np.float64), self.fraction_bits))
        return scaled.astype(np.int64).astype(f"u{self.word_bits // 8}")

    def decode(self, words: np.ndarray) -> np.ndarray:
        """Decodes words: those from 2^(w-1) on are negative numbers.

        Args:
          words: unsigned integers of w bits.

        Returns:
          float64, of the same shape.
        """
        size = self.word_bits // 8
        signed = np.ascontiguousarray(words, f"u{size}").view(f"i{size}")
        return np.ldexp(signed.astype(np.float64), -self.fraction_bits)


@checked
def fixed_point(
    max_clients: Several,
    *,
    integer_bits: int = 4,
    fraction_bits: int | None = None,
    word_bits: Literal[32, 64] = 32,
) -> FixedPoint:
    """Chooses an encoding whose sums of `max_clients` contributions cannot overflow.

    The modulus Q = 2^w must be above 2 n 2^(k+f).

    Guarantee: sums of at most `max_clients` words are exact. A sum of rounded entries errs by at
    most n 2^-(f+1) in addition to what is cut off; by n 2^-f where entries are rounded toward zero.

    Args:
      max_clients: n, the largest number of contributions in one sum, at least 2.
      integer_bits: k, from 2 - w to w - 3; entries are in [-2^k, 2^k].
      fraction_bits: f; where None the largest that the modulus allows.
      word_bits: w, 32 or 64.

    Returns:
      The encoding.

    Raises:
      ValueError: if the modulus is too small.

    Source: Mugunthan 2022, section 2.4.1 (fixed-point values as field elements).
    """
    low, high = 2 - word_bits, word_bits - 3
    rule = f"be an integer from {low} to {high}"
    checks.require(low <= integer_bits <= high, "integer_bits", rule, integer_bits)
    # The largest e with 2 n 2^e < 2^w.
    exponent = ((2 ** (word_bits - 1) - 1) // max_clients).bit_length() - 1
    most = exponent - integer_bits
    if fraction_bits is None:
        rule = f"be at most {exponent} for {max_clients} clients and words of {word_bits} bits"
        checks.require(most >= 0, "integer_bits", rule, integer_bits)
        return FixedPoint(max_clients, integer_bits, most, word_bits)
    rule = (
        f"be from {-integer_bits} to {most} for {max_clients} clients, integer_bits = "
        f"{integer_bits} and words of {word_bits} bits"
    )
    checks.require(-integer_bits <= fraction_bits <= most, "fraction_bits", rule, fraction_bits)
    return FixedPoint(max_clients, integer_bits, fraction_bits, word_bits)
