"""The separation of clusters in noise, and their overlap."""

import numpy as np
from numpy.typing import ArrayLike
from scipy import special

from fedjax_dp.core import checks
from fedjax_dp.core.argument_checks import checked


@checked
def separation_scores(centres: ArrayLike, stddevs: ArrayLike) -> np.ndarray:
    """Computes the separation of clusters, in standard deviations of the noise.

    Half the distance between two centres over the larger of the two standard deviations *of one
    coordinate*: with noise of variance σ² summed over p coordinates that is `√p Δ/(2σ)`.

    Args:
      centres: centres of the clusters, `[clusters, features]`, at least 2 of them.
      stddevs: standard deviation of one coordinate, above 0; a scalar or `[clusters]`.

    Returns:
      `[clusters, clusters]`, symmetric, infinite on the diagonal; its minimum is the score MSS of
      the whole clustering.

    Raises:
      ValueError: naming the argument, the rule and the value.

    Source: Malekmohammadi and others 2025 (R-DPCFL), section 4.2 (separation score).
    """
    centres = np.asarray(centres, np.float64)
    rule = "be [clusters, features] of at least 2 clusters"
    checks.require(centres.ndim == 2 and len(centres) >= 2, "centres", rule, centres.shape)
    checks.positive("stddevs", stddevs)
    spread = np.broadcast_to(np.asarray(stddevs, np.float64), len(centres))
    # Centres of wide features are compared one by one: all differences at once would be large.
    scores = np.full((len(centres), len(centres)), np.inf)
    for i, centre in enumerate(centres):
        distance = np.linalg.norm(centres - centre, axis=1)
        scores[i] = distance / (2 * np.maximum(spread, spread[i]))
    np.fill_diagonal(scores, np.inf)
    return scores


@checked
def overlap(separation: ArrayLike) -> np.ndarray:
    """Computes the overlap of two clusters, the probability of mistaking one for the other.

    Args:
      separation: separation scores, at least 0 or infinite, of any shape; given the smallest one
        (MSS) the answer is the largest overlap (MPO).

    Returns:
      `2 Q(SS) = erfc(SS/√2)`, in [0, 1], the shape of `separation`.

    Source: Malekmohammadi and others 2025 (R-DPCFL), section 4.2 (pairwise overlap).
    """
    score = np.asarray(separation, np.float64)
    checks.require(bool(np.all(score >= 0)), "separation", "be at least 0", separation)
    return special.erfc(score / np.sqrt(2))
