"""The results of a grid for a paper: a LaTeX table, and the picture of its accuracies."""

import contextlib
import math
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy import stats

from fedjax_dp.core.decimals import shown
from fedjax_dp.core.foreign_text import in_latex
from fedjax_dp.core.titles import title_of, title_of_key
from fedjax_dp.experiment.components.keeping import has_direction, is_larger_better
from fedjax_dp.experiment.studies.sweep import Study, number_of
from fedjax_dp.privacy.reports.latex import in_math

_Rows = Sequence[Mapping[str, Any]]
_CONFIDENCE = 0.95
_MISSING = "--"
_ACCURACY = "accuracy"


def as_latex(study: Study, rows: _Rows) -> str:
    """Writes a table of the package booktabs with a line for each point, over seeds.

    Figures are means ± standard errors; ε is the largest of a point's seeds. The best figure is
    bold if it differs from that of every other point of the same ε, see `clear_best`.

    Args:
      study: the study.
      rows: the summaries of its points, as `read_summaries` returns them.

    Returns:
      The text of a LaTeX file, a floating table with its caption and label.
    """
    axes = _varied(study, rows)
    spent = [n for n in ("epsilon_record", "epsilon_client") if _has(rows, n)]
    spent = spent or [n for n in ("epsilon",) if _has(rows, n)]
    groups: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault(tuple(str(row[a]) for a in axes), []).append(row)
    points = list(groups.values())
    metrics = [m for m in study.metrics if m != "epsilon" and _has(rows, m)]
    epsilons = [tuple(_epsilon(group, name) for name in spent) for group in points]
    seeds = [len(group) for group in points]
    budgets = [axis for axis in axes if _is_budget(axis)]
    if len(set(epsilons)) >= len({tuple(row[a] for a in budgets) for row in rows}):
        # The ε of the statement stands for its budget.
        axes = [axis for axis in axes if axis not in budgets]
    columns = {
        in_latex(title_of_key(axis, study.axes)): [_setting(axis, group[0]) for group in points]
        for axis in axes
    }
    if len(set(epsilons)) > 1:
        names = [f"$\\varepsilon${_level(name, spent)}" for name in spent]
        columns |= dict(zip(names, map(list, zip(*epsilons, strict=True)), strict=True))
    if len(set(seeds)) > 1 or not metrics:
        columns["seeds"] = [str(n) for n in seeds]
    for metric in metrics:
        columns[_head(metric)] = _figures(points, metric, epsilons)
    lines = [r"\toprule", _line(columns), r"\midrule"]
    lines += [_line(cells) for cells in zip(*columns.values(), strict=True)]
    caption = _caption(study, rows, metrics, spent, epsilons, seeds)
    layout = "l" * len(axes) + "r" * (len(columns) - len(axes))
    name = re.sub(r"[^a-z0-9]+", "-", study.name.lower()).strip("-")
    table = [
        *(r"% Needs \usepackage{booktabs}.", r"\begin{table}", r"\centering"),
        *(f"\\caption{{{caption}}}", f"\\label{{tab:{name}}}"),
        *(f"\\begin{{tabular}}{{{layout}}}", *lines, r"\bottomrule", r"\end{tabular}"),
        r"\end{table}",
    ]
    return "\n".join(table) + "\n"


def clear_best(samples: Sequence[Sequence[float]], larger_is_better: bool = True) -> int | None:
    """Finds the sample whose mean is better than every other with 95 % confidence.

    Each difference of means is compared with half its interval by Welch, at the level that
    Bonferroni leaves to it. A sample of one value has no interval, and neither is better.

    Args:
      samples: values over seeds, by point.
      larger_is_better: the direction.

    Returns:
      The place of the sample, or None if no mean is apart from all others.
    """
    if len(samples) < 2 or min(map(len, samples)) < 2:
        return None
    counts = np.array([len(each) for each in samples])
    means = np.array([np.mean(each) for each in samples]) * (1 if larger_is_better else -1)
    squares = np.array([np.var(each, ddof=1) for each in samples]) / counts
    best = int(np.argmax(means))
    level = (1 - _CONFIDENCE) / 2 / (len(samples) - 1)
    for other in set(range(len(samples))) - {best}:
        pair = [best, other]
        total = squares[pair].sum()
        if total > 0:
            freedom = total**2 / np.sum(squares[pair] ** 2 / (counts[pair] - 1))
            half = stats.t.ppf(1 - level, freedom) * math.sqrt(total)
        else:
            half = 0.0
        if means[best] - means[other] <= half:
            return None
    return best


def draw(study: Study, entries: _Rows, file: pathlib.Path) -> None:
    """Draws accuracies of averaged entries: by spent ε, by a number of the grid, or by point.

    Args:
      study: the study.
      entries: as `average_over_seeds` returns them.
      file: the PNG; its PDF is beside it.

    Raises:
      MissingPackageError: without the extra `plots`.
    """
    from fedjax_dp.io import plots

    found = [entry for entry in entries if entry["metric"] == "test_accuracy"]
    if not found:
        return
    seeds = [int(entry["seeds"]) for entry in found]
    title, axes = title_of(study.name), _varied(study, found)
    by, x = _across(study, entries, found)
    rest = [axis for axis in axes if axis != by and not (by == "ε" and _is_budget(axis))]
    names = [", ".join(_named(axis, entry[axis], study) for axis in rest) for entry in found]
    if by is None:
        points = {n: (e["mean"], e["std"]) for n, e in zip(names, found, strict=True)}
        plots.save(plots.accuracy_of(points, title, seeds=seeds), file)
        return
    curves: dict[str, tuple[list[float], list[float], list[float | None]]]
    curves = {name: ([], [], []) for name in names}
    for name, at, entry in sorted(zip(names, x, found, strict=True), key=lambda each: each[1]):
        places, means, deviations = curves[name]
        places.append(at)
        means.append(entry["mean"])
        deviations.append(entry["std"])
    label = by if by == "ε" else title_of_key(by, study.axes)
    plots.save(plots.accuracy_by(curves, label, title, seeds=seeds), file)


def _across(study: Study, entries: _Rows, found: _Rows) -> tuple[str | None, list[float]]:
    """Chooses what accuracies are drawn against: ε, an axis of numbers, or None, for names."""
    axes = _varied(study, found)
    own = [axis for axis in study.axes if axis != "seed"]
    spent = {tuple(e[a] for a in own): e["mean"] for e in entries if e["metric"] == "epsilon"}
    keys = [tuple(entry[a] for a in own) for entry in found]
    if any(map(_is_budget, axes)) and all(math.isfinite(spent.get(k, math.inf)) for k in keys):
        return "ε", [spent[key] for key in keys]
    numbers = {axis: [_number(entry[axis]) for entry in found] for axis in axes}
    whole = {axis: x for axis, x in numbers.items() if None not in x}
    by = max(whole, key=lambda axis: len(set(whole[axis])), default=None)
    return by, [] if by is None else [float(value or 0) for value in whole[by]]


def _varied(study: Study, rows: _Rows) -> list[str]:
    """Lists the axes on which points differ."""
    axes = [axis for axis in study.axes if axis != "seed"]
    return [axis for axis in axes if len({str(row[axis]) for row in rows}) > 1]


def _is_budget(axis: str) -> bool:
    return axis.rpartition(".")[2] == "epsilon"


def _number(text: str) -> float | None:
    with contextlib.suppress(ValueError):
        return float(text) if math.isfinite(float(text)) else None
    return None


def _named(axis: str, value: str, study: Study) -> str:
    """Names a setting in a few words: that of a method by its value alone."""
    is_name = axis.rpartition(".")[2] == "name"
    return title_of(value) if is_name else f"{title_of_key(axis, study.axes)} {value}"


def _has(rows: _Rows, name: str) -> bool:
    return any(number_of(row, name) is not None for row in rows)


def _epsilon(group: _Rows, name: str) -> str:
    """Writes the largest ε of a point's seeds; "none" if it claims nothing at all."""
    found = [each for each in (number_of(row, name) for row in group) if each is not None]
    if not found:
        return _MISSING if _has(group, "epsilon") else "none"
    return f"${in_math(shown('epsilon', max(found)))}$" if max(found) < math.inf else r"$\infty$"


def _delta(rows: _Rows, name: str) -> str:
    """Writes the δ of what has an ε: the largest, at which every ε holds too."""
    key = name.replace("epsilon", "dp_delta")
    # Runs of older versions have one δ, of both units.
    found = [row.get(key, row.get("dp_delta")) for row in rows if row.get(name) is not None]
    deltas = {float(delta) for delta in found if delta is not None}
    if not deltas:
        return ""
    sign = "=" if len(deltas) == 1 else r"\leq"
    return rf" at $\delta {sign} {in_math(shown('dp_delta', max(deltas)))}$"


def _level(name: str, spent: Sequence[str]) -> str:
    return f" ({name.removeprefix('epsilon_')})" if len(spent) > 1 else ""


def _setting(axis: str, row: Mapping[str, Any]) -> str:
    value = str(row[axis])
    if _number(value) is not None:
        return f"${in_math(value)}$"
    return in_latex(title_of(value) if axis.rpartition(".")[2] == "name" else value)


def _head(metric: str) -> str:
    return in_latex(title_of(metric) + (" (%)" if metric.endswith(_ACCURACY) else ""))


def _figures(points: Sequence[_Rows], metric: str, epsilons: Sequence[Any]) -> list[str]:
    """Writes mean ± standard error of each point; what is clearly best of an ε is bold."""
    factor = 100.0 if metric.endswith(_ACCURACY) else 1.0
    found = [[number_of(row, metric) for row in group] for group in points]
    samples = [[factor * each for each in group if each is not None] for group in found]
    bold = set()
    for epsilon in set(epsilons) if has_direction(metric) else ():
        places = [i for i, each in enumerate(epsilons) if each == epsilon and samples[i]]
        best = clear_best([samples[i] for i in places], is_larger_better(metric))
        bold |= {places[best]} if best is not None else set()
    cells = []
    for i, values in enumerate(samples):
        if not values:
            cells.append(_MISSING)
            continue
        mean = (
            f"{np.mean(values):.2f}"
            if factor > 1
            else in_math(shown(metric, float(np.mean(values))))
        )
        text = rf"\mathbf{{{mean}}}" if i in bold else mean
        if len(values) > 1:
            error = float(np.std(values, ddof=1)) / math.sqrt(len(values))
            text += rf" \pm {error:.2f}" if factor > 1 else rf" \pm {in_math(f'{error:.2g}')}"
        cells.append(f"${text}$")
    return cells


def _caption(
    study: Study,
    rows: _Rows,
    metrics: Sequence[str],
    spent: Sequence[str],
    epsilons: Sequence[tuple[str, ...]],
    seeds: Sequence[int],
) -> str:
    """Says what is averaged, which ε and δ of which unit hold, and what is bold."""
    named = " and ".join(in_latex(title_of(m)) for m in metrics) or "results"
    least, most = min(seeds, default=1), max(seeds, default=1)
    number = f"{most}" if least == most else f"{least} to {most}"
    over = rf": mean $\pm$ standard error over {number} seeds." if most > 1 else ", one seed."
    parts = [f"{in_latex(title_of(study.name))}: {named}{over}"]
    for place, name in enumerate(spent):
        values = {each[place] for each in epsilons}
        epsilon = rf"$\varepsilon = {values.pop()[1:]}" if len(values) == 1 else r"$\varepsilon$"
        level = name.removeprefix("epsilon").lstrip("_")
        whose = f" for one {level}" if level else ""
        delta = _delta(rows, name)
        parts.append(f"Differential privacy{whose}: {epsilon}{delta}, of a single run.")
    if spent:
        parts.append("The choice of a line by these figures is not covered.")
    else:
        parts.append("No differential privacy is claimed.")
    if most > 1 and len(set(epsilons)) < len(epsilons):
        same = r" of the same $\varepsilon$" if len(set(epsilons)) > 1 else ""
        parts.append(rf"Bold: better than every other line{same} with 95\,\% confidence.")
    return " ".join(parts)


def _line(cells: Sequence[str] | Mapping[str, Any]) -> str:
    return " & ".join(cells) + r" \\"
