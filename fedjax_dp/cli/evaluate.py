"""`fedjax-dp evaluate`: the model of a run on held-out data."""

import json
import pathlib
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from fedjax_dp.experiment.loading import evaluate_run, load_run, other_data
from fedjax_dp.io.logbook import to_json

app = typer.Typer(add_completion=False)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def command(
    context: typer.Context,
    folder: Annotated[pathlib.Path, typer.Argument(help="A run folder.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Evaluate the model of a run: `fedjax-dp evaluate DIR [--data.key VALUE ...]`.

    Overrides of the data section name other data to judge the shared model by.
    """
    run = load_run(folder)
    found = evaluate_run(run, other_data(run, context.args))
    if as_json:
        print(json.dumps(to_json(found)))
        return
    table = Table("figure", "value")
    for name, value in found.items():
        if np.ndim(value) == 0:
            table.add_row(name, "" if value is None else f"{float(value):.6g}")
    console = Console()
    console.print(f"{run.config.title}, round {int(run.state.round)}; exact, not private")
    console.print(table)
