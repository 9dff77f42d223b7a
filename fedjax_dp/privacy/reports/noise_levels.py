"""How much noise record-level DP leaves in updates, and whether clusters still stand apart in it.

A variance here is the sum of the variances of all coordinates, as in the papers.
"""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from scipy import special

from fedjax_dp.core import checks
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.privacy.accounting.calibration import calibrate_poisson


@checked
def clipped_gradient_variance(
    noise_multiplier: ArrayLike,
    batch_size: ArrayLike,
    *,
    clip_norm: ArrayLike,
    num_parameters: int,
    mean_gradient_norm: ArrayLike | None = None,
) -> np.ndarray:
    """Computes the variance of a DP-SGD gradient when every example of a batch is clipped.

    The first of its two terms, the spread of the clipped gradients, is small beside the noise; it
    is left out where the mean gradient is not known.

    Args:
      noise_multiplier: z, at least 0; a scalar or `[clients]`.
      batch_size: expected examples a step, at least 1; a scalar or `[clients]`.
      clip_norm: bound on each example's gradient, above 0.
      num_parameters: size of the model, at least 1.
      mean_gradient_norm: norm of the mean clipped gradient, in [0, clip_norm]; a scalar or
        `[clients]`.

    Returns:
      `(c² − ‖G‖²)/b + p c² z²/b²`, or its second term alone; the shape of the arguments together.

    Raises:
      ValueError: naming the argument, the rule and the value.

    Source: Malekmohammadi and others 2024, (3.3).
    """
    z, b, c = _checked(noise_multiplier, batch_size, clip_norm, num_parameters)
    spread: Any = 0.0
    if mean_gradient_norm is not None:
        norm = np.asarray(mean_gradient_norm, np.float64)
        checks.require(
            bool(np.all((norm >= 0) & (norm <= c))),
            "mean_gradient_norm",
            "lie between 0 and clip_norm",
            mean_gradient_norm,
        )
        spread = (c**2 - norm**2) / b
    return spread + num_parameters * (c * z / b) ** 2


@checked
def unclipped_gradient_variance(
    noise_multiplier: ArrayLike,
    batch_size: ArrayLike,
    *,
    clip_norm: ArrayLike,
    num_parameters: int,
    sampling_variance: ArrayLike,
) -> np.ndarray:
    """Bounds the variance of a DP-SGD gradient when no example of a batch is clipped.

    Args:
      noise_multiplier: z, at least 0; a scalar or `[clients]`.
      batch_size: expected examples a step, at least 1; a scalar or `[clients]`.
      clip_norm: bound on each example's gradient, above 0.
      num_parameters: size of the model, at least 1.
      sampling_variance: variance of the client's gradient on a batch without any noise, at least
        0; a scalar or `[clients]`.

    Returns:
      `σ_g² + p c² z²/b²`; the shape of the arguments together.

    Raises:
      ValueError: naming the argument, the rule and the value.

    Source: Malekmohammadi and others 2024, (3.4).
    """
    z, b, c = _checked(noise_multiplier, batch_size, clip_norm, num_parameters)
    checks.non_negative("sampling_variance", sampling_variance)
    return np.asarray(sampling_variance, np.float64) + num_parameters * (c * z / b) ** 2


@checked
def update_variance(
    gradient_variance: ArrayLike,
    num_examples: ArrayLike,
    batch_size: ArrayLike,
    *,
    learning_rate: ArrayLike,
    num_epochs: ArrayLike = 1,
    rounds_steps_up: bool = True,
) -> np.ndarray:
    """Computes the variance of a client's update after its local steps.

    With (3.3) for the gradient and unrounded steps this is lemma 4.1 of the clustered paper,
    `K N η² p c² z²/b³`; with `b = N`, its first round, `K η² p c² z²/N²`. How the noise of one step
    moves the gradients of later ones is left out: exact for a linear loss, first order otherwise.

    Args:
      gradient_variance: of one step, at least 0; a scalar or `[clients]`.
      num_examples: N, at least 1; a scalar or `[clients]`.
      batch_size: b, expected examples a step, at least 1; a scalar or `[clients]`.
      learning_rate: η, at least 0; a scalar or `[clients]`.
      num_epochs: K, passes over the data in a round, above 0; a scalar or `[clients]`.
      rounds_steps_up: whether an epoch takes ⌈N/b⌉ steps, as it does when it runs, or N/b, as in
        the approximate forms.

    Returns:
      `K ⌈N/b⌉ η² Var(g)`; the shape of the arguments together.

    Raises:
      ValueError: naming the argument, the rule and the value.

    Source: Malekmohammadi and others 2024, (3.5); Malekmohammadi and others 2025, lemma 4.1.
    """
    checks.non_negative("gradient_variance", gradient_variance)
    checks.non_negative("learning_rate", learning_rate)
    checks.positive("num_epochs", num_epochs)
    steps = _steps(num_examples, batch_size, rounds_steps_up)
    eta = np.asarray(learning_rate, np.float64)
    return np.asarray(num_epochs, np.float64) * steps * eta**2 * np.asarray(gradient_variance)


@checked
def inverse_variance_weights(variance: ArrayLike) -> np.ndarray:
    """Computes the weights that sum to one and average with the least variance.

    Args:
      variance: of each client's update, above 0, `[clients]`.

    Returns:
      Weights proportional to 1/variance, `[clients]`.

    Raises:
      ValueError: if a variance is not positive.

    Source: Malekmohammadi and others 2024, section 3.5.
    """
    checks.positive("variance", variance)
    inverse = 1.0 / np.asarray(variance, np.float64)
    return inverse / inverse.sum()


@checked
def aggregate_variance(weights: ArrayLike, variance: ArrayLike) -> np.ndarray:
    """Computes the variance of a weighted sum of independent updates.

    Args:
      weights: `[..., clients]`.
      variance: of each client's update, at least 0, `[clients]`.

    Returns:
      `Σ w² σ²`, `[...]`; divided by `p η²` it is the normalised noise variance of table 3.4.
    """
    checks.require(bool(np.all(np.isfinite(weights))), "weights", "be finite", weights)
    checks.non_negative("variance", variance)
    return np.sum(np.square(np.asarray(weights, np.float64)) * np.asarray(variance), axis=-1)


@checked
def noise_multiplier_of_run(
    epsilon: ArrayLike,
    dp_delta: ArrayLike,
    num_examples: ArrayLike,
    batch_size: ArrayLike,
    *,
    num_rounds: int,
    num_epochs: ArrayLike = 1,
    first_batch_size: ArrayLike | None = None,
    accountant: str = "rdp",
    relation: str = "add_remove",
) -> np.ndarray:
    """Finds z of clients that train with Poisson batches in every round of a run.

    An epoch takes ⌈N/b⌉ steps, as it does when it runs; the recipe "rdp-classic-64" counts N/b, as
    its authors do.

    Args:
      epsilon: budgets, above 0; a scalar or `[clients]`.
      dp_delta: δ in (0, 1); a scalar or `[clients]`.
      num_examples: N, at least 1; a scalar or `[clients]`.
      batch_size: b, in [1, N]; a scalar or `[clients]`.
      num_rounds: E, at least 1.
      num_epochs: K, passes over the data in a round, whole and above 0; a scalar or `[clients]`.
      first_batch_size: the batch of the first round, in [1, N], where it is another one.
      accountant: "rdp", "pld" or "rdp-classic-64".
      relation: "add_remove", "zero_out" or "replace_one".

    Returns:
      z of each client, `[clients]`, or a scalar array where all arguments are scalars.

    Raises:
      ValueError: if an argument is not valid, or no noise reaches a budget.

    Source: Malekmohammadi and others 2024, section 3.4; Malekmohammadi and others 2025,
    section 4 for two batch sizes under one z.
    """
    checks.whole("num_rounds", num_rounds)
    checks.positive("num_epochs", num_epochs)
    phases = [(batch_size, num_rounds)]
    if first_batch_size is not None:
        checks.at_least_one("first_batch_size", first_batch_size)
        phases = [(first_batch_size, 1), (batch_size, num_rounds - 1)]
    rates, steps = [], []
    is_whole = accountant != "rdp-classic-64"
    for batch, rounds in phases:
        rate = np.asarray(batch, np.float64) / np.asarray(num_examples, np.float64)
        rule = "be at most num_examples"
        checks.require(bool(np.all(rate <= 1)), "batch_size", rule, batch)
        rates.append(rate)
        epochs = np.asarray(num_epochs, np.float64)
        steps.append(rounds * epochs * _steps(num_examples, batch, is_whole))
    shape = np.broadcast_shapes(*(x.shape for x in (*rates, *steps)), np.shape(epsilon))
    rate_table = np.stack([np.broadcast_to(x, shape) for x in rates], axis=-1)
    step_table = np.stack([np.broadcast_to(x, shape) for x in steps], axis=-1)
    if not shape:
        rate_table, step_table = rate_table[None], step_table[None]
    found = calibrate_poisson(
        epsilon, dp_delta, rate_table, step_table, accountant=accountant, relation=relation
    )
    return np.asarray(found).reshape(shape)


@checked
def separation_scores(centres: ArrayLike, stddevs: ArrayLike) -> np.ndarray:
    """Computes how far clusters stand apart, in standard deviations of the noise.

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

    Source: Malekmohammadi and others 2025, section 4.2 (separation score).
    """
    centres = np.asarray(centres, np.float64)
    checks.require(
        centres.ndim == 2 and len(centres) >= 2,
        "centres",
        "be [clusters, features] of at least 2 clusters",
        centres.shape,
    )
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
    """Computes the overlap of two clusters, the chance to mistake one for the other.

    Args:
      separation: separation scores, at least 0 or infinite, of any shape; given the smallest one
        (MSS) the answer is the largest overlap (MPO).

    Returns:
      `2 Q(SS) = erfc(SS/√2)`, in [0, 1], the shape of `separation`.

    Raises:
      ValueError: if a score is below zero or not a number.

    Source: Malekmohammadi and others 2025, section 4.2 (pairwise overlap).
    """
    score = np.asarray(separation, np.float64)
    checks.require(bool(np.all(score >= 0)), "separation", "be at least 0", separation)
    return special.erfc(score / np.sqrt(2))


def _steps(num_examples: ArrayLike, batch_size: ArrayLike, rounds_up: bool) -> np.ndarray:
    checks.at_least_one("num_examples", num_examples)
    checks.at_least_one("batch_size", batch_size)
    steps = np.asarray(num_examples, np.float64) / np.asarray(batch_size, np.float64)
    return np.ceil(steps) if rounds_up else steps


def _checked(
    noise_multiplier: ArrayLike, batch_size: ArrayLike, clip_norm: ArrayLike, num_parameters: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    checks.non_negative("noise_multiplier", noise_multiplier)
    checks.at_least_one("batch_size", batch_size)
    checks.positive("clip_norm", clip_norm)
    checks.whole("num_parameters", num_parameters)
    z, b, c = (np.asarray(x, np.float64) for x in (noise_multiplier, batch_size, clip_norm))
    return z, b, c
