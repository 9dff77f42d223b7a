"""Lists every key of a configuration, and the options of every part."""

from collections.abc import Sequence
from typing import Any

from pydantic.fields import FieldInfo

from fedjax_dp.core import checks
from fedjax_dp.core.synonyms import suggestion
from fedjax_dp.experiment.components.catalogue import CHOICES, DESCRIBED, TABLES
from fedjax_dp.experiment.schema.config import ROOT
from fedjax_dp.experiment.schema.constraints import (
    ConfigError,
    annotation_of,
    kinds_of,
    rule_of,
)
from fedjax_dp.experiment.schema.sections import (
    Section,
    can_be_left_out,
    default_section,
    fields_below,
    sections_of,
    tag_of,
)

Row = tuple[str, str, str, str]


def describe() -> list[Row]:
    """Lists for every key its dotted name, rule, default as text, and description."""
    return [
        (key, _named(key) or rule, default, about) for key, rule, default, about in _rows(ROOT, "")
    ]


def _named(key: str) -> str:
    """Lists the parts that a key may name; empty for other keys."""
    names = ", ".join(map(repr, CHOICES[key].names)) if key in CHOICES else ""
    return names and f"one of {names}, or your own as file.py:name"


def describe_choice(word: str) -> list[Row]:
    """Lists the options of a part, named as in "algorithm.name=fedprox", as `describe`."""
    key, _, name = word.partition("=")
    if key not in DESCRIBED:
        raise ConfigError(
            f"--keys must be followed by nothing or by one of {', '.join(DESCRIBED)} with =NAME, "
            f"got {word!r}{suggestion(key, DESCRIBED)}"
        )
    choice = DESCRIBED[key]
    checks.one_of(key, name, choice.names)
    fields, table = choice.fields(name), f"{key}.{name}" if key in TABLES else choice.options
    return [_row(f"{table}.{option}", field) for option, field in fields.items()]


def keys_and_values(overrides: Sequence[str]) -> dict[str, list[str]]:
    """Lists all keys, with options of the parts in use, and the values that can be listed.

    Args:
      overrides: words of a command line, `--key=value`, that name parts.
    """
    given = dict(word.removeprefix("--").partition("=")[::2] for word in overrides)
    fields: dict[str, list[FieldInfo]] = {}
    for key, field in fields_below(ROOT):
        fields.setdefault(key, []).append(field)
    found = {
        key: sorted({v for each in known for v in _values(each)}) for key, known in fields.items()
    }
    for key, choice in CHOICES.items():
        names = [*choice.names]
        found[key] = names
        name = given.get(key, fields[key][0].get_default())
        for option, field in (choice.fields(name) if name in names else {}).items():
            found[f"{choice.options}.{option}"] = _values(field)
    sections = {key for key, known in fields.items() if sections_of(known[0]) and not found[key]}
    return {key: values for key, values in found.items() if key not in sections}


def _values(field: FieldInfo) -> list[str]:
    """Lists the words that a value may be, if they can be listed."""
    if sections_of(field):
        return ["none"] * can_be_left_out(field)
    kinds = kinds_of(field.annotation)
    words = ["true", "false"] * (bool in kinds) + ["none"] * (type(None) in kinds)
    return [*rule_of(annotation_of(field)).choices, *words]


def _rows(field: FieldInfo, prefix: str) -> list[Row]:
    sections = sections_of(field)
    rows: dict[str, list[Row]] = {}
    owners: dict[str, list[type[Section]]] = {}
    first = default_section(field)
    for section in (first, *(s for s in sections if s is not first)):
        for name, inner in section.model_fields.items():
            key = f"{prefix}{name}"
            owners.setdefault(key, []).append(section)
            if key not in rows:
                nested = bool(sections_of(inner))
                rows[key] = _rows(inner, f"{key}.") if nested else [_row(key, inner)]
    if field.discriminator is not None:
        words = ", ".join(repr(tag_of(section, field)) for section in sections)
        key = f"{prefix}{field.discriminator}"
        [(_, _, default, about)] = rows[key]
        rows[key] = [(key, f"one of {words}", default, about)]
        for key, having in owners.items():
            if len(having) < len(sections):
                only = ", ".join(tag_of(section, field) for section in having)
                rows[key] = [(*row[:3], f"{row[3]}; if {only}") for row in rows[key]]
    return [row for found in rows.values() for row in found]


def _row(key: str, field: FieldInfo) -> Row:
    default = (
        "needed" if field.is_required() else _shown(field.get_default(call_default_factory=True))
    )
    return key, rule_of(annotation_of(field)).words, default, field.description or ""


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return "" if value is None else str(value)
