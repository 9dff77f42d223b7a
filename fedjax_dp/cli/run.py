"""`fedjax-dp run`: an experiment with progress on the console."""

import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from fedjax_dp.cli.progress import Progress, end_process
from fedjax_dp.core import checks
from fedjax_dp.experiment import reading as configuration
from fedjax_dp.experiment import run as running
from fedjax_dp.experiment.config import Config
from fedjax_dp.experiment.folder import CONFIG_FILE, require_free
from fedjax_dp.experiment.keys import describe, describe_choice
from fedjax_dp.experiment.run import Outcome, Watcher
from fedjax_dp.io.disk import DiskFull

app = typer.Typer(add_completion=False)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def command(
    context: typer.Context,
    output: Annotated[
        pathlib.Path | None, typer.Option(help="Run folder; the next free one under runs/.")
    ] = None,
    resume: Annotated[
        pathlib.Path | None,
        typer.Option(help="Go on with the run in this folder; with --run.rounds for longer."),
    ] = None,
    keys: Annotated[
        bool,
        typer.Option("--keys", help="List every key; with algorithm.name=NAME, a part's options."),
    ] = False,
) -> None:
    """Run an experiment: `fedjax-dp run [FILE.toml] [--section.key VALUE ...]`.

    A table given as a whole, as `--model.options={}`, replaces that of the file; where an override
    names another part, the file's options of the old one are dropped.

    `--keys` lists all keys, and `--keys algorithm.name=fedprox` the options of an algorithm; in the
    same way those of data.name, data.partition, model.name and training.optimizer.
    """
    if keys:
        # In a pipe no line is broken, so that keys can be searched and cut out.
        _show_keys(Console() if sys.stdout.isatty() else Console(width=10_000), context.args)
        return
    words = list(context.args)
    file = words.pop(0) if words and not words[0].startswith("--") else None
    if resume is not None:
        others = [str(word) for word in (file, output) if word is not None]
        rule = "stand without a file or --output, since a run goes on with what it has"
        checks.require(not others, "--resume", rule, others)
        found = (resume / CONFIG_FILE).is_file()
        rule = f"name a run folder with a {CONFIG_FILE}"
        checks.require(found, "--resume", rule, str(resume))
        config = configuration.load(resume / CONFIG_FILE, words)
        start = _resuming(resume, words)
    else:
        config = configuration.load(file, words)
        if output is not None:
            require_free(output)
        start = _starting(config, output)
    try:
        status = shown(config, start, Console())
    except KeyboardInterrupt:
        # Python would wait for the round that it left.
        end_process("interrupted; what the last checkpoint holds is kept", 130)
    except DiskFull as error:
        # Whatever is closed on the way out would only fail, and say so, once more.
        end_process(f"error: {error}", 2)
    raise typer.Exit(status)


def _starting(config: Config, folder: pathlib.Path | None) -> Callable[[Watcher], Outcome]:
    return lambda watcher: running.run(config, folder, watcher)


def _resuming(folder: pathlib.Path, words: Sequence[str]) -> Callable[[Watcher], Outcome]:
    return lambda watcher: running.resume(folder, watcher, words=words)


def shown(config: Config, start: Callable[[Watcher], Outcome], console: Console) -> int:
    """Runs an experiment with progress, and says what became of it.

    Args:
      config: the experiment.
      start: runs it under a watcher.
      console: where words go.

    Returns:
      The exit status: 0 at the end, 130 after an interruption, 3 if no client's work came into the
      model.
    """
    with Progress(console, config.run.rounds) as progress:
        outcome = start(progress)
    _report(console, outcome)
    if outcome.is_interrupted:
        return 130
    return 3 if outcome.is_futile else 0


def _show_keys(console: Console, parts: list[str]) -> None:
    rows = [row for part in parts for row in describe_choice(part)] if parts else describe()
    table = Table(Column("key", overflow="fold"), "may be", "default", "meaning")
    for row in rows:
        table.add_row(*map(Text, row))
    console.print(table)


def _report(console: Console, outcome: Outcome) -> None:
    summary, folder = outcome.summary, outcome.folder
    if outcome.is_interrupted:
        console.print(
            f"interrupted after round {summary['rounds']}; nothing is lost: "
            f"fedjax-dp run --resume {folder}"
        )
    if outcome.stopped_by is not None:
        console.print(f"stopped after round {summary['rounds']} by {outcome.stopped_by}")
    if outcome.is_over_budget:
        console.print(f"stopped after round {summary['rounds']}: one more would exceed the budget")
    parts = [f"{summary['rounds']} rounds in {summary['seconds']:.1f} s"]
    if np.isfinite(summary.get("test_accuracy", np.nan)):
        parts.append(f"test accuracy {summary['test_accuracy']:.4f}")
    if summary.get("worst_client_accuracy") is not None:
        parts.append(f"worst client {summary['worst_client_accuracy']:.4f}")
    if summary["epsilon"] is not None:
        low, high = summary["dp_delta_smallest"], summary["dp_delta"]
        delta = f"{high:g}" if low == high else f"{low:g} to {high:g}"
        parts.append(f"ε = {summary['epsilon']:.3f} at δ = {delta}")
        if "not_covered" in summary:
            parts.append(f"NOT covered: {summary['not_covered']}")
    else:
        parts.append("no privacy is claimed")
    console.print(", ".join(parts))
    for text in summary["warnings"]:
        console.print(f"warning: {text}", soft_wrap=True, markup=False)
    if outcome.is_futile:
        console.print("the run went wrong: no round brought any client's work into the model")
    console.print(f"run folder: {folder}", soft_wrap=True)
