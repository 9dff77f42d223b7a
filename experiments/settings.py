"""Comparing the settings of experiments."""

from collections.abc import Mapping, Sequence
from typing import Any


def flat(tables: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values of a configuration that decide what a run finds, by dotted name.

    How it executes is left out.
    """
    found: dict[str, Any] = {}
    for name, value in tables.items():
        key = f"{prefix}{name}"
        if key in ("execution", "training.micro_batch_size"):
            continue
        if isinstance(value, Mapping) and not key.endswith("options"):
            found |= flat(value, f"{key}.")
        else:
            found[key] = value
    return found


def differences(
    one: Mapping[str, Any], other: Mapping[str, Any], besides: Sequence[str] = ()
) -> list[str]:
    """Where two configurations differ, as lines for people; `besides` may differ."""
    a, b = flat(one), flat(other)
    return [
        f"{key}: {a.get(key)!r} and {b.get(key)!r}"
        for key in sorted(a.keys() | b.keys())
        if key not in besides and a.get(key) != b.get(key)
    ]
