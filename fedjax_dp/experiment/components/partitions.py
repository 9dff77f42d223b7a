"""The partitions of a data set that a configuration can name."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from fedjax_dp.core import checks
from fedjax_dp.core.ranges import Count
from fedjax_dp.core.registry import Registry
from fedjax_dp.data import arrays, clusters, disk_arrays, mixtures, partition
from fedjax_dp.data.datasets import Dataset
from fedjax_dp.data.federated import FederatedData, flat

# Purposes of the draws from a seed.
_TRAIN, _TEST = 0, 2


class Facts:
    """The facts of the pool and of the configuration that a partition may use."""

    def __init__(self, pool: Dataset, num_clients: int, seed: int):
        """Stores the data set, the number of clients and the seed."""
        self.pool, self.num_clients, self.seed = pool, num_clients, seed

    @property
    def num_examples(self) -> int:
        """The number of training examples."""
        return len(self.pool.train["y"])

    @property
    def labels(self) -> np.ndarray:
        """The class of each example, if there are classes."""
        labels = self.pool.train["y"]
        checks.require(
            labels.ndim == 1 and self.pool.task == "classification",
            "data.partition",
            f"not read labels, since those of {self.pool.name} are not classes of examples",
            self.pool.task,
        )
        return labels

    @property
    def test_labels(self) -> np.ndarray:
        """The class of each example of the test part."""
        return np.asarray(self.pool.test["y"])

    @property
    def client_ids(self) -> np.ndarray:
        """The client of each example, if the data name clients."""
        ids = self.pool.train_clients
        rule = f"not be natural, since {self.pool.name} names no clients"
        checks.require(ids is not None, "data.partition", rule, "natural")
        return np.asarray(ids)

    @property
    def rng(self) -> np.random.Generator:
        """The generator of the partition's draws."""
        return np.random.default_rng([self.seed, _TRAIN])


class Spread(NamedTuple):
    """Clients with changed copies of examples, or with parts of several pools.

    Attributes:
      train: training data.
      validation: data that rounds may read besides them, or None.
      client_test: held-out data, or None.
      rows: for each client the rows of the training pool that its training data are made of, one
        for each of its examples, each once: several clients may have copies of a record.
      clusters: the hidden cluster of each client, `[clients]`, whole numbers; None without
        clusters.
    """

    train: FederatedData
    validation: FederatedData | None
    client_test: FederatedData | None
    rows: Sequence[np.ndarray]
    clusters: np.ndarray | None = None


class Partition(NamedTuple):
    """A way to spread examples over clients.

    Attributes:
      factory: `(facts…, options…) -> rows of each client`; or, if it changes examples, a `Spread`
        or a `Splits`.
      given: the names of the facts that are passed to it.
      defaults: defaults of options in a configuration that differ from the factory's.
      kinds: annotations of options in a configuration that differ from the factory's.
      counts_clients: whether it makes the configured number of clients.
      changes_examples: whether clients get changed copies of examples, held-out ones among them.
      num_clients_of: `(options) -> number of clients`, if the options alone determine it.
    """

    factory: Callable[..., Any]
    given: tuple[str, ...]
    defaults: Mapping[str, Any] = {}
    kinds: Mapping[str, Any] = {}
    counts_clients: bool = True
    changes_examples: bool = False
    num_clients_of: Callable[[Mapping[str, Any]], int] | None = None

    def make(self, facts: Facts, options: Mapping[str, Any]) -> Any:
        """Calls the factory with the facts it is given and its options."""
        handed = {name: getattr(facts, name) for name in self.given}
        made = self.factory(**handed, **{**self.defaults, **options})
        return _in_parts(facts.pool, made) if isinstance(made, partition.Splits) else made


def shifted_clusters(
    pool: Dataset,
    seed: int,
    *,
    shift: Literal["rotation", "label"] = "rotation",
    cluster_sizes: Sequence[Count] = clusters.CLUSTER_SIZES,
    samples_per_client: Count | None = None,
    test_samples_per_client: Count | None = None,
) -> Spread:
    """Draws overlapping clients in hidden clusters, each with a separate draw for testing.

    Args:
      shift: how clusters differ: "rotation" of images, or "label" for other labels.
      cluster_sizes: clients of each cluster.
      samples_per_client: training examples that a client draws; a sixth of all if none.
      test_samples_per_client: held-out examples that a client draws; a sixth of all if none.
    """
    is_image_task = pool.task == "classification" and pool.train["x"].ndim == 4
    checks.require(is_image_task, "data.name", "hold labelled images", pool.name)

    def shifted(examples: Mapping[str, np.ndarray], count: int | None, purpose: int) -> Any:
        rng = np.random.default_rng([seed, purpose])
        rows, cluster = clusters.overlapping_draw(
            len(examples["y"]), rng, cluster_sizes=cluster_sizes, samples_per_client=count
        )
        copies = clusters.shift_clusters(
            examples, rows, cluster, shift=shift, num_classes=pool.num_classes
        )
        return FederatedData.from_clients(copies), rows, cluster

    train, rows, cluster = shifted(pool.train, samples_per_client, _TRAIN)
    test, *_ = shifted(pool.test, test_samples_per_client, _TEST)
    return Spread(train, None, test, rows, cluster)


def common_pool(pool: Dataset, num_clients: int, seed: int, *, samples_per_client: Count) -> Spread:
    """Draws each client's examples from one pool; clients hold nothing out for tests of their own.

    Args:
      samples_per_client: examples that each client draws, all its rounds together.
    """
    size, rng = len(pool.train["y"]), np.random.default_rng([seed, _TRAIN])
    rows = partition.common_pool(size, num_clients, rng, samples_per_client=samples_per_client)
    arrays_of_pool = flat(pool.train).items()
    copies = [{n: disk_arrays.take(a, own) for n, a in arrays_of_pool} for own in rows]
    return Spread(FederatedData.from_clients(copies), None, None, rows)


def _in_parts(pool: Dataset, rows: partition.Splits) -> Spread:
    arrays.require_disjoint("the partition", [*rows.train, *rows.validation])
    # Clients may share test examples.
    test_rows = arrays.rows_of_clients("test rows", rows.test, len(pool.test["y"]))
    test = {name: np.asarray(array) for name, array in flat(pool.test).items()}
    return Spread(
        FederatedData.from_indices(pool.train, rows.train),
        FederatedData.from_indices(pool.train, rows.validation),
        FederatedData.from_clients([{n: a[own] for n, a in test.items()} for own in test_rows]),
        rows.train,
    )


_COUNTED = ("num_examples", "num_clients", "rng")
_LABELLED = ("labels", "num_clients", "rng")
_IN_PARTS = ("labels", "test_labels", "num_clients", "rng")
# No part of a client is empty in an experiment.
_PARTS = {"validation_per_client": Count, "test_per_client": Count}


def _adopted(own: Any) -> Partition:
    """Adopts a user's partition: a `Partition`, or a function of pool, number and generator."""
    if isinstance(own, Partition):
        return own
    checks.require(callable(own), "data.partition", "name a function or a Partition", own)
    return Partition(own, ("pool", "num_clients", "rng"))


PARTITIONS: Registry[Partition] = Registry(
    {
        "iid": Partition(partition.iid, _COUNTED),
        "dirichlet": Partition(partition.dirichlet, _LABELLED, {"alpha": 0.5}),
        "shards": Partition(partition.shards, _LABELLED),
        "quantity_skew": Partition(partition.quantity_skew, _COUNTED),
        "label_and_quantity_skew": Partition(
            mixtures.label_and_size_skew, _LABELLED, {"alpha": 0.5, "exponent": 0.5}
        ),
        "majority_classes": Partition(mixtures.majority_classes, _LABELLED),
        "few_classes": Partition(
            partition.few_classes, _IN_PARTS, kinds=_PARTS, changes_examples=True
        ),
        "class_mixtures": Partition(
            partition.class_mixtures, _IN_PARTS, {"alpha": 0.5}, kinds=_PARTS, changes_examples=True
        ),
        "common_pool": Partition(
            common_pool, ("pool", "num_clients", "seed"), changes_examples=True
        ),
        "natural": Partition(partition.natural, ("client_ids",), counts_clients=False),
        "shifted_clusters": Partition(
            shifted_clusters,
            ("pool", "seed"),
            counts_clients=False,
            changes_examples=True,
            num_clients_of=lambda options: sum(
                options.get("cluster_sizes", clusters.CLUSTER_SIZES)
            ),
        ),
    },
    _adopted,
)
