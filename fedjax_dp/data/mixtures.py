"""Partitions in which clients differ in their preferred classes and in size."""

import numpy as np

from fedjax_dp.core import checks
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.ranges import Count, Fraction, Index, NonNegative, Positive
from fedjax_dp.data.partition import Seed, by_owner, class_labels, even_sizes, power_law_sizes

_MAX_SWEEPS = 100
_TOLERANCE = 1e-3


@checked
def by_preference(
    labels: np.ndarray, preferences: np.ndarray, sizes: np.ndarray, rng: Seed
) -> list[np.ndarray]:
    """Deals examples so that clients get nearly the label shares that they prefer.

    Preferences and the pool rarely fit together exactly. The expected counts are those closest to
    the preferences, in Kullback-Leibler divergence, among all that use every example once and give
    each client its size (iterative proportional fitting; Deming and Stephan 1940); they are then
    rounded to integers that keep both.

    Args:
      labels: the class of each example, `[examples]`.
      preferences: the desired share of each class by client, `[clients, classes]`, at
        least 0, with a positive sum for each client; classes in the order of `np.unique(labels)`.
      sizes: the number of examples of each client, `[clients]`; they sum to the number of examples.
      rng: a NumPy generator, or a seed for one.

    Returns:
      The rows of each client, ascending.

    Raises:
      ValueError: if shapes or sums do not fit.
    """
    labels = class_labels(labels)
    classes, code = np.unique(labels, return_inverse=True)
    sizes = np.asarray(sizes, dtype=np.int64)
    preferences = np.asarray(preferences, dtype=np.float64)
    fits = preferences.shape == (len(sizes), len(classes))
    rule = f"have the shape (clients, classes) = {(len(sizes), len(classes))}"
    checks.require(fits, "preferences", rule, preferences.shape)
    checks.non_negative("preferences", preferences)
    fits = bool(np.all(preferences.sum(axis=1) > 0))
    rule = "have a positive sum for each client"
    checks.require(fits, "preferences", rule, "a client with sum 0")
    checks.non_negative("sizes", sizes)
    checks.require(
        int(sizes.sum()) == len(labels), "sizes", f"sum to {len(labels)}", int(sizes.sum())
    )
    rng = np.random.default_rng(rng)
    totals = np.bincount(code, minlength=len(classes))
    counts = _round_to_margins(_fit_margins(preferences, sizes, totals), sizes, totals, rng)
    owner = np.empty(len(labels), dtype=np.int64)
    for j in range(len(classes)):
        rows = rng.permutation(np.flatnonzero(code == j))
        owner[rows] = np.repeat(np.arange(len(sizes)), counts[:, j])
    return by_owner(owner, len(sizes))


@checked
def label_and_size_skew(
    labels: np.ndarray,
    num_clients: Count,
    rng: Seed,
    *,
    alpha: Positive,
    exponent: NonNegative = 1.0,
    min_size: Index = 1,
) -> list[np.ndarray]:
    """Skews labels and sizes, each to a separate degree.

    A client's label shares are drawn from Dirichlet(alpha * classes * p) with p the shares of the
    pool, so that for balanced classes alpha has the same meaning as in `dirichlet`; sizes follow a
    power law. With `exponent=0` this is the partition of Hsu et al., whose concentration is `alpha`
    times the number of classes.

    Args:
      labels: the class of each example, `[examples]`.
      num_clients: the number of clients.
      rng: a NumPy generator, or a seed for one.
      alpha: the concentration of the labels, above 0; small values give few classes to a client.
      exponent: of the power law of sizes, at least 0; 0 gives equal sizes.
      min_size: the fewest examples of a client, before any are held out.

    Returns:
      The rows of each client, ascending.

    Source: Hsu, Qi, Brown 2019, section 3.
    """
    labels = class_labels(labels)
    rng = np.random.default_rng(rng)
    sizes = power_law_sizes(len(labels), num_clients, rng, exponent=exponent, min_size=min_size)
    _, counts = np.unique(labels, return_counts=True)
    concentration = alpha * len(counts) * counts / len(labels)
    preferences = rng.dirichlet(concentration, size=num_clients)
    return by_preference(labels, preferences, sizes, rng)


@checked
def majority_classes(
    labels: np.ndarray,
    num_clients: Count,
    rng: Seed,
    *,
    num_majority: Count = 2,
    majority_share: Fraction = 0.9,
) -> list[np.ndarray]:
    """Gives each client a few majority classes, and a small share of all others.

    Sizes are equal. Each class is a majority class of the same number of clients (give or take
    one), randomly combined, so that for balanced classes the shares are exact.

    Args:
      labels: the class of each example, `[examples]`.
      num_clients: the number of clients.
      rng: a NumPy generator, or a seed for one.
      num_majority: majority classes of each client, fewer than there are classes.
      majority_share: the share of a client's examples in its majority classes together, in [0, 1].

    Returns:
      The rows of each client, ascending.

    Source: Mugunthan 2022, appendix B.2.
    """
    labels = class_labels(labels)
    num_classes = len(np.unique(labels))
    rule = f"be below the number of classes, {num_classes}"
    checks.require(num_majority < num_classes, "num_majority", rule, num_majority)
    checks.require(
        num_clients <= len(labels), "num_clients", f"be at most {len(labels)}", num_clients
    )
    rng = np.random.default_rng(rng)
    # Blocks of as many clients as there are classes; within one, shifts of one random order.
    majority = np.concatenate(
        [
            rng.permutation(num_classes)[
                (
                    np.arange(num_classes)[:, None]
                    + rng.permutation(num_classes)[None, :num_majority]
                )
                % num_classes
            ]
            for _ in range(-(-num_clients // num_classes))
        ]
    )[:num_clients]
    rest = (1 - majority_share) / (num_classes - num_majority)
    preferences = np.full((num_clients, num_classes), rest)
    np.put_along_axis(preferences, majority, majority_share / num_majority, axis=1)
    return by_preference(labels, preferences, even_sizes(len(labels), num_clients), rng)


def _fit_margins(preferences: np.ndarray, sizes: np.ndarray, totals: np.ndarray) -> np.ndarray:
    """Scales rows and columns in turn until both sums match."""
    shares = preferences / preferences.sum(axis=1, keepdims=True)
    # A little of every class everywhere: with exact zeros some pools could not be used up.
    shares += 1e-9
    table = shares * (sizes[:, None] / shares.sum(axis=1, keepdims=True))
    for _ in range(_MAX_SWEEPS):
        columns = table.sum(axis=0)
        if np.max(np.abs(columns - totals) / totals) < _TOLERANCE:
            break
        table *= totals / columns
        rows = table.sum(axis=1, keepdims=True)
        table *= np.divide(sizes[:, None], rows, out=np.zeros_like(rows), where=rows > 0)
    return table


def _round_to_margins(
    table: np.ndarray, sizes: np.ndarray, totals: np.ndarray, rng: np.random.Generator
) -> np.ndarray:
    """Rounds a table to integers with the given row and column sums."""
    table = table * np.minimum(totals / table.sum(axis=0), 1)
    counts = np.floor(table).astype(np.int64)
    remainder = table - counts
    missing = sizes - counts.sum(axis=1)
    for j in range(len(totals)):
        open_rows = np.flatnonzero(missing > 0)
        wanted = int(totals[j] - counts[:, j].sum())
        chosen = open_rows[np.argsort(-remainder[open_rows, j], kind="stable")[:wanted]]
        counts[chosen, j] += 1
        missing[chosen] -= 1
    rows = rng.permutation(np.repeat(np.arange(len(sizes)), missing))
    columns = np.repeat(np.arange(len(totals)), totals - counts.sum(axis=0))
    np.add.at(counts, (rows, columns), 1)
    return counts
