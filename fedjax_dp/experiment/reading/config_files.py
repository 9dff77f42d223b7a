"""Reads a configuration from a file and a command line; errors name the mistake and its origin."""

import functools
import operator
import pathlib
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import tomli_w
from pydantic.fields import FieldInfo

from fedjax_dp.algorithms.registry import ALGORITHMS, options_of
from fedjax_dp.core import checks, files
from fedjax_dp.data.datasets.cells import without_ending
from fedjax_dp.experiment.components.catalogue import options_of_other_parts, read_parts
from fedjax_dp.experiment.components.partitions import option_naming_clients
from fedjax_dp.experiment.schema.config import Config, Options
from fedjax_dp.experiment.schema.constraints import (
    ConfigError,
    Section,
    annotation_of,
    bare,
    kinds_of,
    ready_value,
    with_floats,
)

_COMMAND_LINE = "command line"
# Options of the command itself, suggested for misspelt keys.
_COMMAND_OPTIONS = ["output", "resume", "keys", "json", "quiet", "log-level"]
# The most characters of a value in an error.
_SHOWN = 200
# The most keys of a section in an error.
_NAMED = 4
ROOT = FieldInfo(annotation=Config)
# Keys of `[data]` that say how examples are divided among clients.
_DIVISION = {"partition", "partition_options", "num_clients"}

# Sections that are left out where the key that turns them on is none.
_SWITCHES = {
    "acceleration": "memory",
    "secure_aggregation": "form",
    "leaving": "tolerance",
    "asynchronous": "concurrency",
    "model.adapters": "rank",
}


def load_config(path: str | pathlib.Path | None, overrides: Sequence[str] = ()) -> Config:
    """Reads a configuration: defaults, then a TOML file, then overrides.

    Args:
      path: a TOML file; None for the defaults alone.
      overrides: words of a command line, `--section.key value` or `--section.key=value`. A table
        given as a whole, such as `--model.options={}`, replaces that of the file; if another part
        is named, the file's options of the old one are dropped.

    Returns:
      The configuration; every value is of its type and in its range, every named part exists, and
      accepts its options.

    Raises:
      ConfigError: naming file or command line, key, rule, value and the nearest valid one; for a
        table that overrides give both as a whole and in parts.
    """
    tables = {} if path is None else _read(path)
    return _made(tables, "defaults" if path is None else str(path), _pairs(overrides))


def from_toml(text: str, where: str) -> Config:
    """Reads a configuration from TOML text as `load_config` does; `where` names it in errors."""
    return _made(files.parse_toml(text, where), where, [])


def from_tables(tables: Mapping[str, Any], where: str) -> Config:
    """Reads a configuration from tables as `load_config` does; `where` names them in errors."""
    return _made(dict(tables), where, [])


def _made(tables: dict[str, Any], file: str, pairs: Sequence[tuple[str, str]]) -> Config:
    """Makes a configuration of the tables of a file and of overrides."""
    _require_whole_or_parts([key for key, _ in pairs])
    changes: dict[str, Any] = {}
    for key, text in pairs:
        _put(changes, key, text)

    def origin(key: str) -> str:
        return _COMMAND_LINE if any(_is_within(key, given) for given, _ in pairs) else file

    replaced = [*(key for key, _ in pairs), *options_of_other_parts(tables, changes)]
    tables = functools.reduce(_without, replaced, tables)
    tables = _with_clients_of_data(_merged(tables, changes))
    return read_parts(_section(ROOT, tables, (), origin), origin)


def _with_clients_of_data(tables: dict[str, Any]) -> dict[str, Any]:
    """Takes the clients that an option names, unless a division of the data is configured."""
    data = tables.get("data")
    if not isinstance(data, Mapping) or not _DIVISION.isdisjoint(data):
        return tables
    if option_naming_clients(data.get("name"), data.get("options")) is None:
        return tables
    return {**tables, "data": {**data, "partition": "natural"}}


def _read(path: str | pathlib.Path) -> dict[str, Any]:
    """Reads the tables of a configuration file."""
    try:
        kind = files.kind_of(path, "the configuration file")
        is_table = without_ending(str(path)) != str(path)
        rule = "be TOML; a table is read by --data.name=table --data.options.path=FILE"
        checks.require(not is_table, "the configuration file", rule, str(path))
        if kind == "missing":
            raise ConfigError(f"there is no configuration file {str(path)!r}")
        if kind != "other":
            # A pipe, as a shell makes one of `<(command)`, is read like a file.
            files.require_file(path, "the configuration file")
        return files.parse_toml(files.read_text(path), path)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _is_within(key: str, given: str) -> bool:
    return f"{key}.".startswith(f"{given}.") or f"{given}.".startswith(f"{key}.")


def to_toml(config: Config) -> str:
    """Writes every value that is not None; `load_config` reads an equal configuration back."""
    tables, privacy = _tables(config), config.privacy
    for unit in {"record", "client"} - set(privacy.units):
        # Of an inactive mechanism, only given values are written.
        if unit not in privacy.model_fields_set:
            del tables["privacy"][unit]
    if "learning_rate" not in config.training.model_fields_set and _has_no_steps(config):
        del tables["training"]["learning_rate"]
    for name, switch in _SWITCHES.items():
        section = operator.attrgetter(name)(config)
        if getattr(section, switch) is None and section.model_fields_set <= {switch}:
            tables = _without(tables, name)
    if not config.clock.model_fields_set:
        del tables["clock"]
    return tomli_w.dumps(tables)


def _has_no_steps(config: Config) -> bool:
    """Checks whether no local steps are taken, so that a learning rate is refused."""
    name, given = config.algorithm.name, config.algorithm.options
    return ALGORITHMS[name].needs(options_of(name) | given).steps == "none"


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


def _tables(section: Section) -> dict[str, Any]:
    tables: dict[str, Any] = {}
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, Section):
            tables[name] = _tables(value)
        elif isinstance(value, Mapping):
            tables[name] = {k: "none" if v is None else v for k, v in value.items()}
        elif value is not None:
            tables[name] = value
        elif field.get_default(call_default_factory=True) is not None:
            # TOML has no null: a removed value is written as a word.
            tables[name] = "none"
    return tables


def _without(tables: dict[str, Any], key: str) -> dict[str, Any]:
    """Removes the value at a dotted key, if present."""
    name, _, rest = key.partition(".")
    value = tables.get(name)
    if rest:
        return {**tables, name: _without(value, rest)} if isinstance(value, dict) else tables
    return {k: v for k, v in tables.items() if k != name}


def _merged(tables: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(tables)
    for name, value in changes.items():
        old = merged.get(name)
        both = isinstance(old, Mapping) and isinstance(value, Mapping)
        merged[name] = _merged(old, value) if both else value  # type: ignore[arg-type]
    return merged


def _pairs(words: Sequence[str]) -> list[tuple[str, str]]:
    pairs: list[tuple[str, str]] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--"):
            is_file = word.endswith(".toml") or bool(pairs)
            hint = "; a configuration file comes before all options" if is_file else ""
            raise ConfigError(f"expected --section.key, got {word!r}{hint}")
        key, equals, text = word[2:].partition("=")
        if not equals:
            if not rest:
                raise ConfigError(f"--{key} needs a value")
            text = rest.pop(0)
        pairs.append((key, text))
    return pairs


def _require_whole_or_parts(keys: Sequence[str]) -> None:
    """Refuses a table that is given both as a whole and in parts, one of which would be lost."""
    for key in keys:
        parts = [f"--{each}" for each in keys if each.startswith(f"{key}.")]
        if parts:
            raise ConfigError(
                f"{_COMMAND_LINE}: {key} must be given as a whole or in parts, got --{key} and "
                + ", ".join(parts)
            )


def _put(changes: dict[str, Any], key: str, text: str) -> None:
    """Adds an override to its table, if its key exists."""
    fields = _fields_at(key)
    if fields and all(map(sections_of, fields)):
        inner = [each for each in all_keys() if each.startswith(f"{key}.")]
        some = ", ".join(inner[:_NAMED]) + ", …" * (len(inner) > _NAMED)
        raise ConfigError(f"{_COMMAND_LINE}: {key} is a section, not a key; its keys are {some}")
    *path, last = key.split(".")
    table = changes
    for part in path:
        table = table.setdefault(part, {})
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    except (RecursionError, ValueError):
        rule = "hold no brackets nested hundreds deep, and no number of thousands of digits"
        shown = checks.shown(text, _SHOWN)
        raise ConfigError(f"{_COMMAND_LINE}: {key} must {rule}, got {shown}") from None
    # A name such as 2024-05-01 is a string if a string is required, quoted or not.
    is_text = any(str in map(bare, kinds_of(field.annotation)) for field in fields)
    table[last] = text if is_text and not isinstance(value, str) else value


def _fields_at(key: str) -> list[FieldInfo]:
    """Lists the fields that a key names, one a section; none inside tables of options."""
    fields = [ROOT]
    for part in key.split("."):
        if all(field.annotation == Options for field in fields):
            return []
        fields = [
            section.model_fields[part]
            for field in fields
            for section in sections_of(field)
            if part in section.model_fields
        ]
        if not fields:
            raise _unknown(key, _COMMAND_LINE)
    return fields


def require_key(key: str) -> None:
    """Requires a word of a command line to name a key; an error suggests the nearest one."""
    _fields_at(key)


def _walk(field: FieldInfo = ROOT, prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Yields the fields below one, and their dotted names, in the order of the sections."""
    for section in sections_of(field):
        for name, inner in section.model_fields.items():
            yield f"{prefix}{name}", inner
            yield from _walk(inner, f"{prefix}{name}.")


def all_keys() -> list[str]:
    """Lists the dotted names of all keys that hold a value, for any choices."""
    return list(dict.fromkeys(key for key, field in _walk() if not sections_of(field)))


def _all_sections() -> list[str]:
    return [key for key, field in _walk() if sections_of(field) or field.annotation == Options]


def _quoted(name: str, key: str, origin: str) -> ConfigError:
    """Makes the error for a name with a dot in it, which can only come from quotes."""
    return ConfigError(
        f"{origin}: the quotes make {name!r} one name, dots included; write {key} without quotes, "
        "or its last part below the header of its section"
    )


def _unknown(key: str, origin: str, *, is_section: bool = False) -> ConfigError:
    noun = "section" if is_section else "key"
    known = _all_sections() if is_section else all_keys()
    if origin == _COMMAND_LINE:
        known += _COMMAND_OPTIONS
    return ConfigError(
        f"{origin}: there is no {noun} {key!r}; did you mean {checks.nearest(key, known)!r}?"
    )


def _section(
    field: FieldInfo, table: Any, path: tuple[str, ...], origin: Callable[[str], str]
) -> Any:
    """Makes a section from its table."""
    here = ".".join(path)
    if not isinstance(table, Mapping):
        raise ConfigError(f"{origin(here)}: {here} must be a section, got {table!r}")
    section = _chosen(field, table, here, origin)
    known = section.model_fields
    ready: dict[str, Any] = {}
    if field.discriminator is not None:
        ready[str(field.discriminator)] = tag_of(section, field)
    for name, value in table.items():
        inner, key = (*path, name), ".".join((*path, name))
        if name not in known:
            others = [s for s in sections_of(field) if name in s.model_fields]
            if "." in name:
                raise _quoted(name, key, origin(key))
            if not others:
                raise _unknown(key, origin(key), is_section=isinstance(value, Mapping))
            if value is not None and value != "none":
                words = ", ".join(tag_of(other, field) for other in others)
                raise ConfigError(
                    f"{origin(key)}: {key} must be left out under the {field.discriminator} "
                    f"{tag_of(section, field)}, got {value!r}; it belongs to {words}"
                )
        elif sections_of(known[name]):
            ready[name] = _section(known[name], value, inner, origin)
        else:
            kind = annotation_of(known[name])
            ready[name] = with_floats(kind, ready_value(origin(key), key, kind, value))
    return section.model_construct(**ready)


def _chosen(
    field: FieldInfo, table: Mapping[str, Any], here: str, origin: Callable[[str], str]
) -> type[Section]:
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
        raise ConfigError(
            f"{origin(key)}: {key} must be one of {words}, got {word!r}"
            + (f"; did you mean {hint!r}?" if hint else "")
        )
    return choices[word]
