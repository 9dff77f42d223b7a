"""Clusters found, minority found, fairness of clusters: counted by hand."""

import math

import numpy as np
import pytest

from fedjax_dp.evaluation import (
    Evaluation,
    HiddenClusters,
    References,
    cost_disparity,
    is_minority_found,
    is_partition_found,
    matched_share,
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


def evaluation_of(accuracy, loss):
    sizes = np.ones(len(accuracy), int)
    return Evaluation(0.0, 0.0, np.array(loss), np.array(accuracy), sizes)


def test_metrics_of_a_run_by_hand():
    """Shortfalls of accuracy .4, .2, .05 and .15; excess losses 1.2, .8, .3 and .4."""
    references = References(np.array([0.9, 0.9, 0.95, 0.95]), np.array([0.3, 0.2, 0.1, 0.1]))
    held_out = evaluation_of([0.5, 0.7, 0.9, 0.8], [NAN] * 4)
    training = evaluation_of([NAN] * 4, [1.5, 1.0, 0.4, 0.5])
    hidden = HiddenClusters(np.array([7, 2, 2, 2]), lambda: references)
    fairness = {"majority_accuracy": 0.8, "minority_accuracy": 0.5}
    found = {"clusters_found": 0.0, "minority_found": 1.0, "clients_matched": 0.75}
    costs = {"accuracy_cost_disparity": 0.35, "loss_cost_disparity": 0.9}
    whole = hidden.metrics([0, 1, 1, 2], held_out, training)
    assert whole == pytest.approx(fairness | found | costs)
    # What a run lacks is not reported.
    assert hidden.metrics(None, held_out, training) == pytest.approx(fairness | costs)
    plain = HiddenClusters(hidden.true)
    assert plain.metrics([0, 1, 1, 2], None, None) == pytest.approx(found)
    of_losses = HiddenClusters(hidden.true, lambda: references._replace(accuracy=None))
    assert of_losses.metrics(None, None, training) == pytest.approx({"loss_cost_disparity": 0.9})


def test_the_first_of_several_smallest_clusters_is_the_minority():
    held_out = evaluation_of([0.5, 0.6, 0.9, NAN], [NAN] * 4)
    found = HiddenClusters(np.array([4, 1, 4, 1])).metrics(None, held_out, None)
    assert found == pytest.approx({"majority_accuracy": 0.7, "minority_accuracy": 0.6})
    alone = HiddenClusters(np.zeros(4, int)).metrics(None, held_out, None)
    assert alone["minority_accuracy"] == pytest.approx(2 / 3)
    assert math.isnan(alone["majority_accuracy"])


def test_cost_disparity_by_hand():
    """Gaps 0.1, -0.2 and 0.4: the two furthest apart differ by 0.6."""
    values, references = np.array([0.8, 0.9, 0.5]), np.array([0.9, 0.7, 0.9])
    pairs = [
        abs((references - values)[i] - (references - values)[j]) for i in range(3) for j in range(3)
    ]
    assert cost_disparity(values, references) == pytest.approx(0.6) == pytest.approx(max(pairs))
    assert cost_disparity(values, values) == 0.0
    assert cost_disparity(values + 5, references) == pytest.approx(0.6)


def test_clients_without_a_number_have_no_gain():
    assert cost_disparity([0.8, NAN, 0.5], [0.9, 0.1, 0.9]) == pytest.approx(0.3)
    assert cost_disparity([0.8, 0.5], [NAN, 0.9]) == 0.0
    assert math.isnan(cost_disparity([NAN], [1.0]))


def test_references_are_of_the_same_clients():
    rule = r"references must hold a number for each of the 2 clients of values, got \(3,\)"
    with pytest.raises(ValueError, match=rule):
        cost_disparity([0.1, 0.2], [0.1, 0.2, 0.3])
