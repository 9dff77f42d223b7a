"""One value of a configuration: read as the kind that its key holds, or a clear error."""

import types
import typing
from collections.abc import Mapping
from typing import Any, Literal

from fedjax_dp.core import checks


class ConfigError(ValueError):
    """A key or value that a configuration may not have."""


def kinds_of(kind: Any) -> tuple[Any, ...]:
    """Lists the alternatives of a kind.

    Args:
      kind: a type or a union of types.

    Returns:
      The types.
    """
    is_union = typing.get_origin(kind) in (types.UnionType, typing.Union)
    return typing.get_args(kind) if is_union else (kind,)


def read_value(kind: Any, value: Any, key: str, origin: str) -> Any:
    """Reads a value as a kind that a key may hold.

    Args:
      kind: a type, or a union of types, literals, lists of numbers, tables and None.
      value: what a file or a command line gave; the word "none" is None where that is a kind.
      key: the key's dotted name.
      origin: the file, or whatever the value came from.

    Returns:
      The value, whole numbers as floats where the kind is one.

    Raises:
      ConfigError: naming the key, the rule, the value and the nearest choice.
    """
    kinds = kinds_of(kind)
    if type(None) in kinds and (value is None or value == "none"):
        return None
    choices: list[str] = []
    for one in kinds:
        if one is type(None):
            continue
        if typing.get_origin(one) is Literal:
            choices += typing.get_args(one)
            if value in typing.get_args(one):
                return value
        elif one is float:
            if _is_number(value):
                return float(value)
        elif one is list[float] or one == list[float]:
            if isinstance(value, list) and value and all(_is_number(v) for v in value):
                return [float(v) for v in value]
        elif one == list[str]:
            if isinstance(value, list) and all(isinstance(v, str) for v in value):
                return list(value)
        elif one == dict[str, Any]:
            if isinstance(value, Mapping):
                return dict(value)
        elif isinstance(value, one) and not (one is int and isinstance(value, bool)):
            return value
    names = " or ".join(_kind_name(one) for one in kinds)
    hint = checks.nearest(value, choices) if isinstance(value, str) else None
    raise ConfigError(
        f"{origin}: {key} must be {names}, got {value!r}"
        + (f"; did you mean {hint!r}?" if hint else "")
    )


def _is_number(value: Any) -> bool:
    return checks.is_finite_number(value) and not isinstance(value, bool)


def _kind_name(kind: Any) -> str:
    if typing.get_origin(kind) is Literal:
        return "one of " + ", ".join(repr(choice) for choice in typing.get_args(kind))
    names = {
        int: "a whole number",
        float: "a finite number",
        str: "a text",
        bool: "true or false",
        type(None): "none",
    }
    if kind == list[float]:
        return "a list of finite numbers, one for each client"
    if kind == list[str]:
        return "a list of texts"
    return names.get(kind, "a table")
