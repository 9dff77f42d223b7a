"""Ways to deal a pool of examples out to clients.

Every partition is a list with the rows of each client, ascending. Clients share no row and together
hold all of them, so that a record's privacy is that of its one client; `common_pool` alone differs.
The same arguments and seed give the same partition.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fedjax_dp.core import checks
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.ranges import Count, Index, NonNegative, Positive
from fedjax_dp.data import arrays

Seed = np.random.Generator | int


def even_sizes(total: int, parts: int) -> np.ndarray:
    """Divides an integer into equal parts, the first larger by one if it does not divide evenly."""
    sizes = np.full(parts, total // parts, dtype=np.int64)
    sizes[: total % parts] += 1
    return sizes


@checked
def power_law_sizes(
    num_examples: Count,
    num_clients: Count,
    rng: Seed,
    *,
    exponent: NonNegative = 1.0,
    min_size: Index = 1,
) -> np.ndarray:
    """Draws sizes `[clients]` that are `min_size` plus a share ∝ rank^(-exponent)."""
    check_pool(num_examples, num_clients, min_size)
    weights = np.arange(1, num_clients + 1, dtype=np.float64) ** -float(exponent)
    sizes = min_size + apportion(num_examples - min_size * num_clients, weights)
    return np.random.default_rng(rng).permutation(sizes)


def apportion(total: int, weights: np.ndarray) -> np.ndarray:
    """Divides an integer in proportion to weights, by largest remainders."""
    return _rounded((weights / weights.sum())[None], total)[0]


def check_pool(num_examples: int, num_clients: int, min_size: int) -> None:
    """Requires that a pool has `min_size` examples for every client."""
    rule = f"leave at least {min_size} of {num_examples} examples to each client"
    checks.require(num_clients * min_size <= num_examples, "num_clients", rule, num_clients)


@checked
def iid(num_examples: Count, num_clients: Count, rng: Seed) -> list[np.ndarray]:
    """Deals examples out at random, the same number to each client (give or take one).

    Args:
      num_examples: the number of examples in the pool.
      num_clients: the number of clients, at most `num_examples`.
      rng: a NumPy generator, or a seed for one.

    Returns:
      The rows of each client, ascending.
    """
    check_pool(num_examples, num_clients, min_size=1)
    return _deal(even_sizes(num_examples, num_clients), np.random.default_rng(rng))


@checked
def quantity_skew(
    num_examples: Count,
    num_clients: Count,
    rng: Seed,
    *,
    exponent: NonNegative = 1.0,
    min_size: Index = 1,
) -> list[np.ndarray]:
    """Deals examples out at random, in numbers that follow a power law.

    Args:
      num_examples: the number of examples in the pool.
      num_clients: the number of clients.
      rng: a NumPy generator, or a seed for one.
      exponent: as in `power_law_sizes`.
      min_size: the fewest examples of a client, before any are held out.

    Returns:
      The rows of each client, ascending.
    """
    rng = np.random.default_rng(rng)
    sizes = power_law_sizes(num_examples, num_clients, rng, exponent=exponent, min_size=min_size)
    return _deal(sizes, rng)


@checked
def dirichlet(
    labels: np.ndarray, num_clients: Count, rng: Seed, *, alpha: Positive, min_size: Index = 1
) -> list[np.ndarray]:
    """Skews labels and sizes by a Dirichlet draw for each class.

    The shares of the clients in each class are Dirichlet(alpha, ..., alpha), so small values of
    alpha give few classes to a client and very different sizes. Where a client falls short of
    `min_size`, examples at random move to it from the largest clients; redrawing the whole
    partition until it fits, as is common, never ends for many clients.

    Args:
      labels: the class of each example, `[examples]`.
      num_clients: the number of clients.
      rng: a NumPy generator, or a seed for one.
      alpha: the concentration, above 0; large values approach equal shares.
      min_size: the fewest examples of a client, before any are held out; may be 0.

    Returns:
      The rows of each client, ascending.

    Source: Yurochkin and others 2019, section 4.
    """
    labels = class_labels(labels)
    check_pool(len(labels), num_clients, min_size)
    rng = np.random.default_rng(rng)
    _, code = np.unique(labels, return_inverse=True)
    owner = np.empty(len(labels), dtype=np.int64)
    for rows in _rows_by_class(code, rng):
        shares = rng.dirichlet(np.full(num_clients, float(alpha)))
        # Systematic sampling: integers whose expectations are the shares.
        cuts = np.floor(np.cumsum(shares) * len(rows) + rng.random())
        cuts[-1] = len(rows)
        counts = np.diff(np.minimum(cuts, len(rows)), prepend=0).astype(np.int64)
        owner[rows] = np.repeat(np.arange(num_clients), counts)
    return by_owner(_raise_to_minimum(owner, num_clients, min_size, rng), num_clients)


@checked
def shards(
    labels: np.ndarray,
    num_clients: Count,
    rng: Seed,
    *,
    shards_per_client: Count = 2,
    equal_sizes: bool = False,
) -> list[np.ndarray]:
    """Sorts by label, cuts into shards and deals each client the same number of them.

    Shards are cut at class boundaries, so that a client never holds more than `shards_per_client`
    classes; within a class they are of one size (give or take one). The original cuts shards of
    equal size instead, of which some straddle two classes.

    Args:
      labels: the class of each example, `[examples]`.
      num_clients: the number of clients.
      rng: a NumPy generator, or a seed for one.
      shards_per_client: the shards of each client, and so the most classes it can hold.
      equal_sizes: cut as in the original: equal sizes, boundaries shared.

    Returns:
      The rows of each client, ascending.

    Raises:
      ValueError: if an argument is out of range, or there are more shards than examples or fewer
        shards than classes.

    Source: McMahan and others 2017, section 3.
    """
    labels = class_labels(labels)
    check_pool(len(labels), num_clients, min_size=shards_per_client)
    rng = np.random.default_rng(rng)
    num_shards = num_clients * shards_per_client
    classes, code = np.unique(labels, return_inverse=True)
    by_class = _rows_by_class(code, rng)
    if equal_sizes:
        sizes = even_sizes(len(labels), num_shards)
    else:
        fits = num_shards >= len(classes)
        rule = f"be at least the number of classes, {len(classes)}"
        checks.require(fits, "num_clients * shards_per_client", rule, num_shards)
        counts = np.array([len(rows) for rows in by_class])
        sizes = np.concatenate(
            [
                even_sizes(count, pieces)
                for count, pieces in zip(counts, _pieces(counts, num_shards), strict=True)
            ]
        )
    shard = np.repeat(np.arange(num_shards), sizes)
    client_of_shard = rng.permutation(num_shards) // shards_per_client
    owner = np.empty(len(labels), dtype=np.int64)
    owner[np.concatenate(by_class)] = client_of_shard[shard]
    return by_owner(owner, num_clients)


class Splits(NamedTuple):
    """Each client's rows of the training pool (`train`, `validation`) and of the test pool."""

    train: list[np.ndarray]
    validation: list[np.ndarray]
    test: list[np.ndarray]


@checked
def few_classes(
    labels: np.ndarray,
    test_labels: np.ndarray,
    num_clients: Count,
    rng: Seed,
    *,
    classes_per_client: Count = 2,
    train_per_class: Count = 25,
    validation_per_client: Index = 25,
    test_per_client: Index = 200,
) -> Splits:
    """Gives each client a few classes, few examples of each, and a test part of the same classes.

    Classes are dealt so that they are used equally often. No training example is used twice. A test
    example is reused once all of its class are used, never twice by one client.

    Args:
      labels: classes of the training pool, `[examples]`.
      test_labels: classes of the test pool, `[examples]`.
      num_clients: the number of clients to make, at least 1.
      rng: a NumPy generator, or a seed for one.
      classes_per_client: different classes of a client, at least 1.
      train_per_class: training examples of each of a client's classes, at least 1.
      validation_per_client: validation examples, in equal numbers from its classes.
      test_per_client: test examples, in equal numbers from its classes.

    Returns:
      The rows of each client.

    Raises:
      ValueError: if there are fewer classes than a client needs, or too few examples of one.

    Source: Mugunthan 2022, section 4.3.1.
    """
    labels, test_labels = class_labels(labels), class_labels(test_labels)
    rng = np.random.default_rng(rng)
    names = np.unique(labels)
    rule = f"be at most the {len(names)} classes of the data"
    checks.require(classes_per_client <= len(names), "classes_per_client", rule, classes_per_client)
    counts = _Counts(*(np.zeros((num_clients, len(names)), np.int64) for _ in range(3)))
    for i, own in enumerate(_dealt_classes(len(names), num_clients, classes_per_client, rng)):
        counts.train[i, own] = train_per_class
        counts.validation[i, own] = even_sizes(validation_per_client, classes_per_client)
        counts.test[i, own] = even_sizes(test_per_client, classes_per_client)
    return _dealt_rows(labels, test_labels, counts, rng)


@checked
def class_mixtures(
    labels: np.ndarray,
    test_labels: np.ndarray,
    num_clients: Count,
    rng: Seed,
    *,
    alpha: Positive,
    train_per_client: Count = 50,
    validation_per_client: Index = 25,
    test_per_client: Index = 200,
) -> Splits:
    """Gives each client few examples of all classes, in shares that differ between clients.

    The shares are Dirichlet(alpha, ..., alpha) over the classes, the same in a client's three
    parts, each rounded so that the part has its size. Examples are used as in `few_classes`.

    Args:
      labels: classes of the training pool, `[examples]`.
      test_labels: classes of the test pool, `[examples]`.
      num_clients: the number of clients to make, at least 1.
      rng: a NumPy generator, or a seed for one.
      alpha: the concentration, above 0; large values approach equal shares.
      train_per_client: training examples of a client, at least 1.
      validation_per_client: validation examples.
      test_per_client: test examples.

    Returns:
      The rows of each client.

    Raises:
      ValueError: if there are too few examples of a class.

    Source: Mugunthan 2022, section 4.3.1 and table 4.4.
    """
    labels, test_labels = class_labels(labels), class_labels(test_labels)
    rng = np.random.default_rng(rng)
    shares = rng.dirichlet(np.full(len(np.unique(labels)), float(alpha)), num_clients)
    sizes = (train_per_client, validation_per_client, test_per_client)
    return _dealt_rows(labels, test_labels, _Counts(*(_rounded(shares, n) for n in sizes)), rng)


class _Counts(NamedTuple):
    """How many examples of each class are in each client's parts, `[num_clients, classes]`."""

    train: np.ndarray
    validation: np.ndarray
    test: np.ndarray


def _rounded(shares: np.ndarray, total: int) -> np.ndarray:
    """Rounds shares of a total so that they add up to it: largest remainders are rounded up."""
    exact = shares * total
    counts = np.floor(exact).astype(np.int64)
    missing = total - counts.sum(axis=1, keepdims=True)
    rank = np.argsort(np.argsort(counts - exact, axis=1, kind="stable"), axis=1, kind="stable")
    return counts + (rank < missing)


def _dealt_rows(
    labels: np.ndarray, test_labels: np.ndarray, counts: _Counts, rng: np.random.Generator
) -> Splits:
    """Deals examples at random: each training one once, test ones again when a class runs out."""
    names = np.unique(labels)
    pools = [rng.permutation(np.flatnonzero(labels == name)) for name in names]
    tests = [rng.permutation(np.flatnonzero(test_labels == name)) for name in names]
    splits = Splits([], [], [])
    for client, (of_train, of_validation, of_test) in enumerate(zip(*counts, strict=True)):
        own: tuple[list[int], ...] = ([], [], [])
        for c, name in enumerate(names):
            asked = of_train[c] + of_validation[c]
            rule = f"hold {asked} more examples of class {name} for client {client}"
            checks.require(len(pools[c]) >= asked, "data", rule, len(pools[c]))
            taken, pools[c] = pools[c][:asked], pools[c][asked:]
            rule = f"hold {of_test[c]} test examples of class {name}"
            checks.require(len(tests[c]) >= of_test[c], "data", rule, len(tests[c]))
            tested, tests[c] = tests[c][: of_test[c]], np.roll(tests[c], -of_test[c])
            of_class = (taken[: of_train[c]], taken[of_train[c] :], tested)
            for part, rows in zip(own, of_class, strict=True):
                part.extend(rows)
        for kept, part in zip(splits, own, strict=True):
            kept.append(np.sort(np.asarray(part, np.int64)))
    return splits


def _dealt_classes(
    num_classes: int, num_clients: int, each: int, rng: np.random.Generator
) -> list[np.ndarray]:
    """Assigns every client the least used classes, ties broken at random."""
    used, dealt = np.zeros(num_classes), []
    for _ in range(num_clients):
        own = np.lexsort((rng.random(num_classes), used))[:each]
        used[own] += 1
        dealt.append(own)
    return dealt


@checked
def common_pool(
    num_examples: Count, num_clients: Count, rng: Seed, *, samples_per_client: Count
) -> list[np.ndarray]:
    """Draws each client's examples from one pool, without replacement.

    Clients draw independently of each other, so that they may share examples; none has an example
    twice, so that later rounds of new examples exclude those of earlier ones.

    Guarantee: none for an example that several clients have. A claim for records is for that of one
    client, and a run with this partition counts those that are shared.

    Args:
      num_examples: the number of examples in the pool.
      num_clients: the number of clients.
      rng: a NumPy generator, or a seed for one.
      samples_per_client: examples of each client, all its rounds together, at most `num_examples`.

    Returns:
      The rows of each client, in the order in which they were drawn.

    Raises:
      ValueError: if the pool has fewer examples than a client draws.
    """
    rule = f"be at most {num_examples}, the examples of the pool"
    checks.require(
        samples_per_client <= num_examples, "samples_per_client", rule, samples_per_client
    )
    rng = np.random.default_rng(rng)
    return [rng.choice(num_examples, samples_per_client, replace=False) for _ in range(num_clients)]


@checked
def natural(client_ids: np.ndarray) -> list[np.ndarray]:
    """Groups examples by the client that the data name.

    Args:
      client_ids: the client of each example, `[examples]`, of a type that can be sorted.

    Returns:
      The rows of each client, ascending; clients in the order of `np.unique(client_ids)`.

    Raises:
      ValueError: if there are no examples, an id is missing, or ids are of several kinds.
    """
    client_ids = arrays.client_ids("client_ids", client_ids)
    checks.require(len(client_ids) > 0, "client_ids", "name at least one client", "no ids")
    names, owner = np.unique(client_ids, return_inverse=True)
    arrays.require_different("client_ids", names.tolist())
    return by_owner(owner, len(names))


@checked
def split_clients(
    clients: Sequence[np.ndarray],
    rng: Seed,
    *,
    test_fraction: float = 0.2,
    labels: np.ndarray | None = None,
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Sets a share of every client's examples aside for testing.

    The number is `test_fraction` of the client's examples, rounded to the nearest, and leaves at
    least one example for training; a client of one example has none for testing.

    Args:
      clients: the rows of each client.
      rng: a NumPy generator, or a seed for one.
      test_fraction: the share, in [0, 1).
      labels: the class of each row of the pool, `[num_examples]`, if each class of a client is
        divided by that share: as many of it as the share comes to, rounded down, and one more where
        the rest of that division is largest, equal ones by chance; None for a draw among all
        examples of a client, of the same number.

    Returns:
      The training rows and the test rows of each client, both in the client's own order.

    Raises:
      ValueError: if the share is out of range, there are no clients, a row is not an integer, or
        labels are not one for each row.
    """
    limit = checks.COUNT_LIMIT
    if labels is not None:
        labels = np.asarray(labels)
        checks.require(labels.ndim == 1, "labels", "be one-dimensional", labels.shape)
        limit = len(labels)
    rows = arrays.rows_of_clients("clients", clients, limit)
    for i, own in enumerate(rows):
        # A copy would be in both parts.
        arrays.require_once(f"clients[{i}]", own)
    checks.require(0 <= test_fraction < 1, "test_fraction", "be in [0, 1)", test_fraction)
    rng = np.random.default_rng(rng)
    sizes = np.array([len(own) for own in rows])
    num_test = np.minimum(np.floor(sizes * test_fraction + 0.5), np.maximum(sizes - 1, 0))
    owner, flat = np.repeat(np.arange(len(clients)), sizes), np.concatenate(rows)
    test_sizes = num_test.astype(np.int64)
    group, group_sizes, quota = owner, sizes, test_sizes
    if labels is not None:
        classes, of_row = np.unique(labels[flat], return_inverse=True)
        count = max(1, len(classes))
        found, group, group_sizes = np.unique(
            owner * count + of_row, return_inverse=True, return_counts=True
        )
        quota = _by_largest_rest(group_sizes, found // count, sizes, test_sizes, rng)
    is_test = _random_rank(group, group_sizes, rng) < quota[group]
    return _cut(flat[~is_test], sizes - test_sizes), _cut(flat[is_test], test_sizes)


def by_owner(owner: np.ndarray, num_clients: int) -> list[np.ndarray]:
    """Groups rows by the client that owns them."""
    return _cut(np.argsort(owner, kind="stable"), np.bincount(owner, minlength=num_clients))


def _deal(sizes: np.ndarray, rng: np.random.Generator) -> list[np.ndarray]:
    owner = rng.permutation(np.repeat(np.arange(len(sizes)), sizes))
    return by_owner(owner, len(sizes))


def _cut(rows: np.ndarray, sizes: np.ndarray) -> list[np.ndarray]:
    ends = np.cumsum(sizes).tolist()
    return [rows[a:b] for a, b in zip([0, *ends[:-1]], ends, strict=True)]


def _pieces(counts: np.ndarray, num_shards: int) -> np.ndarray:
    """Divides shards over classes in proportion to size, at least one a class."""
    shares = counts * (num_shards / counts.sum())
    pieces = np.maximum(np.floor(shares), 1).astype(np.int64)
    while (excess := int(pieces.sum()) - num_shards) != 0:
        step = -1 if excess > 0 else 1
        gain = np.where(pieces + step >= 1, step * (shares - pieces), -np.inf)
        pieces[np.argmax(gain)] += step
    return pieces


def _rows_by_class(code: np.ndarray, rng: np.random.Generator) -> list[np.ndarray]:
    """Lists the rows of each class in random order."""
    shuffled = rng.permutation(len(code))
    order = shuffled[np.argsort(code[shuffled], kind="stable")]
    return _cut(order, np.bincount(code))


def _random_rank(owner: np.ndarray, sizes: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Numbers the examples of each owner from 0, in random order."""
    shuffled = rng.permutation(len(owner))
    order = shuffled[np.argsort(owner[shuffled], kind="stable")]
    rank = np.empty(len(owner), dtype=np.int64)
    rank[order] = np.arange(len(owner)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return rank


def _by_largest_rest(
    counts: np.ndarray,
    owner: np.ndarray,
    sizes: np.ndarray,
    totals: np.ndarray,
    rng: np.random.Generator,
) -> np.ndarray:
    """Divides each owner's total over its groups in proportion to their counts; ties by chance."""
    # Whole numbers, in which equal rests are equal.
    quota, rest = np.divmod(counts * totals[owner], sizes[owner])
    order = np.lexsort([rng.permutation(len(counts)), -rest, owner])
    rank = np.empty_like(order)
    of_owner = np.bincount(owner, minlength=len(sizes))
    rank[order] = np.arange(len(counts)) - np.repeat(np.cumsum(of_owner) - of_owner, of_owner)
    missing = totals - np.bincount(owner, quota, len(sizes)).astype(np.int64)
    return quota + (rank < missing[owner])


def _raise_to_minimum(
    owner: np.ndarray, num_clients: int, min_size: int, rng: np.random.Generator
) -> np.ndarray:
    """Moves examples from the largest clients to those below the minimum."""
    sizes = np.bincount(owner, minlength=num_clients)
    lacking = np.maximum(min_size - sizes, 0)
    needed = int(lacking.sum())
    if needed == 0:
        return owner
    # The highest level to which the largest clients can be cut and still yield enough.
    low, high = min_size, int(sizes.max())
    while high - low > 1:
        middle = (low + high) // 2
        enough = int(np.maximum(sizes - middle, 0).sum()) >= needed
        low, high = (middle, high) if enough else (low, middle)
    given = np.maximum(sizes - low, 0)
    given[np.flatnonzero(given)[: int(given.sum()) - needed]] -= 1
    moved = np.flatnonzero(_random_rank(owner, sizes, rng) < given[owner])
    result = owner.copy()
    result[rng.permutation(moved)] = np.repeat(np.arange(num_clients), lacking)
    return result


def class_labels(labels: np.ndarray) -> np.ndarray:
    """Validates the class of each example, `[examples]`, at least one and none missing."""
    labels = np.asarray(labels)
    rule = "be one-dimensional and hold at least one label"
    checks.require(labels.ndim == 1 and len(labels) > 0, "labels", rule, labels.shape)
    is_known = labels.dtype.kind != "f" or not np.isnan(labels).any()
    checks.require(is_known, "labels", "name the class of every example", "NaN")
    return labels
