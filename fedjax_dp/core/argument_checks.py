"""What a signature says is held: kinds and ranges of arguments are read off their annotations."""

import collections.abc
import functools
import inspect
import os
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import jax
import numpy as np
import numpy.typing

from fedjax_dp.core import checks, ranges

_F = TypeVar("_F", bound=Callable[..., Any])
# How much of a value an error shows.
_SHOWN = 120


def checked(function: _F) -> _F:
    """Refuses arguments that are not what a function's annotations say, before it runs.

    Held are kinds (numbers, texts, arrays, functions, parts of the package), choices, and the
    ranges of `core.ranges`, whose numbers are finite. Traced numbers cannot be looked at and are
    let through, whatever their range. What `Any` says, and which shapes arrays have, is left to the
    function.

    Args:
      function: a function with annotations; its decorator, as in `@checked`.

    Returns:
      The function, which raises a ValueError that names argument, rule and value.
    """
    signature = inspect.signature(function)

    @functools.wraps(function)
    def held(*args: Any, **kwargs: Any) -> Any:
        try:
            given = signature.bind(*args, **kwargs).arguments
        except TypeError:
            # Python's own words name the function too.
            return function(*args, **kwargs)
        _hold(function, given)
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
            raise _refusal(f"{prefix}{name}", rule, value)


@functools.cache
def _rules(of: Callable[..., Any]) -> dict[str, "_Rule"]:
    hints = typing.get_type_hints(of, include_extras=True)
    found = {}
    for name, parameter in inspect.signature(of).parameters.items():
        is_one = parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
        if is_one and name in hints:
            kind = hints[name]
            rule = _rule(kind if parameter.default is not None else kind | None)
            if rule is not None:
                found[name] = rule
    return found


def _refusal(name: str, rule: "_Rule", value: Any) -> ValueError:
    """The error for an argument that is not of its kind, with the nearest word that it may be."""
    hint = checks.nearest(value, rule.choices) if isinstance(value, str) and rule.choices else None
    shown = checks.shown(value, _SHOWN) if _is_plain(value) else f"a {type(value).__name__}"
    return ValueError(
        f"{name} must be {rule.range_of(value) or rule.words}, got {shown}"
        + (f"; did you mean {hint!r}?" if hint else "")
    )


class _Rule(NamedTuple):
    """What an argument must be; `range_of` says of a value of the right kind what it misses."""

    holds: Callable[[Any], bool]
    words: str
    choices: tuple[str, ...] = ()
    range_of: Callable[[Any], str | None] = lambda value: None


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


def _is_traced(value: Any) -> bool:
    return isinstance(value, jax.core.Tracer)


def _as_array(value: Any) -> Any:
    """Reads a value as an array; None where it is none."""
    if isinstance(value, np.ndarray | jax.Array | np.generic):
        return value
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        return None
    try:
        array = np.asarray(value)
    except (ValueError, TypeError, jax.errors.JAXTypeError):
        # Lists of traced numbers are arrays all the same.
        return value if any(map(_is_traced, value)) else None
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
    """Whether JAX can make an array of them: it takes no integer beyond 32 bits."""
    return _are_numbers(value) and not (isinstance(value, int) and abs(value) >= checks.COUNT_LIMIT)


def _is_integer(value: Any) -> bool:
    if not _is_number(value) or _is_traced(value):
        return False
    is_array = isinstance(value, np.ndarray | jax.Array)
    return value.dtype.kind in "iu" if is_array else isinstance(value, int | np.integer)


def _is_finite(value: Any) -> bool:
    return _is_number(value) and (_is_traced(value) or bool(np.isfinite(float(value))))


def _within(limits: Sequence[Any], is_of_kind: Callable[[Any], bool], words: str) -> _Rule:
    """The rule of a number with a range, or of an array of such numbers."""

    def holds(value: Any) -> bool:
        if not is_of_kind(value):
            return False
        if _is_traced(value) or (isinstance(value, Sequence) and any(map(_is_traced, value))):
            return True
        if is_of_kind is _fit_arrays and isinstance(value, jax.Array):
            # Computed, as traced ones are: who computes with it answers what is out of range.
            return True
        return ranges.inside(np.asarray(value), limits)

    limits_in_words = ranges.in_words(limits)

    def range_of(value: Any) -> str | None:
        return limits_in_words if is_of_kind(value) and is_of_kind is not _is_integer else None

    return _Rule(holds, f"{words} {limits_in_words}", range_of=range_of)


_LIKE_ARRAYS = [
    frozenset(typing.get_args(kind)) for kind in (jax.typing.ArrayLike, numpy.typing.ArrayLike)
]
_PLAIN = {
    type(None): _Rule(lambda value: value is None, "None"),
    bool: _Rule(lambda value: isinstance(value, bool | np.bool_), "True or False"),
    int: _Rule(_is_integer, "an integer"),
    float: _Rule(_is_finite, "a finite number"),
    str: _Rule(lambda value: isinstance(value, str), "a text"),
    np.ndarray: _Rule(_is_host_array, "an array"),
    jax.Array: _Rule(_is_array, "an array"),
    os.PathLike: _Rule(lambda value: isinstance(value, os.PathLike), "a path"),
}
_NUMBERS = _Rule(_are_numbers, "a number or an array of numbers")


def _rule(kind: Any) -> _Rule | None:
    """What an annotation says; None where that is anything."""
    origin = typing.get_origin(kind)
    if origin is Annotated:
        kind, *limits = typing.get_args(kind)
        if kind is int:
            return _within(limits, _is_integer, "an integer of")
        if kind is float:
            return _within(limits, _is_number, "a number,")
        return _within(
            limits, _fit_arrays, "a number (integers below 2^31) or an array of numbers,"
        )
    if origin in (typing.Union, types.UnionType):
        return _of_alternatives(typing.get_args(kind))
    if kind in _PLAIN:
        return _PLAIN[kind]
    if origin is Literal:
        choices = typing.get_args(kind)
        words = "one of " + ", ".join(map(repr, choices))
        texts = tuple(choice for choice in choices if isinstance(choice, str))
        return _Rule(lambda value: isinstance(value, str | int) and value in choices, words, texts)
    if origin is collections.abc.Callable or kind is Callable:
        return _Rule(callable, "a function")
    if origin in (Sequence, list, tuple):
        return _of_entries(origin, typing.get_args(kind))
    if origin is type or kind in (Any, object):
        return None
    of = origin or kind
    if of is Mapping:
        return _Rule(lambda value: isinstance(value, Mapping), "a mapping")
    if not inspect.isclass(of) or getattr(of, "_is_protocol", False):
        return None
    if issubclass(of, os.PathLike):
        return _PLAIN[os.PathLike]
    article = "an" if of.__name__[0] in "AEIOU" else "a"
    return _Rule(lambda value: isinstance(value, of), f"{article} {of.__name__}")


def _of_alternatives(kinds: Sequence[Any]) -> _Rule | None:
    like = next((names for names in _LIKE_ARRAYS if names <= set(kinds)), frozenset())
    found = [_rule(one) for one in kinds if one not in like] + ([_NUMBERS] if like else [])
    if any(rule is None for rule in found):
        return None
    rules = [rule for rule in found if rule is not None]
    # "or None" comes last.
    rules.sort(key=lambda rule: rule.words == "None")
    words = list(dict.fromkeys(rule.words for rule in rules))
    choices = tuple(choice for rule in rules for choice in rule.choices)

    def range_of(value: Any) -> str | None:
        return next(filter(None, (rule.range_of(value) for rule in rules)), None)

    # Arrays first: whether one is a sequence of numbers takes a look at each of them.
    quick_first = sorted(rules, key=lambda rule: rule.holds is not _is_host_array)
    return _Rule(
        lambda value: any(rule.holds(value) for rule in quick_first),
        " or ".join(words),
        choices,
        range_of,
    )


def _of_entries(origin: Any, kinds: Sequence[Any]) -> _Rule:
    """Sequences, which arrays are too; of tuples of unlike entries only that they are tuples."""
    accepted = (origin,) if origin is tuple else (Sequence, np.ndarray, jax.Array)
    same = [kind for kind in kinds if kind is not Ellipsis]
    rule = _rule(same[0]) if len(same) == 1 else None

    def holds(value: Any) -> bool:
        if not isinstance(value, accepted) or isinstance(value, str | bytes):
            return False
        if isinstance(value, np.ndarray | jax.Array) and value.ndim == 0:
            return False
        return rule is None or all(map(rule.holds, value))

    name = "tuple" if origin is tuple else "sequence"
    return _Rule(holds, f"a {name}" + (f", each entry {rule.words}" if rule is not None else ""))
