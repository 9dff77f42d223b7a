"""Attack: a unit that is there or not, in many runs, and the ε that telling them apart proves.

Whether the attack has power is measured on simulations of the claim at half its noise.
"""

import dataclasses
import math
from collections.abc import Iterator

import numpy as np
from scipy import stats

from fedjax_dp.audit.conformance.accounting import epsilon_above
from fedjax_dp.audit.conformance.claims import (
    FixedSize,
    Poisson,
    Release,
    Training,
    divisor_of,
    noise_law,
    stddev_of,
)
from fedjax_dp.audit.conformance.findings import Draws, Finding, Test, Verdict, judged
from fedjax_dp.audit.conformance.noise import check_draws
from fedjax_dp.audit.conformance.subjects import Misbehaviour, Run, View, numbers
from fedjax_dp.audit.floats import MARGIN
from fedjax_dp.privacy.reports import auditing

# A canary's entries, in units of the clip norm: its norm is clipped.
_STRENGTH = 1e6
_SIMULATIONS = 20
# A claim holds at every δ; at a large one, few runs prove more.
_LARGE_DELTA = 0.1


def run_of(name: str, view: View) -> Run:
    """Views one release as a training of one round, in which everybody takes part."""
    everyone = FixedSize(view.claim.rows, view.claim.rows)
    training = Training(view.claim, everyone, 1)
    return Run(name, lambda rows, seed: view(rows, seed)[None], training)


def check_rounds(subject: Run, draws: Draws, significance: float) -> Iterator[Finding]:
    """Tests the noise of all rounds of a training in which nobody contributes."""
    claim, name = subject.claim, subject.name
    release, sampling = claim.release, claim.sampling
    if release.divisor is None and isinstance(sampling, Poisson):
        sentence = "noise is divided by a number of rows that differs from round to round"
        yield Finding(name, "noise: standard deviation", "open", sentence)
        return
    zeros = np.zeros((sampling.num_units, release.size), np.float32)
    shape = (claim.rounds, release.size)
    try:
        noise = [numbers(shape, subject.run, zeros, seed) for seed in draws.spread()]
    except Misbehaviour as wrong:
        yield Finding(name, "noise: call", "failed", f"the subject {wrong} on units of zeros")
        return
    size = max(1, round(sampling.num_units * sampling.rate))
    # Rounds are layers, whose noise is independent too.
    layers, divisor = release.layers * claim.rounds, divisor_of(release, size)
    rounds = dataclasses.replace(release, layers=layers, divisor=divisor)
    flat = np.stack(noise).reshape(len(noise), -1)
    yield from check_draws(name, flat, rounds, significance / 5)


def check_attack(subject: Run, draws: Draws, significance: float) -> Iterator[Finding]:
    """Attacks a whole training, in which a unit among others of zeros is drawn as any other."""
    claim, name, share = subject.claim, subject.name, significance / 2
    release, check = claim.release, "attack: lower bound"
    if release.noise_stddev == 0:
        yield Finding(name, check, "open", "no noise is claimed, so that no ε is")
        return
    shape = (claim.rounds, release.size)

    def attacked(row: np.ndarray, seed: int) -> np.ndarray:
        rows = np.zeros((claim.sampling.num_units, release.size), np.float32)
        rows[-1] = row
        return numbers(shape, subject.run, rows, seed)

    canary = _STRENGTH * _canary(release).astype(np.float32)
    absent = -canary if release.relation == "replace_one" else np.zeros_like(canary)
    try:
        seen = [
            np.stack([attacked(row, seed) for seed in draws.block(4 * draws.count)])
            for row in (canary, absent)
        ]
    except Misbehaviour as wrong:
        yield Finding(name, check, "failed", f"the subject {wrong} in an attacked run")
        return
    if not all(np.isfinite(side).all() for side in seen):
        yield Finding(name, check, "failed", "a release of an attacked run is not finite")
        return
    if release.divisor is not None or claim.sampling.rate == 1:
        yield _mean(subject, seen, share)
    yield _bound(subject, seen, draws, share)


def _mean(subject: Run, sides: list[np.ndarray], share: float) -> Finding:
    """Compares mean releases with and without the unit, in every round and over all rounds."""
    claim, release = subject.claim, subject.claim.release
    canary, tests = _canary(release), []
    size, expected = round(claim.sampling.num_units * claim.sampling.rate), claim.sampling.mean
    expected *= release.sensitivity / divisor_of(release, max(1, size))
    inside, outside = (side @ canary / np.linalg.norm(canary) for side in sides)
    columns = {f"round {i}": [i] for i in range(claim.rounds)}
    for where, chosen in {**columns, "all rounds": list(range(claim.rounds))}.items():
        scores = [side[:, chosen].mean(axis=1) for side in (inside, outside)]
        error = math.sqrt(sum(s.var() / len(s) for s in scores))
        gap = float(scores[0].mean() - scores[1].mean())
        above = max(0.0, gap - (1 + MARGIN) * expected)
        p_value = float(stats.norm.sf(above / max(error, 1e-300)))
        what = f"what a large unit adds to a release on average, in {where},"
        tests.append(Test(p_value, what, gap, expected))
    # What has a p-value below that of a failure nine times in ten.
    least = (1 + MARGIN) * expected + (
        stats.norm.isf(share / len(tests)) + stats.norm.isf(0.1)
    ) * error
    says = (
        "a unit adds no more to a release, on average, than when it is drawn as claimed; "
        f"{least / expected:.2f} times as much in all rounds would be found in 9 of 10 reports"
    )
    return judged(subject.name, "attack: mean of a round", tests, share, says)


def _bound(subject: Run, seen: list[np.ndarray], draws: Draws, significance: float) -> Finding:
    """Proves a lower bound on ε, of runs with and without the unit."""
    claim, name = subject.claim, subject.name
    release, check = claim.release, "attack: lower bound"
    is_gaussian = release.law == "gaussian" and claim.sampling.rate == 1
    delta = claim.dp_delta if is_gaussian else _LARGE_DELTA
    claimed = epsilon_above(claim, claim.rounds, delta)
    if not math.isfinite(claimed):
        return Finding(name, check, "open", "no analysis of the claim is known, to compare with")

    def proven(sides: list[np.ndarray]) -> float:
        scores = _scores(sides, claim)
        bound = auditing.gaussian_bound if is_gaussian else auditing.threshold_bound
        return bound(*scores, delta, confidence=1 - significance).epsilon

    found, caught = proven(seen), 0
    for _ in range(_SIMULATIONS):
        caught += proven(_simulated(claim, len(seen[0]), draws.rng)) > claimed
    power = f"at half the noise, {caught} of {_SIMULATIONS} simulated attacks prove more"
    sentence = f"ε of at least {found:.3g} is proven at δ = {delta:.3g}, claimed {claimed:.3g}"
    verdict: Verdict = (
        "failed" if found > claimed else "passed" if 2 * caught > _SIMULATIONS else "open"
    )
    if verdict == "open":
        power += ": more runs are needed"
    values = found, claimed, 1 - significance
    return Finding(name, check, verdict, f"{sentence}; {power}", *values)


def _scores(sides: list[np.ndarray], claim: Training) -> tuple[np.ndarray, np.ndarray]:
    """Scores runs `[runs, rounds, entries]`: the log-likelihood ratio of the claim along a line.

    The line is learned from every second run, on which thresholds are chosen too.
    """
    release, rate = claim.release, claim.sampling.rate
    inside, outside = (side[::2].reshape(-1, release.size) for side in sides)
    direction = auditing.linear_direction(inside, outside)
    # In units of the claimed noise, from the middle of the runs without the unit.
    stddev = stddev_of(release, max(1, round(claim.sampling.num_units * rate)))
    middle = float(np.mean(outside @ direction))
    shift = release.sensitivity / release.noise_stddev
    found = []
    for side in sides:
        z = (side @ direction - middle) / stddev
        ratio = shift * z - shift**2 / 2
        # The logarithm of what a unit that is drawn at the rate makes of the ratio.
        with np.errstate(divide="ignore"):
            mixed = np.logaddexp(np.log1p(-rate), np.log(rate) + ratio)
        found.append(np.sum(mixed, axis=1))
    return found[0], found[1]


def _canary(release: Release) -> np.ndarray:
    """A row of the clip norm: all entries alike, or one alone, which the L1 norm bounds less."""
    size = release.size
    return release.clip_norm * (
        np.eye(size)[0] if release.norm == "l1" else np.full(size, size**-0.5)
    )


def _simulated(claim: Training, runs: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Simulates attacked runs of the claim with half of its noise."""
    release = claim.release
    shape = (runs, claim.rounds, release.size)
    count = max(1, round(claim.sampling.num_units * claim.sampling.rate))
    law = noise_law(release, stddev_of(release, count) / 2)
    length = release.clip_norm / divisor_of(release, count)
    row = _canary(release) * length / release.clip_norm
    absent = -row if release.relation == "replace_one" else 0 * row
    sides = []
    for contribution in (row, absent):
        is_drawn = rng.random((*shape[:2], 1)) < claim.sampling.rate
        sides.append(law.rvs(shape, random_state=rng) + is_drawn * contribution)
    return sides
