"""Runs a grid of experiments through the library, goes on where it stopped, and writes tables.

A study names a configuration file and its axes; each point of the grid is one ordinary run folder.
"""

import argparse
import csv
import io
import itertools
import json
import os
import pathlib
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from rich.console import Console

from experiments.settings import require_same, tables_of
from fedjax_dp.cli import config as configuration
from fedjax_dp.cli.run import run as run_experiment

Axes = Mapping[str, Mapping[str, Sequence[str]]]


class Study(NamedTuple):
    """A grid of experiments and the table that it fills.

    Attributes:
      name: the study's name.
      file: the configuration that all points start from.
      axes: for each axis its values, and for each value the overrides that stand for it, as words
        of a command line; the axis "seed" is averaged over.
      rows: the axis whose values are the rows of the table.
      columns: the axis whose values are its columns.
      metrics: what is read from each run's summary, and the factor for the table.
      published: `(metric, values by axis) -> number` of the paper, or None.
      skip: `(values by axis) -> bool`, whether a point of the grid is left out.
    """

    name: str
    file: pathlib.Path
    axes: Axes
    rows: str
    columns: str
    metrics: Mapping[str, float]
    published: Callable[[str, Mapping[str, str]], float | None] = lambda metric, values: None
    skip: Callable[[Mapping[str, str]], bool] = lambda values: False


class Point(NamedTuple):
    """One experiment of a grid.

    Attributes:
      values: its value on each axis.
      words: the overrides that make it.
    """

    values: dict[str, str]
    words: tuple[str, ...]

    @property
    def name(self) -> str:
        return ",".join(f"{axis}={value}" for axis, value in self.values.items())


def points(study: Study, only: Mapping[str, Sequence[str]], words: Sequence[str]) -> list[Point]:
    """Lists the points of a grid; `only` narrows axes, `words` are overrides for all of them."""
    chosen = {}
    for axis, values in study.axes.items():
        names = list(only.get(axis, values))
        unknown = [name for name in names if name not in values]
        if unknown:
            raise ValueError(f"{axis} must be of {list(values)}, got {unknown}")
        chosen[axis] = names
    strange = set(only) - set(study.axes)
    if strange:
        raise ValueError(f"an axis must be of {list(study.axes)}, got {sorted(strange)}")
    found = []
    for names in itertools.product(*chosen.values()):
        values = dict(zip(chosen, names, strict=True))
        if not study.skip(values):
            made = [word for axis, name in values.items() for word in study.axes[axis][name]]
            found.append(Point(values, (*made, *words)))
    return found


def run_points(
    study: Study,
    grid: Sequence[Point],
    output: pathlib.Path,
    console: Console,
    seconds: float = float("inf"),
) -> None:
    """Runs every point that has no summary yet; starts none after so many seconds.

    Raises:
      SystemExit: before anything runs, if a folder holds a run under another setting.
    """
    started = time.perf_counter()
    loaded = [
        configuration.load(study.file, (f"--run.name={study.name}", *point.words)) for point in grid
    ]
    for point, config in zip(grid, loaded, strict=True):
        file = output / point.name / "config.toml"
        if file.is_file():
            require_same(file, tables_of(configuration.load(file)), tables_of(config))
    for number, (point, config) in enumerate(zip(grid, loaded, strict=True), 1):
        folder, label = output / point.name, f"[{number}/{len(grid)}] {point.name}"
        if (folder / "summary.json").is_file():
            console.print(f"{label}: done before")
            continue
        if time.perf_counter() - started > seconds:
            console.print(f"{label}: left for another time")
            continue
        resume = (folder / "checkpoint").is_dir() and any((folder / "checkpoint").iterdir())
        # A secret run never starts over: where it has lost its root, going on with it is refused.
        resume |= config.run.secret and (folder / "config.toml").is_file()
        if resume:
            config = configuration.load(folder / "config.toml")
        begun = time.perf_counter()
        quiet = Console(file=io.StringIO(), width=200)
        status = run_experiment(config, folder, quiet, resume=resume)
        if status:
            raise KeyboardInterrupt
        summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
        shown = ", ".join(f"{m} {summary[m]:.4f}" for m in study.metrics if summary.get(m))
        console.print(f"{label}: {shown} in {time.perf_counter() - begun:.0f} s")
        # Programs of one point are of no use to the next, and there may be hundreds.
        jax.clear_caches()


def collect(grid: Sequence[Point], output: pathlib.Path) -> list[dict[str, Any]]:
    """Reads the summaries of the points that have run."""
    rows = []
    for point in grid:
        file = output / point.name / "summary.json"
        if file.is_file():
            # An axis keeps its name for what a summary may call otherwise, such as the algorithm.
            rows.append(json.loads(file.read_text(encoding="utf-8")) | point.values)
    return rows


def averaged(study: Study, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Averages over seeds: mean, standard deviation, number, and the published figure beside."""
    axes = [axis for axis in study.axes if axis != "seed"]
    groups: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault(tuple(row[axis] for axis in axes), []).append(row)
    found = []
    for names, members in groups.items():
        values = dict(zip(axes, names, strict=True))
        for metric, factor in study.metrics.items():
            numbers = [factor * m[metric] for m in members if m.get(metric) is not None]
            if numbers:
                spread = float(np.std(numbers, ddof=1)) if len(numbers) > 1 else None
                found.append(
                    values
                    | {
                        "metric": metric,
                        "mean": float(np.mean(numbers)),
                        "std": spread,
                        "seeds": len(numbers),
                        "published": study.published(metric, values),
                    }
                )
    return found


def as_csv(entries: Sequence[Mapping[str, Any]]) -> str:
    """Writes averaged entries as CSV text."""
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(entries[0]) if entries else ["metric"])
    writer.writeheader()
    writer.writerows(
        {k: f"{v:.6g}" if isinstance(v, float) else v for k, v in entry.items()}
        for entry in entries
    )
    return text.getvalue()


def as_markdown(study: Study, entries: Sequence[Mapping[str, Any]]) -> str:
    """Writes one table for each metric: ours, and the paper's number in brackets."""
    parts = []
    for metric in study.metrics:
        cells: dict[tuple[str, str], list[str]] = {}
        for entry in entries:
            if entry["metric"] != metric:
                continue
            text = f"{entry['mean']:.2f}"
            if entry["std"] is not None:
                text += f" ± {entry['std']:.2f}"
            if entry["published"] is not None:
                text += f" ({entry['published']:g})"
            cells.setdefault((entry[study.rows], entry[study.columns]), []).append(text)
        rows, columns = (
            [name for name in study.axes[axis] if any(key[side] == name for key in cells)]
            for side, axis in enumerate((study.rows, study.columns))
        )
        if not cells:
            continue
        lines = [f"| {metric} | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
        for row in rows:
            shown = (" / ".join(cells.get((row, column), ["–"])) for column in columns)
            lines.append(f"| {row} | {' | '.join(shown)} |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def hardware() -> str:
    """Names the class of hardware that ran."""
    devices = jax.devices()
    if devices[0].platform == "cpu":
        return f"{os.cpu_count()} CPU cores"
    return f"{len(devices)} {devices[0].device_kind}"


def main(study: Study, arguments: Sequence[str] | None = None) -> None:
    """Runs a study from the command line and writes its tables beside the runs."""
    parser = argparse.ArgumentParser(
        description=f"Sweep of the study {study.name}.",
        epilog="Further words, --section.key=VALUE, override the configuration of every point.",
    )
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("runs") / study.name)
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="AXIS=A,B",
        help=f"some values of an axis; axes are {', '.join(study.axes)}",
    )
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no run later")
    known, words = parser.parse_known_args(arguments)
    only = {axis: names.split(",") for axis, _, names in (o.partition("=") for o in known.only)}
    console = Console()
    started = time.perf_counter()
    grid = points(study, only, words)
    run_points(study, grid, known.output, console, known.seconds)
    rows = collect(grid, known.output)
    entries = averaged(study, rows)
    module = getattr(sys.modules["__main__"], "__spec__", None)
    command = ["python", "-m", module.name] if module else ["python", sys.argv[0]]
    facts = {
        "study": study.name,
        "command": " ".join([*command, *sys.argv[1:]]),
        "hardware": hardware(),
        "seconds_of_all_runs": round(sum(row["seconds"] for row in rows), 1),
        "seconds_of_this_call": round(time.perf_counter() - started, 1),
        "runs": len(rows),
        "points": len(grid),
    }
    lines = [f"- {key}: {value}" for key, value in facts.items()]
    note = "Ours, mean ± standard deviation over seeds; the paper's number in brackets."
    table = as_markdown(study, entries)
    known.output.mkdir(parents=True, exist_ok=True)
    text = "\n".join([f"# {study.name}", "", *lines, "", note, "", table, ""])
    (known.output / "table.md").write_text(text, encoding="utf-8")
    (known.output / "table.csv").write_text(as_csv(entries), encoding="utf-8")
    (known.output / "runs.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    console.print(table)
    console.print(f"tables: {known.output}", soft_wrap=True)
