"""Noise: its law, its standard deviation by entry and cohort, and its independence.

P-values are exact for Gaussian noise, or conservative; those of standard deviations count the
kurtosis of the claimed law.
"""

import math
from collections.abc import Iterable, Iterator
from itertools import pairwise

import numpy as np
from scipy import stats

from fedjax_dp.audit.conformance.claims import Release, noise_law, stddev_of
from fedjax_dp.audit.conformance.contribution import code_of
from fedjax_dp.audit.conformance.findings import Draws, Finding, Test, Verdict, judged
from fedjax_dp.audit.conformance.subjects import Misbehaviour, View

# A share of the standard deviation that is rounding.
_ROUNDING = 1e-3
# Draws in the tails that are expected: none at all is as unlikely as 3 in 10 million.
_IN_TAILS = 15
# A probability above that of any one number, of an entry of noise, on a lattice too.
_ZERO = 0.01
# Numbers closer than this share of the standard deviation are equal, but for rounding in float32.
_EQUAL = 1e-6
# A probability above that of two equal numbers without signs, of 23 random bits.
_EQUAL_CHANCE = 2.0**-18
# The most numbers of noise that are compared with one another.
_COMPARED = 2**12
_KURTOSIS = {"gaussian": 3.0, "laplace": 6.0}
_FINDINGS = 7


def check_noise(name: str, view: View, draws: Draws, significance: float) -> Iterator[Finding]:
    """Releases rows of zeros, and other rows, under many seeds."""
    claim, share = view.claim, significance / _FINDINGS
    zeros = np.zeros((claim.rows, claim.size), np.float32)
    try:
        noise = releases(view, zeros, draws.spread())
    except Misbehaviour as wrong:
        sentence = f"the subject {wrong} on {claim.rows} rows of zeros"
        yield Finding(name, "noise: call", "failed", sentence)
        return
    yield from check_draws(name, noise, claim, share)
    yield _by_cohort(name, view, noise, draws, share)


def releases(
    view: View, rows: np.ndarray, seeds: Iterable[int], weights: np.ndarray | None = None
) -> np.ndarray:
    """Releases the same rows, of weight 1 or of these, under every seed, `[seeds, entries]`."""
    return np.stack([view(rows, seed, weights) for seed in seeds])


def check_draws(name: str, noise: np.ndarray, claim: Release, share: float) -> Iterator[Finding]:
    """Tests draws of pure noise, `[seeds, entries]`; `share` is the significance of a finding."""
    stddev = stddev_of(claim, claim.rows)
    if not np.isfinite(noise).all():
        sentence = "a release of zeros is not finite"
        yield Finding(name, "noise: standard deviation", "failed", sentence)
        return
    if stddev == 0:
        is_quiet = not noise.any()
        sentence = "no noise is claimed, and " + ("none is there" if is_quiet else "there is some")
        verdict: Verdict = "passed" if is_quiet else "failed"
        yield Finding(
            name, "noise: standard deviation", verdict, sentence, float(np.abs(noise).max()), 0.0
        )
        return
    yield _standard_deviations(name, noise, claim, share)
    yield _law(name, noise, claim, share)
    yield _entries(name, noise, claim, share)
    yield _seeds(name, noise, share)
    yield _repeated(name, noise, share)


def scale_test(noise: np.ndarray, stddev: float, law: str, what: str, centred: bool) -> Test:
    """Tests the root mean square of draws, `[seeds, entries]`, about 0 or about their means."""
    if not centred:
        noise = noise - noise.mean(axis=0)
    count = noise.size - (0 if centred else noise.shape[1])
    measured = math.sqrt(float(np.sum(noise**2)) / count)
    # Rounding may be on either side.
    nearest = min(max(measured, stddev * (1 - _ROUNDING)), stddev * (1 + _ROUNDING))
    # Freedoms of a chi-square law with the variance that this kurtosis gives.
    freedoms = 2 * count / (_KURTOSIS[law] - 1)
    statistic = freedoms * (measured / nearest) ** 2
    side = min(stats.chi2.cdf(statistic, freedoms), stats.chi2.sf(statistic, freedoms))
    return Test(2 * float(side), f"the standard deviation of {what}", measured, stddev)


def _standard_deviations(name: str, noise: np.ndarray, claim: Release, share: float) -> Finding:
    """Tests all entries together, every layer, every entry, and their means."""
    stddev, law = stddev_of(claim, claim.rows), claim.law
    ends = np.cumsum([0, *claim.layers])
    tests = [scale_test(noise, stddev, law, "the noise", True)]
    for i, (first, last) in enumerate(pairwise(ends)):
        if last > first:
            part = noise[:, first:last]
            tests += [
                scale_test(part, stddev, law, f"the noise of layer {i}", True),
                _quiet(part, f"layer {i}"),
            ]
    for j in range(claim.size):
        tests += [
            scale_test(noise[:, [j]], stddev, law, f"the noise of entry {j}", True),
            _quiet(noise[:, [j]], f"entry {j}"),
        ]
    error = stddev / math.sqrt(len(noise))
    for j, mean in enumerate(noise.mean(axis=0)):
        p_value = 2 * float(stats.norm.sf(abs(mean) / error))
        tests.append(Test(p_value, f"the mean of the noise of entry {j}", float(mean), 0.0))
    says = f"{tests[0].measured:.4g} over all entries, and as claimed in every layer and entry"
    return judged(name, "noise: standard deviation", tests, share, says)


def _quiet(part: np.ndarray, where: str) -> Test:
    """Tests how many draws have no noise in a part of the entries."""
    quiet, chance = int(np.sum(~part.any(axis=1))), _ZERO ** part.shape[1]
    p_value = float(stats.binom.sf(quiet - 1, len(part), chance))
    return Test(p_value, f"the share of draws without noise in {where}", quiet / len(part), 0.0)


def _law(name: str, noise: np.ndarray, claim: Release, share: float) -> Finding:
    """Tests the shape of the law at the measured scale: Kolmogorov and Smirnov, and its tails."""
    scale = math.sqrt(float(np.mean(noise**2)))
    check = "noise: law"
    if scale == 0:
        return Finding(name, check, "failed", "there is no noise", 0.0, claim.noise_stddev)
    says = f"{noise.size} draws follow the {claim.law} law"
    return judged(name, check, _law_tests(noise / scale, claim, ""), share, says)


def _law_tests(noise: np.ndarray, claim: Release, where: str) -> list[Test]:
    """Tests the shape of the law of draws whose standard deviation, of them, is 1."""
    law = noise_law(claim, 1.0)
    found = stats.kstest(noise.ravel(), law.cdf)
    # The scale was fitted, so the distance is smaller than that of the true law.
    what = f"the distance of the noise{where} from the {claim.law} law"
    tests = [Test(float(found.pvalue), what, float(found.statistic), 0.0)]
    chance = _IN_TAILS / max(noise.size, 4 * _IN_TAILS)
    far = int(np.sum(np.abs(noise) > law.isf(chance / 2)))
    p_value = float(stats.binomtest(far, noise.size, chance).pvalue)
    what = f"the share of the noise{where} in the tails"
    return [*tests, Test(p_value, what, far / noise.size, chance)]


def normal_scores(noise: np.ndarray) -> np.ndarray:
    """Normal scores of every column, which are independent if the columns are."""
    ranks = stats.rankdata(noise, axis=0)
    scores = stats.norm.ppf((ranks - 0.5) / len(noise))
    return (scores - scores.mean(axis=0)) / np.maximum(scores.std(axis=0), 1e-12)


def correlation(one: np.ndarray, other: np.ndarray, of: str) -> Test:
    """Tests the largest correlation of normal scores: of pairs of columns, or of all with all."""
    count, pairs = len(one), one.shape[1] * other.shape[1]
    found = one.T @ other / count
    if one is other:
        found, pairs = np.triu(found, 1), one.shape[1] * (one.shape[1] - 1) // 2
    i, j = np.unravel_index(np.argmax(np.abs(found)), found.shape)
    r = float(np.clip(found[i, j], -1, 1))
    t = abs(r) * math.sqrt((count - 2) / max(1 - r * r, 1e-300))
    p_value = min(1.0, 2 * pairs * float(stats.t.sf(t, count - 2)))
    return Test(p_value, f"the largest correlation, {of.format(i, j)},", r, 0.0)


def _entries(name: str, noise: np.ndarray, claim: Release, share: float) -> Finding:
    """Tests whether entries are independent: correlations of pairs, and the variance of the sum."""
    check = "noise: independence of entries"
    if claim.size == 1:
        return Finding(name, check, "open", "a row has one entry")
    tests = []
    for what, numbers in (("", noise), (" without signs", np.abs(noise))):
        scores = normal_scores(numbers)
        total = scores.sum(axis=1, keepdims=True) / math.sqrt(claim.size)
        about = f"the sum of all entries' scores{what}"
        tests += [
            correlation(scores, scores, "of entries {} and {}" + what),
            scale_test(total, 1.0, "gaussian", about, True),
        ]
    return judged(name, check, tests, share, "no two entries are correlated, nor their sizes")


def _seeds(name: str, noise: np.ndarray, share: float) -> Finding:
    """Tests whether seeds that follow one another draw independent noise, and no noise twice."""
    check = "noise: independence of seeds"
    distinct = len(np.unique(noise, axis=0))
    # Of one entry, float32 has equal numbers by chance.
    chance = math.comb(len(noise), 2) * _ZERO ** noise.shape[1]
    if distinct < 0.9 * len(noise) or (distinct < len(noise) and chance <= share):
        sentence = f"{len(noise)} seeds draw {distinct} different noises"
        return Finding(name, check, "failed", sentence, distinct, len(noise))
    scores = normal_scores(noise)
    tests = [
        correlation(
            scores[:-lag], scores[lag:], f"of entries {{}} and {{}} of seeds that differ by {lag}"
        )
        for lag in (1, 2)
    ]
    return judged(name, check, tests, share, "noise of one seed does not predict that of the next")


def _repeated(name: str, noise: np.ndarray, share: float) -> Finding:
    """Tests how many numbers are equal but for signs, which are few unless all are on a lattice."""
    check = "noise: repeated numbers"
    scale = math.sqrt(float(np.mean(noise**2)))
    if scale == 0:
        return Finding(name, check, "failed", "there is no noise")
    compared = noise[:, : max(1, _COMPARED // len(noise))]
    gaps = np.diff(np.sort(np.abs(compared).ravel())) / scale
    ends = np.flatnonzero(np.concatenate([[True], gaps > _EQUAL, [True]]))
    copies, pairs = np.diff(ends).astype(float), math.comb(compared.size, 2)
    equal, apart = int(np.sum(copies * (copies - 1) / 2)), gaps[gaps > _EQUAL]
    chance, says = _EQUAL_CHANCE, "noise is of many bits"
    step = float(apart.min(initial=1.0))
    # Most gaps of a lattice are multiples of its step; two draws are equal less often than it.
    if np.mean(np.abs(apart / step - np.round(apart / step)) < 0.1) > 0.95:
        chance = min(1.0, max(chance, step))
        says += ", or on a lattice"
    p_value = float(stats.binom.sf(equal - 1, pairs, chance))
    what = "the share of pairs of numbers of noise that are equal, but for signs,"
    return judged(name, check, [Test(p_value, what, equal / pairs, chance)], share, says)


def _by_cohort(name: str, view: View, noise: np.ndarray, draws: Draws, share: float) -> Finding:
    """Tests the standard deviation with one, half and no rows, and with rows that are not zero."""
    claim, check = view.claim, "noise: whoever replies"
    if claim.noise_stddev == 0:
        return Finding(name, check, "open", "no noise is claimed")
    zeros = np.zeros((claim.rows, claim.size), np.float32)
    broken = zeros.copy()
    broken[0] = np.nan
    length = claim.clip_norm / (2 * (claim.size if claim.norm == "l1" else math.sqrt(claim.size)))
    opposite = np.where(np.arange(claim.rows) % 2, 1e6, -1e6)[:, None] + zeros
    cohorts = {
        "no rows": zeros[:0],
        "1 row": zeros[:1],
        f"{claim.rows // 2} rows": zeros[: claim.rows // 2],
        f"{2 * claim.rows} rows": np.concatenate([zeros, zeros]),
        "a row of NaN": broken,
        "one large row": np.concatenate([np.full_like(zeros[:1], 1e6), zeros[1:]]),
        "rows of half the clip norm": np.full_like(zeros, length),
        "rows that are all large": np.full_like(zeros, 1e6),
        "large rows that cancel": opposite.astype(np.float32),
    }
    weights = {what: np.ones(len(rows), np.float32) for what, rows in cohorts.items()}
    if view.has_weights:
        for weight in (0.0, 100.0):
            what = f"rows of weight {weight:g}"
            cohorts[what], weights[what] = zeros, np.full(claim.rows, weight, np.float32)
    about = f"the noise on {claim.rows} rows"
    tests = [scale_test(noise, stddev_of(claim, claim.rows), claim.law, about, True)]
    untried, examples, whole = [], dict[str, str](), []
    for what, rows in cohorts.items():
        smaller = len(rows) < claim.rows
        try:
            drawn = releases(view, rows, draws.block(), weights[what])
            if not np.isfinite(drawn).all():
                raise Misbehaviour("releases what is not finite")
        except Misbehaviour as wrong:
            # Where the number of rows is public it need not vary, and it may have a limit.
            if len(rows) == claim.rows or (smaller and claim.relation == "add_remove"):
                sentence = f"the subject {wrong} on {what}"
                return Finding(name, check, "failed", sentence, example=code_of(rows))
            untried.append(what)
            continue
        about = f"the noise on {what}"
        examples[f"the standard deviation of {about}"] = code_of(rows)
        tests.append(scale_test(drawn, stddev_of(claim, len(rows)), claim.law, about, False))
        whole.append((drawn - drawn.mean(axis=0)) / max(float(drawn.std()), 1e-300))
    if whole:
        tests += _law_tests(np.stack(whole), claim, " of all cohorts")
    says = f"the standard deviation is the claimed one for {len(whole) + 1} cohorts"
    says += f"; not for {', '.join(untried)}" if untried else ""
    return judged(name, check, tests, share, says, examples)
