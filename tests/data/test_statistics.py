"""Figures about partitions, against values worked out by hand and by SciPy."""

import json

import numpy as np
import pytest
import scipy.stats

from fedjax_dp.data import partition, statistics
from fedjax_dp.data.federated import FederatedData

LABELS = np.array([0, 0, 0, 0, 7, 7, 7, 7, 7, 7])
CLIENTS = [np.array([0, 1]), np.array([4, 5, 6, 7]), np.array([2, 8]), np.array([], int)]


def test_by_hand():
    figures = statistics.describe(CLIENTS, LABELS)
    assert figures.num_clients == 4
    np.testing.assert_array_equal(figures.sizes, [2, 4, 2, 0])
    np.testing.assert_array_equal(figures.label_counts, [[2, 0], [0, 4], [1, 1], [0, 0]])
    assert figures.labels == ("0", "7")
    np.testing.assert_allclose(figures.label_entropy, [0, 0, np.log(2), 0])
    # Together the clients hold 3 and 5 of the two labels.
    np.testing.assert_allclose(figures.total_variation, [5 / 8, 3 / 8, 1 / 8, 0])
    assert (figures.num_shared, figures.num_unused) == (0, 2)
    values = json.loads(json.dumps(figures.to_dict()))
    assert (values["size_min"], values["size_median"], values["size_max"]) == (0, 2.0, 4)
    assert (values["num_clients"], values["num_examples"], values["num_empty"]) == (4, 8, 1)
    assert values["label_counts"] == [[2, 0], [0, 4], [1, 1], [0, 0]]
    text = str(figures)
    assert "4 clients, 8 examples" in text and "2 examples belong to no client" in text
    assert "labels per client: min 0, median 1, max 2 of 2" in text


def test_against_scipy():
    labels = np.random.default_rng(0).integers(0, 6, 500)
    clients = partition.dirichlet(labels, 9, 0, alpha=0.4)
    figures = statistics.describe(clients, labels)
    everyone = np.bincount(labels) / 500
    for i, rows in enumerate(clients):
        counts = np.bincount(labels[rows], minlength=6)
        assert figures.label_entropy[i] == pytest.approx(scipy.stats.entropy(counts))
        distance = 0.5 * np.abs(counts / counts.sum() - everyone).sum()
        assert figures.total_variation[i] == pytest.approx(distance)


def test_shared_rows_are_counted():
    figures = statistics.describe([np.array([0, 1, 2]), np.array([2, 1, 4])], num_examples=8)
    assert (figures.num_shared, figures.num_unused) == (2, 4)
    assert figures.label_counts is None and figures.label_entropy is None
    assert "2 examples belong to more than one client" in str(figures)
    with pytest.raises(ValueError, match=r"rows in \[0, 2\)"):
        statistics.describe([np.array([0, 2])], np.array([0, 1]))


def test_who_shares_a_row_is_counted():
    rows = [np.array([0, 1, 2]), np.array([2, 1, 4]), np.array([2, 2, 7])]
    assert statistics.sharing_of(rows) == (2, 3)
    assert statistics.sharing_of(rows[:1]) == statistics.Sharing() == (0, 1)
    assert statistics.sharing_of([np.array([], int)]) == (0, 1)


def test_clients_that_have_names_are_listed():
    examples = {"y": LABELS}
    data = FederatedData.from_indices(examples, CLIENTS[:2], ("ward a", "ward b"))
    figures = statistics.describe_data(data)
    assert figures.by_client() == "ward a: 2 examples\nward b: 4 examples"
    assert figures.to_dict()["client_names"] == ["ward a", "ward b"]
    unnamed = statistics.describe_data(FederatedData.from_indices(examples, CLIENTS))
    assert unnamed.by_client() == ""


def test_a_store_has_the_figures_of_its_partition():
    examples = {"x": np.arange(10.0), "y": LABELS}
    clients = partition.iid(10, 3, 0)
    stored = statistics.describe_data(FederatedData.from_indices(examples, clients))
    figures = statistics.describe(clients, LABELS)
    np.testing.assert_array_equal(stored.label_counts, figures.label_counts)
    assert stored.to_dict() == figures.to_dict()
    data = FederatedData.from_indices({"x": np.zeros((10, 2))}, clients)
    assert statistics.describe_data(data, label=None).label_counts is None
    with pytest.raises(ValueError, match="label must name one-dimensional labels"):
        statistics.describe_data(data, label="x")
