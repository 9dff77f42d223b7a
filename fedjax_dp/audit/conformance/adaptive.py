"""Adaptive clipping: whether the clip norm comes closer to the rows, and holds in later rounds."""

import dataclasses
import math
from collections.abc import Iterator

import numpy as np

from fedjax_dp.audit.conformance.claims import divisor_of
from fedjax_dp.audit.conformance.contribution import rounding_of
from fedjax_dp.audit.conformance.findings import Draws, Finding, Verdict, judged
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
# Seeds of a clip norm.
_SEEDS = 16


def check_adaptive(subject: AdaptiveAggregation, draws: Draws) -> Iterator[Finding]:
    """Runs rounds on rows of one norm, then changes one row of the last round."""
    name, first = subject.name, subject.claim.first
    seed = draws.block(1)[0]
    yield _not_finite(subject, seed)
    for factor in _FACTORS:
        check = f"contribution: clip norm of rows {factor:g} times as long"
        norm = factor * first.clip_norm
        root = first.size if first.norm == "l1" else math.sqrt(first.size)
        shape = (subject.claim.patience, first.rows, first.size)
        updates = np.full(shape, norm / root, np.float32)
        example = f"updates = np.full({shape}, {norm / root:.9g}, np.float32); seed = {seed}"
        changed, plain = updates.copy(), updates
        changed[-1, 0] *= -1e6
        plain[-1, 0] *= 1e6 if first.relation == "replace_one" else 0
        try:
            after, _ = _rounds(subject, changed, seed)
            before, norms = _rounds(subject, plain, seed)
        except Misbehaviour as wrong:
            yield Finding(name, check, "failed", f"the subject {wrong}", example=example)
            continue
        yield _approach(name, check, norms, norm, example)
        yield _last_round(subject, before[-1], after[-1], float(norms[-1]), factor, example)


def check_later_noise(
    subject: AdaptiveAggregation, draws: Draws, significance: float
) -> Iterator[Finding]:
    """Tests the noise of two rounds, after others that move the clip norm, and pairs of rounds."""
    name, first = subject.name, subject.claim.first
    yield _count(subject, draws)
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
    for finding in check_draws(name, last, both, significance / 6):
        yield finding._replace(check=f"{finding.check}, later rounds")
    scores = normal_scores(np.stack(noise).swapaxes(1, 2).reshape(-1, len(updates)))
    yield judged(
        name,
        "noise: independence of rounds",
        [correlation(scores, scores, "of rounds {} and {}")],
        significance / 6,
        "no two rounds are correlated",
    )


def _count(subject: AdaptiveAggregation, draws: Draws) -> Finding:
    """Requires noise in a clip norm that depends on one row of the round before."""
    name, first, check = subject.name, subject.claim.first, "noise: clip norm of the next round"
    rows = np.full((2, first.rows, first.size), 0.01 * first.clip_norm / first.size, np.float32)
    rows[0, first.rows // 2 :] *= 1e4
    changed = rows.copy()
    changed[0, 0] *= 1e4
    try:
        found = np.array(
            [
                [_rounds(subject, updates, seed)[1][1] for updates in (rows, changed)]
                for seed in draws.block(_SEEDS)
            ]
        )
    except Misbehaviour as wrong:
        return Finding(name, check, "failed", f"the subject {wrong}")
    values, gap = len(np.unique(found[:, 0])), float(np.max(np.abs(found[:, 1] - found[:, 0])))
    if values > 1 or gap == 0:
        return Finding(name, check, "passed", "seeds move it too, or no row does")
    says = f"one row moves it by {gap:.4g}, and {_SEEDS} seeds do not: the count has no noise"
    shape = f"({first.rows}, {first.size})"
    example = f"rows = np.full({shape}, {rows[0, 0, 0]:.9g}, np.float32)"
    example += f"\nrows[{first.rows // 2}:] *= 1e4\nneighbour = rows.copy(); neighbour[0] *= 1e4"
    return Finding(name, check, "failed", says, gap, 0.0, 1.0, example)


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
    before: Array,
    after: Array,
    clip_norm: float,
    factor: float,
    example: str,
) -> Finding:
    """Requires a row of the last round to move its release by at most that round's clip norm."""
    first, check = subject.claim.first, f"contribution: last round of rows {factor:g} times as long"
    order = 1 if first.norm == "l1" else 2
    share = first.sensitivity / first.clip_norm / divisor_of(first, first.rows)
    allowed = (1 + MARGIN) * share * clip_norm
    allowed += rounding_of(before, order)
    distance = float(np.linalg.norm(before - after, order))
    if not distance <= allowed:
        sentence = f"one unit moves the last round by {distance:.6g}, allowed {allowed:.6g}"
        return Finding(subject.name, check, "failed", sentence, distance, allowed, 1.0, example)
    says = "one unit moves the last round within the bound of its clip norm"
    return Finding(subject.name, check, "passed", says, distance, allowed)
