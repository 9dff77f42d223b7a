"""Clusters of clients: means and similarities, k-means on devices, mixtures on the host."""

import math
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from chex import PRNGKey
from numpy.typing import ArrayLike

from fedjax_dp.core import checks, trees
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.keys import fold
from fedjax_dp.core.ranges import Count, Fraction
from fedjax_dp.core.trees import PyTree
from fedjax_dp.privacy.reports.separation import overlap, separation_scores
from fedjax_dp.server.base import Stacked, stateless
from fedjax_dp.server.mean import ModelChoice

FEATURES = ("centred", "authors")
# Of one restart of k-means.
_MAX_ITERATIONS = 50
# Features are rounded, so that differences in the last bits of the updates, as between two layouts
# of a round, do not change clusters.
_DECIMALS = 4
_RESOLUTION = 1e-5
_NUM_RESTARTS = 10
_TOLERANCE = 1e-6
_MOST_STEPS = 1000
# Clusters with fewer expected clients than this have no width.
_FEW_CLIENTS = 1.5


class Similarity(NamedTuple):
    """Inner products of the clients' updates, which determine their principal components.

    Attributes:
      scatter: of the updates that the components are found from, `[clients, clients]`.
      cross: of the updates that are projected, rows, with those, columns, `[clients, clients]`.
      is_seen: the clients whose updates are included, `[clients]`, bool; other rows and columns are
        0.
    """

    scatter: jax.Array
    cross: jax.Array
    is_seen: jax.Array


class ClusterAggregate(NamedTuple):
    """The aggregate of a clustered algorithm.

    Attributes:
      mean: the mean update of each model's clients, `[models, ...]`; zero for a model that no
        client trained.
      similarity: of the round's updates.
    """

    mean: PyTree
    similarity: Similarity


def no_similarity(num_clients: int) -> Similarity:
    """Returns the similarity of a round without clients."""
    zeros = jnp.zeros((num_clients, num_clients), jnp.float32)
    return Similarity(zeros, zeros, jnp.zeros(num_clients, bool))


@checked
def similarity_of(deltas: PyTree, is_real: jax.Array, *, features: str = "centred") -> Similarity:
    """Computes the inner products of updates, so that updates need not be stored.

    "centred" subtracts the mean update. "authors" repeats the published code: components are found
    from updates whose every coordinate is centred and divided by its standard deviation, but the
    unmodified updates are projected.

    Args:
      deltas: `[slots, ...]`.
      is_real: which slots hold an update, `[slots]`, bool.
      features: "centred" or "authors".

    Returns:
      The similarity by slot.

    Source: the code of Malekmohammadi and others 2025 (R-DPCFL), corrected: it finds components of
    standardised updates and projects others on them.
    """
    count = jnp.maximum(jnp.sum(is_real), 1).astype(jnp.float32)
    num_slots = is_real.shape[0]
    scatter = cross = jnp.zeros((num_slots, num_slots), jnp.float32)
    for leaf in jax.tree.leaves(deltas):
        flat = trees.at_least_float32(leaf).reshape(num_slots, -1)
        flat = jnp.where(is_real[:, None], flat, 0.0)
        centred = jnp.where(is_real[:, None], flat - jnp.sum(flat, axis=0) / count, 0.0)
        if features == "authors":
            stddev = jnp.sqrt(jnp.sum(jnp.square(centred), axis=0) / count)
            scaled = centred / jnp.where(stddev > 0, stddev, 1.0)
            scatter = scatter + _inner(scaled, scaled)
            cross = cross + _inner(flat, scaled)
        else:
            scatter = scatter + _inner(centred, centred)
    if features == "centred":
        cross = scatter
    return Similarity(scatter, cross, is_real)


def by_client(similarity: Similarity, clients: jax.Array, num_clients: int) -> Similarity:
    """Reorders a similarity from slots to clients, `[clients, clients]`."""
    ids = jnp.where(similarity.is_seen, clients, num_clients)
    there = (ids[:, None], ids[None, :])
    empty = no_similarity(num_clients)
    return Similarity(
        empty.scatter.at[there].set(similarity.scatter, mode="drop"),
        empty.cross.at[there].set(similarity.cross, mode="drop"),
        empty.is_seen.at[ids].set(True, mode="drop"),
    )


def _inner(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.dot(a, b.T, precision=jax.lax.Precision.HIGHEST)


def mean_per_cluster(num_models: int, num_clients: int, *, features: str = "centred") -> Stacked:
    """Averages, for each server model, the updates of its clients, and compares all updates.

    Args:
      num_models: the number of server models, at least 1.
      num_clients: the population, at least 1.
      features: as for `similarity_of`.

    Returns:
      The aggregator of `ModelChoice` updates; its aggregate is a `ClusterAggregate`. Clients of
      weight 0 are ignored.
    """
    checks.whole("num_models", num_models)
    checks.whole("num_clients", num_clients)
    checks.one_of("features", features, FEATURES)

    def contribute(state, numbers, update: ModelChoice, sender):
        return update, sender.weight

    def combine(state, numbers, stack, close):
        update, weight = stack
        is_real = close.contributes & (weight > 0)
        counted = weight * is_real.astype(weight.dtype)
        mean, per_model = means_of(update.delta, update.model, counted, num_models)
        by_slot = similarity_of(update.delta, is_real, features=features)
        similarity = by_client(by_slot, close.roster.clients, num_clients)
        return state, ClusterAggregate(mean, similarity), {"weight_per_model": per_model}

    return Stacked(stateless, contribute, combine)


def means_of(
    deltas: PyTree, cluster: jax.Array, weight: jax.Array, num_clusters: int
) -> tuple[PyTree, jax.Array]:
    """Averages stacked updates by cluster; returns `[clusters, ...]` and each cluster's weight."""
    share = jax.nn.one_hot(cluster, num_clusters) * weight[:, None]
    total = jnp.sum(share, axis=0)
    share = share / jnp.where(total > 0, total, 1.0)

    def mean(leaf):
        flat = trees.at_least_float32(leaf).reshape(leaf.shape[0], -1)
        flat = jnp.where(weight[:, None] > 0, flat, 0.0)
        summed = jnp.dot(share.T, flat, precision=jax.lax.Precision.HIGHEST)
        return summed.reshape(num_clusters, *leaf.shape[1:])

    return jax.tree.map(mean, deltas), total


class Clusters(NamedTuple):
    """A partition of points.

    Attributes:
      assignment: the cluster of each point, `[points]`, int32.
      inertia: summed squared distances of the points to the centres of their clusters.
    """

    assignment: jax.Array
    inertia: jax.Array


@checked
def kmeans(
    key: PRNGKey,
    gram: jax.Array,
    is_real: jax.Array,
    num_clusters: Count,
    *,
    num_restarts: Count = 10,
) -> Clusters:
    """Partitions points by k-means++ and Lloyd's iterations, and keeps the best restart.

    Centres are means of points, so that every distance is a sum of inner products: the cost follows
    the number of points and not their dimension.

    Args:
      key: used for the seeds only.
      gram: inner products, `[points, points]`.
      is_real: which of them are points, `[points]`, bool.
      num_clusters: at least 1.
      num_restarts: number of restarts, at least 1.

    Returns:
      The partition; points that are not real belong to cluster 0. With fewer points than clusters
      some clusters stay empty.

    Source: Arthur and Vassilvitskii 2007; Lloyd 1982.
    """
    squares = jnp.diagonal(gram)

    def distances_to(weights):
        """Squared distances to weighted means, `[points, clusters]`."""
        centre_squares = jnp.sum(weights * (gram @ weights), axis=0)
        between = squares[:, None] - 2 * gram @ weights + centre_squares[None, :]
        return jnp.maximum(between, 0.0)

    def first_centres(key):
        def add(c, chosen):
            nearest = jnp.min(
                jnp.where(jnp.arange(num_clusters) < c, distances_to(chosen), jnp.inf), axis=1
            )
            chance = jnp.where(is_real, jnp.where(c == 0, 1.0, nearest), 0.0)
            # If all points are at centres, any point will do.
            chance = jnp.where(jnp.sum(chance) > 0, chance, is_real.astype(jnp.float32))
            point = jax.random.categorical(fold(key, c), jnp.log(chance))
            return chosen.at[:, c].set(jax.nn.one_hot(point, len(squares)))

        empty = jnp.zeros((len(squares), num_clusters), jnp.float32)
        return jax.lax.fori_loop(0, num_clusters, add, empty)

    def weights_of(assignment, before):
        members = jax.nn.one_hot(assignment, num_clusters) * is_real[:, None].astype(jnp.float32)
        count = jnp.sum(members, axis=0)
        # A cluster that lost its points keeps its centre.
        return jnp.where(count > 0, members / jnp.maximum(count, 1), before)

    def assigned(weights):
        return jnp.argmin(distances_to(weights), axis=1).astype(jnp.int32)

    def one_restart(key):
        weights = first_centres(key)

        def step(carry):
            i, assignment, weights, _ = carry
            weights = weights_of(assignment, weights)
            after = assigned(weights)
            return i + 1, after, weights, jnp.any((after != assignment) & is_real)

        carry = (jnp.int32(0), assigned(weights), weights, jnp.bool_(True))
        _, assignment, weights, _ = jax.lax.while_loop(
            lambda c: (c[0] < _MAX_ITERATIONS) & c[3], step, carry
        )
        nearest = jnp.take_along_axis(distances_to(weights), assignment[:, None], axis=1)[:, 0]
        return Clusters(assignment, jnp.sum(jnp.where(is_real, nearest, 0.0)))

    restarts = jax.vmap(lambda r: one_restart(fold(key, r)))(jnp.arange(num_restarts))
    best = jnp.argmin(restarts.inertia)
    assignment = jnp.where(is_real, restarts.assignment[best], 0)
    return Clusters(assignment, restarts.inertia[best])


class Mixture(NamedTuple):
    """A fitted mixture of spherical Gaussians.

    Attributes:
      means: `[clusters, features]`.
      radii: standard deviation of one coordinate in each cluster, `[clusters]`.
      responsibilities: probability of each client to belong to each cluster under equal priors,
        `[clients, clusters]`.
      separation: the smallest separation score of two clusters (MSS); infinite for one cluster.
      overlap: the largest overlap of two clusters (MPO), in [0, 1]; 0 for one cluster.
      num_iterations: steps of expectation-maximisation in the best restart.
    """

    means: np.ndarray
    radii: np.ndarray
    responsibilities: np.ndarray
    separation: float
    overlap: float
    num_iterations: int


@checked
def principal_features(similarity: Similarity, num_components: Count = 3) -> np.ndarray:
    """Projects the clients' updates on their principal components, each scaled to [0, 1].

    The components come from the clients' inner products alone: of n updates of p parameters they
    are the leading eigenvectors of an n by n matrix.

    Args:
      similarity: inner products of the updates.
      num_components: how many components are kept, at least 1.

    Returns:
      `[clients, components]`, float64; 0 for clients that were not seen, and for a component that
      does not separate clients.

    Source: the code of Malekmohammadi and others 2025 (R-DPCFL); the paper leaves features open.
    """
    is_seen = np.asarray(similarity.is_seen)
    scatter = np.asarray(similarity.scatter, np.float64)[np.ix_(is_seen, is_seen)]
    cross = np.asarray(similarity.cross, np.float64)[np.ix_(is_seen, is_seen)]
    features = np.zeros((len(is_seen), num_components))
    if len(scatter) < 2:
        return features
    values, vectors = np.linalg.eigh((scatter + scatter.T) / 2)
    kept = np.argsort(values)[::-1][:num_components]
    values, vectors = np.maximum(values[kept], 0), vectors[:, kept]
    # Components below float32 rounding separate no clients.
    is_used = values > _RESOLUTION * values.max(initial=0.0)
    # The sign of an eigenvector is arbitrary: the first client that is far out gets a positive
    # value. The farthest would not do, since in a pair both are equally far.
    sizes = np.abs(vectors)
    first = np.argmax(sizes >= sizes.max(axis=0) / 2, axis=0)
    signs = np.sign(vectors[first, np.arange(len(kept))])
    # Component k is Dᵀu/√λ for the updates D.
    projected = cross @ (vectors * signs) / np.where(is_used, np.sqrt(values), 1.0)
    low, high = projected.min(axis=0), projected.max(axis=0)
    spread = np.where(is_used & (high > low), high - low, np.inf)
    features[is_seen, : len(kept)] = np.round((projected - low) / spread, _DECIMALS)
    return features


@checked
def fit_mixture(features: ArrayLike, num_clusters: Count, seed: int) -> Mixture:
    """Fits a mixture of spherical Gaussians, each with its own variance.

    Args:
      features: `[clients, features]`, at least as many clients as clusters.
      num_clusters: at least 1.
      seed: of the restarts, from 0 to 2^32 - 1.

    Returns:
      The mixture; its components are ordered by their means.

    Raises:
      ValueError: if there are fewer clients than clusters.

    Source: Malekmohammadi and others 2025 (R-DPCFL), algorithm 1 and section 4.3.
    """
    features = np.asarray(features, np.float64)
    checks.require(np.ndim(features) == 2, "features", "be [clients, features]", features)
    fewest = max(2, num_clusters)
    rule = f"hold at least {fewest} clients"
    checks.require(len(features) >= fewest, "features", rule, features.shape)
    from sklearn.mixture import GaussianMixture

    model = GaussianMixture(
        num_clusters,
        covariance_type="spherical",
        tol=_TOLERANCE,
        max_iter=_MOST_STEPS,
        n_init=_NUM_RESTARTS,
        init_params="k-means++",
        random_state=seed,
    ).fit(features)
    order = np.lexsort(model.means_.T[::-1])
    # Cluster sizes do not affect how likely a client is to belong to a cluster.
    model.weights_ = np.full(num_clusters, 1 / num_clusters)
    responsibilities = model.predict_proba(features)[:, order]
    means, radii = model.means_[order], np.sqrt(model.covariances_[order])
    separation = math.inf
    if num_clusters > 1:
        separation = float(np.min(separation_scores(means, radii)))
    between = float(overlap(separation))
    return Mixture(means, radii, responsibilities, separation, between, int(model.n_iter_))


@checked
def fit_best_mixture(
    features: ArrayLike,
    candidates: Sequence[int],
    seed: int,
    *,
    separation: Literal["adjusted", "plain"] = "adjusted",
) -> Mixture:
    """Fits mixtures of several sizes and keeps the one whose clusters are farthest apart.

    A cluster of a single client has no width and seems far from all others. In an "adjusted"
    comparison it counts as no narrower than the unbiased average of all clusters, since all clients
    have the same noise.

    Guarantee: post-processing of the features.

    Args:
      features: `[clients, features]`.
      candidates: numbers of clusters, each at least 2 and below the number of clients.
      seed: as for `fit_mixture`.
      separation: "plain" compares the smallest separation scores (MSS) as the source defines them;
        "adjusted" those in which clusters that are expected to hold fewer than 1.5 clients have at
        least the average width.

    Returns:
      The mixture with the largest score, its own MSS being the plain one; the first of several.

    Raises:
      ValueError: if there is no candidate.

    Source: Malekmohammadi and others 2025 (R-DPCFL), section 4.3; the least width is ours.
    """
    checks.require(np.ndim(features) == 2, "features", "be [clients, features]", features)
    checks.require(len(candidates) > 0, "candidates", "name a number of clusters", candidates)

    return best_separated((fit_mixture(features, m, seed) for m in candidates), separation)


def best_separated(mixtures: Iterable[Mixture], separation: str) -> Mixture:
    """Chooses the mixture with the largest score, the first of several, as `fit_best_mixture`."""

    def adjusted(mixture: Mixture) -> float:
        shares = mixture.responsibilities.mean(axis=0)
        n, m = mixture.responsibilities.shape
        average = np.sqrt(np.sum(shares * np.square(mixture.radii)) * n / max(n - m, 1))
        least = np.where(n * shares < _FEW_CLIENTS, average, 0.0)
        return float(np.min(separation_scores(mixture.means, np.maximum(mixture.radii, least))))

    score = adjusted if separation == "adjusted" else lambda mixture: mixture.separation
    return max(mixtures, key=score)


@checked
def num_soft_rounds(largest_overlap: Fraction, num_rounds: Count) -> int:
    """Counts the rounds in which clients follow the mixture, before they choose by their own data.

    Args:
      largest_overlap: MPO, in [0, 1].
      num_rounds: E, rounds of the run, at least 1.

    Returns:
      `E_c = ⌊(1 − MPO) E / 2⌋`.

    Source: Malekmohammadi and others 2025 (R-DPCFL), section 4.3.
    """
    return math.floor((1 - largest_overlap) * num_rounds / 2)
