"""Data that lie on the nodes of a federation: what a node reads, and what the server has of it."""

import itertools
import json
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, get_args

import numpy as np

from fedjax_dp.algorithms import registry as algorithms
from fedjax_dp.core import checks, disclosure, files
from fedjax_dp.data import datasets
from fedjax_dp.data.datasets import Dataset
from fedjax_dp.data.datasets.base import Task
from fedjax_dp.data.federated import FederatedData, flat
from fedjax_dp.experiment.assembly.population import population_from, require_vocabulary
from fedjax_dp.experiment.components.experiment import Population
from fedjax_dp.experiment.schema.config import Config

# The options of a data set that name its files.
FILE_OPTIONS = _PATH, _TEST = "path", "test_path"
# The types of arrays that clients' data may have.
_TYPES = [f"{kind}{bits}" for kind in ("float", "int", "uint") for bits in (8, 16, 32, 64)]
_TYPES += ["bool", "bfloat16"]


class Registered(NamedTuple):
    """What a server has of the clients' data: their kind and sizes, public facts, and no record."""

    kind: Mapping[str, Any]
    sizes: Sequence[int]
    validation_sizes: Sequence[int] = ()

    @classmethod
    def read(cls, file: pathlib.Path) -> "Registered | None":
        """Reads a file that `write` wrote; None if there is none."""
        if not file.exists():
            return None
        found = files.without_digest(files.parse_json(files.read_text(file), file), file)
        with files.reading(file, "hold what nodes reported of their data", TypeError):
            return cls(**found)

    def write(self, file: pathlib.Path) -> None:
        """Writes a file."""
        files.write_text(file, json.dumps(files.with_digest(self._asdict())) + "\n")


def kind_of(data: Dataset) -> dict[str, Any]:
    """Describes what the data of all clients must have alike, for JSON: types, shapes, names."""
    arrays = {
        name: [str(x.dtype), list(x.shape[1:])] for name, x in sorted(flat(data.train).items())
    }
    return {
        "arrays": arrays,
        "task": data.task,
        "num_classes": data.num_classes,
        "class_names": list(data.class_names),
        "feature_names": list(data.feature_names),
    }


def require_kind(kind: Any) -> None:
    """Requires what `kind_of` describes, wherever it comes from."""
    parts = {"arrays", "task", "num_classes", "class_names", "feature_names"}
    is_kind = isinstance(kind, Mapping) and set(kind) == parts
    rule = "describe data of the node's own, by node-config data"
    checks.require(is_kind, "kind", rule, kind)
    checks.one_of("kind.task", kind["task"], get_args(Task))
    checks.whole("kind.num_classes", kind["num_classes"], at_least=0)
    for name in ("class_names", "feature_names"):
        found = kind[name]
        fits = isinstance(found, list) and all(isinstance(each, str) for each in found)
        checks.require(fits, f"kind.{name}", "be a list of names", found)
    rule = "be types and shapes of arrays by name, y among them"
    arrays = kind["arrays"]
    fits = isinstance(arrays, Mapping) and "y" in arrays and all(map(_is_array, arrays.values()))
    checks.require(fits, "kind.arrays", rule, arrays)


def _is_array(found: Any) -> bool:
    """Whether a type and a shape are described."""
    if not isinstance(found, list) or len(found) != 2 or not isinstance(found[1], list):
        return False
    is_shape = all(type(each) is int and each >= 0 for each in found[1])
    return is_shape and found[0] in _TYPES and math.prod(found[1]) < checks.COUNT_LIMIT


def require_same_kind(what: str, found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Requires data of one kind; an error names the first part that differs."""
    for name in sorted({*found, *expected}):
        mine, other = found.get(name), expected.get(name)
        checks.require(mine == other, f"{name} of {what}", f"be {other}", mine)


def own_population(config: Config, path: str) -> tuple[Population, dict[str, Any]]:
    """Reads a node's file or pattern; returns its clients in the order of names, and their kind."""
    require_own_data(config)
    data = _loaded(config, path, "the data of a node")
    population = population_from(data, config.data, config.data_seed)
    require_vocabulary(config.model, population)
    return population, kind_of(data)


def public_test(config: Config, kind: Mapping[str, Any]) -> FederatedData | None:
    """Reads the server's test set as one client, of the clients' kind; None if there is none."""
    path = config.data.options.get(_TEST)
    if path is None:
        return None
    data = _loaded(config, path, "the test set")
    require_same_kind("the test set", kind_of(data), kind)
    if config.data.input_norm is not None:
        data = datasets.within_norm(data, config.data.input_norm)
    test = FederatedData(data.train, np.array([0, len(data.train["y"])]), ("test",))
    if config.data.check_finite:
        test.check_finite()
    return test


def population_without_records(
    registered: Registered, test: FederatedData | None = None
) -> Population:
    """Makes a population of the registered sizes, types and shapes, without values."""
    kind = registered.kind

    def without_values(sizes: Sequence[int]) -> FederatedData:
        offsets = np.array([0, *itertools.accumulate(sizes)])
        arrays = {
            # One value in memory, whatever the size.
            name: np.broadcast_to(np.zeros((), dtype), (offsets[-1], *shape))
            for name, (dtype, shape) in kind["arrays"].items()
        }
        return FederatedData(arrays, offsets)

    second = registered.validation_sizes
    return Population(
        train=without_values(registered.sizes),
        client_test=None,
        test=test,
        public_x=None,
        num_classes=kind["num_classes"],
        # Labels are on the nodes, and no statistics of them leave these.
        has_class_labels=False,
        validation=without_values(second) if second else None,
        is_elsewhere=True,
    )


def require_own_data(config: Config) -> None:
    """Requires an experiment that needs no records of clients outside of their nodes."""
    data, why = config.data, "since nodes read data of their own"
    for key, value, allowed in (
        ("data.partition", data.partition, "natural"),
        ("data.max_examples", data.max_examples, None),
        ("data.client_test_share", data.client_test_share, 0),
        ("data.unseen_client_share", data.unseen_client_share, 0),
        ("data.unseen_clients", data.unseen_clients, []),
        ("data.public_examples", data.public_examples, 0),
        ("evaluation.personal", config.evaluation.personal, "received"),
        ("evaluation.training", config.evaluation.training, False),
        ("evaluation.clusters", config.evaluation.clusters, False),
    ):
        checks.require(value == allowed, key, f"be {allowed!r}, {why}", value)
    weights, rule = config.model.class_weights, f"be numbers, {why}"
    checks.require(weights != "balanced", "model.class_weights", rule, weights)
    name = config.algorithm.name
    is_pooled = algorithms.ALGORITHMS[name].pools_clients
    checks.require(not is_pooled, "algorithm.name", f"pool no data, {why}", name)
    rule = f"be given, the number of clients of all nodes, {why}"
    is_given = "num_clients" in data.model_fields_set
    checks.require(is_given, "data.num_clients", rule, None)
    has_path = _PATH in datasets.options(data.name)
    rule = f"be a data set with the option {_PATH!r}, such as table, {why}"
    checks.require(has_path, "data.name", rule, data.name)


def _loaded(config: Config, path: str, what: str) -> Dataset:
    """Loads a file by the options of the experiment, each record by itself."""
    given = {name: x for name, x in config.data.options.items() if name != _TEST}
    data = datasets.load(config.data.name, config.data.data_dir, **{**given, _PATH: path})
    rule = "be encoded by public facts alone (declared categories, scaling by ranges)"
    disclosure.require(not data.exact_statistics, what, rule, list(data.exact_statistics))
    rule = f"hold no test part: give the server a public {_TEST}"
    disclosure.require(not len(data.test["y"]), what, rule, f"{len(data.test['y'])} rows of it")
    return data
