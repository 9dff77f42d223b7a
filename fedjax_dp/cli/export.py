"""`fedjax-dp export`: the parameters of a run, for whoever goes on without this package."""

import pathlib
from typing import Annotated

import typer
from rich.console import Console

from fedjax_dp.core import checks
from fedjax_dp.experiment.loading import load_run
from fedjax_dp.io.params import FORMATS, write_params

app = typer.Typer(add_completion=False)


@app.command()
def command(
    folder: Annotated[pathlib.Path, typer.Argument(help="A run folder.")],
    output: Annotated[
        pathlib.Path, typer.Option(help="The file, or for orbax the folder, to write; must be new.")
    ],
    form: Annotated[
        str, typer.Option("--format", help="safetensors, npz or orbax.")
    ] = "safetensors",
    client: Annotated[
        int | None, typer.Option(help="Whose model; the shared one if not given.")
    ] = None,
) -> None:
    """Write a run's parameters: `fedjax-dp export DIR --output FILE.safetensors`.

    Every leaf has its path as its name, frozen ones among them, and `model.pretrained` reads them.
    """
    checks.one_of("--format", form, FORMATS)
    checks.require(not output.exists(), "--output", "be new", str(output))
    run = load_run(folder)
    params = run.params if client is None else run.params_of(client)
    write_params(output, run.model.full_params(params), form)  # type: ignore[arg-type]
    Console().print(f"wrote {output}", soft_wrap=True)
