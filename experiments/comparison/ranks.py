"""Compares methods over tasks and writes the tables of the page.

Means over seeds have intervals by Student's t. A method is compared with the baseline of its unit
on the same seeds, with Holm's correction over tasks; all are compared by Friedman's test and
Nemenyi's critical difference of ranks. Methods that are judged by models which ε does not cover are
in no ranks.

Source: Demšar 2006, "Statistical comparisons of classifiers over multiple data sets".
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from scipy import stats

from experiments.comparison.compare import (
    UNITS,
    Cell,
    epsilons_of,
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
SHOWN = 4.0  # The ε of tests, and of the other metrics in the tables.
NOTHING = "No cell has been run."


class Ranking(NamedTuple):
    """Methods over tasks."""

    mean_ranks: np.ndarray  # By method; 1 is best, ties share the mean of their ranks.
    p_value: float  # Friedman's test, corrected for ties; NaN below three methods or two tasks.
    p_value_f: float  # That of Iman and Davenport, which is less conservative.
    difference: float  # Nemenyi's critical difference at LEVEL; NaN below two tasks.

    @property
    def num_different(self) -> int:
        """The number of pairs that the tests tell apart."""
        if not self.p_value_f < LEVEL:
            return 0
        pairs = itertools.combinations(self.mean_ranks, 2)
        return sum(abs(a - b) >= self.difference for a, b in pairs)


def critical_difference(num_methods: int, num_tasks: int, level: float = LEVEL) -> float:
    """Computes the difference of mean ranks that Nemenyi's test takes for significant."""
    quantile = stats.studentized_range.ppf(1 - level, num_methods, np.inf) / math.sqrt(2)
    return float(quantile * math.sqrt(num_methods * (num_methods + 1) / (6 * num_tasks)))


def ranking(scores: np.ndarray) -> Ranking:
    """Ranks methods by scores `[tasks, methods]`, of which larger ones are better."""
    num_tasks, num_methods = scores.shape
    ranks = stats.rankdata(-np.nan_to_num(scores, nan=-np.inf), axis=1)
    p_value = p_value_f = difference = math.nan
    if num_tasks > 1 and num_methods > 1:
        difference = critical_difference(num_methods, num_tasks)
    if num_tasks > 1 and num_methods > 2:
        p_value = p_value_f = 1.0
        if np.ptp(ranks, axis=1).any():
            chi2, p_value = map(float, stats.friedmanchisquare(*-ranks.T))
            most = num_tasks * (num_methods - 1)
            ratio = (num_tasks - 1) * chi2 / (most - chi2) if chi2 < most else math.inf
            freedom = num_methods - 1, (num_methods - 1) * (num_tasks - 1)
            p_value_f = float(stats.f.sf(ratio, *freedom))
    return Ranking(ranks.mean(axis=0), p_value, p_value_f, difference)


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Computes a mean and the half-width of its 95 % interval; NaN for one value."""
    array = np.asarray(values, np.float64)
    if len(array) < 2:
        return float(array.mean()), math.nan
    error = array.std(ddof=1) / math.sqrt(len(array))
    return float(array.mean()), float(error * stats.t.ppf(0.975, len(array) - 1))


def signs(gains: np.ndarray) -> list[int]:
    """Tells where gains `[tasks, seeds]` are above (1) or below 0 (-1), and where neither (0).

    By Student's t over seeds with Holm's correction over tasks, at LEVEL.
    """
    means, errors = gains.mean(axis=1), stats.sem(gains, axis=1)
    ratio = np.divide(abs(means), errors, out=np.where(means == 0, 0.0, np.inf), where=errors > 0)
    p_values, found = 2 * stats.t.sf(ratio, gains.shape[1] - 1), np.zeros(len(gains), int)
    for place, i in enumerate(np.argsort(p_values)):
        if p_values[i] > LEVEL / (len(gains) - place):
            break
        found[i] = np.sign(means[i])
    return found.tolist()


def reported(cells: Sequence[Cell]) -> list[Cell]:
    """Leaves the trials of tuning out."""
    return [cell for cell in cells if cell.seed != plan()["tuning_seed"]]


def is_uncovered(cell: Cell) -> bool:
    """Whether the models whose accuracy this is are not those that ε covers."""
    return "and not" in cell.covered


Accuracies = Mapping[tuple[str, str], np.ndarray]


def complete(cells: Sequence[Cell], unit: str, epsilon: float) -> Accuracies:
    """Collects accuracy `[seeds]` by task and method where all seeds were run."""
    found: dict[tuple[str, str], dict[int, float]] = {}
    for cell in reported(cells):
        if (cell.unit, cell.epsilon) == (unit, epsilon) and cell.task in tasks():
            found.setdefault((cell.task, cell.method), {})[cell.seed] = cell.accuracy
    seeds = plan()["seeds"]
    return {k: np.array([v[s] for s in seeds]) for k, v in found.items() if {*seeds} <= v.keys()}


class Block(NamedTuple):
    """Methods that were run on the same tasks, with the baseline, at one ε."""

    tasks: tuple[str, ...]
    methods: tuple[str, ...]
    accuracy: np.ndarray  # `[tasks, methods, seeds]`.
    gains: np.ndarray  # Minus the baseline's on the same seed.

    def of(self, method: str) -> np.ndarray:
        """The gains `[tasks, seeds]` of a method."""
        return self.gains[:, self.methods.index(method)]

    def only(self, methods: Sequence[str]) -> Ranking:
        """Ranks some of the methods."""
        places = [self.methods.index(method) for method in methods]
        return ranking(self.accuracy[:, places].mean(axis=2))


def largest_block(accuracy: Accuracies, baseline: str) -> Block | None:
    """Finds the tasks and methods, the baseline among them, with the most results in common."""
    with_baseline = [task for task in tasks() if (task, baseline) in accuracy]

    def methods_of(some: Sequence[str]) -> list[str]:
        return [m for m in plan()["method"] if all((task, m) in accuracy for task in some)]

    subsets = [
        some
        for count in range(len(with_baseline), 0, -1)
        for some in itertools.combinations(with_baseline, count)
    ]
    if not subsets:
        return None
    # The first of equals has the most tasks.
    some = max(subsets, key=lambda some: len(some) * len(methods_of(some)))
    methods = methods_of(some)
    found = np.array([[accuracy[task, method] for method in methods] for task in some])
    own = found[:, [methods.index(baseline)]]
    return Block(tuple(some), tuple(methods), found, found - own)


class Compared(NamedTuple):
    """The methods of a unit at all ε."""

    unit: str
    baseline: str
    blocks: Mapping[float, Block]
    uncovered: frozenset[str]  # Methods that are judged by models which ε does not cover.

    @property
    def shown(self) -> Block | None:
        """The block of the tests."""
        return self.blocks.get(SHOWN)

    def methods(self, uncovered: bool = False) -> list[str]:
        """Lists the compared methods at the ε that is shown."""
        names = self.shown.methods if self.shown else ()
        return [name for name in names if (name in self.uncovered) == uncovered]


def compared(cells: Sequence[Cell]) -> list[Compared]:
    """Collects what is compared by unit."""
    found = []
    for unit in UNITS:
        baseline = plan()["unit"][unit]["baseline"]
        blocks = {float(e): complete(cells, unit, float(e)) for e in plan()["epsilons"]}
        largest = {e: largest_block(block, baseline) for e, block in blocks.items()}
        uncovered = frozenset(c.method for c in cells if c.unit == unit and is_uncovered(c))
        some = {e: block for e, block in largest.items() if block}
        found.append(Compared(unit, baseline, some, uncovered))
    return [each for each in found if each.shown]


def _points(mean: float, half: float) -> str:
    """Writes a gain of a share in points."""
    return f"{100 * mean:+.1f} ± {100 * half:.1f}"


def _count(names: Sequence[str]) -> str:
    return f"{len(names)} task{'s' * (len(names) != 1)}"


def _mean_gain(block: Block, method: str) -> tuple[float, float]:
    """The mean gain over tasks, and its interval over seeds."""
    return interval(block.of(method).mean(axis=0))


def _sign(mean: float, half: float) -> int:
    """Tells on which side of an interval 0 is; 0 if it is within."""
    return int(np.sign(mean)) if abs(mean) > half else 0


def which() -> str:
    """Writes which methods were better than the baseline, and which not, or were not different."""
    parts = []
    for each in compared(read_cells()):
        block, groups = each.shown, {name: [] for name in (_GROUPS[1], _BUT, *_GROUPS.values())}
        for method in each.methods():
            if method == each.baseline:
                continue
            mean, half = _mean_gain(block, method)
            of_tasks = zip(block.tasks, signs(block.of(method)), strict=True)
            worse = [task for task, sign in of_tasks if sign < 0]
            name, where = _GROUPS[_sign(mean, half)], ""
            if worse and mean > half:
                name, where = _BUT, f" (worse on {' and '.join(worse)})"
            groups[name].append((mean, f"`{method}` {_points(mean, half)}{where}"))
        rows = [
            [name, ", ".join(text for _, text in sorted(some, reverse=True))]
            for name, some in groups.items()
            if some
        ]
        head = f"unit {each.unit}, ε = {SHOWN:g}, beside `{each.baseline}`"
        where = f"{_count(block.tasks)}: {', '.join(block.tasks)}"
        parts.append(as_table([head, where], rows))
    return "\n\n".join(parts) or NOTHING


_GROUPS = {
    1: "better in the mean, and worse on no task",
    0: "not different in the mean",
    -1: "worse in the mean",
}
_BUT = "better in the mean, but worse on some task"


def tests() -> str:
    """Writes what Friedman's and Nemenyi's tests tell apart."""
    lines = []
    for each in compared(read_cells()):
        methods = each.methods()
        ranked, count = each.shown.only(methods), len(methods)
        head = f"- Unit {each.unit}: {count} methods on {_count(each.shown.tasks)}. "
        if math.isnan(ranked.p_value):
            lines.append(f"{head}There are too few for a test.")
            continue
        pairs = count * (count - 1) // 2
        lines.append(
            f"{head}Friedman p = {ranked.p_value:.2g}, Iman and Davenport p = "
            f"{ranked.p_value_f:.2g}. Nemenyi's critical difference is {ranked.difference:.1f} "
            f"ranks, which tells {ranked.num_different} of {pairs} pairs apart."
        )
    return "\n".join(lines) or NOTHING


def gains_table() -> str:
    """Writes the mean gains over the baseline by ε, the tasks won and lost, and the mean ranks."""
    parts = []
    for each in compared(read_cells()):
        heads = ["method", *(f"ε = {e:g}" for e in each.blocks), "won", "tied", "lost", "mean rank"]
        for uncovered in (False, True):
            methods, rows = each.methods(uncovered), []
            ranked = None if uncovered else each.shown.only(methods).mean_ranks
            for i, method in enumerate(methods):
                found = signs(each.shown.of(method))
                row = [f"`{method}`" + " *" * uncovered]
                for block in each.blocks.values():
                    is_there = method in block.methods and method != each.baseline
                    row.append(_points(*_mean_gain(block, method)) if is_there else "")
                row += ["" if method == each.baseline else found.count(s) for s in (1, 0, -1)]
                rows.append([*row, *([] if ranked is None else [f"{ranked[i]:.1f}"])])
            if rows:
                title = "models that ε does not cover" if uncovered else "models that ε covers"
                table = as_table(heads[:-1] if uncovered else heads, rows)
                parts.append(f"Unit {each.unit}, {title}:\n\n{table}")
        others = _elsewhere(each)
        parts += [others] if others else []
    return "\n\n".join(parts) or NOTHING


def _elsewhere(each: Compared) -> str:
    """Says over which tasks the gains at another ε are, and which methods have no ranks."""
    lines = []
    for epsilon, block in each.blocks.items():
        if block.tasks != each.shown.tasks:
            lines.append(f"At ε = {epsilon:g} the tasks are {', '.join(block.tasks)}.")
    left = [m for m in plan()["method"] if each.unit in units_of(m) and m not in each.shown.methods]
    if left:
        lines.append(f"Not run on all of these tasks: {', '.join(f'`{name}`' for name in left)}.")
    return " ".join(lines)


def sources_table() -> str:
    """Writes what the sources claim of their methods, and what the tasks say of it."""
    rows = []
    for each in compared(read_cells()):
        for method, entry in plan()["method"].items():
            if "source" not in entry or method not in each.shown.methods:
                continue
            mean, half = _mean_gain(each.shown, method)
            found = signs(each.shown.of(method))
            is_tested = each.unit in entry["tested"]
            verdict = {1: "shown", 0: "no difference", -1: "contradicted"}[_sign(mean, half)]
            rows.append(
                [
                    f"[`{method}`](../{entry['source']}/README.md)",
                    entry["claim"],
                    each.unit,
                    _points(mean, half),
                    " / ".join(str(found.count(s)) for s in (1, 0, -1)),
                    verdict if is_tested else f"not tested, since it needs {entry['needs']}",
                ]
            )
    heads = ["method", "its source says", "unit", "mean gain", "won / tied / lost", "here"]
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
    cells, parts = reported(read_cells()), []
    for task, unit in itertools.product(tasks(), UNITS):
        own = [cell for cell in cells if (cell.task, cell.unit) == (task, unit)]
        rows, epsilons = [], epsilons_of(task)
        for method in plan()["method"]:
            some = [cell for cell in own if cell.method == method]
            if not some:
                continue
            of = {e: [cell.accuracy for cell in some if cell.epsilon == e] for e in epsilons}
            main = [cell for cell in some if cell.epsilon == SHOWN]
            others = ["", "", "", ""]
            if main:
                others = [
                    _percent([cell.worst_tenth for cell in main]),
                    _percent([cell.disparity for cell in main]),
                    f"{np.mean([cell.up for cell in main]) / 1e6:.2f}",
                    f"{np.mean([cell.seconds for cell in main]):.1f}",
                ]
            star = " *" if is_uncovered(some[0]) else ""
            rows.append([f"`{method}`{star}", *map(_percent, of.values()), *others])
        if rows:
            heads = ["method", *(f"ε = {e}" for e in epsilons), "worst tenth", "disparity"]
            table = as_table([*heads, "MB up", "CPU s"], rows)
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
    return as_table(["task", "unit", "cells run", "not run", "hours of a core left", "by"], rows)


def tuning() -> str:
    """Writes what tuning cost."""
    cells, planned = read_cells(), plan()
    trials = [cell for cell in cells if cell.seed == planned["tuning_seed"]]
    others = reported(cells)
    return (
        f"Every method has {planned['trials']} settings for each task, unit and ε. So far there "
        f"were {len(trials):,} tuning runs of {sum(c.seconds for c in trials) / 3600:.2f} hours "
        f"of a core, and {len(others):,} reported runs of "
        f"{sum(c.seconds for c in others) / 3600:.2f} hours."
    )


def settings_table() -> str:
    """Writes the settings that each method tries."""
    rows = []
    for method, entry in plan()["method"].items():
        own = {**entry.get("values", {})}
        for unit in units_of(method):
            of_unit = {**own, **entry.get(unit, {}).get("values", {})}
            fixed = entry.get("set", {}) | entry.get(unit, {}).get("set", {})
            texts = [f"{key.rpartition('.')[2]} {values}" for key, values in of_unit.items()]
            times = (
                entry.get(unit, {}).get("times")
                or plan()["unit"][unit]["beside" if of_unit else "times"]
            )
            texts += [f"{key.rpartition('.')[2]} × {values}" for key, values in times.items()]
            stay = ", ".join(f"{key.rpartition('.')[2]} = {value}" for key, value in fixed.items())
            rows.append([f"`{method}`", unit, "; ".join(texts), stay])
    return as_table(["method", "unit", "tried", "fixed"], rows)


def left_out_table() -> str:
    """Writes which methods and tasks are not compared, and why."""
    planned = plan()
    rows = [[f"`{name}`", reason] for name, reason in planned["left_out"].items()]
    for task, entry in (planned["task"] | planned["larger"]).items():
        if "why" in entry:
            units = [unit for unit in UNITS if unit not in entry["units"]]
            rows.append([f"{task}, unit {', '.join(units)}", entry["why"]])
    return as_table(["not compared", "why"], rows)
