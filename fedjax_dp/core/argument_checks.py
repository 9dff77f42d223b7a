"""Argument checks at run time, read off type annotations."""

import collections.abc
import functools
import inspect
import math
import os
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import jax
import numpy as np
import numpy.typing
from annotated_types import Le, MinLen

from fedjax_dp.core import checks, ranges
from fedjax_dp.core.registry import groups_of
from fedjax_dp.core.synonyms import suggestion

_F = TypeVar("_F", bound=Callable[..., Any])
# How much of a value an error shows.
_SHOWN = 200


def checked(function: _F) -> _F:
    """Refuses arguments that do not match a function's annotations, before it runs.

    Checked are kinds (numbers, strings, arrays, functions, parts of the package), choices, and the
    ranges of `core.ranges`, whose numbers are finite. Traced numbers pass, whatever their range.
    Arguments annotated with `Any`, and shapes of arrays, are left to the function. A named tuple in
    the place of one that is a default, as options have it, is checked field by field.

    Args:
      function: a function with annotations; its decorator, as in `@checked`.

    Returns:
      The function, which raises a ValueError that names argument, rule and value.
    """
    signature, groups = inspect.signature(function), groups_of(function)

    @functools.wraps(function)
    def held(*args: Any, **kwargs: Any) -> Any:
        try:
            given = signature.bind(*args, **kwargs).arguments
        except TypeError:
            # Python's own words name the function too.
            return function(*args, **kwargs)
        _hold(function, given)
        for name in groups.keys() & given.keys():
            check_fields(given[name])
        return function(*args, **kwargs)

    return typing.cast(_F, held)


def check_fields(holder: Any, prefix: str = "") -> None:
    """Requires the fields of a named tuple or data class to be what its annotations say."""
    of = type(holder)
    _hold(of, {name: getattr(holder, name) for name in inspect.signature(of).parameters}, prefix)


def _hold(of: Callable[..., Any], given: Mapping[str, Any], prefix: str = "") -> None:
    rules = _rules(of)
    for name, value in given.items():
        rule = rules.get(name)
        if rule is not None and not rule.holds(value):
            raise refusal(f"{prefix}{name}", rule, value)


@functools.cache
def _rules(of: Callable[..., Any]) -> dict[str, "Rule"]:
    hints = typing.get_type_hints(of, include_extras=True)
    rules = {}
    for name, parameter in inspect.signature(of).parameters.items():
        is_one = parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
        if is_one and name in hints:
            kind = hints[name]
            rule = rule_of(kind if parameter.default is not None else kind | None)
            if rule is not None:
                rules[name] = rule
    return rules


class Rule(NamedTuple):
    """A rule for a value; `range_of` describes the range for a value of the right kind."""

    holds: Callable[[Any], bool]
    words: str
    choices: tuple[str, ...] = ()
    range_of: Callable[[Any], str | None] = lambda value: None


def refusal(name: str, rule: Rule, value: Any) -> ValueError:
    """Builds the error for a value that breaks its rule, with the nearest choice."""
    hint = suggestion(value, rule.choices) if isinstance(value, str) else ""
    shown = checks.shown(value, _SHOWN) if _is_plain(value) else f"a {type(value).__name__}"
    return ValueError(f"{name} must be {rule.range_of(value) or rule.words}, got {shown}{hint}")


def _is_plain(value: Any) -> bool:
    kinds = (str, bytes, bool, int, float, complex, np.generic, np.ndarray, jax.Array, type(None))
    return type(value) in (list, tuple, dict, set, type) or isinstance(value, kinds)


def _is_number(value: Any) -> bool:
    """Whether a value is one real number, traced or not."""
    if isinstance(value, bool | np.bool_):
        return False
    if isinstance(value, int | float | np.integer | np.floating):
        return True
    is_scalar = isinstance(value, np.ndarray | jax.Array) and np.ndim(value) == 0
    return is_scalar and value.dtype != bool and _has_real_entries(value)


def _has_real_entries(array: Any) -> bool:
    kinds = (np.bool_, np.integer, np.floating)
    return any(jax.numpy.issubdtype(array.dtype, kind) for kind in kinds)


def _as_array(value: Any) -> Any:
    """Converts a value to an array; None if that is not possible."""
    if isinstance(value, np.ndarray | jax.Array | np.generic):
        return value
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        return None
    try:
        array = np.asarray(value)
    except (ValueError, TypeError, jax.errors.JAXTypeError):
        # Lists of traced numbers count as arrays too.
        return value if any(map(checks.is_traced, value)) else None
    return None if array.dtype == object else array


def _is_array(value: Any) -> bool:
    return isinstance(value, np.ndarray | jax.Array)


def _is_host_array(value: Any) -> bool:
    """NumPy reads lists too, which JAX refuses."""
    is_list = isinstance(value, Sequence) and not isinstance(value, np.generic)
    return _is_array(value) or (is_list and _as_array(value) is not None)


def _are_numbers(value: Any) -> bool:
    if _is_number(value):
        return True
    array = _as_array(value)
    if array is None or isinstance(value, np.bool_):
        return False
    return isinstance(array, Sequence) or _has_real_entries(array)


def _fit_arrays(value: Any) -> bool:
    """Whether JAX can make an array of them: integers must fit 32 bits."""
    return _are_numbers(value) and not (isinstance(value, int) and abs(value) >= checks.COUNT_LIMIT)


def _is_integer(value: Any) -> bool:
    if not _is_number(value) or checks.is_traced(value):
        return False
    is_array = isinstance(value, np.ndarray | jax.Array)
    return value.dtype.kind in "iu" if is_array else isinstance(value, int | np.integer)


def _is_finite(value: Any) -> bool:
    return _is_number(value) and (checks.is_traced(value) or bool(np.isfinite(_as_float(value))))


def _as_float(value: Any) -> float:
    try:
        return float(value)
    except OverflowError:
        # An integer of hundreds of digits.
        return np.inf


def _within(limits: Sequence[Any], is_of_kind: Callable[[Any], bool], words: str) -> Rule:
    """Builds the rule of a number with a range, or of an array of such numbers."""

    def holds(value: Any) -> bool:
        if not is_of_kind(value):
            return False
        several = value if isinstance(value, Sequence) else (value,)
        if any(map(checks.is_traced, several)):
            return True
        if is_of_kind is _fit_arrays and isinstance(value, jax.Array):
            # Computed, like traced ones: its users define the result out of range too.
            return True
        return ranges.inside(
            np.asarray(_as_float(value) if isinstance(value, int) else value), limits
        )

    limits_in_words = ranges.in_words(limits)

    def range_of(value: Any) -> str | None:
        if is_of_kind is _is_integer or not is_of_kind(value):
            return None
        is_any = Le(math.inf) in limits or not isinstance(value, float) or math.isfinite(value)
        return limits_in_words if is_any else f"{limits_in_words} and finite"

    return Rule(holds, words, range_of=range_of)


class _Words(NamedTuple):
    """The names of types in Python, or in a file."""

    none: str = "None"
    boolean: str = "True or False"
    sequence: str = "a sequence"
    mapping: str = "a mapping"


_IN_PYTHON, _IN_FILE = _Words(), _Words("none", "true or false", "a list", "a table")
# NumPy's is a name without alternatives since 2.5, for Python 3.12 and later.
_LIKE_ARRAYS = [
    frozenset(typing.get_args(kind) or [kind])
    for kind in (jax.typing.ArrayLike, numpy.typing.ArrayLike)
]
_PLAIN = {
    int: Rule(_is_integer, "an integer"),
    float: Rule(_is_finite, "a finite number"),
    str: Rule(lambda value: isinstance(value, str), "a string"),
    np.ndarray: Rule(_is_host_array, "an array"),
    jax.Array: Rule(_is_array, "an array"),
    os.PathLike: Rule(lambda value: isinstance(value, os.PathLike), "a path"),
}
_NUMBERS = Rule(_are_numbers, "a number or an array of numbers")
_SEQUENCES, _MAPPINGS = (Sequence, list, tuple), (Mapping, dict)


def rule_of(kind: Any, *, in_file: bool = False) -> Rule | None:
    """Reads the rule of an annotation, worded for Python or a file; None if it allows anything."""
    called = _IN_FILE if in_file else _IN_PYTHON
    if kind is numpy.typing.ArrayLike:
        return _NUMBERS
    origin = typing.get_origin(kind)
    if origin is Annotated:
        kind, *limits = typing.get_args(kind)
        return _limited(kind, limits, in_file)
    if origin in (typing.Union, types.UnionType):
        return _of_alternatives(typing.get_args(kind), in_file)
    if kind is type(None):
        return Rule(lambda value: value is None, called.none)
    if kind is bool:
        return Rule(lambda value: isinstance(value, bool | np.bool_), called.boolean)
    if kind in _PLAIN:
        return _PLAIN[kind]
    if origin is Literal:
        choices = typing.get_args(kind)
        words = "one of " + ", ".join(map(repr, choices))
        texts = tuple(choice for choice in choices if isinstance(choice, str))
        return Rule(lambda value: isinstance(value, str | int) and value in choices, words, texts)
    if origin is collections.abc.Callable or kind is Callable:
        return Rule(callable, "a function")
    if origin in _SEQUENCES:
        return _of_entries(origin, typing.get_args(kind), called.sequence, in_file)
    of = origin or kind
    if of in _MAPPINGS:
        # In Python a mapping may nest deeper than its annotation says, as examples do.
        values = typing.get_args(kind)[1:] if in_file else ()
        return _of_values(*(rule_of(v, in_file=True) for v in values), words=called.mapping)
    if origin is type or kind in (Any, object):
        return None
    if getattr(of, "_is_protocol", False):
        return Rule(callable, "a function") if "__call__" in vars(of) else None
    if not inspect.isclass(of):
        return None
    if issubclass(of, os.PathLike):
        return _PLAIN[os.PathLike]
    article = "an" if of.__name__[0] in "AEIOU" else "a"
    return Rule(lambda value: isinstance(value, of), f"{article} {of.__name__}")


def _limited(kind: Any, limits: Sequence[Any], in_file: bool) -> Rule | None:
    if kind is int:
        return _within(limits, _is_integer, ranges.of_kind("an integer", limits))
    if kind is float:
        return _within(limits, _is_number, ranges.of_kind("a number", limits))
    if kind is str:
        (pattern,) = limits
        return Rule(lambda value: isinstance(value, str) and pattern.holds(value), pattern.words)
    if limits == [MinLen(1)]:
        some = rule_of(kind, in_file=in_file)
        assert some is not None
        noun, comma, entries = some.words.partition(",")
        words = f"{noun} of at least one entry{comma}{entries}"
        return some._replace(holds=lambda value: some.holds(value) and len(value) > 0, words=words)
    noun = "a number (integers below 2^31) or an array of numbers"
    return _within(limits, _fit_arrays, f"{noun}, {ranges.in_words(limits)}")


def _of_alternatives(kinds: Sequence[Any], in_file: bool) -> Rule | None:
    like = next((names for names in _LIKE_ARRAYS if names <= set(kinds)), frozenset())
    found = [rule_of(one, in_file=in_file) for one in kinds if one not in like]
    found += [_NUMBERS] if like else []
    if any(rule is None for rule in found):
        return None
    rules = [rule for rule in found if rule is not None]
    if in_file:
        rules = [_for_each(rule, one, kinds) for rule, one in zip(rules, kinds, strict=True)]
    # "or None" comes last.
    rules.sort(key=lambda rule: rule.words in ("None", "none"))
    words = list(dict.fromkeys(rule.words for rule in rules))
    choices = tuple(choice for rule in rules for choice in rule.choices)

    def range_of(value: Any) -> str | None:
        return next(filter(None, (rule.range_of(value) for rule in rules)), None)

    # Arrays first: whether one is a sequence of numbers takes a check of each of them.
    quick_first = sorted(rules, key=lambda rule: rule.holds is not _is_host_array)
    return Rule(
        lambda value: any(rule.holds(value) for rule in quick_first),
        " or ".join(words),
        choices,
        range_of,
    )


def _for_each(rule: Rule, kind: Any, kinds: Sequence[Any]) -> Rule:
    """Shortens the text of a list or table whose entries are another of the alternatives."""
    base = typing.get_args(kind)[0] if typing.get_origin(kind) is Annotated else kind
    origin, parts = typing.get_origin(base), typing.get_args(base)
    if origin not in (list, dict) or parts[-1] not in kinds:
        return rule
    is_list = origin is list
    words = "a list of these, one for each client" if is_list else "a table of these by name"
    return rule._replace(words=words)


def _of_entries(origin: Any, kinds: Sequence[Any], words: str, in_file: bool) -> Rule:
    """Builds the rule of sequences and arrays; mixed tuples are only checked to be tuples."""
    accepted = (origin,) if origin is tuple else (Sequence, np.ndarray, jax.Array)
    same = [kind for kind in kinds if kind is not Ellipsis]
    rule = rule_of(same[0], in_file=in_file) if len(same) == 1 else None

    def holds(value: Any) -> bool:
        if not isinstance(value, accepted) or isinstance(value, str | bytes):
            return False
        if isinstance(value, np.ndarray | jax.Array) and value.ndim == 0:
            return False
        return rule is None or all(map(rule.holds, value))

    noun = "a tuple" if origin is tuple else words
    return Rule(holds, noun + (f", each entry {rule.words}" if rule is not None else ""))


def _of_values(rule: Rule | None = None, *, words: str) -> Rule:
    """Builds the rule of mappings, whatever their keys."""

    def holds(value: Any) -> bool:
        is_mapping = isinstance(value, Mapping)
        return is_mapping and (rule is None or all(map(rule.holds, value.values())))

    return Rule(holds, words + (f", each value {rule.words}" if rule is not None else ""))
