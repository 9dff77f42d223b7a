"""Sampling: which units are drawn, how many, together and again, against the claimed law."""

import math
from collections.abc import Callable, Iterable, Iterator
from itertools import combinations, islice
from typing import Any, TypeAlias

import numpy as np
from scipy import stats

from fedjax_dp.audit.conformance.claims import FixedSize, Poisson, Shuffled, WithReplacement
from fedjax_dp.audit.conformance.findings import Draws, Finding, Test, Verdict, judged
from fedjax_dp.audit.conformance.subjects import (
    Misbehaviour,
    Sampling,
    array_of,
    as_numbers,
    called,
)

# The units drawn in each round.
Rounds: TypeAlias = list[np.ndarray]

_ROUNDS = 4
# The most batches of an epoch after which the next one is looked at.
_MOST_BATCHES = 50
# The most units that are watched.
_WATCHED = 200
# The most rounds after which a cohort may be drawn again, and runs of twice as many rounds.
_LAGS, _LONG_RUNS = 32, 16
# The most permutations that a p-value is counted in, and how many as far out end the count.
_PERMUTED, _AS_FAR = 20_000, 10
# Rounds of the largest sizes that are expected.
_IN_TAIL = 15
_FINDINGS = 5


def check_sampling(subject: Sampling, draws: Draws, significance: float) -> Iterator[Finding]:
    """Draws a few rounds under many seeds, and tests counts, units, pairs, and rounds in a row."""
    claim, name, share = subject.claim, subject.name, significance / _FINDINGS
    rounds = _ROUNDS
    if isinstance(claim, Shuffled):
        batches, rest = divmod(claim.num_units, claim.size)
        has_next = rest == 0 and 1 < batches <= _MOST_BATCHES
        rounds = batches + 1 if has_next else max(2, min(_ROUNDS, batches))
    try:
        runs = [_drawn(subject, rounds, seed) for seed in draws.spread(2 * draws.count)]
        long = [_drawn(subject, 2 * _LAGS, seed) for seed in draws.block(_LONG_RUNS)]
    except Misbehaviour as wrong:
        yield Finding(name, "sampling: draws", "failed", f"the subject {wrong}")
        return
    yield Finding(name, "sampling: draws", "passed", "indices are in range, none twice in a round")
    yield _seeds(subject, runs, share)
    yield _counts(subject, np.array([[len(drawn) for drawn in run] for run in runs]), share)
    first = np.linspace(0, max(0, claim.num_units - 2), _WATCHED // 2).astype(int)
    watched = np.unique(np.minimum([first, first + 1], claim.num_units - 1))
    yield _units(subject, runs, long, watched, share)
    yield _pairs(subject, runs, watched, draws.rng, share)
    yield _rounds(subject, runs, long, share)


def _drawn(subject: Sampling, rounds: int, seed: int) -> Rounds:
    """Draws rounds, and requires indices of units, distinct ones unless the law repeats them."""
    claim = subject.claim
    run = called(lambda *given: _listed(subject.draw(*given), rounds + 1), rounds, seed)
    if len(run) != rounds:
        number = f"{len(run)} rounds, not" if len(run) < rounds else "more rounds than"
        raise Misbehaviour(f"returns {number} {rounds}")
    indices = []
    for drawn in run:
        if array_of(drawn).dtype.kind == "b":
            raise Misbehaviour("draws booleans, not indices of units, as of np.flatnonzero")
        values = as_numbers(drawn)
        if values.ndim != 1 or not np.all(
            (values == np.floor(values)) & (values >= 0) & (values < claim.num_units)
        ):
            raise Misbehaviour(f"draws what is no list of units 0 to {claim.num_units - 1}")
        if not isinstance(claim, WithReplacement) and len(np.unique(values)) < len(values):
            raise Misbehaviour(f"draws a unit twice in a round of seed {seed}")
        indices.append(values.astype(int))
    return indices


def _listed(run: Any, most: int) -> list[Any]:
    """Lists so many rounds at most: they may have no end."""
    if not isinstance(run, Iterable):
        raise Misbehaviour(f"returns {type(run).__name__}, not a list of rounds")
    return list(islice(run, most))


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
    total = stats.binomtest(int(flat.sum()), claim.num_units * len(flat), claim.rate)
    about = "the mean size of a round"
    tests = [Test(float(total.pvalue), about, float(flat.mean()), float(law.mean()))]
    # A share of empty rounds that is too small shows whether they are drawn again.
    empty, chance = int(np.sum(flat == 0)), float(law.pmf(0))
    p_value = float(stats.binomtest(empty, len(flat), chance).pvalue)
    tests.append(Test(p_value, "the share of empty rounds", empty / len(flat), chance))
    # A largest size cuts off those above it.
    last = int(law.isf(_IN_TAIL / len(flat)))
    for most in (last - 1, last):
        above, chance = int(np.sum(flat > most)), float(law.sf(most))
        p_value = float(stats.binomtest(above, len(flat), chance).pvalue)
        what = f"the share of rounds of more than {most} units"
        tests.append(Test(p_value, what, above / len(flat), chance))
    if len(expected) > 1 and expected.min() >= 5:
        spread = float(stats.chisquare(measured, expected).pvalue)
        deviations = float(flat.std()), float(law.std())
        tests.append(Test(spread, "the standard deviation of the size of a round", *deviations))
    says = f"sizes of {len(flat)} rounds are binomial"
    return judged(subject.name, check, tests, share, says)


def _units(
    subject: Sampling, runs: list[Rounds], long: list[Rounds], units: np.ndarray, share: float
) -> Finding:
    """Tests how often each watched unit is drawn: in a round of many runs, and in all rounds."""
    rate = subject.claim.rate
    is_drawn = [
        np.array([[np.isin(units, d) for d in run] for run in part]) for part in (runs, long)
    ]
    tests = [
        _rarest(
            drawn.sum(axis=0),
            len(drawn),
            rate,
            lambda i, u: f"the share of runs that draw unit {units[u]} in round {i}",
        )
        for drawn in is_drawn
    ]
    rounds = np.concatenate([drawn.reshape(-1, len(units)) for drawn in is_drawn])
    about = "the share of rounds that draw unit {}"
    tests.append(_rarest(rounds.sum(axis=0), len(rounds), rate, lambda u: about.format(units[u])))
    if len(units) > 1:
        # The half of the units that every second round prefers, in the other rounds.
        half = np.argsort(rounds[::2].sum(axis=0), kind="stable")[len(units) // 2 :]
        count, trials = int(rounds[1::2, half].sum()), len(rounds[1::2]) * len(half)
        p_value = float(stats.binomtest(count, trials, rate).pvalue)
        what = "the rate of units that other rounds prefer"
        tests.append(Test(p_value, what, count / trials, rate))
    says = f"units are drawn at rate {rate:.4g}"
    return judged(subject.name, "sampling: rate of a unit", tests, share, says)


def _rarest(counts: np.ndarray, trials: int, chance: float, what: Callable[..., str]) -> Test:
    """Tests binomial counts together, by the one whose p-value is the smallest."""
    law = stats.binom(trials, chance)
    p_values = 2 * np.minimum(law.cdf(counts), law.sf(counts - 1))
    at = np.unravel_index(np.argmin(p_values), counts.shape)
    p_value = min(1.0, counts.size * float(p_values[at]))
    return Test(p_value, what(*at), float(counts[at]) / trials, chance)


def _seeds(subject: Sampling, runs: list[Rounds], share: float) -> Finding:
    """Tests whether two seeds draw the same units in every round."""
    claim, check = subject.claim, "sampling: seeds"
    n, pairs = claim.num_units, math.comb(len(runs), 2)
    if isinstance(claim, Poisson):
        chance = (claim.rate**2 + (1 - claim.rate) ** 2) ** (n * len(runs[0]))
    elif isinstance(claim, WithReplacement):
        chance = math.exp(math.lgamma(claim.size + 1) - claim.size * math.log(n))
    else:
        chance = 1 / math.comb(n, claim.size)
    different = len({tuple(tuple(np.sort(drawn)) for drawn in run) for run in runs})
    said = f"{len(runs)} seeds draw {different} different runs"
    if pairs * chance > share:
        return Finding(subject.name, check, "passed", f"{said}; some are equal by chance")
    verdict: Verdict = "passed" if different == len(runs) else "failed"
    return Finding(subject.name, check, verdict, said, different, len(runs))


def _pairs(
    subject: Sampling,
    runs: list[Rounds],
    units: np.ndarray,
    rng: np.random.Generator,
    share: float,
) -> Finding:
    """Tests how often two watched units are drawn together, in the first round."""
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
    drawn = np.array([np.isin(units, run[0]) for run in runs], np.float64)
    i, j = np.triu_indices(len(units), 1)
    counts = np.rint((drawn.T @ drawn)[i, j]).astype(int)

    def what(k: int) -> str:
        return f"the share of rounds that draw units {units[i[k]]} and {units[j[k]]}"

    tests = [_rarest(counts, len(runs), chance, what), _preferred(drawn, rng, share / 2)]
    says = "units are drawn together as often as the law says"
    return judged(subject.name, check, tests, share, says)


def _preferred(drawn: np.ndarray, rng: np.random.Generator, share: float) -> Test:
    """Tests whether pairs that one half of the runs prefers are preferred by the other, too.

    For small preferences of many pairs, such as those of units of different strata. The p-value is
    that of permutations of units within each round of the other half, which every law allows.
    """
    weights = np.triu(drawn[::2].T @ drawn[::2], 1)
    others = drawn[1::2]
    # Rounds with fewer than two of the units have no pair.
    others = others[others.sum(axis=1) > 1]

    def score(rounds: np.ndarray) -> float:
        return float(np.sum((rounds @ weights) * rounds))

    found, scores, as_far = score(others), list[float](), 0
    most = min(_PERMUTED, math.ceil(2 / share))
    while len(scores) < most and as_far < _AS_FAR:
        scores.append(score(rng.permuted(others, axis=1)))
        as_far += scores[-1] >= found
    p_value = as_far / len(scores) if as_far == _AS_FAR else (1 + as_far) / (1 + most)
    what = "the score of pairs of units that other runs prefer"
    return Test(p_value, what, found, float(np.mean(scores)))


def _rounds(subject: Sampling, runs: list[Rounds], long: list[Rounds], share: float) -> Finding:
    """Tests how many units are drawn in two rounds of a run, and none in two of an epoch."""
    claim, check = subject.claim, "sampling: rounds in a row"
    pairs, lags = list(combinations(range(len(runs[0])), 2)), range(1, _LAGS + 1)
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
        lags = range(batches, _LAGS + 1, batches)
    trials, expected = len(runs) * claim.num_units, claim.num_units * claim.rate**2
    tests = []
    for pair in pairs:
        again = _again(runs, pair)
        # Exact for Poisson sampling, whose units are independent; others vary less.
        p_value = float(stats.binomtest(again, trials, claim.rate**2).pvalue)
        what = f"the number of units drawn in both rounds {pair[0]} and {pair[1]}"
        tests.append(Test(p_value, what, again / len(runs), expected))
    for lag in lags:
        # No round is in two pairs.
        apart = [(i, i + lag) for i in range(len(long[0]) - lag) if i // lag % 2 == 0]
        again, rounds = sum(_again(long, pair) for pair in apart), len(apart) * len(long)
        p_value = float(stats.binomtest(again, rounds * claim.num_units, claim.rate**2).pvalue)
        what = f"the number of units drawn again {lag} rounds later"
        tests.append(Test(p_value, what, again / rounds, expected))
    return judged(subject.name, check, tests, share, "no round predicts another")


def _again(runs: list[Rounds], pair: tuple[int, int]) -> int:
    """The number of units, over all runs, that are drawn in both rounds."""
    return sum(np.intersect1d(run[pair[0]], run[pair[1]]).size for run in runs)
