"""Tables of a sweep: averages over seeds as CSV and Markdown."""

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any

from fedjax_dp.experiment.studies.sweep import Study


def as_csv(entries: Sequence[Mapping[str, Any]]) -> str:
    """Writes averaged entries as CSV text.

    Args:
      entries: as `average_over_seeds` returns them.

    Returns:
      The text, one line for each point and metric.
    """
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(entries[0]) if entries else ["metric"])
    writer.writeheader()
    writer.writerows(
        {k: f"{v:.6g}" if isinstance(v, float) else v for k, v in entry.items()}
        for entry in entries
    )
    return text.getvalue()


def as_grid(study: Study, entries: Sequence[Mapping[str, Any]]) -> str:
    """Writes one Markdown table for each metric, over the rows and columns of a study.

    Args:
      study: the study.
      entries: as `average_over_seeds` returns them.

    Returns:
      The tables: mean and standard deviation over seeds, and the published number in brackets.
    """
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
    """Writes one Markdown table with a row for each point, and its metrics side by side.

    Args:
      study: the study.
      entries: as `average_over_seeds` returns them.

    Returns:
      The table: mean and standard deviation over seeds, and the number of seeds.
    """
    axes = [axis for axis in study.axes if axis != "seed"]
    found: dict[tuple[str, ...], dict[str, Mapping[str, Any]]] = {}
    for entry in entries:
        found.setdefault(tuple(entry[a] for a in axes), {})[entry["metric"]] = entry
    metrics = [m for m in study.metrics if any(m in row for row in found.values())]
    lines = [_line([*axes, *metrics, "seeds"]), _rule(len(axes) + len(metrics) + 1)]
    for values, row in found.items():
        shown = [_cell(row[m], 4) if m in row else "–" for m in metrics]
        seeds = max(entry["seeds"] for entry in row.values())
        lines.append(_line([*values, *shown, str(seeds)]))
    return "\n".join(lines)


def as_rows(entries: Sequence[Mapping[str, Any]]) -> str:
    """Writes one Markdown table with a row for each entry.

    Args:
      entries: of the same names.

    Returns:
      The table.
    """
    heads = list(entries[0]) if entries else ["trial"]
    lines = [_line(heads), _rule(len(heads))]
    for entry in entries:
        shown = (f"{v:.4g}" if isinstance(v, float) else str(v) for v in entry.values())
        lines.append(_line(list(shown)))
    return "\n".join(lines)


def _cell(entry: Mapping[str, Any], digits: int) -> str:
    text = f"{entry['mean']:.{digits}f}"
    if entry["std"] is not None:
        text += f" ± {entry['std']:.{digits}f}"
    if entry["published"] is not None:
        text += f" ({entry['published']:g})"
    return text


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _rule(count: int) -> str:
    return "|---" * count + "|"
