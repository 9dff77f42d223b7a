"""Clusters found, minority found, fairness of clusters, summaries over seeds: counted by hand."""

import math

import numpy as np
import pytest

from experiments.clustered_dp.metrics import (
    by_group,
    cluster_fairness,
    disparity_of_gains,
    is_minority_found,
    is_partition_found,
    matched_share,
    over_seeds,
)

NAN = math.nan
TRUE = [0, 0, 1, 1, 1, 2, 2, 2]


@pytest.mark.parametrize(
    "assigned, partition, minority, share",
    [
        ([5, 5, 0, 0, 0, 9, 9, 9], True, True, 1.0),
        ([1, 1, 0, 0, 0, 0, 0, 0], False, True, 5 / 8),
        ([1, 1, 1, 0, 0, 2, 2, 2], False, False, 7 / 8),
        ([1, 3, 0, 0, 0, 2, 2, 2], False, False, 7 / 8),
        ([0, 0, 0, 0, 0, 0, 0, 0], False, False, 3 / 8),
        ([4, 4, 0, 0, 1, 2, 2, 2], False, True, 7 / 8),
    ],
)
def test_what_was_found(assigned, partition, minority, share):
    assert is_partition_found(assigned, TRUE) is partition
    assert is_minority_found(assigned, TRUE) is minority
    assert matched_share(assigned, TRUE) == pytest.approx(share)


def test_another_cluster_may_be_asked_for():
    assigned = [0, 0, 1, 1, 1, 2, 2, 0]
    assert is_minority_found(assigned, TRUE, minority=1)
    assert not is_minority_found(assigned, TRUE, minority=2)
    with pytest.raises(ValueError, match="minority must be a cluster with clients"):
        is_minority_found(assigned, TRUE, minority=3)
    with pytest.raises(ValueError, match="assigned must name a cluster for each of the 8 clients"):
        is_partition_found([0, 1], TRUE)


def test_fairness_of_clusters_by_hand():
    metrics = cluster_fairness(
        accuracy=np.array([0.5, 0.7, 0.9, 0.8]),
        loss=np.array([1.5, 1.0, 0.4, 0.5]),
        reference_accuracy=np.array([0.9, 0.9, 0.95, 0.95]),
        reference_loss=np.array([0.3, 0.2, 0.1, 0.1]),
        is_minority=np.array([True, False, False, False]),
    )
    # Shortfalls 40, 20, 5, 15 percent; excess losses 1.2, 0.8, 0.3, 0.4.
    expected = {
        "acc_all": 72.5,
        "acc_maj": 80.0,
        "acc_min": 50.0,
        "min_acc": 50.0,
        "acc_disparity": 40.0,
        "F_acc": 35.0,
        "F_loss": 0.9,
    }
    assert metrics == pytest.approx(expected)


def test_summaries_over_seeds():
    seeds = [{"a": 1.0, "b": 5.0}, {"a": 3.0, "b": 5.0, "c": 0.0}, {"a": 5.0, "b": 5.0}]
    assert over_seeds(seeds) == {"a": (3.0, pytest.approx(2.0)), "b": (5.0, 0.0)}
    mean, spread = over_seeds(seeds[:1])["a"]
    assert mean == 1.0 and np.isnan(spread)
    with pytest.raises(ValueError, match="results must hold at least one seed"):
        over_seeds([])


def test_disparity_of_gains_by_hand():
    """Gaps 0.1, -0.2 and 0.4: the two furthest apart differ by 0.6."""
    values, references = np.array([0.8, 0.9, 0.5]), np.array([0.9, 0.7, 0.9])
    pairs = [
        abs((references - values)[i] - (references - values)[j]) for i in range(3) for j in range(3)
    ]
    assert disparity_of_gains(values, references) == pytest.approx(0.6) == pytest.approx(max(pairs))
    assert disparity_of_gains(values, values) == 0.0
    assert disparity_of_gains(values + 5, references) == pytest.approx(0.6)


def test_clients_without_a_number_have_no_gain():
    assert disparity_of_gains([0.8, NAN, 0.5], [0.9, 0.1, 0.9]) == pytest.approx(0.3)
    assert disparity_of_gains([0.8, 0.5], [NAN, 0.9]) == 0.0
    assert math.isnan(disparity_of_gains([NAN], [1.0]))


def test_groups_by_hand():
    values, minority = [0.9, 0.7, 0.2, 0.4], [False, False, True, True]
    expected = {"all": 0.55, "majority": 0.8, "minority": 0.3}
    assert by_group(values, minority) == pytest.approx(expected)
    assert by_group([0.9, NAN, 0.2, NAN], minority) == pytest.approx(
        {"all": 0.55, "majority": 0.9, "minority": 0.2}
    )


def test_a_group_without_clients_has_no_mean():
    means = by_group([0.9, 0.7], [False, False])
    assert means["all"] == means["majority"] == pytest.approx(0.8)
    assert math.isnan(means["minority"])


def test_groups_must_match_the_clients():
    with pytest.raises(ValueError, match=r"is_minority must match the clients, got \(2,\)"):
        by_group([0.1, 0.2, 0.3], [True, False])
