"""Adaptive clipping: whether the clip norm comes closer to the rows, and holds in later rounds."""

import dataclasses
import math
from collections.abc import Iterator

import numpy as np
from scipy import stats

from fedjax_dp.audit.conformance.claims import divisor_of
from fedjax_dp.audit.conformance.contribution import alike, code_of, quantile_of, rounding_of
from fedjax_dp.audit.conformance.findings import Draws, Finding, Test, Verdict, judged
from fedjax_dp.audit.conformance.noise import check_draws, correlation, normal_scores
from fedjax_dp.audit.conformance.subjects import (
    AdaptiveAggregation,
    Array,
    Misbehaviour,
    as_numbers,
    called,
)
from fedjax_dp.audit.floats import MARGIN

# Norms of rows, in units of the first clip norm.
_FACTORS = (10.0, 0.1)
# Rounds that move the clip norm before two whose noise is looked at.
_MOVED = 10


def check_adaptive(
    subject: AdaptiveAggregation, draws: Draws, significance: float
) -> Iterator[Finding]:
    """Runs rounds on rows of one norm, then changes one row of the last round."""
    name, first, seeds = subject.name, subject.claim.first, draws.block(2)
    yield _not_finite(subject, seeds[0])
    for factor in _FACTORS:
        check = f"contribution: clip norm of rows {factor:g} times as long"
        norm = factor * first.clip_norm
        root = first.size if first.norm == "l1" else math.sqrt(first.size)
        shape = (subject.claim.patience, first.rows, first.size)
        updates = np.full(shape, norm / root, np.float32)
        example = f"updates = np.full({shape}, {norm / root:.9g}, np.float32); seed = {seeds[0]}"
        changed, plain = updates.copy(), updates
        changed[-1, 0] *= -1e6
        plain[-1, 0] *= 1e6 if first.relation == "replace_one" else 0
        try:
            runs = [[_rounds(subject, u, seed) for u in (plain, changed)] for seed in seeds]
        except Misbehaviour as wrong:
            yield Finding(name, check, "failed", f"the subject {wrong}", example=example)
            continue
        yield _approach(name, check, runs[0][0][1], norm, example)
        yield _last_round(subject, runs, factor, example, significance / len(_FACTORS))


def check_later_noise(
    subject: AdaptiveAggregation, draws: Draws, significance: float
) -> Iterator[Finding]:
    """Tests the noise of two rounds, after others that move the clip norm, and pairs of rounds."""
    name, first = subject.name, subject.claim.first
    yield _count(subject, draws, significance / 7)
    if first.noise_stddev == 0:
        return
    updates = np.zeros((_MOVED + 2, first.rows, first.size), np.float32)
    # Rows that move the clip norm, and cancel.
    pairs = first.rows // 2 * 2
    updates[:_MOVED, :pairs] = _FACTORS[0] * first.clip_norm
    updates[:, 1:pairs:2] *= -1
    noise = []
    try:
        for seed in draws.spread():
            released, norms = _rounds(subject, updates, seed)
            noise.append(released / norms[:, None] * first.clip_norm)
    except Misbehaviour as wrong:
        yield Finding(name, "noise: later rounds", "failed", f"the subject {wrong}")
        return
    # Rounds are layers, whose noise is independent too.
    both = dataclasses.replace(first, layers=first.layers * 2)
    last = np.stack(noise)[:, -2:].reshape(len(noise), -1)
    for finding in check_draws(name, last, both, significance / 7):
        yield finding._replace(check=f"{finding.check}, later rounds")
    scores = normal_scores(np.stack(noise).swapaxes(1, 2).reshape(-1, len(updates)))
    yield judged(
        name,
        "noise: independence of rounds",
        [correlation(scores, scores, "of rounds {} and {}")],
        significance / 7,
        "no two rounds are correlated",
    )


def _count(subject: AdaptiveAggregation, draws: Draws, share: float) -> Finding:
    """Tests how far the next clip norm is moved by noise, where one row moves it by one count."""
    name, first, check = subject.name, subject.claim.first, "noise: clip norm of the next round"
    claimed, tests, examples = subject.claim.count_stddev, [], dict[str, str]()
    if claimed == 0:
        return Finding(name, check, "open", "no noise on the count is claimed")
    for long in sorted({0, first.rows // 2, first.rows - 1}):
        rows = np.full((2, first.rows, first.size), 0.01 * first.clip_norm / first.size, np.float32)
        rows[0, first.rows - long :] *= 1e4
        changed = rows.copy()
        changed[0, 0] *= 1e4
        try:
            norms = np.array(
                [
                    [_rounds(subject, u, seed)[1][1] for u in (rows, changed)]
                    for seed in draws.block()
                ]
            )
            if not (np.isfinite(norms).all() and norms.min() > 0):
                raise Misbehaviour("has a clip norm that is not finite and above 0")
        except Misbehaviour as wrong:
            return Finding(name, check, "failed", f"the subject {wrong}", example=code_of(rows[0]))
        # Of a rule that multiplies the clip norm by an exponential of the count.
        kept, moved = np.log(norms).T
        gaps, freedoms = moved - kept, len(norms) - 1
        error = float(gaps.std(ddof=1)) / math.sqrt(len(gaps))
        gap = abs(float(gaps.mean())) - float(stats.t.isf(share / 12, freedoms)) * error
        if gap > 0:
            noise = float(kept.std(ddof=1)) / gap
            p_value = float(
                stats.chi2.cdf(freedoms * ((1 + MARGIN) * noise / claimed) ** 2, freedoms)
            )
            what = (
                f"the standard deviation of the count, with {long} of {first.rows} rows too long,"
            )
            tests.append(Test(p_value, what, noise, claimed))
            examples[what] = f"{code_of(rows[0])}\nneighbour = rows.copy(); neighbour[0] *= 1e4"
    if not tests:
        return Finding(name, check, "passed", "no row moves it")
    says = "it moves by no less than the claimed noise on the count, in units of a row's part"
    return judged(name, check, tests, share / 2, says, examples)


def _not_finite(subject: AdaptiveAggregation, seed: int) -> Finding:
    """Requires a clip norm that is finite and above 0 after a row that is not finite."""
    name, first = subject.name, subject.claim.first
    check = "contribution: clip norm after rows that are not finite"
    norms = np.ones(1)
    for value in (math.nan, math.inf):
        updates = np.zeros((3, first.rows, first.size), np.float32)
        updates[0, 0] = value
        example = f"updates = np.zeros({updates.shape}, np.float32)\nupdates[0, 0] = np.{value}"
        try:
            _, norms = _rounds(subject, updates, seed)
        except Misbehaviour as wrong:
            return Finding(name, check, "failed", f"the subject {wrong}", example=example)
        if not (np.isfinite(norms).all() and norms.min() > 0):
            sentence = f"the clip norms of three rounds are {norms}, the first with one such row"
            return Finding(name, check, "failed", sentence, example=example)
    return Finding(name, check, "passed", "it stays finite and above 0", float(norms[-1]))


def _rounds(subject: AdaptiveAggregation, updates: Array, seed: int) -> tuple[Array, Array]:
    """Aggregates rounds; returns aggregates `[rounds, entries]` and clip norms `[rounds]`."""
    answer = called(subject.aggregate, updates, seed)
    if not isinstance(answer, tuple | list) or len(answer) != 2:
        raise Misbehaviour("does not return aggregates and clip norms")
    shape = (len(updates), subject.claim.first.size)
    return as_numbers(answer[0], shape), as_numbers(answer[1], shape[:1])


def _approach(name: str, check: str, norms: Array, norm: float, example: str) -> Finding:
    """Requires clip norms above 0 that end nearer to the norm of all rows than they began."""
    if not (np.isfinite(norms).all() and norms.min() > 0):
        worst = float(norms[~(np.isfinite(norms) & (norms > 0))][0])
        sentence = f"a clip norm is {worst:g}"
        return Finding(name, check, "failed", sentence, worst, norm, 1.0, example)
    start, end = (abs(math.log(x / norm)) for x in (norms[0], norms[-1]))
    moved = f"the clip norm went from {norms[0]:.4g} to {norms[-1]:.4g}; all rows have {norm:.4g}"
    verdict: Verdict = "passed" if end < start else "failed"
    shown = example if verdict == "failed" else ""
    return Finding(name, check, verdict, moved, float(norms[-1]), norm, 1.0, shown)


def _last_round(
    subject: AdaptiveAggregation,
    runs: list[list[tuple[Array, Array]]],
    factor: float,
    example: str,
    significance: float,
) -> Finding:
    """Requires a row of the last round to move its release by at most that round's clip norm.

    Of runs by seed, with and without the row.
    """
    first, check = subject.claim.first, f"contribution: last round of rows {factor:g} times as long"
    order = 1 if first.norm == "l1" else 2
    (before, norms), (_, others) = runs[0]
    # Of a subject that does not follow its seed, neighbours have different clip norms.
    clip_norms = norms[-1], others[-1]
    share = first.sensitivity / first.clip_norm / divisor_of(first, first.rows)
    allowed = (1 + MARGIN) * share * max(clip_norms) + rounding_of(before[-1], order)
    gaps = np.stack([one[-1] - other[-1] for (one, _), (other, _) in runs])
    distance = float(np.linalg.norm(gaps[0], order))
    # Seeds have different clip norms: without noise, gaps differ in length, and not in direction.
    lengths = np.linalg.norm(gaps, axis=1) if first.size > 1 else [n[-1] for (_, n), _ in runs]
    if distance > allowed and not alike(
        gaps / np.reshape(lengths, (-1, 1)), before[-1] / lengths[0]
    ):
        noise = quantile_of(first, first.rows, significance / 2) / first.clip_norm
        allowed += noise * sum(clip_norms)
    values = distance, float(allowed), 1 - significance
    if not distance <= allowed:
        sentence = f"one unit moves the last round by {distance:.6g}, allowed {allowed:.6g}"
        return Finding(subject.name, check, "failed", sentence, *values, example)
    says = f"one unit moves the last round by {distance:.4g}, within {allowed:.4g}"
    return Finding(subject.name, check, "passed", says, *values)
