"""What a subject claims: a release, the law of a draw, a training, a modulus of masks."""

import dataclasses
import math
from typing import Annotated, Literal, TypeAlias

from annotated_types import Ge, Le, Lt
from scipy import stats

from fedjax_dp.core import checks
from fedjax_dp.core.argument_checks import check_fields
from fedjax_dp.core.checks import COUNT_LIMIT
from fedjax_dp.core.ranges import Count, Index, NonNegative, Positive, Probability, ProperFraction

_MOST_ENTRIES = 4096

Relation: TypeAlias = Literal["add_remove", "zero_out", "replace_one"]
AtLeast3 = Annotated[int, Ge(3), Lt(COUNT_LIMIT)]
Modulus = Annotated[int, Ge(16), Le(2**61)]


@dataclasses.dataclass(frozen=True)
class _Claim:
    def __post_init__(self) -> None:
        """Checks every field."""
        check_fields(self)


@dataclasses.dataclass(frozen=True)
class Release(_Claim):
    """A sum of clipped rows, one for each unit, with noise added once, over a divisor.

    Attributes:
      clip_norm: the largest norm of what one unit adds to the sum, above 0.
      noise_stddev: standard deviation of an entry of the noise on the sum, at least 0.
      divisor: the public constant that sum and noise are divided by, above 0; None for the number
        of rows that are given, which neighbours under "add_remove" do not share.
      layers: the number of entries of each layer, in the order of a row, some
        may be empty; 1 to 4,096 entries in all.
      rows: the number of units that the checks hand over, at least 3.
      relation: which data are neighbours: "add_remove" (a row is there or not), "zero_out" (it is
        zeros) or "replace_one" (it is any other, which moves a sum twice as far).
      norm: of `clip_norm`, "l2" or "l1".
      law: of the noise, "gaussian" or "laplace", whose ε is that of an L1 norm.
    """

    clip_norm: Positive
    noise_stddev: NonNegative
    divisor: Positive | None
    layers: tuple[Index, ...] = (8,)
    rows: AtLeast3 = 8
    relation: Relation = "add_remove"
    norm: Literal["l2", "l1"] = "l2"
    law: Literal["gaussian", "laplace"] = "gaussian"

    def __post_init__(self) -> None:
        """Checks every field."""
        super().__post_init__()
        # Many releases are in memory together.
        rule = f"have 1 to {_MOST_ENTRIES} entries in all"
        checks.require(0 < self.size <= _MOST_ENTRIES, "layers", rule, self.layers)
        rule = "be a public constant under relation='add_remove'"
        is_public = self.divisor is not None or self.relation != "add_remove"
        checks.require(is_public, "divisor", rule, self.divisor)
        root = f"{math.sqrt(self.size):.4g}"
        rule = f"be 'l1' for law='laplace': an L2 norm C is an L1 norm of at most {root} C here"
        checks.require(self.law == "gaussian" or self.norm == "l1", "norm", rule, self.norm)

    @property
    def size(self) -> int:
        """The number of entries of a row."""
        return sum(self.layers)

    @property
    def sensitivity(self) -> float:
        """How far one unit may move the sum."""
        return self.clip_norm * (2 if self.relation == "replace_one" else 1)


@dataclasses.dataclass(frozen=True)
class AdaptiveRelease(_Claim):
    """A release whose clip norm follows how many rows it clips, from round to round.

    The noise of a round is in proportion to its clip norm, and independent of other rounds.

    Attributes:
      first: the release of the first round.
      count_stddev: standard deviation of the noise on the number of rows below the clip norm, on
        which the next clip norm depends, in rows, at least 0.
      patience: the number of rounds after which the clip norm must have come closer to rows that
        all have one norm, ten times larger or smaller, at least 2.
    """

    first: Release
    count_stddev: NonNegative
    patience: Annotated[int, Ge(2), Lt(COUNT_LIMIT)] = 50


@dataclasses.dataclass(frozen=True)
class Poisson(_Claim):
    """Draws every unit with the same probability, independently in every round.

    Attributes:
      num_units: the number of units, at least 1.
      rate: the probability, in (0, 1].
    """

    num_units: Count
    rate: Probability

    @property
    def mean(self) -> float:
        """How often a unit is drawn in a round, on average."""
        return self.rate


@dataclasses.dataclass(frozen=True)
class _Sized(_Claim):
    num_units: Count
    size: Count

    def __post_init__(self) -> None:
        """Checks every field."""
        super().__post_init__()
        rule = f"be at most num_units={self.num_units}"
        checks.require(self.size <= self.num_units, "size", rule, self.size)

    @property
    def mean(self) -> float:
        """How often a unit is drawn in a round, on average."""
        return self.size / self.num_units

    @property
    def rate(self) -> float:
        """The probability that a unit is drawn in a round."""
        return self.mean


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
class Training(_Claim):
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


@dataclasses.dataclass(frozen=True)
class Masked(_Claim):
    """Messages of clients that hide their values in integers modulo m, which cancel in a sum.

    Attributes:
      modulus: m, from 16 to 2^61.
      clients: the number of clients, at least 3.
      size: the number of integers of a message, at least 1.
      dropped: how many clients may drop out after sending their masks, at least 0; at least two
        stay, as the sum of one is what it sent.
    """

    modulus: Modulus
    clients: AtLeast3
    size: Count = 8
    dropped: Index = 0

    def __post_init__(self) -> None:
        """Checks every field."""
        super().__post_init__()
        rule = f"leave two of clients={self.clients}"
        checks.require(self.dropped <= self.clients - 2, "dropped", rule, self.dropped)


@dataclasses.dataclass(frozen=True)
class MaskLaw(_Claim):
    """Masks that are uniform modulo m and independent of one another.

    Attributes:
      modulus: m, from 16 to 2^61.
      count: the number of masks that are drawn, at least 64. Repeated masks are found if their
        seeds have fewer than about 2 log2(count) − 4 bits.
      size: the number of integers of a mask, at least 1; with m^size below about count^2 masks
        are equal by chance, and nothing is found about their seeds.
    """

    modulus: Modulus
    count: Annotated[int, Ge(64), Lt(COUNT_LIMIT)] = 2**12
    size: Count = 8


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
