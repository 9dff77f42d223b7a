"""`fedjax-dp evaluate`: evaluates the model of a run on held-out data."""

import json
import pathlib
from collections.abc import Mapping
from typing import Annotated, Any

import numpy as np
import typer

from fedjax_dp.cli.output import Answer, ConfiguredData, Output, answering, application
from fedjax_dp.core import files
from fedjax_dp.experiment.running.loading import evaluate_run, load_run, other_data

app = application()


@answering(app, cls=ConfiguredData)
def command(
    context: typer.Context,
    out: Output,
    folder: Annotated[pathlib.Path, typer.Argument(metavar="DIR", help="A run folder.")],
    by_client: Annotated[
        pathlib.Path | None, typer.Option(help="A new .jsonl file: results of each client.")
    ] = None,
) -> Answer:
    """Evaluate the model of a run: `fedjax-dp evaluate DIR [--data.key VALUE ...]`.

    `--data.key VALUE` selects other data to evaluate the shared model on. `--by-client FILE.jsonl`
    writes loss, accuracy and `run.metrics` of each client, one on a line, as `by_client.jsonl` of a
    run folder has them.
    """
    if by_client is not None:
        files.require_new(by_client, "--by-client", (".jsonl",))
    out.note("reading the run")
    run = load_run(folder, out.warn)
    evaluated = evaluate_run(run, other_data(run, context.args), by_client)
    rounds = int(run.state.round)
    # A table is one entry, as NumPy counts.
    lines = [
        (name, json.dumps(value) if isinstance(value, Mapping) else f"{float(value):.6g}")
        for name, value in evaluated.items()
        if value is not None and np.ndim(value) == 0
    ]

    def show(out: Output) -> None:
        out.say(f"{run.config.title}, round {rounds}; exact, not private")
        out.table(("figure", "value"), lines)

    document: dict[str, Any] = {"folder": str(folder), "rounds": rounds, "figures": evaluated}
    return Answer(document, show, "\n".join("\t".join(line) for line in lines))
