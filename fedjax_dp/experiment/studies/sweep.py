"""Runs a grid of experiments, each in its own run folder; its tables, as CSV and Markdown."""

import csv
import io
import itertools
import pathlib
import re
import time
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any, NamedTuple

import numpy as np

from fedjax_dp.core import checks, files
from fedjax_dp.core.decimals import shown
from fedjax_dp.core.foreign_text import in_csv, in_markdown
from fedjax_dp.experiment.components.numbers_by_client import with_named_lists
from fedjax_dp.experiment.reading import config_files
from fedjax_dp.experiment.reading.config_diff import decided, require_same, tables_of
from fedjax_dp.experiment.running.run_folder import CONFIG_FILE, SUMMARY_FILE
from fedjax_dp.experiment.running.watcher import Watcher
from fedjax_dp.experiment.schema.config import Config
from fedjax_dp.experiment.studies.batched_runs import (
    Continued,
    Job,
    assembled_before,
    batches,
    run_together,
)
from fedjax_dp.experiment.studies.cluster import Cluster, run_on_cluster
from fedjax_dp.experiment.studies.worker import summaries_of
from fedjax_dp.io.checkpoint import require_usable
from fedjax_dp.io.digests import STUDY_KEPT, read_sealed_object, reporting_full_disk

Axes = Mapping[str, Mapping[str, Sequence[str]]]
# Characters that names of folders keep, and those that they must not have.
_PLAIN, _STRANGE = re.compile(r"[\w .+-]*"), re.compile(r"[^\w .,=+-]|^\.+")
# Bytes of a name that leave space for a digest in the 255 of most file systems.
_LONGEST, _DIGITS = 200, 12
# Columns whose figures are of the metric that the entry names.
_OF_METRIC = ("mean", "published")


class Study(NamedTuple):
    """A grid of experiments and the table of its results.

    Attributes:
      name: the study's name.
      file: the configuration file of all points; None for the defaults.
      axes: for each axis its values, and for each value its overrides, as words of a command
        line; results are averaged over the axis "seed".
      rows: the axis of the rows of the table.
      columns: the axis of its columns.
      metrics: names in the summary of a run, each with a factor for the table.
      published: `(metric, values by axis) -> number`, the paper's result or None.
      skip: `(values by axis) -> bool`, whether to leave a point out.
    """

    name: str
    file: pathlib.Path | None
    axes: Axes
    rows: str
    columns: str
    metrics: Mapping[str, float]
    published: Callable[[str, Mapping[str, str]], float | None] = lambda metric, values: None
    skip: Callable[[Mapping[str, str]], bool] = lambda values: False


class Point(NamedTuple):
    """One experiment of a grid: its value on each axis, and the overrides that make it."""

    values: dict[str, str]
    words: tuple[str, ...]

    @property
    def name(self) -> str:
        """The name of the point."""
        return ",".join(f"{axis}={value}" for axis, value in self.values.items())

    @property
    def folder(self) -> str:
        """The name of its run folder: that of the point, if it is plain; else a safe one."""
        words = [*self.values, *self.values.values()]
        is_plain = bool(words) and all(map(_PLAIN.fullmatch, words))
        if is_plain and len(self.name.encode()) <= _LONGEST and self.name[-1] not in " .":
            return self.name
        digest = files.digest_of([self.name.encode()]).hex()[:_DIGITS]
        short = _STRANGE.sub("_", self.name).encode()[:_LONGEST].decode(errors="ignore")
        return f"{short or 'point'}-{digest}"


def grid_points(
    study: Study, only: Mapping[str, Sequence[str]] = {}, words: Sequence[str] = ()
) -> list[Point]:
    """Lists the points of a grid.

    Args:
      study: the study.
      only: the wanted values of an axis, by axis; all if an axis is missing.
      words: overrides for every point, as words of a command line.

    Returns:
      The points, the last axis fastest.

    Raises:
      ValueError: if the study has no such axis or value.
    """
    chosen: dict[str, list[str]] = {}
    for axis, values in study.axes.items():
        names = list(only.get(axis, values))
        unknown = [name for name in names if name not in values]
        if unknown:
            raise ValueError(f"{axis} must be of {list(values)}, got {unknown}")
        chosen[axis] = names
    strange = set(only) - set(study.axes)
    if strange:
        raise ValueError(f"an axis must be of {list(study.axes)}, got {sorted(strange)}")
    points = []
    for combination in itertools.product(*chosen.values()):
        point = dict(zip(chosen, combination, strict=True))
        if not study.skip(point):
            made = [word for axis, name in point.items() for word in study.axes[axis][name]]
            points.append(Point(point, (*made, *words)))
    return points


def sweep(
    study: Study,
    grid: Sequence[Point],
    output: pathlib.Path,
    report: Callable[[str], None] = print,
    seconds: float = float("inf"),
    watcher: Watcher | None = None,
    cluster: Cluster | None = None,
) -> None:
    """Runs every point that has no summary yet, and resumes interrupted ones.

    Points that share a program, which those do that differ in numbers alone, run together.

    Args:
      study: the study.
      grid: the points to run.
      output: the folder for their run folders.
      report: receives a line for every point.
      seconds: no point starts later than this after the call.
      watcher: receives the progress, in rounds of the points that run together; None for none.
      cluster: workers for the points, with the results of one process; None for this process.

    Raises:
      ConfigError: before anything runs, if a folder holds a run of another configuration.
      KeyboardInterrupt: if a run was interrupted.
      WorkerError: if a worker of a cluster failed; the points that it had resume with the next
        call.
    """
    files.require_folder(output, "--output", writable=True)
    jobs = {i: Job(loaded(study, point), output / point.folder) for i, point in enumerate(grid)}
    folders = {job.folder for job in jobs.values()}
    names = [point.name for point in grid]
    checks.require(len(folders) == len(jobs), "the points", "have different names", names)
    labels = [f"[{i}/{len(grid)}] {point.name}" for i, point in enumerate(grid, 1)]
    run_all(study, jobs, labels, report, seconds, watcher, {"sweep": len(grid)}, cluster)


def run_all(
    study: Study,
    jobs: Mapping[int, Job],
    labels: Sequence[str] | Mapping[int, str],
    report: Callable[[str], None],
    seconds: float = float("inf"),
    watcher: Watcher | None = None,
    stated: Mapping[str, Any] = {},
    cluster: Cluster | None = None,
) -> None:
    """Runs what has not ended yet; assembles all before the first runs; `stated` are facts."""
    started = time.perf_counter()
    for job in jobs.values():
        require_usable(job.folder, "the folder of a run")
        file = job.folder / CONFIG_FILE
        if file.is_file():
            # A run records the numbers of published lists, and not their names.
            saved = config_files.load_config(file)
            wanted = decided(with_named_lists(job.config), saved)
            require_same(file, tables_of(saved), tables_of(wanted))
    done = summaries_of(jobs)
    for place in done:
        report(f"{labels[place]}: done before")
    pending = {place: job.config for place, job in jobs.items() if place not in done}
    groups = batches(pending)
    together = {place: len(places) for places in groups for place in places}
    # Each text once: points of a sweep warn of the same.
    warned: set[str] = set()
    counted = Continued(watcher or Watcher())

    def ended(place: int, summary: Mapping[str, Any]) -> None:
        measured = [m for m in study.metrics if number_of(summary, m)]
        results = ", ".join(f"{m} {shown(m, summary[m], decimals=4)}" for m in measured)
        is_interrupted = summary.get("ended") == "interrupted"
        after = f" (interrupted after round {summary['rounds']})" if is_interrupted else ""
        count = together[place] - 1
        others = f" beside {count} other{'s' * (count > 1)}" if count else ""
        report(f"{labels[place]}: {results}; ran {summary['seconds']:.0f} s{others}{after}")
        for text in summary.get("warnings", ()):
            if text not in warned:
                warned.add(text)
                report(f"{labels[place]}: warning: {text}")
        # Of each kind, which the key at its beginning names, the first alone: figures differ.
        for text in summary.get("hints", ()):
            kind = text.partition(": ")[0]
            if kind not in warned:
                warned.add(kind)
                report(f"{labels[place]}: hint: {text}")

    def may_start() -> bool:
        return time.perf_counter() - started <= seconds

    def skip(places: Sequence[int]) -> None:
        for place in places:
            report(f"{labels[place]}: skipped: time limit reached")

    if cluster is not None:
        skip(run_on_cluster(cluster, jobs, groups, counted, ended, report, stated, may_start))
        return
    jobs = assembled_before(jobs, groups, counted)
    for places in groups:
        if not may_start():
            skip(places)
            continue
        some = {place: jobs[place] for place in places}
        with reporting_full_disk(STUDY_KEPT):
            _, is_interrupted = run_together(
                some, counted, lambda place, outcome: ended(place, outcome.summary), stated
            )
        if is_interrupted:
            raise KeyboardInterrupt


def loaded(study: Study, point: Point) -> Config:
    """Reads the configuration of a point, which draws no pictures unless it is asked to."""
    usual = ("--run.name", study.name), ("--run.plots", "false")
    given = {word.partition("=")[0] for word in point.words}
    words = [f"{key}={value}" for key, value in usual if key not in given]
    return config_files.load_config(study.file, (*words, *point.words))


def read_summaries(grid: Sequence[Point], output: pathlib.Path) -> list[dict[str, Any]]:
    """Reads the summaries of points that have run.

    Args:
      grid: the points.
      output: the folder of their run folders.

    Returns:
      The entries of each summary, with the value of the point on each axis.
    """
    rows = []
    for point in grid:
        # An axis such as "algorithm" replaces the entry of the same name.
        if row := read_sealed_object(output / point.folder, SUMMARY_FILE):
            rows.append(row | point.values)
    return rows


def number_of(summary: Mapping[str, Any], name: str) -> float | None:
    """Reads a number of a summary; None for a table, or what is not there."""
    value = summary.get(name)
    # JSON has an infinite ε as a string.
    return float(value) if isinstance(value, Real) or value == "inf" else None


def average_over_seeds(study: Study, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Averages results over seeds.

    Args:
      study: the study.
      rows: the summaries, as `read_summaries` returns them.

    Returns:
      The mean, standard deviation, number of seeds and published result of each metric and point.
    """
    axes = [axis for axis in study.axes if axis != "seed"]
    groups: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault(tuple(row[axis] for axis in axes), []).append(row)
    entries: list[dict[str, Any]] = []
    for names, members in groups.items():
        values = dict(zip(axes, names, strict=True))
        for metric, factor in study.metrics.items():
            found = [number_of(member, metric) for member in members]
            numbers = [factor * number for number in found if number is not None]
            if numbers:
                spread = float(np.std(numbers, ddof=1)) if len(numbers) > 1 else None
                entries.append(
                    values
                    | {
                        "metric": metric,
                        "mean": float(np.mean(numbers)),
                        "std": spread,
                        "seeds": len(numbers),
                        "published": study.published(metric, values),
                    }
                )
    return entries


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
