"""`fedjax-dp export`: writes a run's parameters, or the Flower app of an experiment."""

import pathlib
import shlex
from typing import Annotated

import typer

from fedjax_dp.cli.output import Answer, Configured, Output, answering, application
from fedjax_dp.core import checks, files
from fedjax_dp.core.packages import needed_for
from fedjax_dp.experiment.reading import config_files
from fedjax_dp.experiment.running.described import about_model
from fedjax_dp.experiment.running.loading import load_run
from fedjax_dp.io.digests import reporting_full_disk
from fedjax_dp.io.params import FORMATS, form_of, write_params

app = application("Export: a run's parameters, or the Flower app of an experiment.")


@answering(app)
def params(
    out: Output,
    folder: Annotated[pathlib.Path, typer.Argument(metavar="DIR", help="A run folder.")],
    output: Annotated[pathlib.Path, typer.Option(help="The new file, or folder for orbax.")],
    form: Annotated[
        str | None,
        typer.Option("--format", help="safetensors, npz or orbax; by default by the ending."),
    ] = None,
    client: Annotated[
        int | None,
        typer.Option(help="A client, for its personal model; by default the shared model."),
    ] = None,
) -> Answer:
    """Write a run's parameters: `fedjax-dp export params DIR --output FILE.safetensors`.

    Each parameter, trained or frozen, is named by its path; `model.pretrained` reads the file. As
    JSON beside them, except for orbax, are the model with its options, the classes and the encoding
    of the columns; of a run that claims privacy, public facts alone.
    """
    if form is not None:
        checks.one_of("--format", form, FORMATS)
    form = form_of(output, form)
    files.require_new(output, "--output", ("",))
    out.note("reading the run")
    run = load_run(folder, out.warn)
    params = run.params if client is None else run.params_of(client)
    with reporting_full_disk("no parameters were written: free some space"):
        write_params(output, run.model.full_params(params), form, about_model(run.experiment))
    document = {"file": str(output), "format": form, "client": client}
    return Answer(document, lambda out: out.say(f"wrote {output}"), str(output))


@answering(app, cls=Configured)
def flower(
    context: typer.Context,
    out: Output,
    file: Annotated[pathlib.Path, typer.Argument(metavar="FILE", help="A TOML file.")],
    folder: Annotated[pathlib.Path, typer.Argument(metavar="DIR", help="A new folder.")],
    output: Annotated[
        pathlib.Path | None,
        typer.Option(help="Run folder on the server's machine; by default DIR-run."),
    ] = None,
    keys: Annotated[
        str, typer.Option(help="device, or parity: the server makes keys of clients, for tests.")
    ] = "device",
) -> Answer:
    """Write a Flower app of an experiment: `fedjax-dp export flower FILE.toml DIR`.

    `FLWR_HOME=DIR/.flwr flwr run DIR` then runs the experiment on the nodes of a federation on this
    machine. `--section.key VALUE` overrides a key of FILE, as for `fedjax-dp run`.
    """
    with needed_for("fedjax-dp export flower", "flower"):
        from fedjax_dp.flower.export import write_app
    config = config_files.load_config(str(file), list(context.args))
    place = folder.resolve()
    runs = place.with_name(f"{place.name}-run") if output is None else output.absolute()
    names = write_app(config, folder, runs, keys=keys)  # type: ignore[arg-type]
    document = {"folder": str(folder), "files": names, "output": str(runs)}
    start = f"FLWR_HOME={shlex.quote(str(folder / '.flwr'))} flwr run {shlex.quote(str(folder))}"
    words = (
        f"wrote {folder}: to run it on a federation on this machine, {start}, with --run-config "
        "'own-data=true' if nodes have data of their own"
    )
    return Answer(document, lambda out: out.say(words), str(folder))
