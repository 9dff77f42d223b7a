"""The parts that a configuration can name, and the options of each."""

import functools
from collections.abc import Callable, Collection, Mapping
from operator import attrgetter
from typing import Any, NamedTuple

from fedjax_dp.algorithms import registry as algorithms
from fedjax_dp.core import checks
from fedjax_dp.core.registry import is_own, options_of
from fedjax_dp.data import datasets
from fedjax_dp.data.augmentation import TRANSFORMS
from fedjax_dp.data.datasets.cells import without_ending
from fedjax_dp.evaluation.metrics import METRICS
from fedjax_dp.experiment.components import optimizers
from fedjax_dp.experiment.components.callbacks import CALLBACKS
from fedjax_dp.experiment.components.optimizers import OPTIMIZERS
from fedjax_dp.experiment.components.partitions import PARTITIONS
from fedjax_dp.experiment.components.schedules import (
    CURVES,
    entries_of,
    fields_of_curve,
    read_schedules,
)
from fedjax_dp.experiment.schema.config import Config as Config
from fedjax_dp.experiment.schema.constraints import refused
from fedjax_dp.experiment.schema.moved import moved
from fedjax_dp.experiment.schema.options import Fields, fields_of, read_options
from fedjax_dp.experiment.schema.sections import default_section
from fedjax_dp.models import registry as models
from fedjax_dp.server.registry import AGGREGATORS, AROUND


class Choice(NamedTuple):
    """A key that names a part: the key of its options, known names, and `(name) -> options`."""

    options: str
    names: Collection[str]
    fields: Callable[[str], Fields]


def _data(name: str) -> Fields:
    return fields_of(name, datasets.loader(name), given=("data_dir",))


def _partition(name: str) -> Fields:
    entry = PARTITIONS[name]
    own = {"kinds": entry.kinds, "defaults": entry.defaults}
    return fields_of(name, entry.factory, given=entry.given, **own)


def _model(name: str) -> Fields:
    return fields_of(name, models.FACTORIES[name], given=models.GIVEN)


def _algorithm(name: str) -> Fields:
    entry = algorithms.ALGORITHMS[name]
    return fields_of(name, entry.factory, given=entry.no_options, kinds=entry.stand_in)


def _aggregator(name: str) -> Fields:
    given = (AROUND[name],) if name in AROUND else ()
    return fields_of(name, AGGREGATORS[name], given=given)


def _optimizer(name: str) -> Fields:
    factory, kinds = OPTIMIZERS[name], optimizers.KINDS.get(name, {})
    # Options of Optax's optimisers without a kind here have Optax's defaults.
    of_optax = [option for option in options_of(factory) if option not in kinds]
    return fields_of(name, factory, given=of_optax if kinds else ("learning_rate",), kinds=kinds)


def _callback(name: str) -> Fields:
    return fields_of(name, CALLBACKS[name])


def _transform(name: str) -> Fields:
    return fields_of(name, TRANSFORMS[name])


CHOICES = {
    "data.name": Choice("data.options", datasets.LOADERS, functools.cache(_data)),
    "data.partition": Choice("data.partition_options", PARTITIONS, functools.cache(_partition)),
    "model.name": Choice("model.options", models.FACTORIES, functools.cache(_model)),
    "algorithm.name": Choice(
        "algorithm.options", algorithms.ALGORITHMS, functools.cache(_algorithm)
    ),
    "algorithm.aggregator": Choice(
        "algorithm.aggregator_options", AGGREGATORS, functools.cache(_aggregator)
    ),
    "training.optimizer": Choice(
        "training.optimizer_options", OPTIMIZERS, functools.cache(_optimizer)
    ),
}


_CURVE = Choice("schedules.KEY", CURVES, fields_of_curve)
# Keys of tables that name any number of parts, each with its options.
TABLES = {
    "run.callbacks": Choice("run.callbacks", CALLBACKS, functools.cache(_callback)),
    "data.augmentation": Choice("data.augmentation", TRANSFORMS, functools.cache(_transform)),
}
# All that `--keys` describes: several of the last are in one table.
DESCRIBED = {**CHOICES, **TABLES, "schedules.curve": _CURVE}


def options_of_other_parts(tables: Mapping[str, Any], changes: Mapping[str, Any]) -> list[str]:
    """Lists the tables of options in a file whose part an override replaces."""
    found = []
    for key, choice in CHOICES.items():
        section, _, name = key.partition(".")
        new, old = (each.get(section, {}) for each in (changes, tables))
        if name in new:
            field = default_section(Config.model_fields[section]).model_fields[name]
            default = field.get_default()
            names = (
                each.get(name, default) if isinstance(each, Mapping) else None
                for each in (new, old)
            )
            before, after = (None if each == "none" else each for each in names)
            if before != after:
                found.append(choice.options)
    return found


def own_parts(config: Config) -> list[str]:
    """Lists the parts of a configuration that are imported by name, but callbacks and metrics."""
    curves = (table["curve"] for table in entries_of(config.schedules).values())
    names = (*attrgetter(*CHOICES)(config), *config.data.augmentation, *curves)
    return sorted({name for name in names if name is not None and is_own(name)})


def read_parts(config: Config) -> None:
    """Checks that the parts a new configuration names exist, and reads their options in place."""
    for key, choice in CHOICES.items():
        name, options = attrgetter(key, choice.options)(config)
        if name is None:
            if options:
                rule = f"{choice.options} must be empty if no {key} is given, got {options!r}"
                raise refused(choice.options, rule)
            continue
        fields = _fields_of(choice, key, name)
        options.update(read_options(fields, name, choice.options, options))
    names = [name.rpartition(":")[2] for name in config.run.metrics]
    if len(set(names)) < len(names):
        rule = f"run.metrics must name each figure once, got {config.run.metrics!r}"
        raise refused("run.metrics", rule)
    for name in config.run.metrics:
        _require_known("run.metrics", name, METRICS)
    for table, choice in TABLES.items():
        for name, options in attrgetter(table)(config).items():
            key = f"{table}.{name}"
            fields = _fields_of(choice, table, name)
            if not isinstance(options, dict):
                raise refused(key, f"{key} must be a table of options, got {options!r}")
            options.update(read_options(fields, name, key, options))
    read_schedules(config, functools.partial(_fields_of, _CURVE))


Config._read_parts = read_parts


def _require_known(key: str, name: str, names: Collection[str]) -> None:
    try:
        is_table = key == "data.name" and without_ending(name) != name
        rule = "be a data set; a file is data.name = 'table' with data.options.path"
        checks.require(not is_table, key, rule, name)
        is_place = "." in name and not is_own(name)
        rule = "have the form file.py:name or package.module:name if it is your own"
        checks.require(not is_place, key, rule, name)
        checks.one_of(key, name, names)
    except ValueError as error:
        # A failed import does not know the key that asked for it.
        text = str(error) if key in str(error) else f"{key}: {error}"
        if now := moved(key, name):
            text = f"{text.partition('; did you mean')[0]}{now}"
        raise refused(key, text) from None


def _fields_of(choice: Choice, key: str, name: str) -> Fields:
    _require_known(key, name, choice.names)
    try:
        return choice.fields(name)
    except (TypeError, NameError) as error:
        if not is_own(name):
            raise
        raise refused(key, f"{key} = {name!r}: {error}") from None
