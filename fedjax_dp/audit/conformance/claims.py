"""What a subject claims: a release, the law of a draw, a training, a modulus of masks."""

import dataclasses
import math
from typing import Literal, TypeAlias

from scipy import stats

from fedjax_dp.core import checks
from fedjax_dp.core.argument_checks import check_fields
from fedjax_dp.core.ranges import Count, NonNegative, Positive, Probability, ProperFraction

_MOST_ENTRIES = 4096

Relation: TypeAlias = Literal["add_remove", "zero_out", "replace_one"]


@dataclasses.dataclass(frozen=True)
class Release:
    """A sum of clipped rows, one for each unit, with noise added once, over a divisor.

    Attributes:
      clip_norm: the largest norm of what one unit adds to the sum, above 0.
      noise_stddev: standard deviation of an entry of the noise on the sum, at least 0.
      divisor: the public constant that sum and noise are divided by, above 0; None for the number
        of rows that are given.
      layers: the number of entries of each layer, in the order of a row, some
        may be empty; 1 to 4,096 entries in all.
      rows: the number of units that the checks hand over, at least 3.
      relation: which data are neighbours: "add_remove" (a row is there or not), "zero_out" (it is
        zeros) or "replace_one" (it is any other, which moves a sum twice as far).
      norm: of `clip_norm`, "l2" or "l1".
      law: of the noise, "gaussian" or "laplace".
    """

    clip_norm: Positive
    noise_stddev: NonNegative
    divisor: Positive | None
    layers: tuple[int, ...] = (8,)
    rows: Count = 8
    relation: Relation = "add_remove"
    norm: Literal["l2", "l1"] = "l2"
    law: Literal["gaussian", "laplace"] = "gaussian"

    def __post_init__(self) -> None:
        """Checks every field."""
        check_fields(self)
        checks.whole("rows", self.rows, at_least=3)
        for size in self.layers:
            checks.whole("layers", size, at_least=0)
        # Many releases are in memory together.
        rule = f"have 1 to {_MOST_ENTRIES} entries in all"
        checks.require(0 < self.size <= _MOST_ENTRIES, "layers", rule, self.layers)

    @property
    def size(self) -> int:
        """The number of entries of a row."""
        return sum(self.layers)

    @property
    def sensitivity(self) -> float:
        """How far one unit may move the sum."""
        return self.clip_norm * (2 if self.relation == "replace_one" else 1)


@dataclasses.dataclass(frozen=True)
class AdaptiveRelease:
    """A release whose clip norm follows a quantile of the rows' norms, from round to round.

    Attributes:
      first: the release of the first round.
      quantile: the share of rows whose norm should be below the clip norm, in (0, 1).
      patience: the number of rounds after which the clip norm must have come closer to rows that
        all have one norm, ten times larger or smaller, at least 2.
    """

    first: Release
    quantile: ProperFraction = 0.5
    patience: Count = 50

    def __post_init__(self) -> None:
        """Checks every field."""
        check_fields(self)
        checks.whole("patience", self.patience, at_least=2)


@dataclasses.dataclass(frozen=True)
class Poisson:
    """Draws every unit with the same probability, independently in every round.

    Attributes:
      num_units: the number of units, at least 1.
      rate: the probability, in (0, 1].
    """

    num_units: Count
    rate: Probability

    def __post_init__(self) -> None:
        """Checks every field."""
        check_fields(self)


@dataclasses.dataclass(frozen=True)
class _Sized:
    """Draws rounds of one size.

    Attributes:
      num_units: the number of units, at least 1.
      size: the number of draws of a round, at least 1.
    """

    num_units: Count
    size: Count

    def __post_init__(self) -> None:
        """Checks every field."""
        check_fields(self)
        rule = f"be at most num_units={self.num_units}"
        checks.require(self.size <= self.num_units, "size", rule, self.size)

    @property
    def rate(self) -> float:
        """The probability that a unit is drawn in a round."""
        return self.size / self.num_units


@dataclasses.dataclass(frozen=True)
class FixedSize(_Sized):
    """Draws a fixed number of distinct units, independently in every round.

    Attributes:
      num_units: the number of units, at least 1.
      size: the number drawn in a round, from 1 to `num_units`, which is full participation.
    """


@dataclasses.dataclass(frozen=True)
class WithReplacement(_Sized):
    """Draws a fixed number of units, each from all of them.

    Attributes:
      num_units: the number of units, at least 1.
      size: the number of draws of a round, from 1 to `num_units`.
    """

    @property
    def rate(self) -> float:
        """The probability that a unit is drawn in a round."""
        return -math.expm1(self.size * math.log1p(-1 / self.num_units)) if self.num_units > 1 else 1


@dataclasses.dataclass(frozen=True)
class Shuffled(_Sized):
    """Draws batches of a permutation of all units, and a new permutation when it is used up.

    Attributes:
      num_units: the number of units, at least 1.
      size: the batch size, from 1 to `num_units`; the first `num_units // size` batches are full.
    """


SamplingLaw: TypeAlias = Poisson | FixedSize | WithReplacement | Shuffled


@dataclasses.dataclass(frozen=True)
class Training:
    """Rounds of one release, each on units that are drawn anew.

    Attributes:
      release: of a round.
      sampling: of the units of a round.
      rounds: the number of rounds, at least 1.
      dp_delta: δ of ε, in (0, 1).
    """

    release: Release
    sampling: SamplingLaw
    rounds: Count
    dp_delta: ProperFraction = 1e-5

    def __post_init__(self) -> None:
        """Checks every field."""
        check_fields(self)


@dataclasses.dataclass(frozen=True)
class Masked:
    """Messages of clients that hide their values in integers modulo m, which cancel in a sum.

    Attributes:
      modulus: m, at least 16 and below 2^62.
      clients: the number of clients, at least 3.
      size: the number of integers of a message, at least 1.
      dropped: how many clients may drop out after sending their masks, at least 0; below `clients`.
    """

    modulus: int
    clients: Count
    size: Count = 8
    dropped: int = 0

    def __post_init__(self) -> None:
        """Checks every field."""
        check_fields(self)
        _check_modulus(self.modulus)
        checks.whole("clients", self.clients, at_least=3)
        checks.whole("dropped", self.dropped, at_least=0)
        rule = f"be below clients={self.clients}"
        checks.require(self.dropped < self.clients, "dropped", rule, self.dropped)


@dataclasses.dataclass(frozen=True)
class MaskLaw:
    """Masks that are uniform modulo m and independent of one another.

    Attributes:
      modulus: m, at least 16 and below 2^62.
      count: the number of masks that are drawn, at least 64. Repeated masks are found if their
        seeds have fewer than about 2 log2(count) − 4 bits.
      size: the number of integers of a mask, at least 1.
    """

    modulus: int
    count: Count = 2**12
    size: Count = 8

    def __post_init__(self) -> None:
        """Checks every field."""
        check_fields(self)
        _check_modulus(self.modulus)
        checks.whole("count", self.count, at_least=64)


def _check_modulus(modulus: int) -> None:
    checks.whole("modulus", modulus, at_least=16, is_sized=False)
    checks.require(modulus < 2**62, "modulus", "be below 2^62", modulus)


def divisor_of(claim: Release, num_rows: int) -> float:
    """What a release of so many rows is divided by."""
    return claim.divisor if claim.divisor is not None else float(max(num_rows, 1))


def stddev_of(claim: Release, num_rows: int) -> float:
    """The claimed standard deviation of an entry of a release of so many rows."""
    return claim.noise_stddev / divisor_of(claim, num_rows)


def noise_law(claim: Release, stddev: float) -> stats.rv_continuous:
    """The claimed law of an entry of the noise, with this standard deviation and mean 0."""
    return (
        stats.laplace(scale=stddev / math.sqrt(2))
        if claim.law == "laplace"
        else stats.norm(scale=stddev)
    )
