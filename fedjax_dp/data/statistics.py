"""Statistics of a partition, as numbers and as text."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from fedjax_dp.core import checks
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.foreign_text import visible
from fedjax_dp.core.ranges import Count
from fedjax_dp.data import arrays
from fedjax_dp.data.federated import FederatedData


class Sharing(NamedTuple):
    """The number of examples of a pool that belong to several clients."""

    num_shared: int = 0
    most_holders: int = 1


def sharing_of(clients: Sequence[np.ndarray]) -> Sharing:
    """Counts the clients that each example belongs to."""
    held = np.bincount(np.concatenate([np.unique(rows).astype(np.int64) for rows in clients]))
    return Sharing(int(np.sum(held > 1)), max(1, int(np.max(held, initial=0))))


@dataclasses.dataclass(frozen=True)
class PartitionStatistics:
    """How examples are spread over clients: exact figures, not private ones.

    Attributes:
      sizes: examples of each client, `[clients]`.
      label_counts: examples of each label at each client, `[clients, labels]`, or None without
        labels.
      labels: the labels that the columns count, ascending, as text.
      num_shared: examples that belong to more than one client; 0 if clients are disjoint.
      num_unused: examples of the pool that no client has.
      client_names: a label for each client, or an empty tuple.
    """

    sizes: np.ndarray
    label_counts: np.ndarray | None
    labels: tuple[str, ...]
    num_shared: int
    num_unused: int
    client_names: tuple[str, ...] = ()

    @property
    def num_clients(self) -> int:
        """The number of clients."""
        return len(self.sizes)

    @property
    def label_entropy(self) -> np.ndarray | None:
        """The entropy of each client's labels, `[clients]`, in nats; 0 for one label."""
        shares = self._shares()
        if shares is None:
            return None
        logs = np.log(shares, out=np.zeros_like(shares), where=shares > 0)
        return -np.sum(shares * logs, axis=1)

    @property
    def total_variation(self) -> np.ndarray | None:
        """The distance of each client's label shares from those of all clients together.

        Half the sum of absolute differences, `[clients]`, from 0 (alike) to 1; clients without
        examples count as 0.
        """
        shares = self._shares()
        if shares is None or self.label_counts is None:
            return None
        population = self.label_counts.sum(axis=0) / max(self.label_counts.sum(), 1)
        return np.where(self.sizes > 0, np.abs(shares - population).sum(axis=1) / 2, 0.0)

    def _shares(self) -> np.ndarray | None:
        if self.label_counts is None:
            return None
        return self.label_counts / np.maximum(self.label_counts.sum(axis=1, keepdims=True), 1)

    def to_dict(self) -> dict[str, Any]:
        """Collects all figures in plain Python types, ready for JSON."""
        entropy, variation = self.label_entropy, self.total_variation
        return {
            "num_clients": self.num_clients,
            "num_examples": int(self.sizes.sum()),
            "size_min": int(self.sizes.min()),
            "size_median": float(np.median(self.sizes)),
            "size_max": int(self.sizes.max()),
            "num_empty": int(np.sum(self.sizes == 0)),
            "num_shared": self.num_shared,
            "num_unused": self.num_unused,
            "client_names": list(self.client_names),
            "sizes": self.sizes.tolist(),
            "labels": list(self.labels),
            "label_counts": None if self.label_counts is None else self.label_counts.tolist(),
            "label_entropy": None if entropy is None else entropy.tolist(),
            "total_variation": None if variation is None else variation.tolist(),
        }

    def __str__(self) -> str:
        """Summarises the main figures in a few lines."""
        quartiles = np.quantile(self.sizes, [0, 0.25, 0.5, 0.75, 1])
        lines = [
            f"{self.num_clients} clients, {int(self.sizes.sum())} examples",
            "sizes: min {:g}, quartiles {:g} / {:g} / {:g}, max {:g}".format(*quartiles),
        ]
        entropy, variation = self.label_entropy, self.total_variation
        if self.label_counts is not None and entropy is not None and variation is not None:
            held = np.sum(self.label_counts > 0, axis=1)
            lines += [
                f"labels per client: min {held.min()}, median {np.median(held):g}, "
                f"max {held.max()} of {len(self.labels)}",
                f"label entropy per client: mean {entropy.mean():.3f} nats of at most "
                f"{np.log(max(len(self.labels), 1)):.3f}",
                f"total variation from all clients together: mean {variation.mean():.3f}, "
                f"max {variation.max():.3f}",
            ]
        if self.num_shared:
            lines.append(f"{self.num_shared} examples belong to more than one client")
        if self.num_unused:
            lines.append(f"{self.num_unused} examples belong to no client")
        return "\n".join(lines)

    def by_client(self) -> str:
        """Lists each named client with its number of examples, a line each."""
        pairs = zip(self.client_names, self.sizes.tolist(), strict=False)
        return "\n".join(f"{visible(name)}: {size} examples" for name, size in pairs)


@checked
def describe(
    clients: Sequence[np.ndarray],
    labels: np.ndarray | None = None,
    *,
    num_examples: Count | None = None,
) -> PartitionStatistics:
    """Describes a partition given as rows of a pool.

    Args:
      clients: the rows of each client.
      labels: the class of each example of the pool, `[examples]`, or None.
      num_examples: the number of examples in the pool; None takes it from `labels` or, without
        them, from the highest row.

    Returns:
      The figures.

    Raises:
      ValueError: if there are no clients, or a row is not in the pool.
    """
    if num_examples is None and labels is not None:
        num_examples = len(labels)
    most = checks.COUNT_LIMIT if num_examples is None else num_examples
    clients = arrays.rows_of_clients("clients", clients, most)
    rows = np.concatenate(clients)
    sizes = np.array([len(client) for client in clients], dtype=np.int64)
    if num_examples is None:
        num_examples = int(rows.max(initial=-1)) + 1
    uses = np.bincount(rows, minlength=num_examples)
    counts, names = _count_labels(sizes, labels[rows] if labels is not None else None)
    return PartitionStatistics(sizes, counts, names, int(np.sum(uses > 1)), int(np.sum(uses == 0)))


@checked
def describe_data(data: FederatedData, label: str | None = "y") -> PartitionStatistics:
    """Describes the clients of a store.

    Args:
      data: the store.
      label: the array that holds the class of each example, or None to count sizes alone.

    Returns:
      The figures; rows of a store belong to one client each.

    Raises:
      ValueError: if the array does not exist or holds more than one label for an example.
    """
    labels = None
    if label is not None:
        checks.one_of("label", label, data.examples)
        labels = np.asarray(data.examples[label])
        checks.require(labels.ndim == 1, "label", "name one-dimensional labels", labels.shape)
    counts, names = _count_labels(data.sizes, labels)
    return PartitionStatistics(data.sizes, counts, names, 0, 0, data.client_names)


def _count_labels(
    sizes: np.ndarray, labels: np.ndarray | None
) -> tuple[np.ndarray | None, tuple[str, ...]]:
    if labels is None:
        return None, ()
    names, code = np.unique(labels, return_inverse=True)
    owner = np.repeat(np.arange(len(sizes)), sizes)
    counts = np.bincount(owner * len(names) + code, minlength=len(sizes) * len(names))
    return counts.reshape(len(sizes), len(names)), tuple(str(name) for name in names)
