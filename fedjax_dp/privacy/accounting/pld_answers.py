"""ε and δ by privacy loss distributions, for a composition of events that have them.

One step's loss is rounded to a lattice (`pld_lattice`); the steps are composed and read at the
answer (`pld_composition`). Here lattices are refined until they add no more than promised, and the
more costly direction of the neighbours is found.
"""

import math
from collections.abc import Sequence

import dp_accounting as dpa

from fedjax_dp.privacy.accounting.pld_composition import Answer, Composition, Question
from fedjax_dp.privacy.accounting.pld_lattice import first_width, losses_of
from fedjax_dp.privacy.events import DpEvent, effective_noise_multiplier, key_of

# The probability cut off at the largest losses of all steps together, as a share of δ.
_CUT = 2.0**-24
# Other accountants treat losses beyond 1e13 as infinite.
_LEAST_NOISE = 1e-7
# Lattices are refined for a found ε of at least this many standard deviations of the loss.
_LEAST_FOUND = 0.01
# The fields of events that hold their noise, and those that hold their sampling.
_NOISES = ("noise_multiplier", "noise_parameter", "standard_deviation")
_CHANCES = ("sampling_probability", "truncated_batch_size")

Parts = Sequence[tuple[DpEvent, int]]


def epsilon(parts: Parts, relation: str, dp_delta: float) -> Answer:
    """Bounds ε of a composition of translated events at a δ in [0, 1); inf without a bound.

    Guarantee: the value is at least the exact ε; it includes the tails that were cut off and the
    possible rounding error.
    """
    if dp_delta == 0:
        is_free = all(isinstance(part, dpa.NoOpDpEvent) for part, _ in parts)
        return Answer(0.0 if is_free else math.inf, is_free)
    return _answer(parts, relation, Question(dp_delta=dp_delta))


def delta(parts: Parts, relation: str, at: float) -> Answer:
    """Bounds δ of a composition at one ε of at least 0, as `epsilon` does; at most 1."""
    return _answer(parts, relation, Question(epsilon=at))


def _answer(parts: Parts, relation: str, question: Question) -> Answer:
    """Answers in the more costly direction of the neighbours."""
    merged = _merged(parts)
    if not merged:
        return Answer(0.0, True)
    if any(isinstance(part, dpa.NonPrivateDpEvent) for part, _ in merged):
        return Answer(question.worst, False)
    directions = _directions(merged, relation, question)
    if not directions:
        return Answer(question.worst, False)
    costly, found = _worst(directions)
    if question.epsilon is None and _wanted(costly, found.value) < costly.width:
        # The lattice was chosen for an ε far larger than the one found.
        finer = _directions(merged, relation, question, found.value)
        if finer:
            costly, found = _worst(finer)
    of_lattice = found.value if question.epsilon is None else math.inf
    return Answer(found.value, found.is_tight and costly.is_resolved(of_lattice))


def _wanted(composition: Composition, found: float) -> float:
    """Computes the lattice width that a composition needs, from an estimate of its ε."""
    known = () if math.isinf(found) else (found, _LEAST_FOUND)
    return max(composition.wanted_width(*known), composition.smallest_width)


def _worst(directions: Sequence[Composition]) -> tuple[Composition, Answer]:
    """Answers in the costliest direction; others are composed only if they might cost more."""
    costly = _costliest(directions)
    found = costly.answer()
    for each in directions:
        if each is costly or each.is_covered(found):
            continue
        other = each.answer()
        if other.value > found.value:
            costly, found = each, other
    return costly, found


def _directions(
    merged: Parts, relation: str, question: Question, found: float = math.inf
) -> list[Composition]:
    """Refines the lattice until it adds no more than its share; None if losses overflow."""
    counts = [count for _, count in merged]
    # The probability cut off in one step; powers of 16, so that later rounds share the lattices.
    cut = 2.0 ** (4 * math.floor(math.log2(question.smallest * _CUT / sum(counts)) / 4))
    width = first_width(merged, relation, cut)
    directions: list[Composition] = []
    for _ in range(10):
        try:
            lattices = [losses_of(key_of(part), relation, width, cut) for part, _ in merged]
        except OverflowError:
            # Losses of many hundreds, which dp-accounting has no numbers for.
            return []
        # Weights from a coarser lattice are good on a finer one.
        tilts: Sequence[float | None] = [each.tilt for each in directions]
        tilts = tilts or [None] * max(map(len, lattices))
        directions = [
            Composition([x[i % len(x)] for x in lattices], counts, width, question, tilt)
            for i, tilt in enumerate(tilts)
        ]
        # What the lattice adds counts in the direction that costs the most.
        wanted = _wanted(_costliest(directions), found)
        if wanted >= width:
            break
        width = max(wanted, width / 2**12)
    return directions


def _costliest(directions: Sequence[Composition]) -> Composition:
    return max(directions, key=lambda each: each.estimate)


def _merged(parts: Parts) -> list[tuple[DpEvent, int]]:
    """Merges Gaussians into one; drops events that cost nothing."""
    gaussians = [dpa.SelfComposedDpEvent(e, n) for e, n in parts if type(e) is dpa.GaussianDpEvent]
    others: list[tuple[DpEvent, int]] = []
    for part, count in parts:
        is_drawn = all(getattr(part, name, None) != 0 for name in _CHANCES)
        is_free = isinstance(part, dpa.NoOpDpEvent) or count == 0 or not is_drawn
        if type(part) is not dpa.GaussianDpEvent and not is_free:
            inner = getattr(part, "event", part)
            is_bare = any(getattr(inner, name, 1.0) < _LEAST_NOISE for name in _NOISES)
            others.append((dpa.NonPrivateDpEvent() if is_bare else part, int(count)))
    noise = effective_noise_multiplier(dpa.ComposedDpEvent(gaussians))
    if noise is not None:
        is_noised = noise >= _LEAST_NOISE
        others.append((dpa.GaussianDpEvent(noise) if is_noised else dpa.NonPrivateDpEvent(), 1))
    return others
