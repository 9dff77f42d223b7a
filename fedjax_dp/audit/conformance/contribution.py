"""Contribution: no unit moves a release by more than its bound, whatever floats and weights it has.

Two releases of neighbouring rows have the same seed, so that noise cancels in their difference. If
another seed gives another difference, it does not, for these rows at least: then a quantile of the
noise is allowed too, and means over many seeds are compared besides.
"""

import math
import time
from collections.abc import Callable, Iterator
from itertools import cycle, pairwise, product
from typing import NamedTuple

import numpy as np
from scipy import stats

from fedjax_dp.audit.conformance.claims import Release, divisor_of, stddev_of
from fedjax_dp.audit.conformance.findings import Draws, Finding, Test, judged
from fedjax_dp.audit.conformance.subjects import Misbehaviour, View
from fedjax_dp.audit.floats import MARGIN, hostile

# Rounding of a sum in float32, as a share of the released numbers.
_ROUNDING = 1e-5
# Of a row: its squares vanish in float32, lose digits, are ordinary, overflow; or its sum does.
_SIZES = (1e-30, 1e-22, 1.0, 1e6, 1e19, 3e38)
# Norms of rows that must be clipped a little, in units of the clip norm.
_LONG = (1.02, 1.1, 1.3, 1.7, 2.5, 5.0, 25.0)
_WEIGHTS = (0.0, -1.0, 1e-30, 1e6, 1e30, -1e30, math.nan, math.inf)
_HOSTILE = 100
# Calls of a subject that search for a smaller input, and seconds.
_SHRINKS, _SHRINK_SECONDS = 300, 20.0
FAMILIES = (
    *("size of a row", "layers", "not finite", "alone", "others", "hostile floats", "weights"),
)


class Case(NamedTuple):
    """Rows and weights, and the neighbour: one row left out, zeroed out or exchanged."""

    rows: np.ndarray  # [rows, entries], float32
    weights: np.ndarray  # [rows], float32
    place: int  # The row of the unit.
    other: np.ndarray | None  # [entries], the row that takes its place; None if it is left out.

    def neighbour(self) -> tuple[np.ndarray, np.ndarray]:
        """The rows and weights of the neighbour."""
        if self.other is None:
            return np.delete(self.rows, self.place, 0), np.delete(self.weights, self.place)
        rows = self.rows.copy()
        rows[self.place] = self.other
        weights = self.weights.copy()
        weights[self.place] = 1.0
        return rows, weights


def check_contribution(
    name: str, view: View, draws: Draws, significance: float
) -> Iterator[Finding]:
    """Compares releases of neighbours: rows and weights of every family, and what a sum shows."""
    claim, seeds = view.claim, draws.block(2)
    plain = np.zeros((claim.rows, claim.size), np.float32)
    try:
        view(plain, seeds[0])
    except Misbehaviour as wrong:
        sentence = f"the subject {wrong} on {claim.rows} rows of zeros"
        yield Finding(name, "contribution: call", "failed", sentence, example=code_of(plain))
        return
    families = [f for f in FAMILIES if f != "weights" or view.has_weights]
    share = significance / (len(families) + 2)
    for family in families:
        yield _worst(name, family, view, list(_cases(family, claim, draws.rng)), seeds, share)
    yield _sum(name, view, draws, share)
    yield from _mean_shift(name, view, draws, share)


def _refusal(view: View, rows: np.ndarray, seed: int, weights: np.ndarray) -> str:
    """What an exception on these rows says, nothing without one."""
    try:
        view(rows, seed, weights)
    except Misbehaviour as wrong:
        return str(wrong)
    return ""


def alike(gaps: np.ndarray, release: np.ndarray) -> bool:
    """Whether gaps, `[seeds, entries]`, are equal but for rounding of a release: without noise."""
    rounding = _ROUNDING * float(np.abs(np.nan_to_num(release)).max())
    return bool(np.isclose(gaps[0], gaps[1:], _ROUNDING, rounding, equal_nan=True).all())


def _other(claim: Release, row: np.ndarray) -> np.ndarray | None:
    """What takes the place of a row in the neighbour."""
    match claim.relation:
        case "add_remove":
            return None
        case "zero_out":
            return np.zeros_like(row)
        case _:
            return -row


def quantile_of(claim: Release, num_rows: int, significance: float) -> float:
    """A norm that the claimed noise of a release exceeds with at most this probability."""
    stddev = stddev_of(claim, num_rows)
    if claim.law == "laplace":
        # The L1 norm is the larger one.
        return float(stats.gamma.isf(significance, claim.size, scale=stddev / math.sqrt(2)))
    norm = stddev * math.sqrt(stats.chi2.isf(significance, claim.size))
    return norm * (math.sqrt(claim.size) if claim.norm == "l1" else 1.0)


def _cases(family: str, claim: Release, rng: np.random.Generator) -> Iterator[Case]:
    """Draws the inputs of a family."""
    count, size = claim.rows, claim.size
    zeros = np.zeros((count, size), np.float32)
    ends = np.cumsum([0, *claim.layers])
    directions = [np.ones(size), *(np.eye(size)[[0, -1]])]

    def case(rows: np.ndarray, place: int = 0, weights: np.ndarray | None = None) -> Case:
        rows = np.asarray(rows, np.float32)
        weights = np.ones(len(rows), np.float32) if weights is None else weights
        return Case(rows, weights, place, _other(claim, rows[place]))

    def with_row(row: np.ndarray, place: int = 0, others: np.ndarray = zeros) -> np.ndarray:
        rows = others.copy()
        rows[place] = row
        return rows

    def ordinary() -> np.ndarray:
        norms = claim.clip_norm * rng.uniform(0.3, 3, (count, 1))
        rows = rng.normal(size=(count, size))
        return (norms * rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)

    match family:
        case "size of a row":
            for place, (m, direction) in zip(
                cycle((0, count // 2, count - 1)), product(_SIZES, directions), strict=False
            ):
                yield case(with_row(m * direction, place, ordinary()), place)
            for m, direction in product(_LONG, directions[:2]):
                norm = np.linalg.norm(direction, 1 if claim.norm == "l1" else 2)
                yield case(with_row(m * claim.clip_norm / norm * direction))
        case "layers":
            for first, last in pairwise(ends):
                row = np.zeros(size)
                row[first:last] = 1e6
                yield case(with_row(row))
            for scales in (np.ones(len(claim.layers)), 10.0 ** -np.arange(len(claim.layers))):
                yield case(with_row(1e6 * np.repeat(scales, claim.layers)))
        case "not finite":
            for value in (math.nan, math.inf, -math.inf):
                yield case(with_row(np.full(size, value)))
                row = np.where(np.arange(size) == 0, value, 1.0)
                yield case(with_row(row, 1, ordinary()), 1)
                yield case(with_row(row[::-1], count - 1), count - 1)
        case "alone":
            for m in _SIZES:
                yield case(np.full((1, size), m))
        case "others":
            # Many copies, and others that the unit opposes, or that absorb it.
            for m, against in ((claim.clip_norm, 1), (claim.clip_norm, -1), (1e6, 1), (1e6, -1)):
                rows = np.full((count, size), m / math.sqrt(size))
                rows[0] *= against
                yield case(rows)
            yield case(with_row(1e6 * np.ones(size), 0, 1e-3 * ordinary()))
            yield case(with_row(np.ones(size), 0, np.full_like(zeros, 3e38)))
            # Sums that may leave the range of integers, along an axis.
            for copies, sign in product((1, 2), (1, -1)):
                axis = np.tile(sign * claim.clip_norm * np.eye(size)[0], (copies * count, 1))
                yield case(axis)
            # More rows than a chunk may have.
            more = np.concatenate([ordinary(), ordinary()])
            yield case(with_row(np.full(size, 1e6), 2 * count - 1, more), 2 * count - 1)
        case "hostile floats":
            for _ in range(_HOSTILE):
                rows = ordinary() if rng.random() < 0.5 else hostile((count, size), rng)[0]
                row, _ = hostile((size,), rng)
                place = int(rng.integers(count))
                yield case(with_row(row, place, rows), place)
        case "weights":
            for weight in _WEIGHTS:
                for m in (0.5 * claim.clip_norm, 1e6):
                    weights = np.ones(count, np.float32)
                    weights[0] = weight
                    row = np.full(size, m / math.sqrt(size))
                    yield case(with_row(row, 0, ordinary()), 0, weights)


def _worst(
    name: str,
    family: str,
    view: View,
    cases: list[Case],
    seeds: range,
    significance: float,
) -> Finding:
    """Finds the case of a family that moves a release farthest in units of what is allowed.

    The significance is that of noise that does not cancel.
    """
    claim, check, noisy = view.claim, f"contribution: {family}", False

    def moved(case: Case) -> tuple[float, float, bool]:
        """The distance of two releases, what is allowed, and whether the first is finite."""
        nonlocal noisy
        rows, weights = case.neighbour()
        try:
            one = view(case.rows, seeds[0], case.weights)
        except Misbehaviour as wrong:
            # The number of rows may be refused where it is public, or too large: then both are.
            refusal = _refusal(view, rows, seeds[0], weights)
            is_public = len(rows) == len(case.rows) and refusal == str(wrong)
            if is_public or (refusal and len(rows) > claim.rows):
                return 0.0, 1.0, True
            raise
        two = view(rows, seeds[0], weights)
        order = 1 if claim.norm == "l1" else 2
        bound = claim.sensitivity / divisor_of(claim, max(len(rows), len(case.rows)))
        allowed = (1 + MARGIN) * bound + rounding_of(one, order)
        # What is NaN in both tells them not apart.
        gap = np.where((one == two) | (np.isnan(one) & np.isnan(two)), 0, one - two)
        distance = float(np.linalg.norm(gap, order))
        if allowed < distance < math.inf:
            again = view(case.rows, seeds[1], case.weights) - view(rows, seeds[1], weights)
            if not alike(np.stack([gap, again]), one):
                noisy, each = True, significance / (2 * len(cases))
                allowed += sum(quantile_of(claim, len(x), each) for x in (rows, case.rows))
        is_finite = bool(np.isfinite(one).all())
        return (distance if math.isfinite(distance) else math.inf), allowed, is_finite

    def fails_as(failing: str | bool) -> Callable[[Case], bool]:
        """Whether a case fails in the same way as one that raised, or was finite, or was not."""

        def fails(case: Case) -> bool:
            try:
                distance, allowed, is_finite = moved(case)
            except Misbehaviour as wrong:
                return str(wrong) == failing
            return distance > allowed and is_finite == failing

        return fails

    worst, ratio = (0.0, 1.0), -1.0
    for case in cases:
        try:
            distance, allowed, is_finite = moved(case)
        except Misbehaviour as wrong:
            small = shrunk(case, fails_as(str(wrong)))
            sentence = f"the subject {wrong}: an exception shows what a unit contributed"
            return Finding(name, check, "failed", sentence, example=as_code(small))
        if distance / allowed > ratio:
            worst, ratio = (distance, allowed), distance / allowed
            farthest, was_finite = case, is_finite
    distance, allowed = worst
    confidence = 1 - significance if noisy else 1.0
    if distance > allowed:
        small = shrunk(farthest, fails_as(was_finite))
        sentence = f"one unit moves the release by {distance:.6g}, allowed {allowed:.6g}"
        return Finding(
            name, check, "failed", sentence, distance, allowed, confidence, as_code(small)
        )
    sentence = f"of {len(cases)} distances of neighbours, {distance:.4g} is nearest to its bound"
    sentence += f", {allowed:.4g}" + (
        " with noise, which one seed does not repeat" if noisy else ""
    )
    return Finding(name, check, "passed", sentence, distance, allowed, confidence)


def rounding_of(release: np.ndarray, order: int) -> float:
    """What rounding in float32 may add to a distance of releases."""
    sizes = np.minimum(np.abs(np.nan_to_num(release)), 1e30)
    return _ROUNDING * float(np.linalg.norm(sizes, order))


def _sum(name: str, view: View, draws: Draws, significance: float) -> Finding:
    """Compares what short rows add to a release with their sum over the divisor."""
    claim, check = view.claim, "contribution: divisor"
    direction = np.full(claim.size, 1 / math.sqrt(claim.size))
    length = claim.clip_norm / (2 * math.sqrt(claim.size) if claim.norm == "l1" else 2)
    tests, examples = [], dict[str, str]()
    more = {2 * claim.rows} if claim.relation == "add_remove" else set()
    for count in sorted({1, claim.rows // 2, claim.rows} | more):
        rows = np.zeros((count, claim.size), np.float32)
        short = np.repeat(length * direction[None], count, 0).astype(np.float32)
        expected = count * length / divisor_of(claim, count)
        what = f"what {count} rows of norm {length:.4g} add to a release"
        try:
            weights = np.ones(count, np.float32)
            gap, error = _mean_gap(view, (short, weights), (rows, weights), draws)
        except Misbehaviour as wrong:
            if claim.relation == "add_remove" and count <= claim.rows:
                sentence = f"the subject {wrong} on {count} rows"
                return Finding(name, check, "failed", sentence, example=code_of(short))
            continue
        measured = float(gap @ direction)
        off = max(0.0, abs(measured - expected) - MARGIN * expected)
        p_value = float(off == 0 if error == 0 else 2 * stats.norm.sf(off / error))
        tests.append(Test(p_value, what, measured, expected))
        examples[what] = code_of(short)
    if not tests:
        return Finding(name, check, "open", "the subject takes no other number of rows")
    says = "short rows are summed and divided as claimed, for every number of rows"
    return judged(name, check, tests, significance, says, examples)


def _mean_gap(
    view: View, one: tuple[np.ndarray, ...], two: tuple[np.ndarray, ...], draws: Draws
) -> tuple[np.ndarray, float]:
    """What rows, with weights, release more than others on average, and the error of an entry."""

    def gaps(seeds: range) -> np.ndarray:
        return np.stack([view(one[0], s, one[1]) - view(two[0], s, two[1]) for s in seeds])

    seeds = draws.block()
    found = gaps(seeds[:2])
    if alike(found, view(one[0], seeds[0], one[1])):
        return found[0], 0.0
    mean = np.concatenate([found, gaps(seeds[2:])]).mean(axis=0)
    return mean, stddev_of(view.claim, len(one[0])) * math.sqrt(2 / len(seeds))


def _mean_shift(name: str, view: View, draws: Draws, significance: float) -> Iterator[Finding]:
    """Compares mean releases of a unit that is large in every layer and of its neighbour.

    Those of which one seed has the same noise have been compared.
    """
    claim, tests = view.claim, []
    bound = claim.sensitivity / divisor_of(claim, claim.rows)
    for case in (*_cases("layers", claim, draws.rng), *_cases("others", claim, draws.rng)):
        direction = np.sign(case.rows[case.place]).astype(np.float64)
        if claim.norm == "l2":
            # Where a row would point that is clipped layer by layer.
            direction *= np.repeat(np.asarray(claim.layers, float), claim.layers) ** -0.5
            direction /= np.linalg.norm(direction)
        try:
            gap, error = _mean_gap(view, (case.rows, case.weights), case.neighbour(), draws)
        except Misbehaviour:
            continue  # Another family reports it.
        if error > 0:
            shift = abs(float(gap @ direction))
            above = (shift - (1 + MARGIN) * bound) / (np.linalg.norm(direction) * error)
            p_value = min(1.0, 2 * float(stats.norm.sf(above)))
            tests.append(Test(p_value, "the mean distance of neighbours", shift, bound))
    if tests:
        says = "mean distances of neighbours over many seeds are within the bound"
        yield judged(name, "contribution: mean shift", tests, significance, says)


def shrunk(case: Case, fails: Callable[[Case], bool]) -> Case:
    """Simplifies a failing case as long as it fails: fewer rows, more zeros, rounder numbers."""
    left, end = _SHRINKS, time.monotonic() + _SHRINK_SECONDS
    is_smaller = True
    while is_smaller:
        is_smaller = False
        for smaller in _simpler(case):
            if left == 0 or time.monotonic() > end:
                return case
            left -= 1
            if fails(smaller):
                case, is_smaller = smaller, True
                break
    return case


def _simpler(case: Case) -> Iterator[Case]:
    """Simpler cases, the simplest first."""
    rows, weights, place, other = case
    others = [i for i in range(len(rows)) if i != place]
    if len(others) > 1:
        yield Case(rows[[place]], weights[[place]], 0, other)
    for i in others:
        where = place - (i < place)
        yield Case(np.delete(rows, i, 0), np.delete(weights, i), where, other)
    for i in others:
        if rows[i].any():
            yield case._replace(rows=_changed(rows, i, 0.0))
    for j in range(rows.shape[1]):
        for value in (0.0, float(_round(rows[place, j]))):
            if rows[place, j] != value and not (np.isnan(value) and np.isnan(rows[place, j])):
                yield _at(case, j, value)
    if weights[place] not in (1.0, _round(weights[place])) and not np.isnan(weights[place]):
        for weight in (1.0, _round(weights[place])):
            fresh = weights.copy()
            fresh[place] = weight
            yield case._replace(weights=fresh)
    for i in others:
        rounded = _round(rows[i])
        if not np.array_equal(rounded, rows[i], equal_nan=True):
            yield case._replace(rows=_changed(rows, i, rounded))


def _changed(rows: np.ndarray, index: int, row: np.ndarray | float) -> np.ndarray:
    rows = rows.copy()
    rows[index] = row
    return rows


def _at(case: Case, entry: int, value: float) -> Case:
    """Changes an entry of the unit's row, and of the opposite row."""
    rows = case.rows.copy()
    rows[case.place, entry] = value
    other = case.other
    if other is not None and other.any():
        other = -rows[case.place]
    return case._replace(rows=rows, other=other)


def _round(values: np.ndarray) -> np.ndarray:
    """The nearest power of ten with the same sign; zero, NaN and infinity stay."""
    values = np.asarray(values, np.float32)
    size = np.abs(values.astype(np.float64))
    power = np.sign(values) * 10.0 ** np.round(np.log10(size))
    return np.where(np.isfinite(power) & (size > 0), power, values).astype(np.float32)


def as_code(case: Case) -> str:
    """Writes a case as NumPy code."""
    lines = [code_of(case.rows)]
    if (case.weights != 1).any():
        lines.append(f"weights = np.array({_listed(case.weights)}, np.float32)")
    if case.other is None:
        lines.append(f"neighbour = np.delete(rows, {case.place}, 0)")
    else:
        row = "0" if not case.other.any() else f"-rows[{case.place}]"
        lines.append(f"neighbour = rows.copy(); neighbour[{case.place}] = {row}")
    return "\n".join(lines)


def code_of(rows: np.ndarray) -> str:
    """Writes rows as NumPy code."""
    if np.unique(rows).size == 1:
        return f"rows = np.full({rows.shape}, {_number(rows.flat[0])}, np.float32)"
    lines = [f"rows = np.zeros({rows.shape}, np.float32)"]
    for i, row in enumerate(rows):
        if np.unique(row).size == 1:
            lines += [f"rows[{i}] = {_number(row[0])}"] if row.any() else []
        else:
            lines += [f"rows[{i}, {j}] = {_number(row[j])}" for j in np.flatnonzero(row)]
    if 0 < rows.size <= 8 or len(lines) > 25:
        return f"rows = np.array([{', '.join(map(_listed, rows))}], np.float32)"
    return "\n".join(lines)


def _listed(row: np.ndarray) -> str:
    return "[" + ", ".join(map(_number, row)) + "]"


def _number(value: float) -> str:
    if math.isfinite(value):
        return f"{float(value):.9g}"
    return "-np.inf" if value < 0 else f"np.{float(value)}"
