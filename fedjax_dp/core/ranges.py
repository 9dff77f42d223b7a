"""Ranges of numbers as types, and their checks and words."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Annotated, Any, get_args, get_origin

import jax
import numpy as np
from annotated_types import Ge, GroupedMetadata, Gt, Le, Lt, Predicate

from fedjax_dp.core import checks
from fedjax_dp.core.checks import COUNT_LIMIT


@dataclass(frozen=True)
class ZeroOrAtLeast(GroupedMetadata):
    """A range of 0 and all numbers of at least `least`, which is above 0."""

    least: float

    def __iter__(self) -> Iterator[Predicate]:
        """Yields the rule in the form that other libraries check."""
        yield Predicate(lambda x: bool(_HOLDS[ZeroOrAtLeast](x, self)))


@dataclass(frozen=True)
class Pattern(GroupedMetadata):
    """A rule for strings, which must match `regex`; `words` complete "must be …"."""

    regex: str
    words: str

    def __iter__(self) -> Iterator[Predicate]:
        """Yields the rule in the form that other libraries check."""
        yield Predicate(self.holds)

    def holds(self, text: str) -> bool:
        """Whether a string matches."""
        return re.fullmatch(self.regex, text) is not None


# Above 0.
Positive = Annotated[float, Gt(0)]
# At least 0.
NonNegative = Annotated[float, Ge(0)]
# In [0, 1].
Fraction = Annotated[float, Ge(0), Le(1)]
# In (0, 1].
Probability = Annotated[float, Gt(0), Le(1)]
# In [0, 1), such as the decay of a moving average.
Decay = Annotated[float, Ge(0), Lt(1)]
# An integer of at least 1.
Count = Annotated[int, Ge(1), Lt(COUNT_LIMIT)]
# An integer of at least 0.
Index = Annotated[int, Ge(0), Lt(COUNT_LIMIT)]
# The seed of a random number generator: a key holds 32 bits of it.
Seed = Annotated[int, Ge(0), Lt(2**32)]
# An expected number of members, at least 1.
Size = Annotated[float, Ge(1), Lt(COUNT_LIMIT)]
# Passes or steps, at least 0.
Amount = Annotated[float, Ge(0), Lt(COUNT_LIMIT)]
# In (0, 1), such as δ, or a share that leaves a rest.
ProperFraction = Annotated[float, Gt(0), Lt(1)]
# In (0, 1/2), such as the δ of noise that is bounded.
HalfFraction = Annotated[float, Gt(0), Lt(0.5)]
# At least 0; infinity means no bound.
Bound = Annotated[float, Ge(0), Le(math.inf)]
# The same for numbers that may be traced, or arrays of them.
PositiveNumbers = Annotated[jax.typing.ArrayLike, Gt(0)]
NonNegativeNumbers = Annotated[jax.typing.ArrayLike, Ge(0)]
DecayNumbers = Annotated[jax.typing.ArrayLike, Ge(0), Lt(1)]
Norms = Annotated[jax.typing.ArrayLike, Gt(0), Le(math.inf)]
Bounds = Annotated[jax.typing.ArrayLike, Ge(0), Le(math.inf)]

# The path of a file or folder. In a configuration "~" is replaced by the user's folder.
PATH = Pattern(r"(?s).+", "a path")
PathText = Annotated[str, PATH]

# Magnitudes that float32 holds, besides 0; compiled code flushes smaller ones to 0.
SMALLEST, LARGEST = (float(x) for x in (np.finfo(np.float32).tiny, np.finfo(np.float32).max))

_HOLDS = {
    Gt: lambda x, limit: x > limit.gt,
    Ge: lambda x, limit: x >= limit.ge,
    Lt: lambda x, limit: x < limit.lt,
    Le: lambda x, limit: x <= limit.le,
    ZeroOrAtLeast: lambda x, limit: (x == 0) | (x >= limit.least),
}


def of_annotation(annotation: Any) -> Any | None:
    """Returns the range that an annotation states, or one of its alternatives; None for no range.

    Other metadata than limits say nothing of a range, such as a text.
    """
    for kind in (annotation, *get_args(annotation)):
        if get_origin(kind) is Annotated:
            base, *found = get_args(kind)
            # An option that may be none is a number all the same.
            kinds = get_args(base)
            base = next(one for one in kinds if one is not NoneType) if NoneType in kinds else base
            limits = [limit for each in found for limit in _parts(each) if type(limit) in _HOLDS]
            if limits:
                return Annotated[base, *limits]
    return None


def _parts(metadata: Any) -> Sequence[Any]:
    is_group = isinstance(metadata, GroupedMetadata) and type(metadata) not in _HOLDS
    return [*metadata] if is_group else [metadata]


def check(numbers: Mapping[str, Any], ranges: Mapping[str, Any], prefix: str = "") -> None:
    """Checks numbers by name, scalars or arrays, against their ranges; traced ones and None pass.

    Numbers without a range are not checked; the range of grouped numbers is a mapping. `prefix` is
    what an error puts before the name, such as "hyper.aggregator.".
    """
    for name, kind in ranges.items():
        value = numbers.get(name)
        if isinstance(kind, Mapping):
            check(value or {}, kind, f"{prefix}{name}.")
            continue
        if value is None or checks.is_traced(value):
            continue
        base, *limits = get_args(kind)
        rule = f"be {of_kind('an integer', limits) if base is int else in_words(limits)}"
        checks.numbers(f"{prefix}{name}", rule, value)
        array = np.asarray(value)
        is_whole = base is not int or bool(np.all(np.mod(array, 1) == 0))
        holds = is_whole and inside(array, limits)
        checks.require(holds, f"{prefix}{name}", rule, value)
        rule = f"be 0 or of a size that float32 can represent, {SMALLEST:.2g} to {LARGEST:.2g}"
        checks.require(fits_float32(array), f"{prefix}{name}", rule, value)


def fits_float32(value: Any) -> bool:
    """Whether float32 can hold numbers up to rounding; infinity passes, ranges decide on it."""
    if isinstance(value, int):
        return abs(value) <= LARGEST
    size = np.abs(np.asarray(value, np.float64))
    return bool(np.all((size == 0) | ((size >= SMALLEST) & (size <= LARGEST)) | np.isinf(size)))


def inside(array: np.ndarray, limits: Sequence[Any]) -> bool:
    """Whether all numbers are in a range; NaN never does, infinity only for "at most inf"."""
    if Le(math.inf) not in limits and not np.all(np.isfinite(array)):
        return False
    return all(bool(np.all(_HOLDS[type(limit)](array, limit))) for limit in limits)


def in_words(limits: Sequence[Any]) -> str:
    """Describes limits, to complete the phrase "must be …": "at least 0", or "in [0, 1)"."""
    low = next((limit for limit in limits if isinstance(limit, Ge | Gt)), None)
    high = next((limit for limit in limits if isinstance(limit, Le | Lt)), None)
    if low is None or high in (None, Lt(COUNT_LIMIT), Le(math.inf)):
        return " and ".join(map(_alone, limits))
    left = f"[{_shown(low.ge)}" if isinstance(low, Ge) else f"({_shown(low.gt)}"
    right = f"{_shown(high.le)}]" if isinstance(high, Le) else f"{_shown(high.lt)})"
    return f"in {left}, {right}"


def of_kind(noun: str, limits: Sequence[Any]) -> str:
    """Puts a noun before its limits: "a number in [0, 1)", "an integer of at least 1"."""
    words = in_words(limits)
    return f"{noun}{' of' * words.startswith('at ')}{',' * words[0].isdigit()} {words}"


def _alone(limit: Any) -> str:
    match limit:
        case Gt():
            return f"above {_shown(limit.gt)}"
        case Ge():
            return f"at least {_shown(limit.ge)}"
        case Lt():
            return f"below {_shown(limit.lt)}"
        case Le():
            return f"at most {_shown(limit.le)}"
    return f"0 or at least {_shown(limit.least)}"


def _shown(limit: Any) -> str:
    is_power = limit in (2**31, 2**32)
    return f"2^{int(limit).bit_length() - 1}" if is_power else f"{limit:g}"
