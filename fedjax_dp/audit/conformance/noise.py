"""Noise: its law, its standard deviation by entry and cohort, and its independence.

P-values are exact for Gaussian noise, or conservative; those of standard deviations count the
kurtosis of the claimed law.
"""

import math
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
from scipy import stats

from fedjax_dp.audit.conformance.claims import Release, noise_law, stddev_of
from fedjax_dp.audit.conformance.findings import Draws, Finding, Test, Verdict, judged
from fedjax_dp.audit.conformance.subjects import Misbehaviour, View

# A share of the standard deviation that is rounding.
_ROUNDING = 1e-3
# The most entries that are compared in pairs.
_PAIRED = 12
_KURTOSIS = {"gaussian": 3.0, "laplace": 6.0}
_FINDINGS = 7


def check_noise(name: str, view: View, draws: Draws, significance: float) -> Iterator[Finding]:
    """Releases rows of zeros, and other rows, under many seeds."""
    claim, share = view.claim, significance / _FINDINGS
    zeros = np.zeros((claim.rows, claim.size), np.float32)
    try:
        noise = releases(view, zeros, draws.block())
    except Misbehaviour as wrong:
        sentence = f"the subject {wrong} on {claim.rows} rows of zeros"
        yield Finding(name, "noise: call", "failed", sentence)
        return
    yield from check_draws(name, noise, claim, share)
    yield _by_cohort(name, view, noise, draws, share)


def releases(view: View, rows: np.ndarray, seeds: range) -> np.ndarray:
    """Releases the same rows under every seed, `[seeds, entries]`."""
    return np.stack([view(rows, seed) for seed in seeds])


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
            tests.append(
                scale_test(noise[:, first:last], stddev, law, f"the noise of layer {i}", True)
            )
    for j in range(claim.size):
        tests.append(scale_test(noise[:, [j]], stddev, law, f"the noise of entry {j}", True))
    error = stddev / math.sqrt(len(noise))
    for j, mean in enumerate(noise.mean(axis=0)):
        p_value = 2 * float(stats.norm.sf(abs(mean) / error))
        tests.append(Test(p_value, f"the mean of the noise of entry {j}", float(mean), 0.0))
    says = f"{tests[0].measured:.4g} over all entries, and as claimed in every layer and entry"
    return judged(name, "noise: standard deviation", tests, share, says)


def _law(name: str, noise: np.ndarray, claim: Release, share: float) -> Finding:
    """Tests the shape of the law, at the measured scale, by Kolmogorov and Smirnov."""
    scale = math.sqrt(float(np.mean(noise**2)))
    check = "noise: law"
    if scale == 0:
        return Finding(name, check, "failed", "there is no noise", 0.0, claim.noise_stddev)
    found = stats.kstest(noise.ravel(), noise_law(claim, scale).cdf)
    # The scale was fitted, so the distance is smaller than that of the true law.
    what = f"the distance of the noise from the {claim.law} law"
    test = Test(float(found.pvalue), what, float(found.statistic), 0.0)
    return judged(name, check, [test], share, f"{noise.size} draws follow the {claim.law} law")


def _ranks(noise: np.ndarray) -> np.ndarray:
    """Normal scores of every column, which are independent if the columns are."""
    ranks = stats.rankdata(noise, axis=0)
    scores = stats.norm.ppf((ranks - 0.5) / len(noise))
    return (scores - scores.mean(axis=0)) / np.maximum(scores.std(axis=0), 1e-12)


def _correlation(one: np.ndarray, other: np.ndarray, what: str) -> Test:
    """Tests the correlation of normal scores."""
    count = len(one)
    r = float(np.clip(np.mean(one * other), -1, 1))
    t = abs(r) * math.sqrt((count - 2) / max(1 - r * r, 1e-300))
    return Test(2 * float(stats.t.sf(t, count - 2)), what, r, 0.0)


def _entries(name: str, noise: np.ndarray, claim: Release, share: float) -> Finding:
    """Tests whether entries are independent: correlations of pairs, and the variance of the sum."""
    check = "noise: independence of entries"
    if claim.size == 1:
        return Finding(name, check, "open", "a row has one entry")
    scores = _ranks(noise)
    some = np.unique(np.linspace(0, claim.size - 1, min(claim.size, _PAIRED)).astype(int))
    tests = [
        _correlation(scores[:, i], scores[:, j], f"the correlation of entries {i} and {j}")
        for i in some
        for j in some
        if i < j
    ]
    tests.append(_total(scores, "the standard deviation of the sum of all entries' scores"))
    return judged(name, check, tests, share, "no two entries are correlated")


def _total(scores: np.ndarray, what: str) -> Test:
    """Tests the variance of the sum of independent normal scores, `[seeds, entries]`."""
    size = scores.shape[1]
    return scale_test(
        scores.sum(axis=1, keepdims=True) / math.sqrt(size), 1.0, "gaussian", what, True
    )


def _seeds(name: str, noise: np.ndarray, share: float) -> Finding:
    """Tests whether seeds that follow one another draw independent noise, and no noise twice."""
    check = "noise: independence of seeds"
    distinct = len(np.unique(noise, axis=0))
    if distinct < 0.9 * len(noise):
        sentence = f"{len(noise)} seeds draw {distinct} different noises"
        return Finding(name, check, "failed", sentence, distinct, len(noise))
    scores = _ranks(noise)
    tests = [
        _correlation(
            scores[:-lag, j], scores[lag:, j], f"the correlation of entry {j} at lag {lag}"
        )
        for lag in (1, 2)
        for j in range(noise.shape[1])
    ]
    return judged(name, check, tests, share, "noise of one seed does not predict that of the next")


def _by_cohort(name: str, view: View, noise: np.ndarray, draws: Draws, share: float) -> Finding:
    """Tests the standard deviation with one, half and no rows, and with rows that are not zero."""
    claim, check = view.claim, "noise: whoever replies"
    if claim.noise_stddev == 0:
        return Finding(name, check, "open", "no noise is claimed")
    zeros = np.zeros((claim.rows, claim.size), np.float32)
    broken = zeros.copy()
    broken[0] = np.nan
    opposite = np.where(np.arange(claim.rows) % 2, 1e6, -1e6)[:, None] + zeros
    cohorts = {
        "no rows": zeros[:0],
        "1 row": zeros[:1],
        f"{claim.rows // 2} rows": zeros[: claim.rows // 2],
        f"{2 * claim.rows} rows": np.concatenate([zeros, zeros]),
        "a row of NaN": broken,
        "rows that are all large": np.full_like(zeros, 1e6),
        "large rows that cancel": opposite.astype(np.float32),
    }
    tests = [scale_test(noise, stddev_of(claim, claim.rows), claim.law, f"{claim.rows} rows", True)]
    untried = []
    for what, rows in cohorts.items():
        smaller = len(rows) < claim.rows
        try:
            drawn = releases(view, rows, draws.block())
            if not np.isfinite(drawn).all():
                raise Misbehaviour("releases what is not finite")
        except Misbehaviour as wrong:
            # Where the number of rows is public it need not vary, and it may have a limit.
            if len(rows) == claim.rows or (smaller and claim.relation == "add_remove"):
                return Finding(name, check, "failed", f"the subject {wrong} on {what}")
            untried.append(what)
            continue
        about = f"the noise on {what}"
        tests.append(scale_test(drawn, stddev_of(claim, len(rows)), claim.law, about, False))
    says = f"the standard deviation is the claimed one for {len(tests)} cohorts"
    says += f"; not for {', '.join(untried)}" if untried else ""
    return judged(name, check, tests, share, says)
