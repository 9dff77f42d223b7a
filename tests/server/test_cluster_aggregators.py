"""Clusters of updates: components against scikit-learn, mixtures and k-means on known problems."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from aggregating import closed
from marks import telling
from oracles.clustered import smallest_separation
from scipy.special import erfc
from sklearn.cluster import KMeans
from sklearn.decomposition import PCA
from sklearn.preprocessing import StandardScaler

from fedjax_dp.evaluation import is_partition_found
from fedjax_dp.privacy.reports.separation import overlap
from fedjax_dp.server import (
    ModelChoice,
    fit_best_mixture,
    fit_mixture,
    kmeans,
    mean_per_cluster,
    num_soft_rounds,
    principal_features,
    similarity_of,
)

SIZES = (3, 6, 6, 6)
TRUE = np.repeat(np.arange(4), SIZES)


def updates(seed=0, num_parameters=40):
    rng = np.random.default_rng(seed)
    centres = 3 * rng.normal(size=(4, num_parameters))
    return centres[TRUE] + rng.normal(size=(21, num_parameters))


def as_tree(deltas):
    """Updates as leaves of two shapes."""
    deltas = np.asarray(deltas, np.float32)
    return {"a": deltas[:, :10], "b": deltas[:, 10:].reshape(len(deltas), 5, -1)}


def min_max(scores):
    low, high = scores.min(axis=0), scores.max(axis=0)
    return (scores - low) / (high - low)


def assert_equal_up_to_reflection(actual, expected, atol):
    """A component may point either way; scaled to [0, 1] that mirrors it."""
    for a, e in zip(actual.T, expected.T, strict=True):
        assert min(np.abs(a - e).max(), np.abs(a - (1 - e)).max()) < atol


@pytest.mark.parametrize("num_components", [1, 2, 3])
def test_features_are_principal_components(num_components):
    deltas = updates()
    similarity = similarity_of(as_tree(deltas), jnp.ones(21, bool))
    expected = min_max(PCA(num_components).fit_transform(deltas))
    actual = principal_features(similarity, num_components)
    assert_equal_up_to_reflection(actual, expected, 2e-4)


def test_features_of_the_authors_project_updates_as_they_are():
    """Their code fits on standardised columns and transforms the raw ones."""
    deltas = updates(1) * np.linspace(0.1, 5, 40) + 2
    similarity = similarity_of(as_tree(deltas), jnp.ones(21, bool), features="authors")
    fitted = PCA(2).fit(StandardScaler().fit_transform(deltas))
    expected = min_max(fitted.transform(deltas))
    actual = principal_features(similarity, 2)
    assert_equal_up_to_reflection(actual, expected, 2e-4)
    centred = principal_features(similarity_of(as_tree(deltas), jnp.ones(21, bool)), 2)
    assert np.abs(centred - actual).max() > 0.05, "the two ways differ on these updates"


def test_slots_without_a_client_change_no_feature():
    deltas, is_real = updates(2), np.arange(21) % 5 != 0
    with_garbage = np.where(is_real[:, None], deltas, 1e9)
    found = principal_features(similarity_of(as_tree(with_garbage), jnp.asarray(is_real)))
    assert np.all(found[~is_real] == 0)
    expected = min_max(PCA(3).fit_transform(deltas[is_real]))
    assert_equal_up_to_reflection(found[is_real], expected, 2e-4)


def test_updates_that_are_all_alike_have_no_features():
    similarity = similarity_of(as_tree(np.ones((21, 40))), jnp.ones(21, bool))
    np.testing.assert_array_equal(principal_features(similarity), 0)
    alone = similarity_of(as_tree(updates()), jnp.arange(21) == 4)
    np.testing.assert_array_equal(principal_features(alone), 0)


def separated(distance, rng):
    """21 points in four spherical clusters of standard deviation 1 on a square."""
    corners = distance * np.array([[0, 0], [1, 0], [0, 1], [1, 1]])
    return corners[TRUE] + rng.normal(size=(21, 2))


@pytest.mark.parametrize("distance", [8.0, 14.0])
@pytest.mark.parametrize("seed", range(4))
def test_the_best_separated_mixture_has_the_true_number_of_clusters(seed, distance):
    """Oracle 6: four spherical clusters in the plane, n = 21."""
    points = separated(distance, np.random.default_rng(seed))
    best = fit_best_mixture(points, range(2, 11), 0)
    assert len(best.means) == 4 and best.separation > 2
    assert is_partition_found(best.responsibilities.argmax(axis=1), TRUE)
    np.testing.assert_allclose(best.overlap, erfc(best.separation / np.sqrt(2)))
    np.testing.assert_allclose(best.responsibilities.sum(axis=1), 1)


def test_clusters_of_single_clients_do_not_count_as_well_separated():
    """Three clients, each a cluster without width, beat the true four by the raw score."""
    points = separated(14.0, np.random.default_rng(2))
    assert fit_mixture(points, 6, 0).separation > fit_mixture(points, 4, 0).separation
    assert len(fit_best_mixture(points, [4, 6], 0).means) == 4
    assert len(fit_best_mixture(points, [4, 6], 0, separation="plain").means) == 6


@pytest.mark.parametrize("seed", [3, 8])
def test_the_plain_choice_maximises_the_smallest_separation(seed):
    """argmax over M of min over pairs of ‖μ - μ'‖ / (2 max(s, s')), by hand."""
    points = separated(6.0, np.random.default_rng(seed))
    scores = {m: smallest_separation(points, m, 0) for m in range(2, 8)}
    best = fit_best_mixture(points, range(2, 8), 0, separation="plain")
    assert len(best.means) == max(scores, key=scores.get)
    np.testing.assert_allclose(best.separation, max(scores.values()), rtol=1e-6)


def test_clusters_of_several_clients_may_be_narrower_than_others():
    """Two close clusters that are narrow for real are not taken for one."""
    rng = np.random.default_rng(0)
    centres = np.array([(0.0, 0.0), (1.0, 0.0), (0.0, 1.0), (0.28, 1.0)])
    widths, sizes = (0.06, 0.06, 0.025, 0.025), (6, 6, 6, 6)
    points = np.concatenate(
        [c + w * rng.normal(size=(n, 2)) for c, w, n in zip(centres, widths, sizes, strict=True)]
    )
    assert len(fit_best_mixture(points, [3, 4], 0).means) == 4


def test_responsibilities_come_from_equal_prior_chances():
    """By hand: densities of the fitted components, without the sizes of their clusters."""
    points = separated(3.0, np.random.default_rng(5))
    mixture = fit_mixture(points, 3, 1)
    squared = ((points[:, None] - mixture.means) ** 2).sum(axis=2)
    density = np.exp(-squared / (2 * mixture.radii**2)) / mixture.radii**2
    expected = density / density.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(mixture.responsibilities, expected, atol=1e-9)
    assert 0.01 < mixture.overlap < 1


def test_soft_rounds_follow_the_overlap():
    """Oracles 3 and 7, with E = 200."""
    overlaps = overlap([1.0, 2.0, 3.0])
    np.testing.assert_allclose(overlaps, [0.3173, 0.0455, 0.0027], atol=5e-5)
    assert [num_soft_rounds(o, 200) for o in overlaps] == [68, 95, 99]
    assert num_soft_rounds(0.0, 200) == 100 and num_soft_rounds(1.0, 200) == 0
    counts = [num_soft_rounds(o, 200) for o in np.linspace(0, 1, 101)]
    assert np.all(np.diff(counts) <= 0)


def test_one_cluster_has_no_pair_that_could_overlap():
    one = fit_mixture(updates()[:, :2], 1, 0)
    assert one.separation == np.inf and one.overlap == 0
    np.testing.assert_array_equal(one.responsibilities, 1)


def test_mixtures_of_too_few_clients_are_refused():
    with pytest.raises(ValueError, match="features must hold at least 4 clients"):
        fit_mixture(np.zeros((3, 2)), 4, 0)
    with pytest.raises(ValueError, match="candidates must name a number of clusters"):
        fit_best_mixture(np.zeros((3, 2)), [], 0)


def inertia_of(points, labels):
    return sum(
        ((points[labels == c] - points[labels == c].mean(axis=0)) ** 2).sum()
        for c in np.unique(labels)
    )


@telling
@pytest.mark.parametrize("seed", range(5))
def test_kmeans_is_as_good_as_that_of_scikit_learn(seed):
    points = np.random.default_rng(seed).normal(size=(21, 6))
    gram = jnp.asarray(points @ points.T, jnp.float32)
    run = jax.jit(lambda key, g: kmeans(key, g, jnp.ones(21, bool), 4, num_restarts=20))
    found = run(jax.random.key(seed), gram)
    labels = np.asarray(found.assignment)
    np.testing.assert_allclose(found.inertia, inertia_of(points, labels), rtol=1e-4)
    theirs = KMeans(4, n_init=20, random_state=seed).fit(points).inertia_
    assert inertia_of(points, labels) <= 1.02 * theirs
    # A fixed point of Lloyd's iteration: no point is nearer to another centre.
    centres = np.array([points[labels == c].mean(axis=0) for c in range(4)])
    nearest = ((points[:, None] - centres) ** 2).sum(axis=2).argmin(axis=1)
    np.testing.assert_array_equal(nearest, labels)


@telling
def test_kmeans_sees_real_points_only_and_survives_too_few():
    points = np.concatenate([updates(3), np.full((4, 40), 1e6)])
    gram = jnp.asarray(points @ points.T, jnp.float32)
    is_real = jnp.arange(25) < 21
    found = kmeans(jax.random.key(0), gram, is_real, 4)
    assert is_partition_found(found.assignment[:21], TRUE)
    np.testing.assert_array_equal(found.assignment[21:], 0)
    two = kmeans(jax.random.key(0), gram, jnp.arange(25) < 2, 4)
    assert np.all(np.isfinite(two.inertia)) and np.all(np.asarray(two.assignment) >= 0)
    assert two.assignment[0] != two.assignment[1]


@telling
def test_means_per_cluster_leave_out_clients_without_weight():
    deltas, models = updates(4), np.arange(21) % 3
    weight = np.where(np.arange(21) % 4 == 0, 0.0, 1.0 + np.arange(21))
    contributes = np.arange(21) != 5
    clients = np.random.default_rng(0).permutation(30)[:21]
    aggregator = mean_per_cluster(4, 30)
    update = ModelChoice(jnp.asarray(models), as_tree(deltas))
    sent = (update, jnp.asarray(weight, jnp.float32))
    _, aggregate, info = aggregator.combine((), {}, sent, closed(clients, contributes))
    counts = weight * contributes
    mean = np.concatenate(
        [np.asarray(leaf).reshape(4, -1) for leaf in (aggregate.mean["a"], aggregate.mean["b"])], 1
    )
    for m in range(3):
        of_it = (models == m) & (counts > 0)
        expected = np.average(deltas[of_it], axis=0, weights=counts[of_it])
        np.testing.assert_allclose(mean[m], expected, atol=1e-5)
    np.testing.assert_array_equal(mean[3], 0)
    assert info["weight_per_model"][3] == 0
    seen = np.asarray(aggregate.similarity.is_seen)
    np.testing.assert_array_equal(np.flatnonzero(seen), np.sort(clients[counts > 0]))
    centred = deltas[counts > 0] - deltas[counts > 0].mean(axis=0)
    order = np.argsort(clients[counts > 0])
    expected = (centred @ centred.T)[np.ix_(order, order)]
    actual = np.asarray(aggregate.similarity.scatter)[np.ix_(seen, seen)]
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-3)
