"""Tables of a sweep: averages over seeds as CSV and Markdown."""

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any

from fedjax_dp.core.decimals import shown
from fedjax_dp.core.foreign_text import in_csv, in_markdown
from fedjax_dp.experiment.studies.sweep import Study

# Columns whose figures are of the metric that the entry names.
_OF_METRIC = ("mean", "published")


def as_csv(entries: Sequence[Mapping[str, Any]]) -> str:
    """Writes averaged entries as CSV text."""
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(map(in_csv, entries[0] if entries else ["metric"]))
    writer.writerows([in_csv(_text(entry, name, 6)) for name in entry] for entry in entries)
    return text.getvalue()


def as_grid(study: Study, entries: Sequence[Mapping[str, Any]]) -> str:
    """Writes one Markdown table for each metric, over the rows and columns of a study."""
    parts = []
    for metric in study.metrics:
        cells: dict[tuple[str, str], list[str]] = {}
        for entry in entries:
            if entry["metric"] == metric:
                key = entry[study.rows], entry[study.columns]
                cells.setdefault(key, []).append(_cell(entry, 2))
        rows, columns = (
            [name for name in study.axes[axis] if any(key[side] == name for key in cells)]
            for side, axis in enumerate((study.rows, study.columns))
        )
        if not cells:
            continue
        lines = [_line([metric, *columns]), _rule(len(columns) + 1)]
        for row in rows:
            lines.append(
                _line([row, *(" / ".join(cells.get((row, column), ["–"])) for column in columns)])
            )
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def as_list(study: Study, entries: Sequence[Mapping[str, Any]]) -> str:
    """Writes one Markdown table with a row for each point, and its metrics side by side."""
    axes = [axis for axis in study.axes if axis != "seed"]
    found: dict[tuple[str, ...], dict[str, Mapping[str, Any]]] = {}
    for entry in entries:
        found.setdefault(tuple(entry[a] for a in axes), {})[entry["metric"]] = entry
    metrics = [m for m in study.metrics if any(m in row for row in found.values())]
    lines = [_line([*axes, *metrics, "seeds"]), _rule(len(axes) + len(metrics) + 1)]
    for values, row in found.items():
        cells = [_cell(row[m], 4) if m in row else "–" for m in metrics]
        seeds = max(entry["seeds"] for entry in row.values())
        lines.append(_line([*values, *cells, str(seeds)]))
    return "\n".join(lines)


def as_rows(entries: Sequence[Mapping[str, Any]]) -> str:
    """Writes one Markdown table with a row for each entry."""
    heads = list(entries[0]) if entries else ["trial"]
    lines = [_line(heads), _rule(len(heads))]
    for entry in entries:
        lines.append(_line([_text(entry, name, 4) or "None" for name in entry]))
    return "\n".join(lines)


def _text(entry: Mapping[str, Any], name: str, digits: int) -> str:
    """Writes a figure of an entry in few digits, and other values as they are."""
    value = entry[name]
    if not isinstance(value, float):
        return "" if value is None else str(value)
    return shown(entry["metric"] if name in _OF_METRIC else name, value, digits)


def _cell(entry: Mapping[str, Any], decimals: int) -> str:
    """Writes mean, standard deviation and published number of a metric."""
    metric = entry["metric"]
    text = shown(metric, entry["mean"], decimals=decimals)
    if entry["std"] is not None:
        text += f" ± {entry['std']:.{decimals}f}"
    if entry["published"] is not None:
        text += f" ({shown(metric, entry['published'], 6)})"
    return text


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(map(in_markdown, cells))} |"


def _rule(count: int) -> str:
    return "|---" * count + "|"
