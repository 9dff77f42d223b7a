"""Compares the settings of experiments."""

import pathlib
import tomllib
from collections.abc import Mapping, Sequence
from typing import Any

from fedjax_dp.core.registry import is_own
from fedjax_dp.experiment.components.numbers_by_client import KEYS
from fedjax_dp.experiment.components.partitions import PARTITIONS
from fedjax_dp.experiment.reading import config_files
from fedjax_dp.experiment.schema.config import Config
from fedjax_dp.experiment.schema.constraints import ConfigError

# Sections that change what is reported of a run, but not its training.
REPORTED = ("communication", "evaluation")
# Keys that change how a run is computed or drawn, but not its results.
EXECUTED = ("execution", "training.micro_batch_size", "run.plots")


def tables_of(config: Config) -> dict[str, Any]:
    """Converts a configuration to plain tables, without the data directory.

    Nor do they have a number of clients, or a share of test examples, that decides nothing.
    """
    tables = tomllib.loads(config_files.to_toml(config))
    tables["data"].pop("data_dir", None)
    if not PARTITIONS[config.data.partition].counts_clients:
        tables["data"].pop("num_clients", None)
    if PARTITIONS[config.data.partition].changes_examples:
        tables["data"].pop("client_test_share", None)
    return tables


def decided(config: Config, saved: Config) -> Config:
    """Fills in what the loaded data of a run decided, as its saved configuration has it."""
    data, there, found = config.data, saved.data, dict[str, Any]()
    if is_own(data.name) and not data.is_divided:
        choices = map(data.partition_for, (True, False))
        found |= {"partition": there.partition} if there.partition in choices else {}
    made = found.get("partition", data.partition)
    decides = made == "natural" or (made and PARTITIONS[made].changes_examples)
    if decides and "client_test_share" not in data.model_fields_set:
        # Clients with test data of their own hold out nothing else, as where the partition decides.
        found |= {} if there.client_test_share else {"client_test_share": 0.0}
    return config.model_copy(update={"data": data.model_copy(update=found)})


def completed(tables: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Gives the sections of saved settings the keys that came later, at their defaults.

    Results that were saved before a key existed ran at its default, and so can be extended.

    Raises:
      ConfigError: for a key that no longer exists; `where` names the settings.
    """
    today = tables_of(config_files.from_tables(tables, where))
    return {name: today[name] for name in tables if name in today}


def differences(
    one: Mapping[str, Any], other: Mapping[str, Any], besides: Sequence[str] = ()
) -> list[str]:
    """Lists the values that differ between two configurations, one line each, by dotted key.

    `besides` names the keys, or sections, that may differ.
    """
    a, b = _by_key(one), _by_key(other)
    return [
        f"{key}: {a.get(key)!r} and {b.get(key)!r}"
        for key in dict.fromkeys((*a, *b))
        if not {key, key.partition(".")[0]} & {*besides} and not _alike(a.get(key), b.get(key))
    ]


def _by_key(tables: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flattens nested tables, except those of numbers by client, to values by dotted key."""
    found: dict[str, Any] = {}
    for name, value in tables.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and key not in KEYS:
            found |= _by_key(value, f"{key}.")
        else:
            found[key] = value
    return found


def _alike(one: Any, other: Any) -> bool:
    """Checks whether values agree; a table by name equals a list in the clients' order."""
    if isinstance(one, Mapping) != isinstance(other, Mapping):
        one, other = (list(x.values()) if isinstance(x, Mapping) else x for x in (one, other))
    return one == other


def require_same(
    path: pathlib.Path,
    found: Mapping[str, Any],
    wanted: Mapping[str, Any],
    besides: Sequence[str] = (),
) -> None:
    """Refuses a file or folder with the results of other settings, naming each difference."""
    lines = differences(found, wanted, (*EXECUTED, *besides))
    if lines:
        raise ConfigError(
            f"{path} holds results of other settings; choose another --output. There and here:\n"
            + "\n".join(lines)
        )
