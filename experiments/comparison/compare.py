"""Runs the standing comparison: every private method on six tasks at equal ε, equally tuned.

    python -m experiments.comparison.compare --minutes 30
    python -m experiments.comparison.compare --only task=digits,unit=record,epsilon=4,method=dp_sgd

A finished cell is a row of `results/cells.csv`, and is not run again: a second call continues, and
one beside it takes other pieces. Rows of a task or a method that was changed since are dropped. The
pieces of work are a task, a unit and a method; within one, all settings, budgets and seeds that
share a program run as one. `methods.toml` says what is run, `--plan` what is left and its hours.
A file `own/NAME.py` adds a method: it has `algorithm`, a function or an `Entry`, and may have
`SETTINGS`, what a method has in `methods.toml`. Larger tasks are run if `--only` names them.

Settings are chosen by exact accuracy on a seed that is not reported. No ε covers this choice.
"""

import argparse
import contextlib
import csv
import fcntl
import functools
import hashlib
import itertools
import json
import math
import os
import pathlib
import shutil
import time
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from experiments.sweep import add_workers, workers
from fedjax_dp import __version__
from fedjax_dp.algorithms.registry import ALGORITHMS
from fedjax_dp.core.registry import module_of_file
from fedjax_dp.experiment import Cluster, Study, read_summaries, sweep
from fedjax_dp.experiment.studies.sweep import Point

HERE = pathlib.Path(__file__).parent
OWN = HERE / "own"
CELLS = HERE / "results" / "cells.csv"
AXES = ("task", "unit", "epsilon", "method")
METRICS = ("client_test_accuracy", "worst_tenth_accuracy", "accuracy_disparity")
UNITS = ("record", "client")
GRID = ("set", "times", "values")
# What a method may have in `methods.toml`.
KEYS = ("algorithm", "units", "source", "claim", "tested", "needs", *GRID, *UNITS)


class Piece(NamedTuple):
    """The work that one method is for one task and unit."""

    task: str
    unit: str
    method: str


class Cell(NamedTuple):
    """A row of the results; one of the tuning seed is a trial."""

    task: str
    unit: str
    epsilon: float
    method: str
    seed: int
    setting: str  # The chosen values, or those of the trial, as "key=value key=value".
    accuracy: float  # Over the test records that clients hold, as all metrics here.
    worst_tenth: float  # Mean accuracy of the worst tenth of the clients.
    disparity: float  # Accuracy of the best client minus that of the worst.
    up: int  # Bytes that all clients sent.
    down: int  # Those that all clients received.
    seconds: float  # Processor time of its batch by the number of runs, compilation included.
    spent: float  # ε by the ledger.
    covered: str  # The models that ε covers.
    models: str  # Those whose accuracy this is.
    version: str
    digest: str  # Of all that was configured, see `digest_of`.


@functools.cache
def plan() -> dict[str, Any]:
    """Reads what is compared, methods of one's own after the others."""
    planned = tomllib.loads((HERE / "methods.toml").read_text(encoding="utf-8"))
    for file in sorted(OWN.glob("*.py")):
        if file.stem in planned["method"]:
            raise SystemExit(f"{file} must have another name: {file.stem} is in methods.toml")
        place = os.path.relpath(file)
        try:
            settings_of = getattr(module_of_file(file, place), "SETTINGS", {})
        except ValueError as error:
            raise SystemExit(f"{file} must be a method, or be moved: {error}") from error
        planned["method"][file.stem] = {"algorithm": f"{place}:algorithm"} | settings_of
    for name, entry in planned["method"].items():
        unknown = [key for key in entry if key not in KEYS]
        unknown += [key for unit in UNITS for key in entry.get(unit, ()) if key not in GRID]
        unknown += [unit for unit in entry.get("units", ()) if unit not in UNITS]
        if unknown:
            raise SystemExit(
                f"the settings of {name} must have the keys {', '.join(KEYS)}, and units of "
                f"{', '.join(UNITS)}; got {', '.join(unknown)}"
            )
    return planned


def tasks() -> list[str]:
    """Lists the tasks in the plan's order."""
    return list(plan()["task"])


def larger() -> list[str]:
    """Lists the tasks that need a card."""
    return list(plan()["larger"])


def _task(name: str) -> dict[str, Any]:
    """The plan of a task."""
    return (plan()["task"] | plan()["larger"])[name]


def epsilons_of(task: str) -> list[float]:
    """Lists the budgets of a task."""
    return [*plan()["epsilons"], *_task(task).get("more_epsilons", ())]


def units_of(method: str) -> list[str]:
    """Lists the units of privacy that a method is run with."""
    entry = plan()["method"][method]
    offered = ALGORITHMS[entry.get("algorithm", method)].units
    return [unit for unit in entry.get("units", UNITS) if unit in offered]


def pieces(names: Iterable[str] | None = None) -> list[Piece]:
    """Lists the work of tasks; methods within tasks, so that a task has results early."""
    return [
        Piece(task, unit, method)
        for task in (tasks() if names is None else names)
        for unit in _task(task).get("units", UNITS)
        for method in plan()["method"]
        if unit in units_of(method) and method not in _task(task).get("without", ())
    ]


def _sources(piece: Piece) -> list[dict[str, Any]]:
    """Lists the tables with the settings of a piece, of which later ones go first."""
    planned, entry = plan(), plan()["method"][piece.method]
    of_unit = _task(piece.task).get(piece.unit, {})
    return [planned["unit"][piece.unit], of_unit, entry, entry.get(piece.unit, {})]


def _fixed(piece: Piece) -> dict[str, Any]:
    """Returns the values of keys that all settings of a method have."""
    return {k: v for table in _sources(piece) for k, v in table.get("set", {}).items()}


def settings(piece: Piece) -> list[dict[str, Any]]:
    """Lists the settings that a method is tried with, each as values of keys."""
    of_unit, *others = _sources(piece)
    grid = {key: table[key] for table in others for key in ("times", "values") if key in table}
    if "times" not in grid:
        grid["times"] = of_unit["beside" if "values" in grid else "times"]
    fixed, trials = _fixed(piece), plan()["trials"]
    base = tomllib.loads(task_file(piece.task).read_text(encoding="utf-8"))
    axes = {key: list(values) for key, values in grid.get("values", {}).items()}
    for key, factors in grid["times"].items():
        section, _, name = key.partition(".")
        start = fixed[key] if key in fixed else base[section][name]
        axes[key] = [float(f"{start * factor:.6g}") for factor in factors]
    found = [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
    if len(found) != trials:
        tried = ", ".join(f"{len(values)} of {key}" for key, values in axes.items())
        raise SystemExit(f"{piece.method} must have {trials} settings, got {len(found)}: {tried}")
    return found


def point(piece: Piece, epsilon: float, setting: Mapping[str, Any], seed: int) -> Point:
    """Makes the run of a method with one setting, budget and seed."""
    entry, names = plan()["method"][piece.method], _task(piece.task).get("names", {})
    keys = {
        "algorithm.name": entry.get("algorithm", piece.method),
        "privacy.unit": piece.unit,
        f"privacy.{piece.unit}.epsilon": float(epsilon),
        "run.seed": seed,
        **_fixed(piece),
        **setting,
    }
    words = tuple(f"--{key}={_word(value, names)}" for key, value in keys.items())
    return Point({"epsilon": f"{epsilon:g}", "setting": as_text(setting), "seed": str(seed)}, words)


def _word(value: Any, names: Mapping[str, str]) -> str:
    if isinstance(value, str):
        return value.format(**names)
    return json.dumps(value)


@functools.cache
def _task_text(file: pathlib.Path) -> str:
    """The configuration of a task without comments."""
    return json.dumps(tomllib.loads(file.read_text(encoding="utf-8")), sort_keys=True)


def digest_of(piece: Piece, epsilon: float, setting: Mapping[str, Any], seed: int) -> str:
    """Names the configuration of a run, so that a row of another one does not count as its row."""
    words = point(piece, epsilon, setting, seed).words
    text = "\n".join([_task_text(task_file(piece.task)), *words])
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def as_text(setting: Mapping[str, Any]) -> str:
    """Writes a setting in one line."""
    return " ".join(f"{key}={value:g}" for key, value in setting.items())


def task_file(task: str) -> pathlib.Path:
    """Returns the configuration file of a task."""
    return HERE / "tasks" / f"{task}.toml"


def read_cells(file: pathlib.Path = CELLS) -> list[Cell]:
    """Reads the rows of configurations that are still in the plan, trials included."""
    if not file.is_file():
        return []
    cells = []
    with file.open(encoding="utf-8", newline="") as lines:
        for number, row in enumerate(csv.reader(lines), 1):
            if number == 1 or not row:
                continue
            try:
                pairs = zip(Cell.__annotations__.values(), row, strict=True)
                cells.append(Cell(*(kind(value) for kind, value in pairs)))
            except ValueError as error:
                raise SystemExit(
                    f"{file}, line {number} must have {', '.join(Cell._fields)}: {error}"
                ) from error
    return [cell for cell in cells if _is_current(cell)]


@functools.cache
def _digests(piece: Piece) -> Mapping[tuple[float, str, int], str]:
    """The digests of all runs of a piece by ε, setting and seed."""
    planned = plan()
    seeds = [planned["tuning_seed"], *planned["seeds"]]
    axes = epsilons_of(piece.task), settings(piece), seeds
    return {
        (float(epsilon), as_text(setting), seed): digest_of(piece, epsilon, setting, seed)
        for epsilon, setting, seed in itertools.product(*axes)
    }


def _is_current(cell: Cell) -> bool:
    """Whether the plan still has the run of a row."""
    piece = Piece(cell.task, cell.unit, cell.method)
    if cell.method not in plan()["method"] or cell.task not in [*tasks(), *larger()]:
        return False
    return _digests(piece).get((cell.epsilon, cell.setting, cell.seed)) == cell.digest


def write_cells(cells: Iterable[Cell], file: pathlib.Path = CELLS) -> None:
    """Writes all rows in the order of the plan; a file that is cut short is never left behind."""
    names = [*tasks(), *larger(), *UNITS, *plan()["method"]]
    order = {name: i for i, name in enumerate(names)}

    def rank(cell: Cell) -> tuple[Any, ...]:
        names = (order[name] for name in (cell.task, cell.unit, cell.method))
        return (*names, cell.epsilon, cell.seed, cell.setting)

    file.parent.mkdir(parents=True, exist_ok=True)
    fresh = file.with_suffix(".new")
    with fresh.open("w", encoding="utf-8", newline="") as lines:
        writer = csv.writer(lines, lineterminator="\n")
        writer.writerow(Cell._fields)
        writer.writerows(sorted(cells, key=rank))
    fresh.replace(file)


def add_cells(cells: Iterable[Cell], file: pathlib.Path) -> None:
    """Adds rows to the file, which others may be doing too; a row replaces that of its run."""
    with _locked(file.with_suffix(".lock")):
        by_run = {cell.digest: cell for cell in (*read_cells(file), *cells)}
        write_cells(by_run.values(), file)


@contextlib.contextmanager
def _locked(file: pathlib.Path, waits: bool = True) -> Iterator[bool]:
    """Holds a lock of the machine's processes; yields whether it was free, if it does not wait."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
            return
        yield True


def of_piece(cells: Iterable[Cell], piece: Piece) -> list[Cell]:
    """Selects the rows of a piece."""
    return [cell for cell in cells if (cell.task, cell.unit, cell.method) == piece]


def missing(
    piece: Piece, cells: Sequence[Cell], epsilons: Sequence[float]
) -> tuple[list[tuple[float, Any]], list[tuple[float, int]]]:
    """Lists trials `(ε, setting)` and cells `(ε, seed)` of a piece that have no row."""
    planned, own = plan(), of_piece(cells, piece)
    trials, left = [], []
    for epsilon in epsilons:
        tried = _trials(own, epsilon)
        best = chosen(piece, own, epsilon)
        text = None if best is None else as_text(best)
        done = {c.seed for c in own if (c.epsilon, c.setting) == (epsilon, text)}
        seeds = [seed for seed in planned["seeds"] if seed not in done]
        left += [(epsilon, seed) for seed in seeds]
        trials += [(epsilon, s) for s in settings(piece) if seeds and as_text(s) not in tried]
    return trials, left


def _trials(own: Iterable[Cell], epsilon: float) -> dict[str, float]:
    """The accuracy of the trials of a piece at one ε, -inf for one that diverged."""
    key = epsilon, plan()["tuning_seed"]
    found = {cell.setting: cell.accuracy for cell in own if (cell.epsilon, cell.seed) == key}
    return {text: -math.inf if math.isnan(value) else value for text, value in found.items()}


def chosen(piece: Piece, cells: Sequence[Cell], epsilon: float) -> dict[str, Any] | None:
    """Returns the best setting on the tuning seed, the first of equals; None if one is missing."""
    found, tried = _trials(of_piece(cells, piece), epsilon), settings(piece)
    if any(as_text(setting) not in found for setting in tried):
        return None
    return max(tried, key=lambda setting: found[as_text(setting)])


def run_piece(
    piece: Piece,
    epsilons: Sequence[float],
    output: pathlib.Path,
    deadline: float,
    file: pathlib.Path = CELLS,
    cluster: Cluster | None = None,
) -> None:
    """Tunes a method and runs its cells; rows are written after each of the two."""
    epsilons = [e for e in epsilons_of(piece.task) if not epsilons or e in epsilons]

    def run(points: Sequence[Point]) -> None:
        _run(piece, points, output, deadline, file, cluster)

    seed = plan()["tuning_seed"]
    trials, _ = missing(piece, read_cells(file), epsilons)
    run([point(piece, e, setting, seed) for e, setting in trials])
    cells = read_cells(file)
    _, left = missing(piece, cells, epsilons)
    best = {epsilon: chosen(piece, cells, epsilon) for epsilon, _ in left}
    run([point(piece, e, found, seed) for e, seed in left if (found := best[e]) is not None])


def _run(
    piece: Piece,
    points: Sequence[Point],
    output: pathlib.Path,
    deadline: float,
    file: pathlib.Path,
    cluster: Cluster | None,
) -> None:
    """Runs points together and adds their rows to the file."""
    if not points:
        return
    study = Study(" ".join(piece), task_file(piece.task), {}, "", "", {METRICS[0]: 100.0})
    folder = output / "-".join(piece)
    # Seconds are of the runs of this call; those of an earlier one that was interrupted are saved.
    before, processor = len(read_summaries(points, folder)), time.process_time()
    sweep(study, points, folder, seconds=max(deadline - time.monotonic(), 0.0), cluster=cluster)
    rows = read_summaries(points, folder)
    seconds = (time.process_time() - processor) / max(len(rows) - before, 1)
    made = [
        Cell(
            piece.task,
            piece.unit,
            float(row["epsilon"]),
            piece.method,
            int(row["seed"]),
            row["setting"],
            *(round(float(row[name]), 5) for name in METRICS),
            *(row["communication"][way]["bytes"] for way in ("up", "down")),
            round(seconds, 2),
            round(float(row[f"epsilon_{piece.unit}"]), 5),
            row["covered_models"],
            row["test_accuracy_of"],
            __version__,
            _digests(piece)[float(row["epsilon"]), row["setting"], int(row["seed"])],
        )
        for row in rows
    ]
    add_cells(made, file)
    # Rows have what the comparison reads.
    shutil.rmtree(folder, ignore_errors=True)


def seconds_of_runs(cells: Sequence[Cell]) -> Mapping[tuple[str, str], float]:
    """Returns the mean processor time of a run by task and unit; the plan's where none was run."""
    found: dict[tuple[str, str], list[float]] = {}
    for cell in cells:
        found.setdefault((cell.task, cell.unit), []).append(cell.seconds)
    stated = {
        (task, unit): seconds
        for task in (*tasks(), *larger())
        for unit, seconds in _task(task)["seconds"].items()
    }
    return stated | {key: sum(values) / len(values) for key, values in found.items()}


def left_hours(
    cells: Sequence[Cell], some: Iterable[Piece] | None = None, only: Sequence[float] = ()
) -> Iterator[tuple[Piece, int, float]]:
    """Yields pieces that are not finished, with the number of their missing cells and hours."""
    seconds = seconds_of_runs(cells)
    for piece in pieces() if some is None else some:
        epsilons = [e for e in epsilons_of(piece.task) if not only or e in only]
        trials, left = missing(piece, cells, epsilons)
        if left:
            yield piece, len(left), (len(trials) + len(left)) * seconds[piece[:2]] / 3600


def selection(texts: Sequence[str]) -> dict[str, list[str]]:
    """Reads `axis=value` texts, several in one divided by commas."""
    found: dict[str, list[str]] = {}
    planned = plan()
    names = [*tasks(), *larger()]
    known = {
        "task": names,
        "unit": [*UNITS],
        "epsilon": [f"{e:g}" for e in sorted({e for name in names for e in epsilons_of(name)})],
        "method": list(planned["method"]),
    }
    for text in ",".join(texts).split(",") if texts else ():
        axis, _, value = text.partition("=")
        if axis == "epsilon":
            with contextlib.suppress(ValueError):
                value = f"{float(value):g}"
        if axis not in known or value not in known[axis]:
            rule = f"one of {', '.join(known[axis])}" if axis in known else "a value of the plan"
            raise SystemExit(
                f"--only must be AXIS=VALUE with an axis of {', '.join(AXES)}, and {rule}; "
                f"got {text!r}"
            )
        found.setdefault(axis, []).append(value)
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs what is missing, until the time is up."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", action="append", default=[], metavar="AXIS=VALUE,…")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start nothing later")
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("runs") / "comparison")
    parser.add_argument("--cells", type=pathlib.Path, default=CELLS, help="the file of rows")
    parser.add_argument("--plan", action="store_true", help="list what is missing, and its hours")
    add_workers(parser)
    options = parser.parse_args(arguments)
    if not options.minutes >= 0:
        parser.error(f"--minutes must be a number of at least 0, got {options.minutes:g}")
    only = selection(options.only)
    epsilons = [float(e) for e in only.get("epsilon", ())]
    of_tasks = pieces(only.get("task"))
    some = [p for p in of_tasks if all(v in only.get(k, [v]) for k, v in p._asdict().items())]
    if not some:
        parser.error(f"--only must leave something of the plan, got {' '.join(options.only)}")
    left = list(left_hours(read_cells(options.cells), some, epsilons))
    if options.plan:
        for piece, count, hours in left:
            print(f"{' '.join(piece)}: {count} cells, {hours:.2f} h")
        print(f"all: {sum(n for _, n, _ in left)} cells, {sum(h for *_, h in left):.1f} h")
        return
    deadline, refused = time.monotonic() + 60 * options.minutes, []
    with workers(options, options.output) as cluster:
        for piece, *_ in left:
            if time.monotonic() >= deadline:
                break
            with _locked(options.output / f"{'-'.join(piece)}.lock", waits=False) as is_free:
                if not is_free:
                    continue
                try:
                    run_piece(piece, epsilons, options.output, deadline, options.cells, cluster)
                except (ValueError, MemoryError, RuntimeError) as error:
                    # Others may run; RuntimeError is JAX's, such as for memory of a device.
                    refused.append(f"{' '.join(piece)}: {error}")
                    print(f"refused: {refused[-1]}")
    if refused:
        raise SystemExit("\n".join(["not run:", *refused]))


if __name__ == "__main__":
    main()
