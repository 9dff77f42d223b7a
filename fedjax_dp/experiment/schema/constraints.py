"""The values of a configuration, which fit the annotations of their keys."""

import contextlib
import functools
import math
import operator
import os
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

import jax
import numpy as np
from pydantic.fields import FieldInfo

from fedjax_dp.core import argument_checks, checks
from fedjax_dp.core.argument_checks import Rule
from fedjax_dp.core.ranges import LARGEST, PATH, SMALLEST, fits_float32

# Floats up to this represent integers exactly.
_EXACT = 2**53


class ConfigError(ValueError):
    """An invalid key or value of a configuration."""


def refused(origin: str, text: str) -> ConfigError:
    """Makes an error that begins with where a value came from; values given in Python do not."""
    return ConfigError(f"{origin}: {text}" if origin else text)


@contextlib.contextmanager
def keyed(section: str, keys: Mapping[str, str] = {}) -> Iterator[None]:
    """Names keys in errors of factories: arguments are keys of a section unless `keys` has them."""
    try:
        yield
    except ValueError as error:
        argument, _, rest = str(error).partition(" ")
        key = keys.get(argument, f"{section}.{argument}")
        raise ValueError(f"{key} {rest}") from error


def kinds_of(kind: Any) -> tuple[Any, ...]:
    """Lists the alternatives of an annotation."""
    is_union = typing.get_origin(kind) in (types.UnionType, typing.Union)
    return typing.get_args(kind) if is_union else (kind,)


def bare(kind: Any) -> Any:
    """Removes the range from an annotation."""
    return typing.get_args(kind)[0] if typing.get_origin(kind) is Annotated else kind


def annotation_of(field: FieldInfo) -> Any:
    """Returns the whole annotation of a field, including its range."""
    return Annotated[field.annotation, *field.metadata] if field.metadata else field.annotation


def may_be_none(kind: Any) -> bool:
    """Whether a value can be left out, written as the word "none"."""
    return type(None) in kinds_of(kind)


def rule_of(kind: Any) -> Rule:
    """Returns the rule for a value in a file."""
    found = argument_checks.rule_of(kind, in_file=True)
    assert found is not None
    return found


def ready_value(origin: str, key: str, kind: Any, value: Any) -> Any:
    """Converts a value of a file, or one given in Python, to its type, or refuses it."""
    value = _plain(value)
    if isinstance(value, str) and value == "none" and may_be_none(kind):
        return None
    ready, rule = _as_asked(kind, value), rule_of(kind)
    if not rule.holds(ready):
        raise refused(origin, str(argument_checks.refusal(key, rule, value)))
    if kind != dict[str, Any]:
        # Tables of options are checked with their part.
        _require_float32(origin, key, ready)
    is_path = isinstance(ready, str) and any(PATH in typing.get_args(one) for one in kinds_of(kind))
    return os.path.expanduser(ready) if is_path else ready


def _plain(value: Any) -> Any:
    """Converts what only Python has (arrays, tuples, NumPy's scalars, paths) to what files have."""
    if isinstance(value, np.ndarray | np.generic | jax.Array):
        return np.asarray(value).tolist()
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, Mapping):
        return {name: _plain(one) for name, one in value.items()}
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _as_asked(kind: Any, value: Any) -> Any:
    kinds = [bare(one) for one in kinds_of(kind)]
    if isinstance(value, list):
        lists = [one for one in kinds if typing.get_origin(one) in (list, Sequence)]
        return [_as_asked(typing.get_args(lists[0])[0], one) for one in value] if lists else value
    # An integer may be written as 1e3.
    is_whole = isinstance(value, float) and value.is_integer() and abs(value) < _EXACT
    return int(value) if is_whole and int in kinds and float not in kinds else value


def with_floats(kind: Any, value: Any) -> Any:
    """Converts integers to floats, alone or in lists and tables, if the kind is a float."""
    kinds = [bare(one) for one in kinds_of(kind)]
    if isinstance(value, list):
        lists = [one for one in kinds if typing.get_origin(one) is list]
        return [with_floats(typing.get_args(lists[0])[0], x) for x in value] if lists else value
    if isinstance(value, dict):
        tables = [one for one in kinds if typing.get_origin(one) is dict]
        entry = typing.get_args(tables[0])[1] if tables else Any
        return {name: with_floats(entry, one) for name, one in value.items()}
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    return float(value) if is_integer and float in kinds and int not in kinds else value


def _require_float32(origin: str, key: str, value: Any) -> None:
    """Requires numbers, alone or in lists and tables, that float32 can represent; δ is float64."""
    if isinstance(value, list | Mapping):
        for one in value.values() if isinstance(value, Mapping) else value:
            _require_float32(origin, key, one)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or key.endswith("dp_delta") or not math.isfinite(value):
        return
    if not fits_float32(value):
        rule = f"be 0 or of a size that float32 can represent, {SMALLEST:.2g} to {LARGEST:.2g}"
        raise refused(origin, f"{key} must {rule}, got {checks.shown(value)}")


def is_plain(kind: Any) -> bool:
    """Whether a file can hold values of a kind: strings, numbers, bools, lists and tables, None."""
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
    """Removes from a union what no file can hold, such as functions, if anything is left."""
    alternatives = kinds_of(kind)
    plain = tuple(one for one in alternatives if is_plain(one))
    return functools.reduce(operator.or_, plain) if 0 < len(plain) < len(alternatives) else kind
