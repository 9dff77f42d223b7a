"""Partitions: every row once, sizes and skew as asked, the same for the same seed."""

import functools
import math
import time
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from marks import later, telling

from fedjax_dp.data import mixtures, partition

SETTINGS = settings(max_examples=60, deadline=None)


def check_partition(clients, num_examples, num_clients, min_size=0):
    assert len(clients) == num_clients
    rows = np.concatenate(clients)
    np.testing.assert_array_equal(np.sort(rows), np.arange(num_examples))
    for client in clients:
        assert np.issubdtype(client.dtype, np.integer)
        assert len(client) >= min_size
        assert np.all(np.diff(client) > 0)


def label_counts(clients, labels):
    classes = np.unique(labels)
    return np.array([[np.sum(labels[rows] == c) for c in classes] for rows in clients])


@st.composite
def pools(draw):
    num_clients = draw(st.integers(1, 12))
    num_examples = draw(st.integers(num_clients, 200))
    num_classes = draw(st.integers(1, 8))
    seed = draw(st.integers(0, 2**32 - 1))
    # Classes of any size, with gaps in their numbering.
    shares = np.random.default_rng(seed).dirichlet(np.full(num_classes, 0.7))
    labels = 3 * np.random.default_rng(seed).choice(num_classes, num_examples, p=shares) - 4
    return labels, num_clients, seed


@SETTINGS
@given(pools())
def test_iid(pool):
    labels, num_clients, seed = pool
    clients = partition.iid(len(labels), num_clients, seed)
    check_partition(clients, len(labels), num_clients, len(labels) // num_clients)
    assert max(map(len, clients)) <= len(labels) // num_clients + 1


@SETTINGS
@given(pools(), st.floats(0, 5), st.integers(0, 20))
def test_quantity_skew(pool, exponent, min_size):
    labels, num_clients, seed = pool
    min_size = min(min_size, len(labels) // num_clients)
    clients = partition.quantity_skew(
        len(labels), num_clients, seed, exponent=exponent, min_size=min_size
    )
    check_partition(clients, len(labels), num_clients, min_size)
    weights = np.arange(1, num_clients + 1.0) ** -exponent
    exact = (len(labels) - num_clients * min_size) * weights / weights.sum() + min_size
    ordered = np.sort([len(rows) for rows in clients])[::-1]
    assert np.all(np.abs(ordered - exact) < 1 + 1e-9)


@SETTINGS
@given(pools(), st.floats(-9, 4), st.integers(0, 20))
def test_dirichlet(pool, log_alpha, min_size):
    labels, num_clients, seed = pool
    min_size = min(min_size, len(labels) // num_clients)
    clients = partition.dirichlet(
        labels, num_clients, seed, alpha=10.0**log_alpha, min_size=min_size
    )
    check_partition(clients, len(labels), num_clients, min_size)


@SETTINGS
@given(pools(), st.integers(1, 6))
def test_shards_hold_at_most_that_many_classes(pool, shards_per_client):
    labels, num_clients, seed = pool
    num_classes = len(np.unique(labels))
    num_shards = num_clients * shards_per_client
    if num_shards > len(labels):
        rule = "num_clients must leave at least"
    elif num_shards < num_classes:
        rule = "must be at least the number of classes"
    else:
        rule = None
    if rule is not None:
        with pytest.raises(ValueError, match=rule):
            partition.shards(labels, num_clients, seed, shards_per_client=shards_per_client)
        return
    clients = partition.shards(labels, num_clients, seed, shards_per_client=shards_per_client)
    check_partition(clients, len(labels), num_clients, shards_per_client)
    assert np.sum(label_counts(clients, labels) > 0, axis=1).max() <= shards_per_client


@SETTINGS
@given(pools(), st.integers(1, 4))
def test_shards_of_equal_size(pool, shards_per_client):
    labels, num_clients, seed = pool
    if num_clients * shards_per_client > len(labels):
        return
    clients = partition.shards(
        labels, num_clients, seed, shards_per_client=shards_per_client, equal_sizes=True
    )
    check_partition(clients, len(labels), num_clients)
    lengths = [len(rows) for rows in clients]
    assert max(lengths) - min(lengths) <= shards_per_client
    # Each of the shards is contiguous in label order, so a boundary adds one class at most.
    held = np.sum(label_counts(clients, labels) > 0, axis=1)
    assert held.sum() <= num_clients * shards_per_client + len(np.unique(labels)) - 1


def test_shards_of_a_client_are_drawn_at_random():
    # 1000 shards, 100 of each of 10 classes: two of them are of one class with chance 99 / 999.
    labels = np.repeat(np.arange(10), 1000)
    clients = partition.shards(labels, 500, 0)
    held = np.sum(label_counts(clients, labels) > 0, axis=1)
    chance = 99 / 999
    assert np.mean(held == 1) == pytest.approx(chance, abs=5 * np.sqrt(chance / 500))
    assert len(np.unique([labels[rows[0]] * 10 + labels[rows[-1]] for rows in clients])) > 50


@SETTINGS
@given(pools())
def test_natural(pool):
    ids, _, _ = pool
    text = np.array([f"client {i}" for i in ids])
    clients = partition.natural(text)
    names = np.unique(text)
    check_partition(clients, len(ids), len(names), 1)
    for name, rows in zip(names, clients, strict=True):
        assert set(text[rows]) == {name}


@SETTINGS
@given(pools(), st.floats(-9, 4), st.floats(0, 3), st.integers(0, 20))
def test_label_and_size_skew(pool, log_alpha, exponent, min_size):
    labels, num_clients, seed = pool
    min_size = min(min_size, len(labels) // num_clients)
    clients = mixtures.label_and_size_skew(
        labels, num_clients, seed, alpha=10.0**log_alpha, exponent=exponent, min_size=min_size
    )
    check_partition(clients, len(labels), num_clients, min_size)
    expected = partition.power_law_sizes(
        len(labels), num_clients, seed, exponent=exponent, min_size=min_size
    )
    np.testing.assert_array_equal([len(rows) for rows in clients], expected)


@SETTINGS
@given(pools(), st.floats(0, 1), st.integers(1, 3))
def test_majority_classes(pool, share, num_majority):
    labels, num_clients, seed = pool
    if num_majority >= len(np.unique(labels)):
        with pytest.raises(ValueError, match="num_majority must be below the number of classes"):
            mixtures.majority_classes(labels, num_clients, seed, num_majority=num_majority)
        return
    clients = mixtures.majority_classes(
        labels, num_clients, seed, num_majority=num_majority, majority_share=share
    )
    check_partition(clients, len(labels), num_clients, len(labels) // num_clients)


@SETTINGS
@given(pools(), st.floats(0, 1, exclude_max=True))
def test_split_clients(pool, test_fraction):
    labels, num_clients, seed = pool
    clients = partition.dirichlet(labels, num_clients, seed, alpha=0.3, min_size=0)
    train, test = partition.split_clients(clients, seed, test_fraction=test_fraction)
    for rows, kept, held_out in zip(clients, train, test, strict=True):
        np.testing.assert_array_equal(np.sort(np.concatenate([kept, held_out])), rows)
        exact = len(rows) * test_fraction
        assert abs(len(held_out) - exact) <= 0.5 + 1e-9 or len(kept) == 1
        assert len(kept) >= min(1, len(rows))


@pytest.mark.parametrize(
    ("num_clients", "classes_per_client", "validation", "test"),
    [(10, 2, 25, 200), (100, 2, 25, 200), (7, 3, 4, 10), (5, 1, 0, 0), (3, 10, 1, 9)],
)
def test_few_classes(num_clients, classes_per_client, validation, test):
    rng = np.random.default_rng(5)
    # Pools of the sizes of CIFAR-10's, with gaps in the numbering of classes.
    labels, test_labels = (3 * rng.permutation(np.repeat(np.arange(10), n)) for n in (5000, 1000))
    parts = partition.few_classes(
        labels,
        test_labels,
        num_clients,
        1,
        classes_per_client=classes_per_client,
        validation_per_client=validation,
        test_per_client=test,
    )
    of_train = label_counts(parts.train, labels)
    # Twenty-five of each own class, and nothing else; every class is used as often as others.
    assert set(np.unique(of_train)) <= {0, 25}
    owns = of_train > 0
    np.testing.assert_array_equal(owns.sum(axis=1), classes_per_client)
    assert np.ptp(owns.sum(axis=0)) <= 1
    for rows, pool, total in (
        (parts.validation, labels, validation),
        (parts.test, test_labels, test),
    ):
        counts = label_counts(rows, pool) if total else np.zeros((num_clients, 10), int)
        np.testing.assert_array_equal(counts.sum(axis=1), total)
        for count, own in zip(counts, owns, strict=True):
            assert not count[~own].any()
            assert np.ptp(count[own]) <= 1
    used = np.concatenate([*parts.train, *parts.validation])
    assert len(np.unique(used)) == len(used)
    for rows in parts.test:
        assert len(np.unique(rows)) == len(rows)
    # A test image is used again once all of its class have been.
    uses = np.bincount(np.concatenate(parts.test).astype(int), minlength=len(test_labels))
    for c in np.unique(test_labels):
        assert np.ptp(uses[test_labels == c]) <= 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"classes_per_client": 4}, "classes_per_client must be at most the 3 classes"),
        ({"train_per_class": 31}, "data must hold 31 more examples of class"),
        ({"test_per_client": 12}, "data must hold 6 test examples of class"),
        # Three clients with two of three classes: each class has two owners of 20 each.
        ({"train_per_class": 20}, "data must hold 20 more examples of class .* got 10"),
    ],
)
def test_few_classes_of_a_small_pool(options, message):
    labels, test_labels = np.repeat(np.arange(3), 30), np.repeat(np.arange(3), 5)
    sizes = {"train_per_class": 3, "validation_per_client": 0, "test_per_client": 2, **options}
    with pytest.raises(ValueError, match=message):
        partition.few_classes(labels, test_labels, 3, 0, **sizes)


@pytest.mark.parametrize("alpha", [0.05, 0.5, 100.0])
def test_class_mixtures(alpha):
    rng = np.random.default_rng(5)
    labels, test_labels = (3 * rng.permutation(np.repeat(np.arange(10), n)) for n in (5000, 1000))
    parts = partition.class_mixtures(labels, test_labels, 12, 1, alpha=alpha)
    shares = []
    for rows, pool, total in zip(parts, (labels, labels, test_labels), (50, 25, 200), strict=True):
        counts = label_counts(rows, pool)
        np.testing.assert_array_equal(counts.sum(axis=1), total)
        assert all(len(np.unique(own)) == total for own in rows)
        shares.append(counts / total)
    # The same mixture in each part, as nearly as whole numbers allow.
    for one, size in zip(shares[:2], (50, 25), strict=True):
        assert np.abs(one - shares[2]).max() < 1 / size + 1 / 200
    used = np.concatenate([*parts.train, *parts.validation])
    assert len(np.unique(used)) == len(used)


def test_shares_of_class_mixtures_are_dirichlet():
    """Their variance over ten classes is (1/10)(9/10) / (10 α + 1)."""
    labels = np.repeat(np.arange(10), 20_000)
    made = partition.class_mixtures(
        labels,
        labels,
        2000,
        0,
        alpha=0.5,
        train_per_client=50,
        validation_per_client=0,
        test_per_client=0,
    )
    shares = label_counts(made.train, labels) / 50
    expected = 0.1 * 0.9 / (10 * 0.5 + 1)
    # Rounding adds at most 1 / (12 * 50^2) or so; 20,000 numbers have a standard error of 2 %.
    assert shares.var() == pytest.approx(expected, rel=0.06)


def test_class_mixtures_of_a_small_pool():
    labels = np.repeat(np.arange(3), 30)
    with pytest.raises(ValueError, match=r"data must hold .* more examples of class"):
        partition.class_mixtures(labels, labels, 3, 0, alpha=9.0, test_per_client=0)
    with pytest.raises(ValueError, match=r"data must hold .* test examples of class"):
        partition.class_mixtures(
            labels, labels, 1, 0, alpha=9.0, train_per_client=3, validation_per_client=0
        )


PARTITIONERS = {
    "iid": lambda labels, rng: partition.iid(len(labels), 7, rng),
    "quantity": lambda labels, rng: partition.quantity_skew(len(labels), 7, rng),
    "dirichlet": lambda labels, rng: partition.dirichlet(labels, 7, rng, alpha=0.5),
    "shards": lambda labels, rng: partition.shards(labels, 7, rng),
    "both": lambda labels, rng: mixtures.label_and_size_skew(labels, 7, rng, alpha=0.5),
    "majority": lambda labels, rng: mixtures.majority_classes(labels, 7, rng),
}


@pytest.mark.parametrize("name", PARTITIONERS)
def test_seeds(name):
    labels = np.random.default_rng(1).integers(0, 5, 300)
    make = PARTITIONERS[name]

    def flat(clients):
        return np.concatenate([rows + 1000 * i for i, rows in enumerate(clients)])

    from_seed, again = flat(make(labels, 3)), flat(make(labels, 3))
    np.testing.assert_array_equal(from_seed, again)
    np.testing.assert_array_equal(from_seed, flat(make(labels, np.random.default_rng(3))))
    assert not np.array_equal(from_seed, flat(make(labels, 4)))


@pytest.mark.parametrize("alpha", later([0.1, 1.0, 10.0], but=[0.1], mark=telling))
def test_shares_of_the_dirichlet_partition_have_its_variance(alpha):
    # With shares s ~ Dirichlet(a, ..., a) over n clients, Var(s_i) = (1/n)(1 - 1/n) / (n a + 1).
    num_clients, num_classes, size = 5, 4000, 400
    labels = np.repeat(np.arange(num_classes), size)
    clients = partition.dirichlet(labels, num_clients, 0, alpha=alpha)
    shares = np.stack([np.bincount(labels[rows], minlength=num_classes) for rows in clients]) / size
    expected = (1 / num_clients) * (1 - 1 / num_clients) / (num_clients * alpha + 1)
    assert shares.mean() == pytest.approx(1 / num_clients)
    np.testing.assert_allclose(
        shares.mean(axis=1), 1 / num_clients, atol=5 * np.sqrt(expected / num_classes)
    )
    # 4000 classes: the standard error of a variance is a few per cent.
    np.testing.assert_allclose(shares.var(axis=1), expected, rtol=0.12)


def test_clients_below_the_minimum_take_from_the_largest():
    labels = np.random.default_rng(2).integers(0, 3, 500)
    free = partition.dirichlet(labels, 20, 5, alpha=0.05, min_size=0)
    held = partition.dirichlet(labels, 20, 5, alpha=0.05, min_size=10)
    before, after = np.array([len(r) for r in free]), np.array([len(r) for r in held])
    assert np.sum(before < 10) > 3
    np.testing.assert_array_equal(after[before < 10], 10)
    level = after[after < before].max()
    untouched = (before >= 10) & (before < level)
    np.testing.assert_array_equal(after[untouched], before[untouched])
    assert np.all(after[before > level] >= level - 1)
    for old, new in zip(free, held, strict=True):
        if 10 <= len(old) == len(new):
            np.testing.assert_array_equal(old, new)


def test_apportion():
    np.testing.assert_array_equal(partition.apportion(10, np.array([1.0, 1, 1])), [4, 3, 3])
    np.testing.assert_array_equal(partition.apportion(7, np.array([0.5, 0.2, 0.3])), [4, 1, 2])
    np.testing.assert_array_equal(partition.apportion(0, np.array([1.0, 2.0])), [0, 0])


class TestByPreference:
    def test_preferences_that_fit_are_met_exactly(self):
        preferences = np.array([[0.5, 0.25, 0.25], [0.1, 0.9, 0.0], [0.0, 0.5, 0.5]])
        lengths = np.array([40, 100, 60])
        wanted = np.rint(preferences * lengths[:, None]).astype(int)
        labels = np.random.default_rng(0).permutation(np.repeat([4, 7, 9], wanted.sum(axis=0)))
        clients = mixtures.by_preference(labels, preferences, lengths, 0)
        check_partition(clients, 200, 3)
        np.testing.assert_array_equal(label_counts(clients, labels), wanted)

    def test_others_are_met_as_nearly_as_the_pool_allows(self):
        # Oracle: the closest table in Kullback-Leibler divergence has the form
        # a_i p_ij b_j with the right sums; solve for log b by Newton-free convex minimisation.
        from scipy.optimize import minimize

        rng = np.random.default_rng(3)
        totals, lengths = np.array([500, 300, 200]), np.array([600, 250, 150])
        preferences = rng.dirichlet([1.0, 1.0, 1.0], size=3)

        def dual(log_b):
            return lengths @ np.log(preferences @ np.exp(log_b)) - totals @ log_b

        log_b = minimize(dual, np.zeros(3), method="BFGS", options={"gtol": 1e-8}).x
        table = preferences * np.exp(log_b)
        table *= (lengths / table.sum(axis=1))[:, None]
        np.testing.assert_allclose(table.sum(axis=0), totals, rtol=1e-4)
        labels = np.repeat([0, 1, 2], totals)
        clients = mixtures.by_preference(labels, preferences, lengths, 0)
        check_partition(clients, 1000, 3)
        # Fitted to a thousandth, then rounded.
        np.testing.assert_allclose(label_counts(clients, labels), table, atol=2.0)

    def test_refusals(self):
        labels = np.array([0, 0, 1, 1])
        even = np.full((2, 2), 0.5)
        with pytest.raises(ValueError, match="sizes must sum to 4"):
            mixtures.by_preference(labels, even, np.array([1, 2]), 0)
        with pytest.raises(ValueError, match="preferences must have the shape"):
            mixtures.by_preference(labels, even[:1], np.array([2, 2]), 0)
        with pytest.raises(ValueError, match="positive sum for each client"):
            mixtures.by_preference(labels, np.array([[1, 0], [0, 0]]), np.array([2, 2]), 0)


@pytest.mark.parametrize("num_clients", [10, 50, 25])
def test_majority_classes_hold_the_share_that_was_asked_for(num_clients):
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(10), 600))
    counts = label_counts(mixtures.majority_classes(labels, num_clients, 0), labels)
    ordered = np.sort(counts, axis=1)[:, ::-1]
    size = 6000 // num_clients
    if num_clients % 10 == 0:
        np.testing.assert_allclose(ordered[:, :2], 0.45 * size, atol=2)
        np.testing.assert_allclose(ordered[:, 2:], 0.0125 * size, atol=2)
    else:
        # 25 clients use some classes more than others: the shares bend a little.
        assert np.all(ordered[:, :2].sum(axis=1) > 0.85 * size)
    majority_of = np.zeros(10, dtype=int)
    for row in counts:
        majority_of[np.argsort(row)[-2:]] += 1
    assert majority_of.max() - majority_of.min() <= (0 if num_clients % 10 == 0 else 2)


def test_label_skew_follows_alpha():
    # With balanced classes a client's label shares are Dirichlet(alpha, ..., alpha) before the pool
    # is used up: the mean squared share is (alpha + 1) / (classes alpha + 1).
    labels = np.repeat(np.arange(10), 20_000)
    for alpha, tolerance in ((0.1, 0.06), (1.0, 0.03), (10.0, 0.03)):
        clients = mixtures.label_and_size_skew(labels, 1000, 0, alpha=alpha, exponent=0)
        counts = np.stack([np.bincount(labels[rows], minlength=10) for rows in clients])
        shares = counts / counts.sum(axis=1, keepdims=True)
        squares = np.mean(np.sum(shares**2, axis=1))
        assert squares == pytest.approx((alpha + 1) / (10 * alpha + 1), rel=tolerance)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: partition.iid(3, 4, 0), "num_clients must leave at least 1 of 3 examples"),
        (lambda: partition.dirichlet(np.zeros(4), 2, 0, alpha=1.0, min_size=3), "at least 3 of 4"),
        (
            lambda: partition.dirichlet(np.zeros((4, 1)), 2, 0, alpha=1.0),
            "labels must be one-dim",
        ),
        (lambda: partition.natural(np.zeros(0)), "client_ids must name at least one client"),
        (lambda: partition.split_clients([], 0), "clients must hold at least one client"),
        (
            lambda: partition.split_clients([np.arange(3)], 0, test_fraction=1.0),
            r"test_fraction must be in \[0, 1\)",
        ),
    ],
)
def test_refusals(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("name", ["dirichlet", "shards", "both"])
def test_a_hundred_thousand_clients(name):
    labels = np.random.default_rng(0).integers(0, 10, 1_000_000)
    make = {
        "dirichlet": lambda: partition.dirichlet(labels, 100_000, 0, alpha=0.1, min_size=2),
        "shards": lambda: partition.shards(labels, 100_000, 0),
        "both": lambda: mixtures.label_and_size_skew(labels, 100_000, 0, alpha=0.1, min_size=2),
    }[name]
    start = time.process_time()
    clients = make()
    assert time.process_time() - start < 5
    assert len(clients) == 100_000 and sum(map(len, clients)) == 1_000_000


@pytest.mark.parametrize(
    "make",
    [
        partition.shards,
        functools.partial(partition.dirichlet, alpha=1.0),
        functools.partial(mixtures.label_and_size_skew, alpha=1.0, exponent=0.5),
        mixtures.majority_classes,
    ],
)
def test_an_unknown_label_is_no_class(make):
    with pytest.raises(ValueError, match="labels must name the class of every example, got 'NaN'"):
        make(np.array([0, np.nan, 1, 1]), 2, 0)


def test_a_row_that_a_client_has_twice_would_be_in_both_parts():
    with pytest.raises(ValueError, match=r"clients\[1\] must hold each row once"):
        partition.split_clients([np.arange(3), np.array([4, 5, 4])], 0)


@SETTINGS
@given(pools(), st.floats(0, 0.99))
def test_stratified_shares_are_those_of_the_largest_rests(pool, test_fraction):
    labels, num_clients, seed = pool
    clients = partition.dirichlet(labels, num_clients, seed, alpha=0.5, min_size=0)
    plain = partition.split_clients(clients, seed, test_fraction=test_fraction)
    train, test = partition.split_clients(clients, seed, test_fraction=test_fraction, labels=labels)
    again = partition.split_clients(clients, seed, test_fraction=test_fraction, labels=labels)
    for i, rows in enumerate(clients):
        np.testing.assert_array_equal(np.sort(np.concatenate([train[i], test[i]])), rows)
        np.testing.assert_array_equal(test[i], again[1][i])
        total = len(plain[1][i])
        assert len(test[i]) == total
        exact = {c: Fraction(int(n) * total, len(rows)) for c, n in counted(labels[rows]).items()}
        found = {c: counted(labels[test[i]]).get(c, 0) for c in exact}
        rests = {c: x - math.floor(x) for c, x in exact.items()}
        # Those with the largest rests have one more, and no other class has.
        more = [c for c in exact if found[c] > math.floor(exact[c])]
        assert all(found[c] - math.floor(exact[c]) in (0, 1) for c in exact)
        others = [rests[c] for c in exact if c not in more]
        assert min((rests[c] for c in more), default=1) >= max(others, default=0)


def counted(labels):
    return dict(zip(*map(list, np.unique(labels, return_counts=True)), strict=True))


def test_equal_rests_of_classes_are_drawn_by_chance():
    """Ten classes of two examples each, of which four give one: by class number they would be
    those from 0 to 3 at every client."""
    labels = np.repeat(np.arange(10), 2)
    clients = [np.arange(20) + 20 * i for i in range(200)]
    _, test = partition.split_clients(clients, 3, labels=np.tile(labels, 200))
    counts = np.bincount(np.concatenate([rows % 20 // 2 for rows in test]), minlength=10)
    # Binomial of 200 trials at 0.4, within five deviations.
    assert counts.sum() == 800 and np.abs(counts - 80).max() < 5 * math.sqrt(200 * 0.4 * 0.6)
    with pytest.raises(ValueError, match=r"labels must be one-dimensional, got \(2, 2\)"):
        partition.split_clients([np.arange(2)], 0, labels=np.zeros((2, 2)))
    with pytest.raises(ValueError, match=r"clients\[0\] must name rows in \[0, 2\), got 2"):
        partition.split_clients([np.arange(3)], 0, labels=np.zeros(2))


def test_clients_draw_from_a_common_pool_each_by_itself():
    rows = partition.common_pool(100, 2000, 0, samples_per_client=10)
    assert all(len(set(own.tolist())) == 10 for own in rows)
    # Each row is a client's with probability 1/10, whatever rows other clients have.
    counts = np.bincount(np.concatenate(rows), minlength=100)
    assert len(counts) == 100 and abs(counts - 200).max() < 5 * np.sqrt(2000 * 0.1 * 0.9)
    shared = np.mean([len(np.intersect1d(a, b)) for a, b in pairwise(rows)])
    # Hypergeometric: 10 · 10 / 100 rows on average, with variance .818.
    assert abs(shared - 1) < 5 * np.sqrt(0.818 / 1999)
    with pytest.raises(ValueError, match=r"samples_per_client must be at most 5, the .* got 6"):
        partition.common_pool(5, 2, 0, samples_per_client=6)
