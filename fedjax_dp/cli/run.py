"""`fedjax-dp run`: runs an experiment."""

import json
import pathlib
import shlex
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.padding import Padding
from rich.text import Text

from fedjax_dp.cli.output import (
    Answer,
    ConfigFile,
    Configured,
    Output,
    answering,
    application,
    note_loading,
    shown_path,
)

# Imported where it is used, after the first line of progress.
if TYPE_CHECKING:
    from fedjax_dp.experiment.reading.keys import Row
    from fedjax_dp.experiment.running.run import Outcome, Watcher
    from fedjax_dp.experiment.schema.config import Config

app = application()
_NAME = "run"


@answering(app, cls=Configured)
def command(
    context: typer.Context,
    out: Output,
    file: ConfigFile = None,
    output: Annotated[
        pathlib.Path | None,
        typer.Option(help="Run folder; by default the next free one under runs/."),
    ] = None,
    resume: Annotated[
        pathlib.Path | None,
        typer.Option(help="Resume the run in this folder; a larger --run.rounds extends it."),
    ] = None,
    keys: Annotated[
        bool, typer.Option("--keys", help="List all keys; with --algorithm.name NAME, its options.")
    ] = False,
    schema: Annotated[
        bool, typer.Option("--schema", help="Print the JSON schema of FILE, for editors.")
    ] = False,
) -> Answer:
    """Run an experiment: `fedjax-dp run [FILE.toml] [--section.key VALUE ...]`.

    `--section.key VALUE`, such as `--training.learning_rate 0.1`, overrides a key of FILE and may
    stand before or after it. Values are written as in TOML; strings need no quotes, and `none`
    removes a value, or a section that may be left out, such as `--acceleration none`. Overriding
    a name, or a table by `{}`, discards the options that FILE has for the previous choice.

    `--keys` lists all keys, and `--keys --algorithm.name=fedprox` the options of an algorithm; the
    same works for data.name, data.partition, model.name and training.optimizer. `--schema` prints
    the JSON schema of FILE, by which editors complete keys and mark mistakes.
    """
    overrides = list(context.args)
    if schema:
        from fedjax_dp.experiment.reading.json_schema import json_schema

        tables = json_schema()
        text = json.dumps(tables, indent=2)
        return Answer({"schema": tables}, lambda out: out.answers.print(text), text)
    if keys:
        return _keys([*([] if file is None else [file]), *overrides])
    note_loading(out)
    from fedjax_dp.cli.progress import INTERRUPTED, ending
    from fedjax_dp.core import checks, files
    from fedjax_dp.experiment.reading import config_files
    from fedjax_dp.experiment.running import run as running
    from fedjax_dp.experiment.running.processes import is_first_process, start_processes
    from fedjax_dp.experiment.running.run import Watcher
    from fedjax_dp.experiment.running.run_folder import CONFIG_FILE, config_of, require_free

    if resume is not None:
        others = [str(word) for word in (file, output) if word is not None]
        rule = "not be combined with a config file or --output, which the resumed run already has"
        checks.require(not others, "--resume", rule, others)
        is_run = files.kind_of(resume / CONFIG_FILE, "--resume") == "file"
        rule = f"name a run folder with a {CONFIG_FILE}"
        checks.require(is_run, "--resume", rule, str(resume))
        config = config_of(resume, out.warn, overrides)
        start_processes(config)
        start = partial(running.resume, resume, config=config)
    else:
        config = config_files.load_config(file, overrides)
        start_processes(config)
        if output is not None and is_first_process():
            require_free(output)
        start = partial(running.run, config, output)
    with ending(out, _NAME, INTERRUPTED):
        if not is_first_process():
            # The first process shows progress and answers for all.
            raise typer.Exit(_status(start(Watcher())))
        answer = shown(config, start, out)
    return answer


def shown(config: "Config", start: "Callable[[Watcher], Outcome]", out: Output) -> Answer:
    """Runs an experiment with progress and returns its answer."""
    from fedjax_dp.cli.progress import Progress

    with Progress(out, _NAME, config.run.rounds) as progress:
        outcome = start(progress)
    folder = shown_path(outcome.folder)
    document: dict[str, Any] = {"folder": folder, "ended": outcome.ended}
    document |= {"is_futile": outcome.is_futile}
    document |= {"summary": outcome.summary}
    return Answer(document, lambda out: _report(out, outcome), folder, _status(outcome))


def _status(outcome: "Outcome") -> int:
    """Returns 0 at the end, 130 if interrupted, 3 if no client's work entered the model."""
    return 130 if outcome.ended == "interrupted" else 3 if outcome.is_futile else 0


def _keys(parts: Sequence[str]) -> Answer:
    """Lists all keys, or the options of parts given as `key=name` or `--key=name`."""
    from fedjax_dp.experiment.reading.keys import describe, describe_choice

    rows = [row for part in parts for row in describe_choice(part.removeprefix("--"))]
    rows = rows if parts else describe()
    heads = ("key", "rule", "default", "meaning")
    document = {"keys": [dict(zip(heads, row, strict=True)) for row in rows]}
    return Answer(document, lambda out: _show_keys(out, rows), "\n".join(row[0] for row in rows))


def _show_keys(out: Output, rows: "Sequence[Row]") -> None:
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


def _report(out: Output, outcome: "Outcome") -> None:
    from fedjax_dp.experiment.running.run import describe_early_end, summary_in_words

    summary, folder = outcome.summary, shown_path(outcome.folder)
    if early := describe_early_end(outcome):
        resumed = f"; to resume: fedjax-dp run --resume {shlex.quote(str(folder))}"
        out.say(early + (resumed if outcome.ended == "interrupted" else ""))
    out.say(summary_in_words(summary))
    for hint in summary.get("hints", ()):
        out.say(f"hint: {hint}")
    if outcome.is_futile:
        out.say("the run failed: no client's work entered the model in any round")
    out.say(f"run folder: {folder}")
