"""The command `fedjax-dp`."""

import pathlib
import sys
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from fedjax_dp.cli import audit, bench, data, privacy
from fedjax_dp.core import checks

app = typer.Typer(
    help="Federated learning under differential privacy, simulated in JAX.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

_ANY_OPTION = {"allow_extra_args": True, "ignore_unknown_options": True}


@app.command(context_settings=_ANY_OPTION)
def run(
    context: typer.Context,
    output: Annotated[
        pathlib.Path | None, typer.Option(help="Run folder; the next free one under runs/.")
    ] = None,
    resume: Annotated[
        pathlib.Path | None, typer.Option(help="Go on with the interrupted run in this folder.")
    ] = None,
    keys: Annotated[
        bool, typer.Option("--keys", help="List every key of a configuration.")
    ] = False,
) -> None:
    """Run an experiment: `fedjax-dp run [FILE.toml] [--section.key VALUE ...]`."""
    from fedjax_dp.cli import config as configuration

    if keys:
        table = Table("key", "default", "meaning")
        for row in configuration.describe():
            table.add_row(*row)
        Console().print(table)
        return
    words = list(context.args)
    file = words.pop(0) if words and not words[0].startswith("--") else None
    if resume is not None:
        others = [str(word) for word in (file, *words, output) if word is not None]
        rule = "stand alone, since a run goes on with the configuration that it has"
        checks.require(not others, "--resume", rule, others)
        file = str(resume / "config.toml")
        checks.require(
            pathlib.Path(file).is_file(),
            "--resume",
            "name a run folder with a config.toml",
            str(resume),
        )
    config = configuration.load(file, words)

    from fedjax_dp.cli import run as running

    if output is not None:
        running.require_free(output)
    try:
        status = running.run(config, resume or output, Console(), resume=resume is not None)
    except KeyboardInterrupt:
        print("interrupted; what the last checkpoint holds is kept", file=sys.stderr)
        status = 130
    raise typer.Exit(status)


app.add_typer(data.app, name="data")
app.add_typer(privacy.app, name="privacy")
app.command("bench")(bench.command)
app.command("audit", context_settings=_ANY_OPTION)(audit.command)


def main() -> None:
    """Runs the command line; a mistake of the user ends in one line and status 2."""
    try:
        app()
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
