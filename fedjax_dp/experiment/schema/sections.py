"""The sections of a configuration, made by the same rules from a file and in Python."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic.fields import FieldInfo

from fedjax_dp.core import checks
from fedjax_dp.core.synonyms import names_of, suggestion
from fedjax_dp.experiment.schema.constraints import (
    STRICT,
    ConfigError,
    annotation_of,
    in_python,
    kinds_of,
    mistake,
    ready_value,
    refused,
    require_float32,
)
from fedjax_dp.experiment.schema.moved import moved


class Section(BaseModel):
    """A part of a configuration: frozen, with known keys, whose values fit their rules."""

    model_config = ConfigDict(**STRICT, frozen=True, extra="forbid")
    # The section around this one, and the name of this one in it; None for the whole configuration.
    around: ClassVar[tuple[type["Section"], str] | None] = None

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        """Notes where the sections inside this one are."""
        for name, field in cls.model_fields.items():
            for section in sections_of(field):
                if "around" not in vars(section):
                    section.around = (cls, name)

    def __init__(self, /, **values: Any) -> None:
        """Checks values, in Python as in a file."""
        kind, ready = type(self), dict[str, Any]()
        for name, value in values.items():
            ready |= _ready(kind, name, value)
        try:
            super().__init__(**ready)
        except ValidationError as error:
            wrong = {each["loc"][0] for each in error.errors(include_input=False)}
            name = next(name for name in values if name in wrong)
            raise mistake(*_rule_at(kind, name), values[name]) from None
        for name in [name for name in ready if not sections_of(kind.model_fields[name])]:
            require_float32(*_rule_at(kind, name), ready[name])


class OptionalSection(Section):
    """A section that can be left out, also by the word "none"."""

    # The key that turns it on; empty if any key does, or one of another section.
    switch: ClassVar[str] = ""


def is_none(value: Any) -> bool:
    """Whether a value leaves its key out, in Python or in a file."""
    return value is None or (isinstance(value, str) and value == "none")


def sections_of(field: FieldInfo) -> tuple[type[Section], ...]:
    """Lists the sections that a field may hold; none for a value."""
    kinds = kinds_of(field.annotation)
    return tuple(k for k in kinds if isinstance(k, type) and issubclass(k, Section))


def default_section(field: FieldInfo) -> type[Section]:
    """Returns the section that a field holds by default."""
    made = field.default_factory
    return made if isinstance(made, type) else sections_of(field)[0]


def tag_of(section: type[Section], field: FieldInfo) -> str:
    """Returns the word by which one of several sections is chosen."""
    return section.model_fields[str(field.discriminator)].default


def can_be_left_out(field: FieldInfo) -> bool:
    """Whether a field holds a section that the word "none" removes."""
    sections = sections_of(field)
    return bool(sections) and all(issubclass(each, OptionalSection) for each in sections)


def fields_below(field: FieldInfo, prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Yields the fields below one, and their dotted names, in the order of the sections."""
    for section in sections_of(field):
        for name, inner in section.model_fields.items():
            yield f"{prefix}{name}", inner
            yield from fields_below(inner, f"{prefix}{name}.")


def keys_below(field: FieldInfo) -> list[str]:
    """Lists the dotted names of all keys that hold a value, for any choices."""
    return list(dict.fromkeys(key for key, each in fields_below(field) if not sections_of(each)))


def sections_in(section: Section) -> Iterator[tuple[str, Section]]:
    """Yields a section, named "", and those inside it with their dotted names, outer ones first."""
    waiting = [("", section)]
    while waiting:
        key, outer = waiting.pop(0)
        yield key, outer
        inner = [(name, value) for name, value in outer if isinstance(value, Section)]
        waiting[:0] = [(f"{key}.{name}" if key else name, value) for name, value in inner]


def given_in(section: Section) -> dict[str, Any]:
    """Lists the values that a section was given, by dotted name, without those that are None."""
    found: dict[str, Any] = {}
    for key, each in sections_in(section):
        field = _field_of(type(each))
        # Another than the default one was chosen by its word.
        tag = None if type(each) is default_section(field) else field.discriminator
        for name, value in each:
            is_given = name in each.model_fields_set or name == tag
            if is_given and value is not None and not isinstance(value, Section):
                found[f"{key}.{name}" if key else name] = value
    return found


def require_tables(field: FieldInfo, value: Any, path: tuple[str, ...]) -> None:
    """Requires tables where a file must have them, and only there, whatever else replaces them."""
    key = ".".join(path)
    if not sections_of(field):
        kind = annotation_of(field)
        if _holds_tables(value) or kinds_of(kind) == (dict[str, Any],):
            ready_value(key, kind, value)
        return
    if value == "none" and can_be_left_out(field):
        return
    if not isinstance(value, Mapping):
        raise refused(key, f"{key} must be a section, got {checks.shown(value)}")
    for name, each in value.items():
        inner = [s.model_fields[name] for s in sections_of(field) if name in s.model_fields]
        if name == field.discriminator:
            _chosen(field, value if _holds_tables(each) else {}, key)
        elif inner:
            require_tables(inner[0], each, (*path, name))


def _holds_tables(value: Any) -> bool:
    is_list = isinstance(value, list)
    return isinstance(value, Mapping) or (is_list and any(map(_holds_tables, value)))


def _field_of(section: type[Section]) -> FieldInfo:
    """Returns the field that holds a section."""
    if section.around is None:
        return FieldInfo(annotation=section)
    outer, name = section.around
    return outer.model_fields[name]


def _key_of(section: type[Section], name: str = "") -> str:
    """Returns the dotted name of a section, or of a key in it."""
    if section.around is None:
        return name
    key = _key_of(*section.around)
    return f"{key}.{name}" if name else key


def _rule_at(section: type[Section], name: str) -> tuple[str, Any]:
    """Returns the key of a value, and its annotation."""
    return _key_of(section, name), annotation_of(section.model_fields[name])


def _ready(section: type[Section], name: str, value: Any) -> dict[str, Any]:
    """Prepares one value for pydantic, by name; empty if it is left out."""
    key, around = _key_of(section, name), _field_of(section)
    field = section.model_fields.get(name)
    if field is None:
        others = [other for other in sections_of(around) if name in other.model_fields]
        if others and is_none(value):
            return {}
        raise _no_key(section, name, value, [tag_of(other, around) for other in others])
    if not sections_of(field):
        if name == around.discriminator:
            # In Python the class has chosen, and the word may be none of them.
            _chosen(around, {name: value}, key.rpartition(".")[0])
        return {name: in_python(annotation_of(field), value)}
    if isinstance(value, sections_of(field)):
        # A copy with other values was not checked.
        given = {name: each for name, each in value if name in value.model_fields_set}
        return {name: type(value)(**given)}
    if is_none(value) and can_be_left_out(field):
        return {}
    if not isinstance(value, Mapping):
        raise refused(key, f"{key} must be a section, got {checks.shown(value)}")
    return {name: _chosen(field, value, key)(**value)}


def _chosen(field: FieldInfo, table: Mapping[str, Any], here: str) -> type[Section]:
    """Determines which of several sections a table is."""
    tag = field.discriminator
    if tag is None:
        return sections_of(field)[0]
    if tag not in table:
        return default_section(field)
    choices = {tag_of(section, field): section for section in sections_of(field)}
    word, key = table[str(tag)], f"{here}.{tag}"
    if not isinstance(word, str) or word not in choices:
        raise mistake(key, Literal.__getitem__(tuple(choices)), word)
    return choices[word]


def _no_key(section: type[Section], name: str, value: Any, words: Sequence[str]) -> ConfigError:
    """Makes the error for a key that a section does not have, but those of `words` may."""
    key = _key_of(section, name)
    if "." in name:
        # Which can only come from quotes.
        return refused(
            key,
            f"the quotes make {name!r} one name, dots included; write {key} without quotes, "
            "or its last part below the header of its section",
        )
    if not words:
        return unknown(section, key, is_section=isinstance(value, Mapping))
    field = _field_of(section)
    return refused(
        key,
        f"{key} must be left out under the {field.discriminator} {tag_of(section, field)}, "
        f"got {value!r}; it belongs to {', '.join(words)}",
    )


def unknown(
    section: type[Section],
    key: str,
    *,
    is_section: bool = False,
    besides: tuple[str, ...] = (),
) -> ConfigError:
    """Makes the error for a key that the configuration around a section does not have."""
    while section.around is not None:
        section, _ = section.around
    root = FieldInfo(annotation=section)
    options = dict[str, Any]
    tables = [name for name, f in fields_below(root) if sections_of(f) or f.annotation == options]
    noun, known = ("section", tables) if is_section else ("key", [*keys_below(root), *besides])
    # Options of parts, which sections do not list.
    of_parts = tuple(f"{name}." for name, f in fields_below(root) if f.annotation == options)
    known += [name for name in names_of(key) if name.startswith(of_parts)]
    hint = moved(key) or suggestion(key, known) or "; fedjax-dp run --keys lists all"
    return refused(key, f"there is no {noun} {key!r}{hint}")
