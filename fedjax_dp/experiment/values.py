"""What a value may be, read off its annotation, in words for people."""

import functools
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
        f"{origin}: {key} must be {rule_of(kind)}, got {value!r}"
        + (f"; did you mean {hint!r}?" if hint else "")
    )


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
        return f"a list, each entry {rule_of(*typing.get_args(kind))}"
    if origin in (dict, Mapping):
        return "a table"
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
