"""Sampling: which units are drawn, how many, together and again, against the claimed law."""

import math
from collections.abc import Iterator
from itertools import combinations
from typing import TypeAlias

import numpy as np
from scipy import stats

from fedjax_dp.audit.conformance.claims import FixedSize, Poisson, Shuffled, WithReplacement
from fedjax_dp.audit.conformance.findings import Draws, Finding, Test, judged
from fedjax_dp.audit.conformance.subjects import Misbehaviour, Sampling, as_numbers, called

# The units drawn in each round.
Rounds: TypeAlias = list[np.ndarray]

_ROUNDS = 4
# The most batches of an epoch after which the next one is looked at.
_MOST_BATCHES = 50
# The most units, and pairs of units, that are watched.
_WATCHED = 200
_FINDINGS = 4


def check_sampling(subject: Sampling, draws: Draws, significance: float) -> Iterator[Finding]:
    """Draws a few rounds under many seeds, and tests counts, units, pairs, and rounds in a row."""
    claim, name, share = subject.claim, subject.name, significance / _FINDINGS
    rounds = _ROUNDS
    if isinstance(claim, Shuffled):
        batches, rest = divmod(claim.num_units, claim.size)
        has_next = rest == 0 and 1 < batches <= _MOST_BATCHES
        rounds = batches + 1 if has_next else max(2, min(_ROUNDS, batches))
    try:
        runs = [_drawn(subject, rounds, seed) for seed in draws.block(2 * draws.count)]
    except Misbehaviour as wrong:
        yield Finding(name, "sampling: draws", "failed", f"the subject {wrong}")
        return
    yield Finding(name, "sampling: draws", "passed", "indices are in range, none twice in a round")
    yield _counts(subject, np.array([[len(drawn) for drawn in run] for run in runs]), share)
    last = max(1, claim.num_units - 1)
    watched = np.unique(np.linspace(0, last - 1, min(last, _WATCHED)).astype(int))
    yield _units(subject, runs, watched, share)
    yield _pairs(subject, runs, watched, share)
    yield _rounds(subject, runs, share)


def _drawn(subject: Sampling, rounds: int, seed: int) -> Rounds:
    """Draws rounds, and requires indices of units, distinct ones unless the law repeats them."""
    claim = subject.claim
    run = called(subject.draw, rounds, seed)
    try:
        run = list(run)
    except TypeError:
        raise Misbehaviour(f"returns {type(run).__name__}, not a list of rounds") from None
    if len(run) != rounds:
        raise Misbehaviour(f"returns {len(run)} rounds, not {rounds}")
    indices = []
    for drawn in run:
        values = as_numbers(drawn, np.shape(drawn))
        if values.ndim != 1 or not np.all(
            (values == np.floor(values)) & (values >= 0) & (values < claim.num_units)
        ):
            raise Misbehaviour(f"draws what is no list of units 0 to {claim.num_units - 1}")
        if not isinstance(claim, WithReplacement) and len(np.unique(values)) < len(values):
            raise Misbehaviour(f"draws a unit twice in a round of seed {seed}")
        indices.append(values.astype(int))
    return indices


def _counts(subject: Sampling, sizes: np.ndarray, share: float) -> Finding:
    """Tests the sizes of rounds: one size, or a binomial law."""
    claim, check = subject.claim, "sampling: size of a round"
    if not isinstance(claim, Poisson):
        wrong = sizes[sizes != claim.size]
        if wrong.size:
            sentence = f"a round has {wrong[0]} units, claimed {claim.size}"
            return Finding(subject.name, check, "failed", sentence, wrong[0], claim.size)
        return Finding(subject.name, check, "passed", f"all rounds have {claim.size} units")
    law = stats.binom(claim.num_units, claim.rate)
    flat = sizes.ravel()
    # Bins of about equal probability, at least five expected in each.
    inner = np.unique(law.ppf(np.linspace(0, 1, min(12, len(flat) // 20) + 1)[1:-1]))
    edges = np.unique([-1, *inner, claim.num_units])
    expected = np.diff(law.cdf(edges)) * len(flat)
    measured = np.histogram(flat, edges + 0.5)[0]
    error = max(float(law.std()), 1e-12) / math.sqrt(len(flat))
    mean = 2 * float(stats.norm.sf(abs(flat.mean() - law.mean()) / error))
    tests = [Test(mean, "the mean size of a round", float(flat.mean()), float(law.mean()))]
    # A share of empty rounds that is too small shows whether they are drawn again.
    empty, chance = int(np.sum(flat == 0)), float(law.pmf(0))
    p_value = float(stats.binomtest(empty, len(flat), chance).pvalue)
    tests.append(Test(p_value, "the share of empty rounds", empty / len(flat), chance))
    if len(expected) > 1 and expected.min() >= 5:
        spread = float(stats.chisquare(measured, expected).pvalue)
        deviations = float(flat.std()), float(law.std())
        tests.append(Test(spread, "the standard deviation of the size of a round", *deviations))
    says = f"sizes of {len(flat)} rounds are binomial"
    return judged(subject.name, check, tests, share, says)


def _units(subject: Sampling, runs: list[Rounds], watched: np.ndarray, share: float) -> Finding:
    """Tests how often each watched unit is drawn in the first round, and in the last one."""
    claim, tests = subject.claim, []
    units = np.union1d(watched, [claim.num_units - 1])
    for at in (0, len(runs[0]) - 1):
        counts = np.sum([np.isin(units, run[at]) for run in runs], axis=0)
        for unit, count in zip(units, counts, strict=True):
            test = stats.binomtest(int(count), len(runs), claim.rate)
            what = f"the share of runs that draw unit {unit} in round {at}"
            tests.append(Test(float(test.pvalue), what, count / len(runs), claim.rate))
    says = f"units are drawn at rate {claim.rate:.4g}"
    return judged(subject.name, "sampling: rate of a unit", tests, share, says)


def _pairs(subject: Sampling, runs: list[Rounds], watched: np.ndarray, share: float) -> Finding:
    """Tests how often two neighbours are drawn together, in the first round."""
    claim, check = subject.claim, "sampling: pairs of units"
    n = claim.num_units
    if n == 1:
        return Finding(subject.name, check, "open", "there is one unit")
    match claim:
        case Poisson():
            chance = claim.rate**2
        case WithReplacement():
            both_absent = max(0.0, 1 - 2 / n) ** claim.size
            chance = 1 - 2 * (1 - 1 / n) ** claim.size + both_absent
        case _:
            chance = claim.size * (claim.size - 1) / (n * (n - 1))
    together = [np.isin(watched, run[0]) & np.isin(watched + 1, run[0]) for run in runs]
    counts = np.sum(together, axis=0)
    tests = []
    for unit, count in zip(watched, counts, strict=True):
        test = stats.binomtest(int(count), len(runs), chance)
        what = f"the share of rounds that draw units {unit} and {unit + 1}"
        tests.append(Test(float(test.pvalue), what, count / len(runs), chance))
    says = "units are drawn together as often as the law says"
    return judged(subject.name, check, tests, share, says)


def _rounds(subject: Sampling, runs: list[Rounds], share: float) -> Finding:
    """Tests how many units are drawn in two rounds of a run, and none in two of an epoch."""
    claim, check = subject.claim, "sampling: rounds in a row"
    pairs = list(combinations(range(len(runs[0])), 2))
    if isinstance(claim, FixedSize | Shuffled) and claim.rate == 1:
        return Finding(subject.name, check, "passed", "every round has all units", 1.0, 1.0)
    if isinstance(claim, Shuffled):
        batches = claim.num_units // claim.size
        if batches == 1:
            return Finding(subject.name, check, "open", "an epoch has one full batch")
        again = sum(_again(runs, pair) for pair in pairs if pair[1] < batches) / len(runs)
        if again:
            sentence = f"{again:.3g} units are drawn again in another batch of an epoch"
            return Finding(subject.name, check, "failed", sentence, again, 0.0)
        pairs = [pair for pair in pairs if pair == (0, batches)]
        if not pairs:
            says = "no unit is drawn twice in an epoch; the next epoch was not looked at"
            return Finding(subject.name, check, "passed", says)
    trials, expected = len(runs) * claim.num_units, claim.num_units * claim.rate**2
    tests = []
    for pair in pairs:
        again = _again(runs, pair)
        # Exact for Poisson sampling, whose units are independent; others vary less.
        p_value = float(stats.binomtest(again, trials, claim.rate**2).pvalue)
        what = f"the number of units drawn in both rounds {pair[0]} and {pair[1]}"
        tests.append(Test(p_value, what, again / len(runs), expected))
    return judged(subject.name, check, tests, share, "no round predicts another")


def _again(runs: list[Rounds], pair: tuple[int, int]) -> int:
    """The number of units, over all runs, that are drawn in both rounds."""
    return sum(np.intersect1d(run[pair[0]], run[pair[1]]).size for run in runs)
