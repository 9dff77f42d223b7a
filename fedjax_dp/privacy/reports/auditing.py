"""Empirical lower bounds on ε: what a successful attack proves about privacy."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy import optimize, special, stats

from fedjax_dp.core import checks
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.ranges import Decay, Fraction, ProperFraction

# Beyond this no practical number of runs could prove anything.
_LARGEST_EPSILON = 200.0
# A test is chosen at far more confidence than it needs: otherwise the luckiest of many thresholds,
# far in the tails, wins and fails on the other half.
_CAUTION = 0.01
_MAX_THRESHOLDS = 512


class LowerBound(NamedTuple):
    """A lower bound on ε: the attacked mechanism is not (ε', δ)-DP for any ε' below `epsilon`."""

    epsilon: float  # At least 0.
    dp_delta: float
    confidence: float  # The probability, at least, that such a bound is right.
    method: str  # "threshold", "gaussian" or "one_run".


@checked
def rate_upper_bound(
    errors: ArrayLike, trials: ArrayLike, significance: ProperFraction
) -> np.ndarray:
    """Bounds an error rate from above by Clopper and Pearson's exact limit; 1 without a success.

    The true rate is above the bound with probability at most `significance`.

    Source: Clopper and Pearson 1934.
    """
    checks.non_negative("errors", errors)
    checks.non_negative("trials", trials)
    errors, trials = np.broadcast_arrays(np.asarray(errors), np.asarray(trials))
    successes = trials - errors
    bound = special.betaincinv(errors + 1.0, np.maximum(successes, 1.0), 1 - significance)
    return np.where(successes > 0, bound, 1.0)


def epsilon_of_rates(
    false_positive: ArrayLike, false_negative: ArrayLike, dp_delta: float
) -> np.ndarray:
    """Computes the smallest ε under which a pair of error rates is possible.

    Every test between neighbours under (ε, δ)-DP has `FPR + e^ε FNR ≥ 1 − δ` and `FNR + e^ε FPR ≥ 1
    − δ`. It is infinite if one rate is 0 and the other below `1 − δ`.

    Source: Kairouz, Oh, Viswanath 2015, theorem 2.1.
    """
    rates = np.asarray(false_positive, float), np.asarray(false_negative, float)
    with np.errstate(divide="ignore", invalid="ignore"):
        both = [
            np.where(1 - dp_delta > a, np.log(np.maximum(1 - dp_delta - a, 0)) - np.log(b), -np.inf)
            for a, b in (rates, rates[::-1])
        ]
    return np.maximum(np.maximum(*both), 0.0)


@checked
def threshold_bound(
    scores_in: ArrayLike,
    scores_out: ArrayLike,
    dp_delta: Decay,
    *,
    confidence: ProperFraction = 0.95,
) -> LowerBound:
    """Bounds ε from scores of many independent runs with and without one canary, `[runs]`.

    A threshold, and the side of it on which a canary counts as included, are chosen on every second
    run; the error rates are bounded on the others, each at half of the significance.

    Guarantee: the bound exceeds the true ε in at most `1 − confidence` of all audits, whatever the
    mechanism and the scores.

    Source: Jagielski, Ullman, Oprea 2020; Nasr and others 2021.
    """

    def value(fpr: np.ndarray, fnr: np.ndarray) -> np.ndarray:
        return epsilon_of_rates(fpr, fnr, dp_delta)

    epsilon = _split_bound(scores_in, scores_out, confidence, value)
    return LowerBound(epsilon, dp_delta, confidence, "threshold")


@checked
def gaussian_bound(
    scores_in: ArrayLike,
    scores_out: ArrayLike,
    dp_delta: ProperFraction,
    *,
    confidence: ProperFraction = 0.95,
) -> LowerBound:
    """Bounds ε from many runs of a mechanism that is known to be Gaussian.

    The error rates bound μ of Gaussian DP, and μ fixes ε at any δ, so that few runs suffice for
    claims at a δ that no number of runs could resolve.

    Guarantee: as for `threshold_bound`, but only if the privacy of the attacked release is exactly
    that of a Gaussian mechanism: noise on a sum without sampling. Under sampling, or for other
    noise, the result is no lower bound.

    Source: Dong, Roth, Su 2022, corollary 2.13; Nasr and others 2023, section 4.
    """

    def value(fpr: np.ndarray, fnr: np.ndarray) -> np.ndarray:
        return np.maximum(-special.ndtri(fpr) - special.ndtri(fnr), 0.0)

    mu = _split_bound(scores_in, scores_out, confidence, value)
    return LowerBound(gaussian_epsilon(mu, dp_delta), dp_delta, confidence, "gaussian")


def gaussian_epsilon(mu: float, dp_delta: float) -> float:
    """Computes ε of Gaussian DP, whose means lie `mu` standard deviations apart.

    Source: Balle and Wang 2018, theorem 8; Dong, Roth, Su 2022, corollary 2.13.
    """

    def excess(epsilon: float) -> float:
        below = special.log_ndtr(-epsilon / mu - mu / 2)
        return special.ndtr(-epsilon / mu + mu / 2) - math.exp(epsilon + below) - dp_delta

    if mu == 0 or excess(0.0) <= 0:
        return 0.0
    largest = mu * (mu / 2 - special.ndtri(dp_delta))
    return float(optimize.brentq(excess, 0.0, largest, xtol=1e-12))


def linear_direction(inside: ArrayLike, outside: ArrayLike) -> np.ndarray:
    """Learns unit weights of several observations of a canary (Fisher's discriminant).

    `[samples, observations]` with canaries and without, from other runs than those of the bound. Of
    fewer than twenty samples an observation on a side, which would fit noise, all are equal.
    """
    sides = np.asarray(inside, float), np.asarray(outside, float)
    size = sides[0].shape[1]
    equal = np.full(size, size**-0.5)
    if min(len(side) for side in sides) < 20 * size:
        return equal
    means = [side.mean(axis=0) for side in sides]
    centred = np.concatenate([side - mean for side, mean in zip(sides, means, strict=True)])
    scatter = centred.T @ centred / len(centred)
    ridge = 1e-6 * np.trace(scatter) / size
    if ridge == 0:
        return equal
    weights = np.linalg.solve(scatter + ridge * np.eye(size), means[0] - means[1])
    length = np.linalg.norm(weights)
    return weights / length if length > 0 else equal


def _split_bound(
    scores_in: ArrayLike,
    scores_out: ArrayLike,
    confidence: float,
    value: Callable[[np.ndarray, np.ndarray], np.ndarray],
) -> float:
    """Chooses a test on every second run and bounds what it proves on the others."""
    halves = []
    for name, scores in (("scores_in", scores_in), ("scores_out", scores_out)):
        array = np.asarray(scores, float)
        checks.require(array.ndim == 1, name, "be one row", array.shape)
        checks.require(bool(np.isfinite(array).all()), name, "be finite", "NaN or infinity")
        halves.append((np.sort(array[::2]), np.sort(array[1::2])))
    (choose_in, prove_in), (choose_out, prove_out) = halves
    significance = (1 - confidence) / 2

    def proven(
        inside: np.ndarray,
        outside: np.ndarray,
        thresholds: np.ndarray,
        is_above: bool,
        significance: float,
    ) -> np.ndarray:
        missed = np.searchsorted(inside, thresholds, side="right")
        alarms = len(outside) - np.searchsorted(outside, thresholds, side="right")
        if not is_above:
            missed, alarms = len(inside) - missed, len(outside) - alarms
        fpr = rate_upper_bound(alarms, len(outside), significance)
        fnr = rate_upper_bound(missed, len(inside), significance)
        return value(fpr, fnr)

    thresholds = np.unique(np.concatenate([choose_in, choose_out]))
    if not thresholds.size:
        return 0.0
    thresholds = thresholds[:: -(-thresholds.size // _MAX_THRESHOLDS)]
    caution = _CAUTION * significance
    found = np.stack(
        [proven(choose_in, choose_out, thresholds, side, caution) for side in (True, False)]
    )
    side = int(np.argmax(found.max(axis=1)))
    # If scores are far apart many thresholds work; the middle one errs least on other runs.
    best = np.flatnonzero(found[side] == found[side].max())
    chosen = thresholds[[best[len(best) // 2]]]
    return float(proven(prove_in, prove_out, chosen, side == 0, significance)[0])


def one_run_p_value(
    num_canaries: int, num_guesses: int, num_correct: int, epsilon: float, dp_delta: float
) -> float:
    """Bounds the probability of `correct` right guesses about the canaries of one run.

    Under ε-DP no guesser beats coins that are right with probability `e^ε / (1 + e^ε)`; δ
    helps it by at most the second term. Each canary is included with probability 1/2,
    independently.

    Source: Steinke, Nasr, Jagielski 2023, corollary 5.4.
    """
    is_valid = 0 <= num_correct <= num_guesses <= num_canaries
    counts = (num_canaries, num_guesses, num_correct)
    checks.require(is_valid, "counts", "be canaries ≥ guesses ≥ correct ≥ 0", counts)
    accuracy = special.expit(epsilon)
    tail = stats.binom.sf(num_correct - 1, num_guesses, accuracy)
    if dp_delta == 0 or num_correct == 0:
        return float(min(tail, 1.0))
    fewer = np.arange(1, num_correct + 1)
    gained = np.cumsum(stats.binom.pmf(num_correct - fewer, num_guesses, accuracy))
    return float(min(tail + 2 * num_canaries * dp_delta * np.max(gained / fewer), 1.0))


@checked
def one_run_epsilon(
    num_canaries: int,
    num_guesses: int,
    num_correct: int,
    dp_delta: Fraction,
    *,
    confidence: ProperFraction = 0.95,
) -> float:
    """Finds the largest ε that right guesses rule out, of a number fixed before the run.

    Source: Steinke, Nasr, Jagielski 2023, section 4.3.
    """

    def excess(epsilon: float) -> float:
        p_value = one_run_p_value(num_canaries, num_guesses, num_correct, epsilon, dp_delta)
        return p_value - (1 - confidence)

    if excess(0.0) >= 0:
        return 0.0
    # The first crossing from below: the hypothesis is rejected at every smaller ε, so that the
    # bound holds whether or not the p-value is monotone in ε.
    low = 0.0
    while excess(low + 0.25) < 0:
        low += 0.25
        if low > _LARGEST_EPSILON:
            return low
    return float(optimize.brentq(excess, low, low + 0.25, xtol=1e-12))


@checked
def one_run_bound(
    scores: ArrayLike,
    is_included: ArrayLike,
    dp_delta: Fraction,
    *,
    confidence: ProperFraction = 0.95,
    guess_shares: Sequence[float] = (0.05, 0.2, 1.0),
) -> LowerBound:
    """Bounds ε from the scores of many canaries in one run, `[canaries]`, and the coin of each.

    The highest scores count as included, equally many of the lowest as excluded, and on the rest
    the guesser abstains. Each number of guesses, a share of the canaries that is fixed before the
    run, is an audit; the significance is divided among them, and the best one counts.

    Guarantee: the bound exceeds the true ε in at most `1 − confidence` of all audits, provided that
    the auditor's coins are fair and independent of everything else. Scores need not be independent.

    Source: Steinke, Nasr, Jagielski 2023, algorithm 1 and corollary 5.8.
    """
    values, truth = np.asarray(scores, float), np.asarray(is_included, bool)
    checks.require(values.ndim == 1 and values.size > 0, "scores", "be one row", values.shape)
    checks.require(truth.shape == values.shape, "is_included", "match scores", truth.shape)
    checks.require(bool(np.isfinite(values).all()), "scores", "be finite", "NaN or infinity")
    checks.require(len(guess_shares) > 0, "guess_shares", "name a share", guess_shares)
    checks.probability("guess_shares", guess_shares)
    order, size = np.argsort(values, kind="stable"), values.size
    each = 1 - (1 - confidence) / len(guess_shares)
    best = 0.0
    for share in guess_shares:
        num_low = max(1, round(share * size)) // 2
        num_high = max(1, round(share * size)) - num_low
        correct = truth[order[size - num_high :]].sum() + (~truth[order[:num_low]]).sum()
        found = one_run_epsilon(size, num_low + num_high, int(correct), dp_delta, confidence=each)
        best = max(best, found)
    return LowerBound(best, dp_delta, confidence, "one_run")
