"""The sections of a configuration, made by the same rules from a file and in Python."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict
from pydantic.fields import FieldInfo

from fedjax_dp.core import checks
from fedjax_dp.experiment.schema.constraints import (
    ConfigError,
    annotation_of,
    kinds_of,
    ready_value,
    refused,
    with_floats,
)

Origin = Callable[[str], str]


class Section(BaseModel):
    """A part of a configuration: frozen, with known keys, whose values fit their rules."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)
    # The section around this one, and the name of this one in it; None for the whole configuration.
    around: ClassVar[tuple[type["Section"], str] | None] = None

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        """Notes where the sections inside this one are."""
        for name, field in cls.model_fields.items():
            for section in sections_of(field):
                if "around" not in vars(section):
                    section.around = (cls, name)

    def __init__(self, **values: Any) -> None:
        """Checks values as those of a file."""
        path = _path_of(type(self))
        super().__init__(**_ready(type(self), values, path, in_python))

    @classmethod
    def require_removable(cls, key: str, name: str, ready: Mapping[str, Any]) -> None:
        """Requires that the section `name`, which is removed, is not in use by its defaults."""


class OptionalSection(Section):
    """A section that can be left out, also by the word "none"."""

    # The key that turns it on; empty if any key does, or one of another section.
    switch: ClassVar[str] = ""


def in_python(key: str) -> str:
    """The origin of values that were given in Python, which errors do not name."""
    return ""


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


def read_section(field: FieldInfo, value: Any, path: tuple[str, ...], origin: Origin) -> Section:
    """Makes a section from its table, or checks one that was made in Python."""
    here = ".".join(path)
    if isinstance(value, sections_of(field)):
        # A copy with other values was not checked.
        ready = _ready(type(value), value.__dict__, path, origin)
        return type(value).model_construct(set(value.model_fields_set), **ready)
    if not isinstance(value, Mapping):
        raise refused(origin(here), f"{here} must be a section, got {checks.shown(value)}")
    section = _chosen(field, value, here, origin)
    return section.model_construct(**_ready(section, value, path, origin))


def require_tables(field: FieldInfo, value: Any, path: tuple[str, ...], origin: Origin) -> None:
    """Requires tables where a file must have them, and only there, whatever else replaces them."""
    key = ".".join(path)
    if not sections_of(field):
        kind = annotation_of(field)
        if _holds_tables(value) or kinds_of(kind) == (dict[str, Any],):
            ready_value(origin(key), key, kind, value)
        return
    if value == "none" and can_be_left_out(field):
        return
    if not isinstance(value, Mapping):
        raise refused(origin(key), f"{key} must be a section, got {checks.shown(value)}")
    for name, each in value.items():
        inner = [s.model_fields[name] for s in sections_of(field) if name in s.model_fields]
        if name == field.discriminator:
            _chosen(field, value if _holds_tables(each) else {}, key, origin)
        elif inner:
            require_tables(inner[0], each, (*path, name), origin)


def _holds_tables(value: Any) -> bool:
    is_list = isinstance(value, list)
    return isinstance(value, Mapping) or (is_list and any(map(_holds_tables, value)))


def _field_of(section: type[Section]) -> FieldInfo:
    """Returns the field that holds a section."""
    if section.around is None:
        return FieldInfo(annotation=section)
    outer, name = section.around
    return outer.model_fields[name]


def _path_of(section: type[Section]) -> tuple[str, ...]:
    if section.around is None:
        return ()
    outer, name = section.around
    return (*_path_of(outer), name)


def _ready(
    section: type[Section], table: Mapping[str, Any], path: tuple[str, ...], origin: Origin
) -> dict[str, Any]:
    """Checks the values of a section, each by its rule."""
    field, known = _field_of(section), section.model_fields
    ready: dict[str, Any] = {}
    removed: dict[str, str] = {}
    for name, value in table.items():
        inner, key = (*path, name), ".".join((*path, name))
        if name not in known:
            others = [s for s in sections_of(field) if name in s.model_fields]
            if "." in name:
                raise _quoted(name, key, origin(key))
            if not others:
                raise unknown(section, key, origin(key), is_section=isinstance(value, Mapping))
            if value is not None and value != "none":
                words = ", ".join(tag_of(other, field) for other in others)
                raise refused(
                    origin(key),
                    f"{key} must be left out under the {field.discriminator} "
                    f"{tag_of(section, field)}, got {value!r}; it belongs to {words}",
                )
        elif sections_of(known[name]):
            is_none = value is None or (isinstance(value, str) and value == "none")
            if is_none and can_be_left_out(known[name]):
                removed[name] = key
            else:
                ready[name] = read_section(known[name], value, inner, origin)
        else:
            if name == field.discriminator:
                # In Python the class has chosen, and the word may be none of them.
                _chosen(field, table, ".".join(path), origin)
            kind = annotation_of(known[name])
            ready[name] = with_floats(kind, ready_value(origin(key), key, kind, value))
    for name, key in removed.items():
        try:
            section.require_removable(key, name, ready)
        except ValueError as error:
            raise refused(origin(key), str(error)) from None
    return ready


def _chosen(field: FieldInfo, table: Mapping[str, Any], here: str, origin: Origin) -> type[Section]:
    """Determines which of several sections a table is."""
    tag = field.discriminator
    if tag is None:
        return sections_of(field)[0]
    if tag not in table:
        return default_section(field)
    choices = {tag_of(section, field): section for section in sections_of(field)}
    word, key = table[str(tag)], f"{here}.{tag}"
    if not isinstance(word, str) or word not in choices:
        hint = checks.similar(word, choices)
        words = ", ".join(map(repr, choices))
        raise refused(
            origin(key),
            f"{key} must be one of {words}, got {word!r}"
            + (f"; did you mean {hint!r}?" if hint else ""),
        )
    return choices[word]


def _quoted(name: str, key: str, origin: str) -> ConfigError:
    """Makes the error for a name with a dot in it, which can only come from quotes."""
    return refused(
        origin,
        f"the quotes make {name!r} one name, dots included; write {key} without quotes, "
        "or its last part below the header of its section",
    )


def unknown(
    section: type[Section],
    key: str,
    origin: str,
    *,
    is_section: bool = False,
    besides: tuple[str, ...] = (),
) -> ConfigError:
    """Makes the error for a key that the configuration around a section does not have."""
    while section.around is not None:
        section, _ = section.around
    root = FieldInfo(annotation=section)
    tables = [name for name, field in fields_below(root) if is_table(field)]
    noun, known = ("section", tables) if is_section else ("key", keys_below(root))
    hint = checks.nearest(key, [*known, *besides])
    return refused(origin, f"there is no {noun} {key!r}; did you mean {hint!r}?")


def is_table(field: FieldInfo) -> bool:
    """Whether a field is a section, or a table of options."""
    return bool(sections_of(field)) or field.annotation == dict[str, Any]
