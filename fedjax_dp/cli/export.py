"""`fedjax-dp export`: writes the parameters of a run for other programs."""

import pathlib
from typing import Annotated

import typer

from fedjax_dp.cli.options import answering, application
from fedjax_dp.cli.output import Answer, Output
from fedjax_dp.core import checks
from fedjax_dp.experiment.running.loading import load_run
from fedjax_dp.io.params import FORMATS, write_params

app = application()


@answering(app)
def command(
    out: Output,
    folder: Annotated[pathlib.Path, typer.Argument(metavar="DIR", help="A run folder.")],
    output: Annotated[pathlib.Path, typer.Option(help="The new file, or folder for orbax.")],
    form: Annotated[
        str, typer.Option("--format", help="safetensors, npz or orbax.")
    ] = "safetensors",
    client: Annotated[
        int | None,
        typer.Option(help="A client, for its personal model; by default the shared model."),
    ] = None,
) -> Answer:
    """Write a run's parameters: `fedjax-dp export DIR --output FILE.safetensors`.

    Each parameter, trained or frozen, is named by its path; `model.pretrained` reads the file.
    """
    checks.one_of("--format", form, FORMATS)
    checks.require(not output.exists(), "--output", "be new", str(output))
    out.note("reading the run")
    run = load_run(folder)
    params = run.params if client is None else run.params_of(client)
    write_params(output, run.model.full_params(params), form)  # type: ignore[arg-type]
    document = {"file": str(output), "format": form, "client": client}
    return Answer(document, lambda out: out.say(f"wrote {output}"), str(output))
