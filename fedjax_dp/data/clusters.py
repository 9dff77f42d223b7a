"""Clients in hidden clusters: every client draws from the same pool, every cluster shifts it."""

from collections.abc import Mapping, Sequence

import numpy as np

from fedjax_dp.core import checks
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.ranges import Count
from fedjax_dp.data import arrays
from fedjax_dp.data.partition import Seed
from fedjax_dp.data.shifts import rotate_quarter_turns, shift_labels

CLUSTER_SIZES = (3, 6, 6, 6)

SHIFTS = ("rotation", "label")


@checked
def overlapping_draw(
    num_examples: Count,
    rng: Seed,
    *,
    cluster_sizes: Sequence[Count] = CLUSTER_SIZES,
    samples_per_client: Count | None = None,
) -> tuple[list[np.ndarray], np.ndarray]:
    """Draws the examples of every client of every cluster from one pool.

    A client draws without replacement, but independently of the others, so that clients overlap.

    Guarantee: since a record may belong to several clients, the privacy of a record over all
    clients is not that of one client; the statement for each client's own data is not affected.

    Args:
      num_examples: the number of examples in the pool.
      rng: a NumPy generator, or a seed for one.
      cluster_sizes: the number of clients of each cluster; the default is 21 clients in 4
        clusters, the first of them a minority.
      samples_per_client: examples that each client draws; None takes one sixth of the pool.

    Returns:
      The rows of each client, ascending, and the cluster of each client, `[clients]`, clients of a
      cluster one after another.

    Source: Malekmohammadi and others 2025 (R-DPCFL), section 6.
    """
    checks.require(len(cluster_sizes) > 0, "cluster_sizes", "name a cluster", cluster_sizes)
    count = num_examples // 6 if samples_per_client is None else samples_per_client
    checks.whole("samples_per_client", count)
    checks.require(count <= num_examples, "samples_per_client", f"be at most {num_examples}", count)
    rng = np.random.default_rng(rng)
    clusters = np.repeat(np.arange(len(cluster_sizes), dtype=np.int32), cluster_sizes)
    clients = [np.sort(rng.choice(num_examples, count, replace=False)) for _ in clusters]
    return clients, clusters


@checked
def shift_clusters(
    examples: Mapping[str, np.ndarray],
    clients: Sequence[np.ndarray],
    clusters: np.ndarray,
    *,
    shift: str,
    num_classes: int,
) -> list[dict[str, np.ndarray]]:
    """Copies each client's examples, shifted by its cluster.

    Cluster k turns its images by 90k degrees ("rotation", a covariate shift) or its labels to
    (y + k) mod classes ("label", a concept shift).

    Args:
      examples: the pool: images `x` and labels `y`.
      clients: the different rows of each client; clients may share rows.
      clusters: the cluster of each client, `[clients]`.
      shift: "rotation" or "label".
      num_classes: the number of classes.

    Returns:
      For each client its `x` and `y`, as `FederatedData.from_clients` takes them.

    Raises:
      ValueError: if lengths do not fit, the shift is unknown or a client holds a row twice.
    """
    checks.one_of("shift", shift, SHIFTS)
    has_both = {"x", "y"} <= set(examples)
    checks.require(has_both, "examples", "hold x and y", sorted(examples))
    rule = f"name the cluster of each of {len(clients)} clients"
    checks.require(len(clusters) == len(clients), "clusters", rule, len(clusters))
    clients = arrays.rows_of_clients("clients", clients, len(examples["y"]))
    clusters = arrays.indices("clusters", clusters, checks.COUNT_LIMIT, "clusters")
    shifted = []
    for i, own in enumerate(clients):
        arrays.require_once(f"clients[{i}]", own)
    for rows, cluster in zip(clients, clusters, strict=True):
        x, y = examples["x"][rows], examples["y"][rows]
        if shift == "rotation":
            x = rotate_quarter_turns(x, int(cluster))
        else:
            y = shift_labels(y, int(cluster), num_classes)
        shifted.append({"x": x, "y": y})
    return shifted
