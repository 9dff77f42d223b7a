"""Named tuples that know the parts they were made with, so that exchanged ones are found."""

from typing import Any, TypeVar

_T = TypeVar("_T", bound=Any)


def made(value: _T) -> _T:
    """Marks a named tuple, which has a field `made`, as made with the parts that it has."""
    return value._replace(made=value._replace(made=None))


def exchanged(value: Any, *names: str) -> list[str]:
    """Names the parts, of some or of all, that are not those that it was made with."""
    first = value.made
    # Names are for reports and may differ.
    parts = set(names or value._fields) - {"made", "name"}
    is_other = {n: not _is_same(getattr(value, n), getattr(first, n, None)) for n in parts}
    return [name for name in value._fields if is_other.get(name)]


def _is_same(a: Any, b: Any) -> bool:
    """Compares numbers and words by value, named tuples by their parts, and all else as objects.

    A copy that was mapped over or unpickled has the same functions, but tuples of its own.
    """
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, int | float | str):
        return bool(a == b)
    return hasattr(a, "_fields") and all(map(_is_same, a, b))


def changed(value: _T, **parts: Any) -> _T:
    """Makes another one by replacing parts; parts that were exchanged before stay so."""
    other = value._replace(**parts)
    return other if exchanged(value) else made(other)
