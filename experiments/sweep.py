"""Runs a grid of experiments from the command line and writes its tables."""

import argparse
import contextlib
import itertools
import json
import os
import pathlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar, get_args

import jax
from rich.console import Console

from fedjax_dp.experiment import (
    Cluster,
    Study,
    average_over_seeds,
    grid_points,
    read_summaries,
    sweep,
)
from fedjax_dp.experiment.studies import executors
from fedjax_dp.experiment.studies.point_settings import with_settings
from fedjax_dp.experiment.studies.sweep import as_csv, as_grid

Item, Result = TypeVar("Item", bound=tuple[Any, ...]), TypeVar("Result")
# Seconds between two looks at workers.
_PAUSE = 0.2


def hardware() -> str:
    """Names the class of hardware that ran."""
    devices = jax.devices()
    if devices[0].platform == "cpu":
        return f"{os.cpu_count()} CPU cores"
    return f"{len(devices)} {devices[0].device_kind}"


def add_workers(parser: argparse.ArgumentParser) -> None:
    """Adds the options of workers."""
    parser.add_argument(
        "--on", choices=get_args(executors.On), help="run on workers, as `fedjax-dp sweep --on`"
    )
    parser.add_argument("--workers", type=int, default=2, help="those that run at the same time")
    parser.add_argument(
        "--worker", action="append", default=[], metavar="NAME=VALUE", help="an option of each"
    )


@contextlib.contextmanager
def workers(known: argparse.Namespace, folder: pathlib.Path) -> Iterator[Cluster | None]:
    """Opens the workers that were asked for, with logs in a folder; None for this process."""
    if known.on is None:
        yield None
        return
    try:
        with executors.opened(known.on, folder, known.workers, known.worker) as cluster:
            yield cluster
    except (ValueError, OSError) as error:
        raise SystemExit(f"error: {error}") from None


def each_of(
    function: Callable[..., Result], items: Iterable[Item], cluster: Cluster | None
) -> Iterator[tuple[Item, Result]]:
    """Calls a function with each item's parts, here or on workers; yields results as they come.

    An item is taken once a worker is free, so that `items` may end when a time is over.
    """
    if cluster is None:
        yield from ((item, function(*item)) for item in items)
        return
    waiting, running = iter(items), list[tuple[Item, Any]]()
    try:
        while True:
            for item in itertools.islice(waiting, cluster.workers - len(running)):
                running.append((item, cluster.executor.submit(function, *item)))
            if not running:
                return
            done = [pair for pair in running if pair[1].done()]
            for item, future in done:
                running.remove((item, future))
                yield item, future.result()
            if not done:
                time.sleep(_PAUSE)
    finally:
        for _, future in running:
            future.cancel()


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
    parser.add_argument(
        "--settings",
        type=pathlib.Path,
        metavar="FILE",
        help="a CSV file of settings by point: columns of axes and of keys",
    )
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no run later")
    add_workers(parser)
    known, words = parser.parse_known_args(arguments)
    only = {axis: names.split(",") for axis, _, names in (o.partition("=") for o in known.only)}
    console = Console()
    started = time.perf_counter()
    try:
        grid = grid_points(study, only, words)
        if known.settings is not None:
            grid, _ = with_settings(grid, known.settings)
        with workers(known, known.output) as cluster:
            sweep(study, grid, known.output, console.print, known.seconds, cluster=cluster)
    except (ValueError, OSError, MemoryError) as error:
        raise SystemExit(f"error: {error}") from None
    rows = read_summaries(grid, known.output)
    entries = average_over_seeds(study, rows)
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
    table = as_grid(study, entries)
    known.output.mkdir(parents=True, exist_ok=True)
    text = "\n".join([f"# {study.name}", "", *lines, "", note, "", table, ""])
    (known.output / "table.md").write_text(text, encoding="utf-8")
    (known.output / "table.csv").write_text(as_csv(entries), encoding="utf-8")
    (known.output / "runs.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    console.print(table)
    console.print(f"tables: {known.output}", soft_wrap=True)
