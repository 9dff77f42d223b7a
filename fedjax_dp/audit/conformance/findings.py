"""Findings of checks: verdict, what was measured and allowed, and an input that shows it."""

import math
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple, TypeAlias

import numpy as np

Verdict: TypeAlias = Literal["passed", "failed", "open"]
# One of the six groups of checks.
CHECKS = ("contribution", "noise", "sampling", "accounting", "attack", "masks")


class Finding(NamedTuple):
    """What one check found in one subject.

    Attributes:
      subject: its name.
      check: the group and the property, such as "noise: law".
      verdict: "passed", "failed", or "open" if it was not tried or decides nothing.
      sentence: what was found and compared, or why the check is open.
      measured: the number that decides, NaN without one.
      allowed: the largest number allowed, or the expected one, NaN without one.
      confidence: the probability, at least, that this check does not fail a correct subject.
      example: the smallest input found that fails, as NumPy code; empty without one.
    """

    subject: str
    check: str
    verdict: Verdict
    sentence: str
    measured: float = math.nan
    allowed: float = math.nan
    confidence: float = 1.0
    example: str = ""


class Test(NamedTuple):
    """A statistical test of one number."""

    p_value: float
    what: str  # What the number is of.
    measured: float
    expected: float


# Seeds are below twice this power of two.
_SEED_BITS = 29


class Draws:
    """Blocks of seeds, each used once, and a generator of inputs."""

    def __init__(self, seed: int, purpose: int, count: int):
        """Begins at seeds of a purpose; `count` is how many a test of noise uses."""
        self.rng = np.random.default_rng([seed, purpose])
        self.count = count
        self._next = int(self.rng.integers(2**_SEED_BITS))

    def block(self, count: int | None = None) -> range:
        """Takes the next seeds."""
        first = self._next
        self._next += self.count if count is None else count
        return range(first, self._next)

    def spread(self, count: int | None = None) -> list[int]:
        """Takes the next seeds, and seeds that differ from the first of them by a power of two."""
        block = self.block(count)
        first_bit = (len(block) - 1).bit_length()
        return [*block, *(block[0] + 2**bit for bit in range(first_bit, _SEED_BITS))]


def judged(
    subject: str,
    check: str,
    tests: Sequence[Test],
    significance: float,
    says: str,
    examples: Mapping[str, str] = {},
) -> Finding:
    """Fails if the smallest p-value, times the number of tests, is at most the significance.

    `says` is what the tests show if all pass; `examples` are inputs by what a test is of.
    """
    worst = min(tests, key=lambda test: test.p_value)
    numbers = worst.measured, worst.expected, 1 - significance
    about = (
        f"{worst.what} is {worst.measured:.4g}, expected {worst.expected:.4g} "
        f"(p = {worst.p_value:.1g}, the least of {len(tests)})"
    )
    if worst.p_value * len(tests) > significance:
        return Finding(subject, check, "passed", f"{says}: {about}", *numbers)
    return Finding(subject, check, "failed", about, *numbers, examples.get(worst.what, ""))
