"""Numbers by client: tables by name, files, published lists, and lists in the clients' order."""

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any

from fedjax_dp.core import checks, files
from fedjax_dp.core.synonyms import nearest
from fedjax_dp.data.datasets.tabular import is_finite
from fedjax_dp.data.federated import FederatedData
from fedjax_dp.experiment.components.unseen import num_unseen
from fedjax_dp.experiment.schema.config import Config
from fedjax_dp.experiment.schema.constraints import annotation_of, ready_value, values_of
from fedjax_dp.privacy.accounting.budgets import (
    published_batch_sizes,
    published_budgets,
    published_count,
)

# The keys that hold one number for all clients, or one for each.
KEYS = (
    "training.learning_rate",
    "training.batch_size",
    "training.num_epochs",
    "training.num_steps",
    "privacy.record.clip_norm",
    "privacy.record.noise_multiplier",
    "privacy.record.epsilon",
    "privacy.record.dp_delta",
)
_NAME = "client"


def names_of(data: FederatedData) -> tuple[str, ...]:
    """Lists the clients' names, or their positions, from "0", if they have none."""
    return data.client_names or tuple(map(str, range(data.num_clients)))


def with_client_numbers(config: Config) -> Config:
    """Replaces the file of numbers by client, if any, by tables of its numbers."""
    file = config.data.client_numbers
    if file is None:
        return config
    files.require_file(file, "data.client_numbers")
    for key, column in _columns(file).items():
        where, _, name = key.rpartition(".")
        section = attrgetter(where)(config)
        rule = f"be left out, since a column of {file} fills it"
        checks.require(name not in section.model_fields_set, key, rule, getattr(section, name))
        kind = annotation_of(type(section).model_fields[name])
        for client, number in column.items():
            with values_of(column.place(client)):
                ready_value(key, kind, {client: number})
        config = _replaced(config, key, column)
    return _replaced(config, "data.client_numbers", None)


class _Column(dict[str, float]):
    """Numbers by client from a file, with the line of each."""

    def __init__(self, file: str):
        super().__init__()
        self.file, self.line_of = file, dict[str, int]()

    def place(self, name: str) -> str:
        """Names the line of a client."""
        return files.at_line(self.file, self.line_of[name])


def listed(config: Config, names: Sequence[str] | None) -> Config:
    """Converts tables by name to lists in the order of `names`, or in their own order if None."""

    def ordered(key: str, value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value
        return list(value.values()) if names is None else _in_order(key, value, names)

    return _changed(config, ordered)


def check_cycle(key: str, values: Sequence[Any], num_clients: int) -> None:
    """Refuses more entries than clients in a list that is repeated cyclically."""
    rule = f"have at most one entry for each of the {num_clients} clients"
    checks.require(len(values) <= num_clients, key, rule, len(values))


def named(config: Config, data: FederatedData) -> Config:
    """Replaces lists by tables by name, for readers, if all names are known and different."""
    names = data.client_names
    if not names or len(set(names)) < len(names):
        return config

    def as_table(key: str, value: Any) -> Any:
        fits = isinstance(value, list) and len(value) == len(names)
        return dict(zip(names, value, strict=True)) if fits else value

    return _changed(config, as_table)


def _changed(config: Config, change: Callable[[str, Any], Any]) -> Config:
    for key in KEYS:
        before = attrgetter(key)(config)
        after = change(key, before)
        if after is not before:
            config = _replaced(config, key, after)
    return config


def _replaced(section: Any, key: str, value: Any) -> Any:
    name, _, rest = key.partition(".")
    inner = _replaced(getattr(section, name), rest, value) if rest else value
    return section.model_copy(update={name: inner})


def _in_order(key: str, table: Mapping[str, Any], names: Sequence[str]) -> list[Any]:
    known = set(names)
    unknown = [name for name in table if name not in known]
    if unknown:
        hint = next(iter(nearest(unknown[0], names)), names[0])
        place, rule = key, "name clients of the data"
        if isinstance(table, _Column):
            place, rule = table.place(unknown[0]), "name a client of the data"
        checks.require(False, place, rule + (f", such as {hint!r}" if hint else ""), unknown[0])
    lacking = [name for name in names if name not in table]
    rule = f"name each of the {len(names)} clients"
    found = f"{len(table)} names, without {lacking[0]!r}" if lacking else ""
    place = f"{table.file}, column {key}," if isinstance(table, _Column) else key
    checks.require(not lacking, place, rule, found)
    return [table[name] for name in names]


def _columns(file: str) -> dict[str, _Column]:
    """Reads a file: by key, numbers by client."""
    lines = list(files.lines(files.read_text(file)))
    checks.require(len(lines) > 1, file, "hold a line of column names and one for each client", "")
    place = files.at_line(file, lines[0][0])
    header = files.cells(lines[0][1], place)
    checks.require(header[0] == _NAME, place, f"begin with the column {_NAME!r}", header[0])
    rule = f"name a key besides {_NAME!r}, such as {KEYS[0]}"
    checks.require(len(header) > 1, place, rule, header)
    for key in header[1:]:
        checks.one_of(f"a column of {place}", key, KEYS)
    is_single = len(set(header)) == len(header)
    checks.require(is_single, place, "name each column once", header)
    found = {key: _Column(file) for key in header[1:]}
    seen: set[str] = set()
    for number, line in lines[1:]:
        place = files.at_line(file, number)
        name, *cells = files.cells(line, place)
        checks.require(name not in seen, place, "name each client once", name)
        fits = len(cells) == len(found)
        checks.require(fits, place, f"have {len(header)} cells", len(cells) + 1)
        seen.add(name)
        for (key, column), cell in zip(found.items(), cells, strict=True):
            where = f"{place}, column {key}"
            checks.require(is_finite(cell), where, "hold a finite number", cell)
            column[name] = float(cell)
            column.line_of[name] = number
    return found


def with_named_lists(config: Config) -> Config:
    """Replaces the names of published lists by their numbers, one for each client."""
    data, epsilon, batches = config.data, config.privacy.record.epsilon, config.training.batch_size
    # Natural clients are counted when the data are read.
    is_known = data.partition != "natural" or "num_clients" in data.model_fields_set
    count = data.num_clients - num_unseen(data, data.num_clients) if is_known else None
    if isinstance(epsilon, str):
        budgets = published_budgets(epsilon, published_count("data.num_clients", count))
        config = _replaced(config, "privacy.record.epsilon", budgets.tolist())
    if isinstance(batches, str):
        sizes = published_batch_sizes(published_count("data.num_clients", count))
        config = _replaced(config, "training.batch_size", sizes.tolist())
    return config
