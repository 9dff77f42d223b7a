"""Adaptive clipping: whether the clip norm comes closer to the rows, and bounds later rounds."""

import math
from collections.abc import Iterator

import numpy as np

from fedjax_dp.audit.conformance.claims import divisor_of
from fedjax_dp.audit.conformance.contribution import rounding_of
from fedjax_dp.audit.conformance.findings import Draws, Finding, Verdict
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
# Independent noises are nearer than this share of their size with a probability below 1e-5, even
# of one entry.
_REPEATED = 1e-5


def check_adaptive(subject: AdaptiveAggregation, draws: Draws) -> Iterator[Finding]:
    """Runs rounds on rows of one norm, then changes one row of the last round."""
    name, first = subject.name, subject.claim.first
    seed = draws.block(1)[0]
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
            noise, bounds = _rounds(subject, np.zeros_like(updates[:2]), seed)
        except Misbehaviour as wrong:
            yield Finding(name, check, "failed", f"the subject {wrong}", example=example)
            continue
        yield _approach(name, check, norms, norm, example)
        if factor == _FACTORS[0] and first.noise_stddev > 0:
            yield _two_rounds(name, noise / bounds[:, None])
        yield _last_round(subject, before[-1], after[-1], float(norms[-1]), factor, example)


def _rounds(subject: AdaptiveAggregation, updates: Array, seed: int) -> tuple[Array, Array]:
    """Aggregates rounds; returns aggregates `[rounds, entries]` and clip norms `[rounds]`."""
    answer = called(subject.aggregate, updates, seed)
    if not isinstance(answer, tuple | list) or len(answer) != 2:
        raise Misbehaviour("does not return aggregates and clip norms")
    shape = (len(updates), subject.claim.first.size)
    return as_numbers(answer[0], shape), as_numbers(answer[1], shape[:1])


def _two_rounds(name: str, noise: Array) -> Finding:
    """Requires other noise in the second round than in the first, in units of the clip norms."""
    gap, size = (float(np.linalg.norm(x)) for x in (noise[1] - noise[0], noise[0]))
    is_repeated = not gap > _REPEATED * size
    says = "the second round has " + ("the noise of the first" if is_repeated else "other noise")
    verdict: Verdict = "failed" if is_repeated else "passed"
    return Finding(name, "noise: independence of rounds", verdict, says, gap, size)


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
