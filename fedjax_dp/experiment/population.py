"""From a named data set to the clients' training and held-out data."""

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedjax_dp.algorithms.centralized import pool
from fedjax_dp.core import checks
from fedjax_dp.data import clusters, datasets, mixtures, partition, statistics
from fedjax_dp.data.federated import FederatedData
from fedjax_dp.experiment.config import Config
from fedjax_dp.experiment.validate import check_options, keyword_defaults

# Each takes (labels, num_clients, rng, **options) or (num_examples, num_clients, rng, **options).
PARTITIONS: Mapping[str, Callable[..., list[np.ndarray]]] = {
    "iid": partition.iid,
    "dirichlet": partition.dirichlet,
    "shards": partition.shards,
    "quantity_skew": partition.quantity_skew,
    "label_and_quantity_skew": mixtures.label_and_size_skew,
}


_DEFAULT_OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "dirichlet": {"alpha": 0.5},
    "label_and_quantity_skew": {"alpha": 0.5, "exponent": 0.5},
}


class Population(NamedTuple):
    """The data of an experiment.

    Attributes:
      train: training examples by client.
      client_test: held-out examples of each client, or None.
      test: the data set's own test part as one client, or None.
      public_x: public inputs without labels, `[queries, ...]`, or None.
      num_classes: number of classes or tokens.
      has_class_labels: whether `y` holds the class of each example.
    """

    train: FederatedData
    client_test: FederatedData | None
    test: FederatedData | None
    public_x: np.ndarray | None
    num_classes: int
    has_class_labels: bool

    def statistics(self) -> statistics.PartitionStatistics:
        """Describes how examples are spread over clients.

        Returns:
          Figures that can be printed and drawn.
        """
        return statistics.describe_data(self.train, "y" if self.has_class_labels else None)


def build_population(config: Config) -> Population:
    """Loads a data set and spreads it over clients.

    Args:
      config: the experiment.

    Returns:
      The population, on the host.

    Raises:
      ValueError: for an unknown data set, partition or option, or data that are not finite.
    """
    section = config.data
    checks.one_of("data.name", section.name, datasets.available())
    checks.one_of("data.partition", section.partition, (*PARTITIONS, "natural", "shifted_clusters"))
    checks.require(
        0 <= section.client_test_share < 1,
        "data.client_test_share",
        "lie in [0, 1)",
        section.client_test_share,
    )
    check_options("data.options", section.options, datasets.options(section.name))
    partition_options = _check_partition(section.partition, section.partition_options)
    data = datasets.load(section.name, section.data_dir, **section.options)
    data, public_x = _hold_out_public(config, data)
    is_labelled = data.task == "classification" and data.train["y"].ndim == 1
    client_test: FederatedData | None
    test: FederatedData | None = None
    if section.partition == "shifted_clusters":
        train, client_test = _shifted_clusters(config, data, **partition_options)
    else:
        train, client_test = _split(config, data, *_clients(config, data, partition_options))
        if len(data.test["y"]):
            test = FederatedData(data.test, np.array([0, len(data.test["y"])]), ("test",))
    if section.check_finite:
        for part in (train, client_test, test):
            if part is not None:
                part.check_finite()
    if config.algorithm.name == "centralized":
        train, client_test = pool(train), None
    return Population(train, client_test, test, public_x, data.num_classes, is_labelled)


def _hold_out_public(
    config: Config, data: datasets.Dataset
) -> tuple[datasets.Dataset, np.ndarray | None]:
    """Takes random training examples out of the pool and drops their labels."""
    count = config.data.public_examples
    if count == 0:
        return data, None
    size = len(data.train["y"])
    rule = f"be below {size}, the number of training examples"
    checks.require(count < size, "data.public_examples", rule, count)
    order = np.random.default_rng([config.run.seed, 3]).permutation(size)
    kept = np.sort(order[count:])
    train = {name: array[kept] for name, array in data.train.items()}
    clients = None if data.train_clients is None else np.asarray(data.train_clients)[kept]
    rest = dataclasses.replace(data, train=train, train_clients=clients)
    return rest, np.asarray(data.train["x"][order[:count]])


def _split(
    config: Config, data: datasets.Dataset, clients: list[np.ndarray], names: tuple[str, ...]
) -> tuple[FederatedData, FederatedData | None]:
    """Sets a share of each client's examples aside for testing."""
    share = config.data.client_test_share
    if share == 0:
        return FederatedData.from_indices(data.train, clients, names), None
    rng = np.random.default_rng([config.run.seed, 1])
    train_rows, test_rows = partition.split_clients(clients, rng, test_fraction=share)
    return (
        FederatedData.from_indices(data.train, train_rows, names),
        FederatedData.from_indices(data.train, test_rows, names),
    )


def _shifted_clusters(
    config: Config,
    data: datasets.Dataset,
    *,
    shift: str = "rotation",
    cluster_sizes: Sequence[int] = clusters.CLUSTER_SIZES,
    samples_per_client: int | None = None,
    test_samples_per_client: int | None = None,
) -> tuple[FederatedData, FederatedData]:
    """Draws overlapping clients in hidden clusters, each with a draw of the test part of its own.

    Where a count is None a client draws a sixth.
    """
    is_image_task = data.task == "classification" and data.train["x"].ndim == 4
    checks.require(is_image_task, "data.name", "hold labelled images", config.data.name)

    def shifted(examples: Mapping[str, np.ndarray], count: int | None, purpose: int):
        rng = np.random.default_rng([config.run.seed, purpose])
        rows, cluster = clusters.overlapping_draw(
            len(examples["y"]), rng, cluster_sizes=cluster_sizes, samples_per_client=count
        )
        return clusters.shift_clusters(
            examples, rows, cluster, shift=shift, num_classes=data.num_classes
        )

    train = FederatedData.from_clients(shifted(data.train, samples_per_client, 0))
    return train, FederatedData.from_clients(shifted(data.test, test_samples_per_client, 2))


def _check_partition(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    factories: dict[str, Callable[..., Any]] = {**PARTITIONS, "shifted_clusters": _shifted_clusters}
    defaults = _DEFAULT_OPTIONS.get(name, {})
    known = {} if name == "natural" else {**keyword_defaults(factories[name]), **defaults}
    check_options("data.partition_options", options, known)
    return {**defaults, **options}


def _clients(
    config: Config, data: datasets.Dataset, options: dict[str, Any]
) -> tuple[list[np.ndarray], tuple[str, ...]]:
    section = config.data
    if section.partition == "natural":
        checks.require(
            data.train_clients is not None,
            "data.partition",
            f"be another than natural, since {section.name} names no clients",
            section.partition,
        )
        ids = np.asarray(data.train_clients)
        return partition.natural(ids), tuple(str(i) for i in np.unique(ids))
    build = PARTITIONS[section.partition]
    rng = np.random.default_rng([config.run.seed, 0])
    first = next(iter(inspect.signature(build).parameters))
    labels = data.train["y"]
    if first == "labels":
        checks.require(
            labels.ndim == 1 and data.task == "classification",
            "data.partition",
            f"not read labels, since those of {section.name} are no classes of examples",
            section.partition,
        )
        return build(labels, section.num_clients, rng, **options), ()
    return build(len(labels), section.num_clients, rng, **options), ()
