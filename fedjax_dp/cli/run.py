"""`fedjax-dp run`: runs an experiment."""

import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import numpy as np
import typer
from rich.padding import Padding
from rich.text import Text

from fedjax_dp.cli.options import Configured, answering, application
from fedjax_dp.cli.output import Answer, Output
from fedjax_dp.cli.progress import Progress, end_process
from fedjax_dp.core import checks, files
from fedjax_dp.core.decimals import rounded_up
from fedjax_dp.experiment.reading import config_files
from fedjax_dp.experiment.reading.keys import Row, describe, describe_choice
from fedjax_dp.experiment.running import run as running
from fedjax_dp.experiment.running.run import Outcome, Watcher
from fedjax_dp.experiment.running.run_folder import CONFIG_FILE, require_free
from fedjax_dp.experiment.schema.config import Config
from fedjax_dp.io.disk import DiskFull

app = application()
_NAME = "run"


@answering(app, cls=Configured)
def command(
    context: typer.Context,
    out: Output,
    file: Annotated[
        str | None,
        typer.Argument(metavar="FILE", help="A TOML file; without one, the defaults."),
    ] = None,
    output: Annotated[
        pathlib.Path | None,
        typer.Option(help="Run folder; by default the next free one under runs/."),
    ] = None,
    resume: Annotated[
        pathlib.Path | None,
        typer.Option(help="Resume the run in this folder; a larger --run.rounds extends it."),
    ] = None,
    keys: Annotated[
        bool,
        typer.Option("--keys", help="List all keys; with --algorithm.name NAME, its options."),
    ] = False,
) -> Answer:
    """Run an experiment: `fedjax-dp run [FILE.toml] [--section.key VALUE ...]`.

    `--section.key VALUE`, such as `--training.learning_rate 0.1`, overrides a key of FILE and may
    stand before or after it. Values are written as in TOML; strings need no quotes, and `none`
    removes a value. Overriding a name, or a table by `{}`, discards the options that FILE has for
    the previous choice.

    `--keys` lists all keys, and `--keys --algorithm.name=fedprox` the options of an algorithm; the
    same works for data.name, data.partition, model.name and training.optimizer.
    """
    words = list(context.args)
    if keys:
        return _keys([*([] if file is None else [file]), *words])
    if resume is not None:
        others = [str(word) for word in (file, output) if word is not None]
        rule = "not be combined with a config file or --output, which the resumed run already has"
        checks.require(not others, "--resume", rule, others)
        found = files.kind_of(resume / CONFIG_FILE, "--resume") == "file"
        rule = f"name a run folder with a {CONFIG_FILE}"
        checks.require(found, "--resume", rule, str(resume))
        config = config_files.load_config(resume / CONFIG_FILE, words)
        start = _resuming(resume, words)
    else:
        config = config_files.load_config(file, words)
        if output is not None:
            require_free(output)
        start = _starting(config, output)
    try:
        return shown(config, start, out)
    except KeyboardInterrupt:
        # Python would wait for the round to end.
        end_process(out, _NAME, "interrupted; the last checkpoint is kept", 130)
    except DiskFull as error:
        # Closing files would only fail again.
        end_process(out, _NAME, f"error: {error}", 2)


def _starting(config: Config, folder: pathlib.Path | None) -> Callable[[Watcher], Outcome]:
    return lambda watcher: running.run(config, folder, watcher)


def _resuming(folder: pathlib.Path, words: Sequence[str]) -> Callable[[Watcher], Outcome]:
    return lambda watcher: running.resume(folder, watcher, words=words)


def shown(config: Config, start: Callable[[Watcher], Outcome], out: Output) -> Answer:
    """Runs an experiment with progress and returns its answer."""
    # Status 0 at the end, 130 after an interruption, 3 if no client's work entered the model.
    with Progress(out, _NAME, config.run.rounds) as progress:
        outcome = start(progress)
    ended, status = "finished", 0
    if outcome.is_interrupted:
        ended, status = "interrupted", 130
    elif outcome.is_over_budget:
        ended = "budget"
    elif outcome.stopped_by is not None:
        ended = "callback"
    if outcome.is_futile:
        status = status or 3
    document = {"folder": str(outcome.folder), "ended": ended, "is_futile": outcome.is_futile}
    document |= {"summary": outcome.summary}
    return Answer(document, lambda out: _report(out, outcome), str(outcome.folder), status)


def _keys(parts: Sequence[str]) -> Answer:
    """Lists all keys, or the options of parts given as `key=name` or `--key=name`."""
    rows = [row for part in parts for row in describe_choice(part.removeprefix("--"))]
    rows = rows if parts else describe()
    heads = ("key", "rule", "default", "meaning")
    document = {"keys": [dict(zip(heads, row, strict=True)) for row in rows]}
    return Answer(document, lambda out: _show_keys(out, rows), "\n".join(row[0] for row in rows))


def _show_keys(out: Output, rows: Sequence[Row]) -> None:
    """Prints a block for each key on a terminal, a line for each in a pipe."""
    if not out.answers.is_terminal:
        out.table(("key", "may be", "default", "meaning"), rows)
        return
    for key, rule, default, about in rows:
        out.answers.print(Text.assemble((key, "bold"), (" = " if default else "", "dim"), default))
        for text in filter(None, (about, rule)):
            style = "dim" if text == rule else ""
            block = Padding(Text(text, style=style), (0, 0, 0, 4))
            out.answers.print(block, soft_wrap=False)


def _report(out: Output, outcome: Outcome) -> None:
    summary, folder = outcome.summary, outcome.folder
    if outcome.is_interrupted:
        out.say(
            f"interrupted after round {summary['rounds']}; to resume: "
            f"fedjax-dp run --resume {folder}"
        )
    if outcome.stopped_by is not None:
        out.say(f"stopped after round {summary['rounds']} by {outcome.stopped_by}")
    if outcome.is_over_budget:
        out.say(f"stopped after round {summary['rounds']}: one more would exceed the budget")
    parts = [f"{summary['rounds']} rounds in {summary['seconds']:.1f} s"]
    if "simulated_seconds" in summary:
        parts.append(f"{summary['simulated_seconds']:.6g} simulated seconds")
    of_all, shared = (summary.get(f"{of}test_accuracy", np.nan) for of in ("", "shared_"))
    if np.isfinite(of_all):
        parts.append(f"test accuracy of {summary['test_accuracy_of']} {of_all:.4f}")
    if np.isfinite(shared):
        parts.append(f"of the shared model {shared:.4f}")
    if summary.get("worst_client_accuracy") is not None:
        parts.append(f"worst client {summary['worst_client_accuracy']:.4f}")
    if summary["epsilon"] is not None:
        low, high = (rounded_up(summary[f"dp_delta{of}"], 6) for of in ("_smallest", ""))
        delta = high if low == high else f"{low} to {high}"
        parts.append(f"ε = {rounded_up(summary['epsilon'])} at δ = {delta}")
        parts[-1] += f", which covers {summary['covered_models']}"
        if "epsilon_of_shared_record" in summary:
            parts.append(_of_shared_record(summary))
        if "not_covered" in summary:
            parts.append(f"NOT covered: {summary['not_covered']}")
    else:
        parts.append("no privacy is claimed")
    out.say(", ".join(parts))
    for text in summary["warnings"]:
        out.say(f"warning: {text}")
    if outcome.is_futile:
        out.say("the run failed: no client's work entered the model in any round")
    out.say(f"run folder: {folder}")


def _of_shared_record(summary: Mapping[str, Any]) -> str:
    """Reports ε of a record that several clients hold."""
    epsilon = summary["epsilon_of_shared_record"]
    if epsilon is None:
        return "no ε can be stated for a record that one client holds several times"
    delta = summary["dp_delta_of_shared_record"]
    return (
        f"for a record that several clients hold: ε = {rounded_up(float(epsilon))} at δ = {delta:g}"
    )
