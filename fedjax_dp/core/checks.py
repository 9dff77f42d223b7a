"""Checks of static input: every failure names the argument, the rule and the value."""

import math
from collections.abc import Collection, Iterable
from typing import Any

import jax
import numpy as np

from fedjax_dp.core.synonyms import suggestion

# Steps, rounds and sizes are counted in an int32 and are below this; float32 holds it exactly.
COUNT_LIMIT = 2**31
# Python formats no integer of more than 4,300 decimal digits.
_MOST_BITS = 8_192


def require(condition: bool, argument: str, rule: str, value: Any) -> None:
    """Raises a ValueError, "ARGUMENT must RULE, got VALUE", if a condition is false."""
    if not condition:
        raise ValueError(f"{argument} must {rule}, got {shown(value)}")


def is_traced(value: Any) -> bool:
    """Checks whether a value is known only when a compiled program runs."""
    return isinstance(value, jax.core.Tracer)


def shown(value: Any, limit: int = 500) -> str:
    """Formats any value for an error message, cut after `limit` characters."""
    if isinstance(value, jax.Array) and not is_traced(value):
        is_key = jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key)
        can_be_read = not is_key and not value.is_deleted() and value.is_fully_addressable
        value = np.asarray(value) if can_be_read else jax.typeof(value)
    if isinstance(value, int) and value.bit_length() > _MOST_BITS:
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, np.number | np.bool_):
        text = str(value)
    elif isinstance(value, np.ndarray):
        text = np.array2string(value, separator=", ") if value.ndim else str(value)
    else:
        text = repr(value)
    return text if len(text) <= limit else f"{text[:limit]}…"


def listed(names: Iterable[str], limit: int = 2000) -> str:
    """Joins names for an error message, cut after `limit` characters."""
    text = ", ".join(names)
    return text if len(text) <= limit else f"{text[:limit]}…"


def _all(values: Any, predicate: Any) -> bool:
    array = np.asarray(values)
    return array.dtype.kind in "biuf" and bool(np.all(predicate(array)))


def numbers(argument: str, rule: str, value: Any) -> None:
    """Requires real numbers, not booleans, before a range is checked."""
    try:
        array = np.asarray(value)
    except (ValueError, TypeError):
        array = np.asarray(None)
    is_real = array.dtype.kind in "iuf" or jax.numpy.issubdtype(array.dtype, np.floating)
    require(is_real, argument, rule, value)


def positive(argument: str, value: Any) -> None:
    """Requires a finite number above zero, or an array of such numbers."""
    require(_all(value, lambda a: np.isfinite(a) & (a > 0)), argument, "be above 0", value)


def positive_for_each_client(argument: str, values: Any, num_clients: int) -> np.ndarray:
    """Requires one finite number above zero for each client; returns them as float32."""
    shape = None if values is None else np.shape(values)
    rule = f"have one number for each of the {num_clients} clients"
    require(shape == (num_clients,), argument, rule, values)
    positive(argument, values)
    return np.asarray(values, np.float32)


def one_for_each(key: str, value: Any, num_clients: int) -> None:
    """Requires one number, or one for each client; None passes."""
    rule = f"be one number or have one for each of the {num_clients} clients"
    require(value is None or np.shape(value) in ((), (num_clients,)), key, rule, value)


def non_negative(argument: str, value: Any) -> None:
    """Requires a finite number of at least zero, or an array of such numbers."""
    require(_all(value, lambda a: np.isfinite(a) & (a >= 0)), argument, "be at least 0", value)


def probability(argument: str, value: Any, *, allow_zero: bool = False) -> None:
    """Requires numbers in (0, 1], or in [0, 1] if zero is allowed."""
    rule = "be in [0, 1]" if allow_zero else "be in (0, 1]"
    lower = (lambda a: a >= 0) if allow_zero else (lambda a: a > 0)
    require(_all(value, lambda a: lower(a) & (a <= 1)), argument, rule, value)


def whole(argument: str, value: Any, *, at_least: int = 1, is_sized: bool = True) -> None:
    """Requires an integer of at least `at_least`, and below 2^31 if it is a computed size."""
    is_whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    require(
        is_whole and value >= at_least, argument, f"be an integer of at least {at_least}", value
    )
    require(not is_sized or value < COUNT_LIMIT, argument, "be below 2^31", value)


def one_of(argument: str, value: str, choices: Collection[str]) -> None:
    """Requires one of the named choices; the error suggests the nearest one."""
    if not isinstance(value, str) or value not in choices:
        known = sorted(choices)
        hint = suggestion(str(value), known)
        raise ValueError(f"{argument} must be one of {listed(known)}, got {value!r}{hint}")


def is_finite_number(value: Any) -> bool:
    """Whether a value is a finite real number."""
    try:
        return isinstance(value, int | float | np.number) and math.isfinite(float(value))
    except OverflowError:
        # An integer above all floats.
        return False
