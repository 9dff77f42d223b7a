"""What the chapter finds on its convex problems, against our curves: holds or not, with numbers."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

# A gap counts as reached from here on.
TOLERANCE = 2e-6
# Of "early" in figure 2.2, from 0.
EARLY = 4
# Where the rounding of float32 ends what can be distinguished.
FLOOR = 1e-9

Row = tuple[str, str, str, str, bool]


def first_rounds(gap: np.ndarray) -> int:
    """The first round, from 0, whose gap is that of the last round."""
    return int(np.argmax(np.abs(gap - gap[-1]) < TOLERANCE))


class Curves:
    """The curves of results by figure and problem."""

    def __init__(self, results: Sequence[Mapping[str, Any]]) -> None:
        self.results = results

    def of(self, figure: str, problem: str, part: str = "") -> dict[str, Any]:
        """Curves by label; those whose group's name holds `part`."""
        found: dict[str, Any] = {}
        for result in self.results:
            group = result["group"]
            of = group["figure"], group["setting"]["problem"]
            if of == (figure, problem) and part in group["name"]:
                found |= result["curves"]
        return found

    def figures(self) -> set[str]:
        """Names the figures that there are curves of."""
        return {result["group"]["figure"] for result in self.results}


def _end(curve: Mapping[str, Any], kind: str = "gap") -> float:
    return max(curve[kind][-1], 0.0)


def _text(values: Mapping[str, float]) -> str:
    return ", ".join(f"{label}: {value:.3g}" for label, value in values.items())


def _is_sorted(values: Sequence[float], slack: float = 1.0) -> bool:
    return all(b >= a * slack - FLOOR for a, b in pairwise(values))


def _trade_off(curves: Curves, problem: str) -> list[Row]:
    rows = []
    for part, what, turned in (("-k", "k", False), ("-eta", "η", True)):
        own = curves.of("2.2", problem, f"2.2-{problem}{part}")
        labels = list(own)[::-1] if turned else list(own)
        early = {label: own[label]["gap"][EARLY] for label in labels}
        ends = {label: _end(own[label]) for label in labels}
        rows += [
            (
                "2.2",
                problem,
                f"larger {what}: smaller gap after {EARLY + 1} rounds",
                _text(early),
                _is_sorted(list(early.values())[::-1]),
            ),
            (
                "2.2",
                problem,
                f"larger {what}: larger gap at the end",
                _text(ends),
                _is_sorted(list(ends.values())),
            ),
        ]
    return rows


def _lines(curves: Curves, problem: str) -> list[Row]:
    by_line: dict[str, list[float]] = {}
    for label, curve in curves.of("2.4", problem).items():
        by_line.setdefault(label.split(", ")[1], []).append(_end(curve))
    spread = {line: max(ends) / min(ends) for line, ends in by_line.items()}
    means = [float(np.mean(ends)) for ends in by_line.values()]
    across = max(means) / min(means)
    rows: list[Row] = [
        (
            "2.4",
            problem,
            "the final gap is about a function of η (k − 1)",
            f"largest over smallest gap on a line: {_text(spread)}; across lines {across:.3g}",
            max(spread.values()) < 3 and max(spread.values()) < across / 5,
        )
    ]
    plain = curves.of("2.4 plain", problem)
    if plain:
        mixed = curves.of("2.4", problem, "-k2")
        off = max(abs(_end(plain[x]) - _end(mixed[x])) / _end(plain[x]) for x in plain)
        text = f"largest relative difference of the gaps of k = 2: {off:.2g}"
        rows.append(
            ("2.4", problem, "6,000 plain rounds end where accelerated ones do", text, off < 0.01)
        )
    return rows


def _schedules(curves: Curves, figure: str, problem: str) -> list[Row]:
    method = "FedProx" if figure == "2.5" else "FedRP"
    own = {
        label.partition(", ")[2]: curve
        for label, curve in curves.of("2.5", problem).items()
        if label.startswith(method)
    }
    ends = {label: _end(curve) for label, curve in own.items()}
    averages = {label: _end(curve, "average") for label, curve in own.items()}
    constant, inverse = own["constant"], own["inverse"]
    fast = {label: curve["gap"][EARLY] for label, curve in own.items()}
    hurt = {label: averages[label] / max(ends[label], FLOOR) for label in own}
    return [
        (
            figure,
            problem,
            f"a constant step is fastest at first (gap after {EARLY + 1} rounds)",
            _text(fast),
            fast["constant"] <= min(fast.values()) * 1.01,
        ),
        (
            figure,
            problem,
            "a constant step stays at a biased value",
            f"reached in round {constant['reached']}, gap {ends['constant']:.3g}",
            ends["constant"] > 1e-3 and constant["reached"] < constant["rounds"][-1] / 2,
        ),
        (
            figure,
            problem,
            "1/t continues towards the minimum, the lowest of all",
            f"{_text(ends)}; the last halving of 1/t's rounds brings a factor "
            f"{_halving(inverse):.3g}",
            ends["inverse"] <= min(ends.values()) * 1.01 and _halving(inverse) > 2,
        ),
        (
            figure,
            problem,
            "averaging does not hurt (gap of the average over that of the model, at the end)",
            _text(hurt),
            max(hurt.values()) < 1.5,
        ),
    ]


def _halving(curve: Mapping[str, Any]) -> float:
    """The gap after half the rounds over that after all."""
    half = int(np.searchsorted(curve["rounds"], curve["rounds"][-1] / 2))
    return curve["gap"][half] / max(curve["gap"][-1], FLOOR)


def _heterogeneity(curves: Curves) -> list[Row]:
    by_sigma: dict[float, dict[str, float]] = {}
    measures: dict[float, float] = {}
    for result in curves.results:
        group = result["group"]
        if group["figure"] == "2.7":
            ends = {label: _end(curve) for label, curve in result["curves"].items()}
            sigma = group["setting"]["sigma"]
            by_sigma.setdefault(sigma, {}).update(ends)
            measures[sigma] = 4 * result["H"]
    best = ("FedSplit", "FedPi", "FedAvg, k = 1")
    rows: list[Row] = []
    for sigma, ends in by_sigma.items():
        others = [value for label, value in ends.items() if label not in best]
        rows.append(
            (
                "2.7",
                "ls",
                f"σ = {sigma:g}, H = {measures[sigma]:.4g} (doubled gradient): FedSplit, FedPi and "
                "FedAvg with k = 1 come closest",
                _text(ends),
                max(ends[label] for label in best) < min(others),
            )
        )
    for label in next(iter(by_sigma.values())):
        ends = {f"σ = {sigma:g}": own[label] for sigma, own in by_sigma.items()}
        worse = list(ends.values())
        rows.append(
            (
                "2.7",
                "ls",
                f"{label} gets worse with H",
                _text(ends),
                all(b > 2 * a for a, b in pairwise(worse)),
            )
        )
    return rows


def _acceleration(curves: Curves, problem: str) -> list[Row]:
    rows: list[Row] = []
    gains = {}
    slow, fast = (
        curves.of("2.8", problem, f"-prox-{m}") | curves.of("2.8", problem, f"-fedavg-{m}")
        for m in (0, 2)
    )
    for label in slow:
        a, b = slow[label]["reached"], fast[label]["reached"]
        gains[label] = a / b
        off = abs(_end(slow[label]) - _end(fast[label]))
        rows.append(
            (
                "2.8",
                problem,
                f"{label} is faster with τ = 2 and ends at the same gap",
                f"rounds {a} → {b}; gaps {_end(slow[label]):.4g} and {_end(fast[label]):.4g}",
                b < a and off < max(TOLERANCE, 0.01 * _end(slow[label])),
            )
        )
    least = min(gains[label] for label in ("FedAvg", "FedProx", "FedRP"))
    text = f"rounds without over rounds with: {_text(gains)}"
    is_so = least > max(gains["FedSplit"], gains["FedPi"])
    rows.append(("2.8", problem, "it helps FedAvg, FedProx and FedRP most", text, is_so))
    return rows


def _parts(curves: Curves, problem: str) -> list[Row]:
    rows: list[Row] = []
    whole = curves.of("2.8", problem, "-fedavg-0") | curves.of("2.8", problem, "-prox-0")
    for share in ("0.5", "0.7"):
        own = curves.of("B.1", problem, f"-{share}")
        ends = {label: _end(curve) for label, curve in own.items()}
        worse = {label: ends[label] - _end(whole[label]) for label in own if label in whole}
        rows.append(
            (
                "B.1",
                problem,
                f"participation {share}: all get worse, FedSplit most (gap more than with all)",
                _text(worse),
                bool(worse)
                and min(worse.values()) > -FLOOR
                and max(worse, key=lambda label: worse[label]) == "FedSplit",
            )
        )
    own = curves.of("B.2", problem)
    if own:
        ends = {label: _end(curve) for label, curve in own.items()}
        full = {label: _end(whole[label]) for label in own if label in whole}
        same = sorted(ends, key=ends.__getitem__) == sorted(full, key=full.__getitem__)
        text = f"with 5 batches {_text(ends)}; with whole ones {_text(full)}"
        rows.append(("B.2", problem, "the same order with a floor of noise", text, same))
    return rows


def rows_of(results: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Compares every finding that there are curves for."""
    for result in results:
        for curve in result["curves"].values():
            curve["rounds"] = result["rounds"]
    curves, rows = Curves(results), []
    figures = curves.figures()
    for problem in sorted({r["group"]["setting"]["problem"] for r in results}):
        has = {f for f in figures if curves.of(f, problem)}
        rows += _trade_off(curves, problem) if "2.2" in has else []
        rows += _lines(curves, problem) if "2.4" in has else []
        for figure in ("2.5", "2.6"):
            rows += _schedules(curves, figure, problem) if "2.5" in has else []
        rows += _acceleration(curves, problem) if "2.8" in has else []
        rows += _parts(curves, problem) if "B.1" in has and "2.8" in has else []
    rows += _heterogeneity(curves) if "2.7" in figures else []
    return sorted(rows, key=lambda row: (row[0], row[1] != "ls"))


def as_markdown(results: Sequence[Mapping[str, Any]]) -> str:
    """Writes the findings as a table."""
    lines = ["| figure | problem | the chapter's finding | our number | |", "|---|---|---|---|---|"]
    for figure, problem, finding, number, holds in rows_of(results):
        verdict = "holds" if holds else "does not hold"
        lines.append(f"| {figure} | {problem.upper()} | {finding} | {number} | {verdict} |")
    return "\n".join(lines) + "\n"
