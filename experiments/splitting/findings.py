"""What the chapter finds on its convex problems, against our curves, with numbers.

A row's verdict is "holds", "does not hold", or why our curves cannot decide it; empty where the
chapter shows curves and says nothing of them.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from experiments.splitting.curves import curve_of
from experiments.splitting.grid import CONSTANT, FIRST, PERIOD

# A gap counts as reached from here on.
TOLERANCE = 2e-6
# Of "early" in figures 2.2 and 2.6, from 0.
EARLY = 4
# "In a few hundred rounds", of figure 2.5.
FEW_HUNDRED = 400
# A curve is above its floor while its gap is more than so many times the last one, and has not
# converged if the second half of its rounds divides the gap by more.
ABOVE = 2.0
# Where the rounding of float32 ends what can be distinguished.
FLOOR = 1e-9
# Those that acceleration helps most, by the chapter.
HELPED = ("FedAvg", "FedProx", "FedRP")

Row = tuple[str, str, str, str, str]


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


def _verdict(holds: bool) -> str:
    return "holds" if holds else "does not hold"


def _text(values: Mapping[str, float]) -> str:
    return ", ".join(f"{label}: {value:.3g}" for label, value in values.items())


def _is_sorted(values: Sequence[float], slack: float = 1.0) -> bool:
    return all(b >= a * slack - FLOOR for a, b in pairwise(values))


def _trade_off(curves: Curves, problem: str) -> list[Row]:
    """Compares early gaps of curves above their floors, and last gaps of those that converged."""
    rows = []
    for part, what, turned in (("-k", "k", False), ("-eta", "η", True)):
        own = curves.of("2.2", problem, f"2.2-{problem}{part}")
        labels = list(own)[::-1] if turned else list(own)
        early = {
            label: own[label]["gap"][EARLY]
            for label in labels
            if own[label]["gap"][EARLY] > ABOVE * _end(own[label])
        }
        ends = {label: _end(own[label]) for label in labels if _has_converged(own[label])}
        left = ", ".join(label for label in labels if label not in early) or "none"
        falling = ", ".join(label for label in labels if label not in ends) or "none"
        rows += [
            (
                "2.2",
                problem,
                f"larger {what}: smaller gap after {EARLY + 1} rounds",
                f"{_text(early)}; at its floor by then: {left}",
                _verdict(_is_sorted(list(early.values())[::-1])),
            ),
            (
                "2.2",
                problem,
                f"larger {what}: larger gap at the end",
                f"{_text(ends)}; not converged: {falling}",
                _verdict(_is_sorted(list(ends.values()))),
            ),
        ]
    return rows


def _has_converged(curve: Mapping[str, Any]) -> bool:
    return _end(curve) <= FLOOR or _halving(curve) < ABOVE


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
            _verdict(max(spread.values()) < 3 and max(spread.values()) < across / 5),
        )
    ]
    plain = curves.of("2.4 plain", problem)
    if plain:
        mixed = curves.of("2.4", problem, "-k2")
        off = max(abs(_end(plain[x]) - _end(mixed[x])) / _end(plain[x]) for x in plain)
        text = f"largest relative difference of the gaps of k = 2: {off:.2g}"
        finding = "6,000 plain rounds end where accelerated ones do"
        rows.append(("2.4", problem, finding, text, _verdict(off < 0.01)))
    return rows


def _schedules(curves: Curves, figure: str, problem: str) -> list[Row]:
    """Compares the constant step, below the schedules' first, with each of them."""
    method = "FedProx" if figure == "2.5" else "FedRP"
    own, longer = (
        {
            label.partition(", ")[2]: curve
            for label, curve in curves.of(name, problem).items()
            if label.startswith(method)
        }
        for name in ("2.5", "2.5 longer")
    )
    ends = {label: _end(curve) for label, curve in own.items()}
    constant, inverse = own["constant"], own["inverse"]
    others = [label for label in own if label != "constant"]
    reached = {label: curve["reached"] for label, curve in own.items()}
    if figure == "2.5":
        fast = (
            f"a constant step converges first, within {FEW_HUNDRED} rounds",
            ", ".join(f"{label}: round {round}" for label, round in reached.items()),
            reached["constant"] < min(FEW_HUNDRED, *(reached[label] for label in others)),
        )
    else:
        early = {label: curve["gap"][EARLY] for label, curve in own.items()}
        fast = (
            f"a constant step is fastest at first (gap after {EARLY + 1} rounds)",
            _text(early),
            early["constant"] <= min(early.values()) * 1.01,
        )
    # The limit of a step is the worse the larger it is: a schedule is better once it is shorter.
    latest = own | longer
    rounds = {label: latest[label]["rounds"][-1] for label in others}
    last = {r: FIRST[problem] * float(curve_of(r, PERIOD)(rounds[r])) for r in others}
    limits = {label: _end(curve) for label, curve in latest.items()}
    after = "".join(f"; {label} after {rounds[label] + 1:,} rounds" for label in longer)
    worse = [label for label in others if limits[label] >= limits["constant"]]
    is_early = bool(worse) and min(last[label] for label in worse) > CONSTANT[problem]
    better = "before convergence" if is_early else _verdict(not worse)
    hurt = {
        kind: {label: _end(own[label], kind) / max(ends[label], FLOOR) for label in own}
        for kind in ("average", "late")
    }
    return [
        (figure, problem, fast[0], fast[1], _verdict(fast[2])),
        (
            figure,
            problem,
            "a constant step stays at a biased value",
            f"reached in round {constant['reached']}, gap {ends['constant']:.3g}",
            _verdict(
                ends["constant"] > 1e-3 and constant["reached"] < constant["rounds"][-1] / 2,
            ),
        ),
        (
            figure,
            problem,
            "schedules end at better values than it",
            f"{_text(limits)}; last steps {_text(last)}, the constant one "
            f"{CONSTANT[problem]:g}{after}",
            better,
        ),
        (
            figure,
            problem,
            "1/t continues towards the minimum, the lowest of all",
            f"{_text(ends)}; the last halving of 1/t's rounds brings a factor "
            f"{_halving(inverse):.3g}",
            _verdict(ends["inverse"] <= min(ends.values()) * 1.01 and _halving(inverse) > 2),
        ),
        (
            figure,
            problem,
            "averaging does not hurt (gap of the average over that of the model, at the end)",
            f"{_text(hurt['average'])}; of the average of the later half: {_text(hurt['late'])}",
            _verdict(max(hurt["average"].values()) < 1.5),
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
                _verdict(max(ends[label] for label in best) < min(others)),
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
                _verdict(all(b > 2 * a for a, b in pairwise(worse))),
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
                _verdict(b < a and off < max(TOLERANCE, 0.01 * _end(slow[label]))),
            )
        )
    text = f"rounds without over rounds with: {_text(gains)}"

    def leads(more: int) -> bool:
        """Whether the three lead if theirs take so many rounds more, and others so many fewer."""
        helped = [slow[x]["reached"] / max(fast[x]["reached"] + more, 1) for x in HELPED]
        rest = [x for x in slow if x not in HELPED]
        others = [slow[x]["reached"] / max(fast[x]["reached"] - more, 1) for x in rest]
        return min(helped) > max(others)

    verdict = _verdict(leads(0)) if leads(1) == leads(-1) else "within a round"
    rows.append(("2.8", problem, "it helps FedAvg, FedProx and FedRP most", text, verdict))
    return rows


def _parts(curves: Curves, problem: str) -> list[Row]:
    """Lists what the captions of B.1 and B.2 announce; they say nothing of the outcome."""
    rows: list[Row] = []
    whole = curves.of("2.8", problem, "-fedavg-0") | curves.of("2.8", problem, "-prox-0")
    for share in ("0.5", "0.7"):
        own = curves.of("B.1", problem, f"-{share}")
        ends = {label: _end(curve) for label, curve in own.items()}
        rows.append(("B.1", problem, f"participation {share}", f"last gaps {_text(ends)}", ""))
    own = curves.of("B.2", problem)
    if own:
        ends = {label: _end(curve) for label, curve in own.items()}
        full = {label: _end(whole[label]) for label in own if label in whole}
        text = f"last gaps with 5 batches {_text(ends)}; with whole ones {_text(full)}"
        rows.append(("B.2", problem, "five mini-batches", text, ""))
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
    for figure, problem, finding, number, verdict in rows_of(results):
        lines.append(f"| {figure} | {problem.upper()} | {finding} | {number} | {verdict} |")
    return "\n".join(lines) + "\n"
