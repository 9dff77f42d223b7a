"""What a value may be, read off its annotation, in words for people."""

import functools
import math
import operator
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import annotated_types as ranges
from pydantic import BaseModel, ConfigDict
from pydantic.fields import FieldInfo

from fedjax_dp.core import checks
from fedjax_dp.core.checks import COUNT_LIMIT
from fedjax_dp.core.ranges import LARGEST, SMALLEST, fits_float32

# Up to here a float is the whole number that was written.
_EXACT = 2**53
# How much of a value an error shows.
_SHOWN = 500


class ConfigError(ValueError):
    """A key or value that a configuration may not have."""


class Section(BaseModel):
    """A part of a configuration: frozen, of known keys, every value of its kind and range."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)


def kinds_of(kind: Any) -> tuple[Any, ...]:
    """Lists the alternatives of a kind.

    Args:
      kind: an annotation.

    Returns:
      The members of a union, else the annotation alone.
    """
    is_union = typing.get_origin(kind) in (types.UnionType, typing.Union)
    return typing.get_args(kind) if is_union else (kind,)


def bare(kind: Any) -> Any:
    """Takes the range off an annotation.

    Args:
      kind: an annotation.

    Returns:
      The kind alone.
    """
    return typing.get_args(kind)[0] if typing.get_origin(kind) is Annotated else kind


def annotation_of(field: FieldInfo) -> Any:
    """Gives the whole annotation of a field, its range with it.

    Args:
      field: the field.

    Returns:
      The annotation.
    """
    return Annotated[field.annotation, *field.metadata] if field.metadata else field.annotation


def may_be_none(kind: Any) -> bool:
    """Tells whether a value can be left out, written as the word "none".

    Args:
      kind: an annotation.

    Returns:
      Whether None is among its alternatives.
    """
    return type(None) in kinds_of(kind)


def choices_of(kind: Any) -> list[str]:
    """Lists the words that a value may be.

    Args:
      kind: an annotation.

    Returns:
      All texts of its literals.
    """
    found = []
    for one in kinds_of(kind):
        if typing.get_origin(one) is Literal:
            found += [choice for choice in typing.get_args(one) if isinstance(choice, str)]
    return found


def rule_of(kind: Any) -> str:
    """Says what a value may be, to complete the phrase "must be …".

    Args:
      kind: an annotation.

    Returns:
      The alternatives in words; "none" among them where a value can be left out.
    """
    kinds = kinds_of(kind)
    words = []
    for one in kinds:
        origin, parts = typing.get_origin(bare(one)), typing.get_args(bare(one))
        if origin in _FOR_EACH and parts[-1] in kinds:
            words.append(_FOR_EACH[origin])
        else:
            words.append(_rule(one))
    return " or ".join(words)


def refusal(origin: str, key: str, kind: Any, value: Any) -> ConfigError:
    """Makes the error for a value that is not of its kind.

    Args:
      origin: the file, or whatever the value came from.
      key: the key's dotted name.
      kind: its annotation.
      value: what was given.

    Returns:
      The error, which names the nearest choice where there are some.
    """
    hint = checks.nearest(value, choices_of(kind)) if isinstance(value, str) else None
    return ConfigError(
        f"{origin}: {key} must be {rule_of(kind)}, got {checks.shown(value, _SHOWN)}"
        + (f"; did you mean {hint!r}?" if hint else "")
    )


def as_asked(kind: Any, value: Any) -> Any:
    """Takes a whole number that is written with a point or an exponent, such as 1e3, for one.

    Args:
      kind: an annotation.
      value: what was given.

    Returns:
      Integers where the kind asks for such, alone or in a list; all else as it is.
    """
    kinds = [bare(one) for one in kinds_of(kind)]
    if isinstance(value, list):
        lists = [one for one in kinds if typing.get_origin(one) in (list, Sequence)]
        return [as_asked(typing.get_args(lists[0])[0], one) for one in value] if lists else value
    is_whole = isinstance(value, float) and value.is_integer() and abs(value) < _EXACT
    return int(value) if is_whole and int in kinds and float not in kinds else value


def require_float32(origin: str, key: str, value: Any) -> None:
    """Requires of numbers a size that float32 has, in which runs compute.

    Args:
      origin: the file, or whatever the value came from.
      key: the key's dotted name; δ is computed with in float64.
      value: a number, or lists and tables that hold some; anything else passes.

    Raises:
      ConfigError: naming the key, the rule and the number.
    """
    if isinstance(value, list | Mapping):
        for one in value.values() if isinstance(value, Mapping) else value:
            require_float32(origin, key, one)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or key.endswith("dp_delta") or not math.isfinite(value):
        return
    if not fits_float32(value):
        rule = f"be 0 or of a size that float32 holds, {SMALLEST:.2g} to {LARGEST:.2g}"
        raise ConfigError(f"{origin}: {key} must {rule}, got {checks.shown(value, _SHOWN)}")


def check_one_for_each(key: str, value: Any, num_clients: int) -> None:
    """Requires a list to hold as many numbers as there are clients.

    Args:
      key: the dotted name of the value.
      value: a list, or anything else, which passes.
      num_clients: how many there must be.

    Raises:
      ValueError: naming the key, the rule and the list.
    """
    rule = f"be one number or have one for each of the {num_clients} clients"
    fits = not isinstance(value, list) or len(value) == num_clients
    checks.require(fits, key, rule, value)


def is_plain(kind: Any) -> bool:
    """Tells whether a configuration file can hold values of a kind.

    Args:
      kind: an annotation.

    Returns:
      Whether it is made of texts, numbers, truth values, lists and tables of them, and None.
    """
    kind = bare(kind)
    if len(kinds_of(kind)) > 1:
        return all(map(is_plain, kinds_of(kind)))
    origin = typing.get_origin(kind)
    if origin is Literal:
        return all(isinstance(choice, str | int) for choice in typing.get_args(kind))
    if origin in (list, Sequence):
        return is_plain(*typing.get_args(kind))
    if origin in (dict, Mapping):
        key, value = typing.get_args(kind)
        return key is str and (value is Any or is_plain(value))
    return kind in (int, float, str, bool, type(None))


def in_a_file(kind: Any) -> Any:
    """Leaves out of a union what no configuration file can hold, such as functions.

    Args:
      kind: an annotation.

    Returns:
      What is left; the annotation itself where that is nothing or everything.
    """
    alternatives = kinds_of(kind)
    plain = tuple(one for one in alternatives if is_plain(one))
    return functools.reduce(operator.or_, plain) if 0 < len(plain) < len(alternatives) else kind


# What stands for one value for each client.
_FOR_EACH: dict[Any, str] = {
    list: "a list of such, one for each client",
    dict: "a table of such by the clients' names",
}
_NAMES = {
    int: "a whole number",
    float: "a finite number",
    str: "a text",
    bool: "true or false",
    type(None): "none",
}


def _rule(kind: Any) -> str:
    limits: tuple[Any, ...] = ()
    if typing.get_origin(kind) is Annotated:
        kind, *limits = typing.get_args(kind)  # type: ignore[assignment]
    origin = typing.get_origin(kind)
    if origin is Literal:
        return "one of " + ", ".join(repr(choice) for choice in typing.get_args(kind))
    if origin in (list, Sequence):
        some = "a list of at least one entry" if ranges.MinLen(1) in limits else "a list"
        return f"{some}, each entry {rule_of(*typing.get_args(kind))}"
    if origin in (dict, Mapping):
        value = typing.get_args(kind)[1]
        return "a table" if value is Any else f"a table, each value {rule_of(value)}"
    if kind is str and limits:
        return "a plain name of letters, digits, spaces and .,=+-_, not begun by a sign"
    bounds = _bounds(limits)
    if not bounds:
        return _NAMES[kind]
    return f"{'a whole number' if kind is int else 'a number'} {bounds}"


def _bounds(limits: Sequence[Any]) -> str:
    low = next((x for x in limits if isinstance(x, ranges.Ge | ranges.Gt)), None)
    high = next((x for x in limits if isinstance(x, ranges.Le | ranges.Lt)), None)
    if low is not None and high == ranges.Lt(COUNT_LIMIT):
        return f"{_bounds([low])} and below 2^31"
    if low is not None and high is not None:
        left = f"[{low.ge}" if isinstance(low, ranges.Ge) else f"({low.gt}"
        right = f"{high.le}]" if isinstance(high, ranges.Le) else f"{high.lt})"
        return f"in {left}, {right}"
    if low is not None:
        return f"of at least {low.ge}" if isinstance(low, ranges.Ge) else f"above {low.gt}"
    if high is not None:
        return f"of at most {high.le}" if isinstance(high, ranges.Le) else f"below {high.lt}"
    return ""
