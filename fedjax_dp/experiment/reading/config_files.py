"""Reads a configuration from a file and a command line; errors name the mistake and its origin."""

import functools
import os
import pathlib
import tomllib
from collections.abc import Mapping, Sequence
from typing import Any

import tomli_w
from pydantic.fields import FieldInfo

from fedjax_dp.algorithms.registry import ALGORITHMS, options_of
from fedjax_dp.core import checks, files
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.registry import is_own
from fedjax_dp.data.datasets.cells import without_ending
from fedjax_dp.experiment.components.catalogue import options_of_other_parts
from fedjax_dp.experiment.components.partitions import PARTITIONS
from fedjax_dp.experiment.schema.config import ROOT, Config, DataSection, Options
from fedjax_dp.experiment.schema.constraints import ConfigError, bare, kinds_of, refused, values_of
from fedjax_dp.experiment.schema.sections import (
    Section,
    can_be_left_out,
    given_in,
    keys_below,
    require_tables,
    sections_in,
    sections_of,
    unknown,
)

_COMMAND_LINE = "command line"
# Options of the command itself, suggested for misspelt keys.
_COMMAND_OPTIONS = ("output", "resume", "keys", "json", "quiet", "log-level")
# The most characters of a value in an error.
_SHOWN = 200
# The folder of `experiments` in an installation; in a checkout it is beside the package.
_PACKED = pathlib.Path(__file__).parents[2] / "configurations"
# The most keys of a section in an error.
_NAMED = 4


@checked
def load_config(path: str | pathlib.Path | None, overrides: Sequence[str] = ()) -> Config:
    """Reads a configuration: defaults, then a TOML file, then overrides.

    Args:
      path: a TOML file; None for the defaults alone. Files of the studies, such as
        `experiments/fedavg/mnist.toml`, come with the package and are found in every folder.
      overrides: words of a command line, `--section.key value` or `--section.key=value`. A table
        given as a whole, such as `--model.options={}`, replaces that of the file; if another part
        is named, the file's options of the old one are dropped. `none` for a section that may be
        left out, such as `--acceleration none`, drops all that the file has of it.

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
        return _COMMAND_LINE if any(overlap(key, given) for given, _ in pairs) else file

    with values_of(file):
        require_tables(ROOT, tables, ())
        replaced = [*(key for key, _ in pairs), *options_of_other_parts(tables, changes)]
        tables = functools.reduce(_without, replaced, tables)
        tables = _merged(tables, changes)
    with values_of(origin):
        return Config(**tables)


def _read(path: str | pathlib.Path) -> dict[str, Any]:
    """Reads the tables of a configuration file."""
    try:
        path = os.path.expanduser(path)
        kind = files.kind_of(path, "the configuration file")
        packages = _PACKED if _PACKED.is_dir() else _PACKED.parents[1]
        if kind == "missing" and pathlib.PurePath(path).parts[:1] == ("experiments",):
            packed = packages / path
            if files.kind_of(packed, "the configuration file") == "file":
                path, kind = str(packed), "file"
        is_table = without_ending(str(path)) != str(path)
        rule = "be TOML; a table is read by --data.name=table --data.options.path=FILE"
        checks.require(not is_table, "the configuration file", rule, str(path))
        if kind == "missing":
            name = pathlib.PurePath(path).name
            there = [
                p.relative_to(packages).as_posix() for p in packages.glob("experiments/**/*.toml")
            ]
            same = [each for each in sorted(there) if each.endswith(f"/{name}")]
            hint = f"; with the package come {', '.join(same)}" if same else ""
            raise ConfigError(f"there is no configuration file {str(path)!r}{hint}")
        if kind != "other":
            # A pipe, as a shell makes one of `<(command)`, is read like a file.
            files.require_file(path, "the configuration file")
        return files.parse_toml(files.read_text(path), path)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def overlap(one: str, other: str) -> bool:
    """Whether two dotted keys are equal, or one is within the other."""
    return f"{one}.".startswith(f"{other}.") or f"{other}.".startswith(f"{one}.")


def to_toml(config: Config) -> str:
    """Writes every value that is not None, and that the data do not decide.

    `load_config` reads an equal configuration back.
    """
    tables, off, given = dict[str, Any](), config.without_effect(), given_in(config)
    for key, section in sections_in(config):
        prefix, defaults = f"{key}." if key else "", type(section).model_fields
        for name, value in section:
            # Values of a section without an effect would be refused when they are read.
            is_set = name in section.model_fields_set or f"{prefix}{name}" in given
            if isinstance(value, Section) or (key in off and not is_set):
                continue
            if value is not None:
                _put_at(tables, f"{prefix}{name}", _written(value))
            elif defaults[name].get_default(call_default_factory=True) is not None:
                # TOML has no null: a removed value is written as a word.
                _put_at(tables, f"{prefix}{name}", "none")
    if "learning_rate" not in config.training.model_fields_set and _has_no_steps(config):
        del tables["training"]["learning_rate"]
    if not config.schedules:
        del tables["schedules"]
    data = config.data
    if is_own(data.name) and not data.is_divided:
        # Only the loaded data show whether they name clients.
        del tables["data"]["partition"], tables["data"]["num_clients"]
    elif not (PARTITIONS[data.partition].counts_clients or "num_clients" in data.model_fields_set):
        # The default would contradict the number of clients that there are.
        del tables["data"]["num_clients"]
    if "client_test_share" not in data.model_fields_set and _may_bring_tests(data):
        # Written, the default would count as asked for beside the clients' own test rows.
        del tables["data"]["client_test_share"]
    return tomli_w.dumps(tables)


def _may_bring_tests(data: DataSection) -> bool:
    """Whether data or partition may have test rows of clients, in place of a share held out."""
    is_open = is_own(data.name) and not data.is_divided
    return is_open or data.partition == "natural" or PARTITIONS[data.partition].changes_examples


def _has_no_steps(config: Config) -> bool:
    """Checks whether no local steps are taken, so that a learning rate is refused."""
    name, given = config.algorithm.name, config.algorithm.options
    return ALGORITHMS[name].needs(options_of(name) | given).steps == "none"


def _written(value: Any) -> Any:
    """Writes options that are None, at any depth, as a word."""
    if isinstance(value, Mapping):
        return {name: "none" if each is None else _written(each) for name, each in value.items()}
    return value


def _without(tables: dict[str, Any], key: str) -> dict[str, Any]:
    """Removes the value at a dotted key, if present."""
    name, _, rest = key.partition(".")
    value = tables.get(name)
    if rest:
        return {**tables, name: _without(value, rest)} if isinstance(value, dict) else tables
    return {k: v for k, v in tables.items() if k != name}


def _merged(
    tables: Mapping[str, Any], changes: Mapping[str, Any], prefix: str = ""
) -> dict[str, Any]:
    """Puts changes into tables; a part of what is no table cannot be changed."""
    merged = dict(tables)
    for name, value in changes.items():
        key, old = f"{prefix}{name}", merged.get(name)
        if old is not None and isinstance(value, Mapping):
            if not isinstance(old, Mapping):
                raise refused(key, f"{key} must be a table, got {checks.shown(old, _SHOWN)}")
            value = _merged(old, value, f"{key}.")
        merged[name] = value
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


# The kinds of a key that holds a string or nothing.
_TEXT = {str, type(None)}


def _put(changes: dict[str, Any], key: str, text: str) -> None:
    """Adds an override to its table, if its key exists."""
    fields = _fields_at(key)
    if fields and all(map(can_be_left_out, fields)) and text == "none":
        _put_at(changes, key, text)
        return
    if fields and all(map(sections_of, fields)):
        inner = [each for each in all_keys() if each.startswith(f"{key}.")]
        some = ", ".join(inner[:_NAMED]) + ", …" * (len(inner) > _NAMED)
        hint = "; none leaves it out" if all(map(can_be_left_out, fields)) else ""
        raise ConfigError(
            f"{_COMMAND_LINE}: {key} is a section, not a key; its keys are {some}{hint}"
        )
    value = value_of(key, text)
    # A name such as 2024-05-01 is a string if a string is required, quoted or not.
    is_text = any(set(map(bare, kinds_of(field.annotation))) <= _TEXT for field in fields)
    _put_at(changes, key, text if is_text and not isinstance(value, str) else value)


def value_of(key: str, text: str) -> Any:
    """Reads the value of a key as TOML writes it; other text is a string."""
    try:
        tables = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    except (RecursionError, ValueError):
        rule = "hold no brackets nested hundreds deep, and no number of thousands of digits"
        shown = checks.shown(text, _SHOWN)
        raise ConfigError(f"{_COMMAND_LINE}: {key} must {rule}, got {shown}") from None
    # A second line, which may be of another key, is no part of a value.
    return tables["value"] if len(tables) == 1 else text


def _put_at(changes: dict[str, Any], key: str, value: Any) -> None:
    *path, last = key.split(".")
    for part in path:
        changes = changes.setdefault(part, {})
    changes[last] = value


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
            with values_of(_COMMAND_LINE):
                raise unknown(Config, key, besides=_COMMAND_OPTIONS)
    return fields


def require_key(key: str) -> None:
    """Requires a word of a command line to name a key; an error suggests the nearest one."""
    _fields_at(key)


def all_keys() -> list[str]:
    """Lists the dotted names of all keys that hold a value, for any choices."""
    return keys_below(ROOT)
