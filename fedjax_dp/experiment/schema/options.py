"""The options of a part, with types and descriptions from its factory."""

import inspect
import re
import sys
import textwrap
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pydantic.fields import FieldInfo

from fedjax_dp.core.registry import groups_of, is_own, options_of
from fedjax_dp.core.synonyms import suggestion
from fedjax_dp.experiment.schema.constraints import (
    annotation_of,
    in_a_file,
    is_plain,
    ready_value,
    refused,
    rule_of,
)
from fedjax_dp.experiment.schema.moved import moved

Fields = Mapping[str, FieldInfo]


def fields_of(
    name: str,
    factory: Callable[..., Any],
    *,
    given: Sequence[str] = (),
    kinds: Mapping[str, Any] = {},
    defaults: Mapping[str, Any] = {},
) -> Fields:
    """Reads kinds, defaults and descriptions of a part's options from its factory.

    `kinds` and `defaults` replace those of the factory. An option that no file can hold, or, in
    this package, without a description, is a TypeError. `python -OO` leaves no descriptions.
    """
    options, hints, about = options_of(factory, given), dict(kinds), described(factory)
    if not options.keys() <= kinds.keys():
        holders: list[Any] = [factory, *map(type, groups_of(factory).values())]
        for holder in holders:
            hints = typing.get_type_hints(holder, include_extras=True) | hints
            about |= described(holder)
    fields = {}
    for option, default in options.items():
        hint = in_a_file(hints.get(option))
        if option not in hints or not is_plain(hint):
            raise TypeError(
                f"option {option} of {name} must be annotated with a kind that a file can hold, "
                "such as float"
            )
        if option not in about and not is_own(name) and sys.flags.optimize < 2:
            raise TypeError(f"option {option} of {name} must have a line in the docstring")
        found = defaults.get(option, default)
        of_default = {} if found is inspect.Parameter.empty else {"default": found}
        fields[option] = FieldInfo(annotation=hint, description=about.get(option), **of_default)
    return fields


def described(factory: Callable[..., Any]) -> dict[str, str]:
    """Reads descriptions from the `Args:` of a docstring, or the `Attributes:` of a class."""
    text = inspect.getdoc(factory) or ""
    *_, rest = re.split("^(?:Args|Attributes):\n", text, maxsplit=1, flags=re.MULTILINE)
    # Up to the next section; own parts may indent by four, and name kinds.
    block = textwrap.dedent(re.split(r"^(?=\S)", rest, maxsplit=1, flags=re.MULTILINE)[0])
    entries = re.split(r"^(\*{0,2}\w+)(?: \([^)]*\))?:(?=\s)", block, flags=re.MULTILINE)[1:]
    return {n: " ".join(x.split()) for n, x in zip(entries[::2], entries[1::2], strict=True)}


def read_options(fields: Fields, name: str, key: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Reads the options of a part from the table at a key."""
    for option, value in values.items():
        if option not in fields:
            here, has = (
                f"{key}.{option}",
                f"the options {', '.join(fields)}" if fields else "no options",
            )
            hint = suggestion(option, fields) or f"; {name} has {has}"
            text = f"there is no option {here} of {name}, got {value!r}{moved(here) or hint}"
            raise refused(here, text)
    for option, field in fields.items():
        if field.is_required() and option not in values:
            raise refused(
                key,
                f"{key} must hold {option!r}, "
                f"{rule_of(annotation_of(field)).words}, which {name} needs, got {dict(values)!r}",
            )
    return {
        option: ready_value(f"{key}.{option}", annotation_of(fields[option]), value)
        for option, value in values.items()
    }
