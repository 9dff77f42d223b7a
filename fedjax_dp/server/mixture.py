"""Soft clusters of clients: principal components of their updates, and a mixture of Gaussians."""

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from fedjax_dp.core import checks
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.ranges import Count, Fraction
from fedjax_dp.privacy.reports.separation import overlap, separation_scores
from fedjax_dp.server.clustering import Similarity

# Features are rounded, so that differences in the last bits of the updates, as between two layouts
# of a round, do not change clusters.
_DECIMALS = 4
_RESOLUTION = 1e-5
_NUM_RESTARTS = 10
_TOLERANCE = 1e-6
_MAX_ITERATIONS = 1000
# Clusters with fewer expected clients than this have no width.
_FEW_CLIENTS = 1.5


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
def principal_features(similarity: Similarity, num_components: Count = 2) -> np.ndarray:
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
    checks.require(
        len(features) >= max(2, num_clusters),
        "features",
        f"hold at least {max(2, num_clusters)} clients",
        features.shape,
    )
    from sklearn.mixture import GaussianMixture

    model = GaussianMixture(
        num_clusters,
        covariance_type="spherical",
        tol=_TOLERANCE,
        max_iter=_MAX_ITERATIONS,
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
    return Mixture(
        means,
        radii,
        responsibilities,
        separation,
        float(overlap(separation)),
        int(model.n_iter_),
    )


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

    def adjusted(mixture: Mixture) -> float:
        shares = mixture.responsibilities.mean(axis=0)
        n, m = mixture.responsibilities.shape
        average = np.sqrt(np.sum(shares * np.square(mixture.radii)) * n / max(n - m, 1))
        least = np.where(n * shares < _FEW_CLIENTS, average, 0.0)
        return float(np.min(separation_scores(mixture.means, np.maximum(mixture.radii, least))))

    score = adjusted if separation == "adjusted" else lambda mixture: mixture.separation
    return max((fit_mixture(features, m, seed) for m in candidates), key=score)


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
