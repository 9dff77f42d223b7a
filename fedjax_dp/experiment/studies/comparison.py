"""Compares benchmarks of two versions, and separates changes from the noise of the machine."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedjax_dp.core import checks

# What has to be equal, or times are not of the same work.
_SAME = ("backend", "devices")
# One figure each, shown as a ratio alone.
_ONCE = ("compile_seconds", "peak_rss_mb", "peak_device_mb")
_LEVEL = 0.95


class Change(NamedTuple):
    """How the seconds of a round changed."""

    name: str  # The workload.
    ratio: float  # New over old, by the median of all pairs of rounds.
    low: float  # The lower end of its interval.
    high: float  # The upper end.
    verdict: str  # "faster", "slower" or "within noise".
    once: Mapping[str, float]  # Ratios of figures that were measured once, by name.


def compare(
    old: Sequence[Mapping[str, Any]], new: Sequence[Mapping[str, Any]], level: float = _LEVEL
) -> list[Change]:
    """Compares workloads with what an older benchmark measured of them.

    Each round counts in operations that the machine's matrix products do in its time, by their
    speed measured right after it, so that a slower minute of the machine is not a change. The
    interval is that of Hodges and Lehmann, which assumes no distribution: the rounds of either
    version are taken as independent, and as differing by a factor.

    Source: Hodges and Lehmann 1963; Mann and Whitney 1947 for the ranks.
    """
    checks.require(0 < level < 1, "level", "be in (0, 1)", level)
    for result in new:
        require_comparable(old, result["name"], len(result["seconds"]), level)
    before = {result["name"]: result for result in old}
    return [_change(before[result["name"]], result, level) for result in new]


def require_comparable(
    old: Sequence[Mapping[str, Any]], name: str, num_rounds: int, level: float = _LEVEL
) -> None:
    """Requires that rounds of a workload can be compared with older results."""
    before = {result["name"]: result for result in old}
    checks.one_of("NAME", name, before)
    result = before[name]
    rule = "have the seconds of each round, as `fedjax-dp bench NAME --json` writes them"
    has_rounds = "seconds" in result and "gemm_gflops" in result
    checks.require(has_rounds, f"the older results of {name}", rule, sorted(result))
    counts = len(result["seconds"]), num_rounds
    rule = f"have more rounds for an interval of {level:.0%}: 4 in both are enough for 95%"
    checks.require(_rank(*counts, level) > 0, f"results of {name}", rule, counts)


def _change(old: Mapping[str, Any], new: Mapping[str, Any], level: float) -> Change:
    name = new["name"]
    for key in _SAME:
        rule = f"be {old[key]}, as in the older results"
        checks.require(new[key] == old[key], f"{key} of {name}", rule, new[key])
    earlier, later = _work(old), _work(new)
    rank = _rank(len(earlier), len(later), level)
    ratios = np.sort(np.divide.outer(later, earlier).ravel())
    low, high = float(ratios[rank - 1]), float(ratios[-rank])
    verdict = "faster" if high < 1 else "slower" if low > 1 else "within noise"
    once = {key: new[key] / old[key] for key in _ONCE if old.get(key) and new.get(key)}
    return Change(name, float(np.median(ratios)), low, high, verdict, once)


def _work(result: Mapping[str, Any]) -> np.ndarray:
    """Returns the operations that products would have done in each round's time."""
    return np.asarray(result["seconds"]) * np.asarray(result["gemm_gflops"])


def _rank(first: int, second: int, level: float) -> int:
    """Counts the smallest, and largest, pairs that an interval leaves out, plus one; 0 if none."""
    # How many orders of two samples have a Mann-Whitney statistic of 0, 1, ...: the coefficients
    # of a Gaussian binomial.
    orders = np.zeros(first * second + 1, object)
    orders[0] = 1
    for i in range(1, first + 1):
        for j in range(len(orders) - 1, second + i - 1, -1):
            orders[j] -= orders[j - second - i]
        for j in range(i, len(orders)):
            orders[j] += orders[j - i]
    share = np.cumsum(orders) / math.comb(first + second, first)
    return int(np.sum(share.astype(float) <= (1 - level) / 2))
