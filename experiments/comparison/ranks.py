"""Ranks methods over tasks and writes the tables of the page.

Ranks are compared by Friedman's test and Nemenyi's critical difference, means over seeds have
intervals by Student's t.

Source: Demšar 2006, "Statistical comparisons of classifiers over multiple data sets".
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from scipy import stats

from experiments.comparison.compare import (
    UNITS,
    Cell,
    larger,
    left_hours,
    pieces,
    plan,
    read_cells,
    tasks,
    units_of,
)
from experiments.reproduction import as_table

LEVEL = 0.05
SHOWN = 4.0  # The ε whose other metrics the tables have.
NOTHING = "No cell has been run."


class Ranking(NamedTuple):
    """Methods over tasks at one budget."""

    methods: tuple[str, ...]
    tasks: tuple[str, ...]
    mean_ranks: np.ndarray  # By method; 1 is best, ties share the mean of their ranks.
    p_value: float  # Friedman's test, corrected for ties; NaN below three methods or two tasks.
    difference: float  # Nemenyi's critical difference at LEVEL; NaN below two tasks.

    @property
    def best(self) -> int:
        """The method with the smallest mean rank."""
        return int(np.argmin(self.mean_ranks))

    @property
    def not_different(self) -> list[str]:
        """The other methods that the tests do not tell from the best."""
        limit = self.difference if self.p_value < LEVEL else math.inf
        near = self.mean_ranks - self.mean_ranks[self.best] < limit
        return [m for i, m in enumerate(self.methods) if near[i] and i != self.best]


def critical_difference(num_methods: int, num_tasks: int, level: float = LEVEL) -> float:
    """Computes the difference of mean ranks that Nemenyi's test takes for significant."""
    quantile = stats.studentized_range.ppf(1 - level, num_methods, np.inf) / math.sqrt(2)
    return float(quantile * math.sqrt(num_methods * (num_methods + 1) / (6 * num_tasks)))


def ranking(methods: Sequence[str], tasks: Sequence[str], scores: np.ndarray) -> Ranking:
    """Ranks methods by scores `[tasks, methods]`, of which larger ones are better."""
    mean_ranks = stats.rankdata(-scores, axis=1).mean(axis=0)
    num_tasks, num_methods = scores.shape
    p_value = difference = math.nan
    if num_tasks > 1 and num_methods > 1:
        difference = critical_difference(num_methods, num_tasks)
    if num_tasks > 1 and num_methods > 2:
        p_value = float(stats.friedmanchisquare(*scores.T).pvalue)
    return Ranking(tuple(methods), tuple(tasks), mean_ranks, p_value, difference)


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Computes a mean and the half-width of its 95 % interval; NaN for one value."""
    array = np.asarray(values, np.float64)
    if len(array) < 2:
        return float(array.mean()), math.nan
    error = array.std(ddof=1) / math.sqrt(len(array))
    return float(array.mean()), float(error * stats.t.ppf(0.975, len(array) - 1))


def reported(cells: Sequence[Cell]) -> list[Cell]:
    """Leaves the trials of tuning out."""
    return [cell for cell in cells if cell.seed != plan()["tuning_seed"]]


Means = Mapping[tuple[str, str], float]


def complete_means(cells: Sequence[Cell], unit: str, epsilon: float) -> Means:
    """Averages accuracy by task and method where all seeds were run."""
    found: dict[tuple[str, str], dict[int, float]] = {}
    for cell in reported(cells):
        if (cell.unit, cell.epsilon) == (unit, epsilon):
            found.setdefault((cell.task, cell.method), {})[cell.seed] = cell.accuracy
    seeds = set(plan()["seeds"])
    return {k: float(np.mean([*v.values()])) for k, v in found.items() if seeds <= v.keys()}


def rank_complete(means: Means) -> Ranking | None:
    """Ranks over the tasks that have the most methods complete; None if there are none."""
    by_task: dict[str, set[str]] = {}
    for task, method in means:
        by_task.setdefault(task, set()).add(method)
    if not by_task:
        return None
    most = max(by_task.values(), key=len)
    some = [task for task in tasks() if by_task.get(task, set()) >= most]
    methods = [method for method in plan()["method"] if method in most]
    scores = np.array([[means[task, method] for method in methods] for task in some])
    return ranking(methods, some, scores)


def _rankings(cells: Sequence[Cell]) -> dict[tuple[str, float], Ranking]:
    found = {
        (unit, float(epsilon)): rank_complete(complete_means(cells, unit, float(epsilon)))
        for unit in UNITS
        for epsilon in plan()["epsilons"]
    }
    return {key: ranked for key, ranked in found.items() if ranked is not None}


def which() -> str:
    """Writes which method to take, and from which it was not different."""
    lines = []
    for (unit, epsilon), ranked in _rankings(read_cells()).items():
        count = f"{len(ranked.tasks)} task{'s' * (len(ranked.tasks) > 1)}"
        head = f"- Unit {unit}, ε = {epsilon:g}, {count} ({', '.join(ranked.tasks)})"
        best = f"`{ranked.methods[ranked.best]}` has the best mean rank"
        figure = f"{ranked.mean_ranks[ranked.best]:.1f} of {len(ranked.methods)}"
        if math.isnan(ranked.p_value):
            lines.append(f"{head}: {best}, {figure}; too few tasks or methods for a test.")
            continue
        others = ", ".join(f"`{name}`" for name in ranked.not_different) or "none"
        test = f"Friedman p = {ranked.p_value:.2g}, critical difference {ranked.difference:.1f}"
        lines.append(f"{head}: {best}, {figure} ({test}). Not different: {others}.")
    return "\n".join(lines) or NOTHING


def ranks_table() -> str:
    """Writes the mean ranks of all methods by unit and ε."""
    ranked = _rankings(read_cells())
    if not ranked:
        return NOTHING
    rows = []
    for method in plan()["method"]:
        cells = [
            f"{r.mean_ranks[r.methods.index(method)]:.1f}" if method in r.methods else ""
            for r in ranked.values()
        ]
        rows += [[f"`{method}`", *cells]] if any(cells) else []
    return as_table(["method", *(f"{unit}, ε = {e:g}" for unit, e in ranked)], rows)


class Duel(NamedTuple):
    """A source's method and the baseline of its unit at one ε."""

    method: str
    unit: str
    epsilon: float
    # By task: the mean over seeds of the method's accuracy minus the baseline's, and the
    # half-width of its interval, where both have all seeds.
    gains: dict[str, tuple[float, float]]

    def tasks_where(self, sign: int) -> dict[str, tuple[float, float]]:
        """Selects tasks that the method won (1), lost (-1), or whose interval holds 0 (0)."""
        return {t: g for t, g in self.gains.items() if (abs(g[0]) > g[1]) * np.sign(g[0]) == sign}


def duels(cells: Sequence[Cell]) -> Iterator[Duel]:
    """Compares the methods of the sources with the baseline, on the same seeds."""
    planned = plan()
    accuracy = {(*cell[:4], cell.seed): cell.accuracy for cell in reported(cells)}
    methods = [name for name, entry in planned["method"].items() if "source" in entry]
    for unit, method, epsilon in itertools.product(UNITS, methods, planned["epsilons"]):
        gains = {}
        for task in tasks():
            ours, base = (
                [accuracy.get((task, unit, epsilon, name, seed)) for seed in planned["seeds"]]
                for name in (method, planned["unit"][unit]["baseline"])
            )
            if None not in (*ours, *base):
                gains[task] = interval(np.subtract(ours, base))
        if gains:
            yield Duel(method, unit, float(epsilon), gains)


def sources_table() -> str:
    """Writes what the sources' methods win and lose against the baseline."""
    rows = []
    for duel in duels(read_cells()):
        source = plan()["method"][duel.method]["source"]
        texts = [
            ", ".join(
                f"{task} {100 * mean:+.1f} ± {100 * half:.1f}"
                for task, (mean, half) in duel.tasks_where(sign).items()
            )
            for sign in (1, 0, -1)
        ]
        name = f"[`{duel.method}`](../{source}/README.md)"
        rows.append([name, duel.unit, f"{duel.epsilon:g}", *texts])
    heads = ["method", "unit", "ε", "wins", "ties", "losses"]
    return as_table(heads, rows) if rows else NOTHING


def larger_table() -> str:
    """Writes the tasks for a card and their hours."""
    rows = []
    for task in larger():
        left = list(left_hours(read_cells(), pieces([task])))
        cells, hours = sum(n for _, n, _ in left), sum(h for *_, h in left)
        rows.append([task, len(left), cells, f"{hours:.0f}"])
    return as_table(["task", "methods, by unit", "cells not run", "hours of a card, a guess"], rows)


def _percent(values: Sequence[float]) -> str:
    if not values:
        return ""
    mean, half = interval([100 * value for value in values])
    return f"{mean:.1f}" + ("" if math.isnan(half) else f" ± {half:.1f}")


def task_tables() -> str:
    """Writes the results of each task and unit."""
    cells, epsilons = reported(read_cells()), plan()["epsilons"]
    parts = []
    for task in tasks():
        for unit in UNITS:
            own = [cell for cell in cells if (cell.task, cell.unit) == (task, unit)]
            rows = []
            for method in plan()["method"]:
                some = [cell for cell in own if cell.method == method]
                if not some:
                    continue
                of = {e: [cell.accuracy for cell in some if cell.epsilon == e] for e in epsilons}
                main = [cell for cell in some if cell.epsilon == SHOWN]
                star = " *" if unit == "client" and some[0].models != "the shared model" else ""
                others = ["", "", "", ""]
                if main:
                    others = [
                        _percent([cell.worst_tenth for cell in main]),
                        _percent([cell.disparity for cell in main]),
                        f"{np.mean([cell.up for cell in main]) / 1e6:.2f}",
                        f"{np.mean([cell.cpu_seconds for cell in main]):.1f}",
                    ]
                seeds = len({cell.seed for cell in some})
                rows.append([f"`{method}`{star}", *map(_percent, of.values()), *others, seeds])
            if rows:
                heads = ["method", *(f"ε = {e}" for e in epsilons), "worst tenth", "disparity"]
                table = as_table([*heads, "MB up", "CPU s", "seeds"], rows)
                parts.append(f"### {task}, unit {unit}\n\n{table}")
    return "\n\n".join(parts) or NOTHING


def left_table() -> str:
    """Writes how many cells were run, and the hours of the rest."""
    cells, rows = read_cells(), []
    left = list(left_hours(cells))
    for task, unit in dict.fromkeys((piece.task, piece.unit) for piece in pieces()):
        own = [(count, hours) for piece, count, hours in left if piece[:2] == (task, unit)]
        done = sum((cell.task, cell.unit) == (task, unit) for cell in reported(cells))
        has_run = any((cell.task, cell.unit) == (task, unit) for cell in cells)
        basis = "measured runs" if has_run else "a guess"
        count, hours = sum(n for n, _ in own), sum(h for _, h in own)
        rows.append([task, unit, done, count, f"{hours:.1f}", basis])
    total = [sum(row[2] for row in rows), sum(row[3] for row in rows)]
    rows.append(["all", "", *total, f"{sum(hours for *_, hours in left):.1f}", ""])
    return as_table(["task", "unit", "cells run", "not run", "hours left", "by"], rows)


def tuning() -> str:
    """Writes what tuning cost."""
    cells, planned = read_cells(), plan()
    trials = [cell for cell in cells if cell.seed == planned["tuning_seed"]]
    others = reported(cells)
    return (
        f"Every method has {planned['trials']} settings for each task, unit and ε. So far: "
        f"{len(trials)} tuning runs of {sum(c.seconds for c in trials) / 3600:.2f} hours, "
        f"{len(others)} reported runs of {sum(c.seconds for c in others) / 3600:.2f} hours."
    )


def left_out_table() -> str:
    """Writes which methods and tasks are not compared, and why."""
    planned = plan()
    rows = [[f"`{name}`", reason] for name, reason in planned["left_out"].items()]
    for task, entry in (planned["task"] | planned["larger"]).items():
        if "why" in entry:
            units = [unit for unit in UNITS if unit not in entry["units"]]
            rows.append([f"{task}, unit {', '.join(units)}", entry["why"]])
    return as_table(["not compared", "why"], rows)


def methods_table() -> str:
    """Writes which methods are compared for which unit."""
    lists = {unit: [m for m in plan()["method"] if unit in units_of(m)] for unit in UNITS}
    rows = [[u, len(names), ", ".join(f"`{n}`" for n in names)] for u, names in lists.items()]
    return as_table(["unit", "methods", "names"], rows)
