"""The values of a configuration, which fit the annotations of their keys."""

import contextlib
import functools
import math
import operator
import os
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Annotated, Any, Literal

import jax
import numpy as np
from annotated_types import Le
from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from fedjax_dp.core import argument_checks, checks
from fedjax_dp.core.argument_checks import Rule
from fedjax_dp.core.ranges import LARGEST, PATH, SMALLEST, fits_float32
from fedjax_dp.experiment.schema.moved import moved

# How pydantic checks values.
STRICT = ConfigDict(strict=True, allow_inf_nan=False)
# Floats up to this represent integers exactly.
_EXACT = 2**53


class ConfigError(ValueError):
    """An invalid key or value of a configuration."""


# Names the source of the value of a key; empty for values given in Python.
_SOURCE: ContextVar[Callable[[str], str]] = ContextVar("_SOURCE", default=lambda key: "")


@contextlib.contextmanager
def values_of(source: str | Callable[[str], str]) -> Iterator[None]:
    """Names the source of values in errors, one for all or `(key) -> source`."""
    before = _SOURCE.set(source if callable(source) else lambda key: source)
    try:
        yield
    finally:
        _SOURCE.reset(before)


def refused(key: str, text: str) -> ConfigError:
    """Makes an error that begins with where the value of a key came from, unless from Python."""
    source = _SOURCE.get()(key)
    return ConfigError(f"{source}: {text}" if source else text)


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


def rule_of(kind: Any) -> Rule:
    """Returns the rule for a value in a file."""
    found = argument_checks.rule_of(kind, in_file=True)
    assert found is not None
    return found


def ready_value(key: str, kind: Any, value: Any) -> Any:
    """Returns a value outside of a section as it is written in Python, or refuses it."""
    ready = in_python(kind, value)
    try:
        _check_of(kind)(ready)
    except ValidationError:
        raise mistake(key, kind, value) from None
    require_float32(key, kind, ready)
    return ready


@functools.cache
def _check_of(kind: Any) -> Callable[[Any], Any]:
    """Returns pydantic's check of an annotation."""
    is_endless = any(Le(math.inf) in typing.get_args(one) for one in kinds_of(kind))
    return TypeAdapter(kind, config={**STRICT, "allow_inf_nan": is_endless}).validate_python


def mistake(key: str, kind: Any, value: Any) -> ConfigError:
    """Makes the error for a value that does not fit its annotation."""
    value = _plain(value)
    text = str(argument_checks.refusal(key, rule_of(kind), value))
    # Text of a command line that TOML does not read, such as [age, sex].
    is_list = isinstance(value, str) and value[:1] in ("[", "{")
    hint = "; strings in it are written in quotes, as in TOML" if is_list else ""
    return refused(key, text + moved(key, value) + hint)


def in_python(kind: Any, value: Any) -> Any:
    """Normalises a value: arrays and tuples become lists, "none" None, ~ a folder, 1e3 1000."""
    value = _plain(value)
    if not isinstance(value, str):
        return _as_asked(kind, value)
    if value == "none" and type(None) in kinds_of(kind):
        return None
    is_path = any(PATH in typing.get_args(one) for one in kinds_of(kind))
    return os.path.expanduser(value) if is_path else value


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


def require_float32(key: str, kind: Any, value: Any) -> None:
    """Requires numbers, alone or in lists and tables, that float32 can represent; δ is float64."""
    if kind == dict[str, Any]:
        # Tables of options are checked with their part.
        return
    if isinstance(value, list | Mapping):
        for one in value.values() if isinstance(value, Mapping) else value:
            require_float32(key, kind, one)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or key.endswith("dp_delta") or not math.isfinite(value):
        return
    if not fits_float32(value):
        rule = f"be 0 or of a size that float32 can represent, {SMALLEST:.2g} to {LARGEST:.2g}"
        raise refused(key, f"{key} must {rule}, got {checks.shown(value)}")


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
