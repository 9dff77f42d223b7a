"""`fedjax-dp predict`: writes the outputs of a run's model."""

import pathlib
from typing import Annotated, Any

import jax
import numpy as np
import typer

from fedjax_dp.cli.options import ConfiguredData, answering, application
from fedjax_dp.cli.output import Answer, Output
from fedjax_dp.core import checks
from fedjax_dp.experiment.running.loading import load_run, other_data, predict

app = application()


@answering(app, cls=ConfiguredData)
def command(
    context: typer.Context,
    out: Output,
    folder: Annotated[pathlib.Path, typer.Argument(metavar="DIR", help="A run folder.")],
    output: Annotated[pathlib.Path, typer.Option(help="The new .npz file.")],
    part: Annotated[str, typer.Option(help="Examples: test, train or client_test.")] = "test",
    client: Annotated[
        int | None,
        typer.Option(help="A client, for its personal model; by default the shared model."),
    ] = None,
) -> Answer:
    """Write the outputs of a run's model: `fedjax-dp predict DIR --output FILE.npz`.

    `--data.key VALUE` selects other data. The file holds `outputs`, or one array for each output,
    and `y` if the examples have it.
    """
    checks.one_of("--part", part, ("test", "train", "client_test"))
    is_new = output.suffix == ".npz" and not output.exists()
    checks.require(is_new, "--output", "be a new file that ends in .npz", str(output))
    out.note("reading the run")
    run = load_run(folder)
    population = other_data(run, context.args) or run.experiment.population
    data = getattr(population, part)
    checks.require(data is not None, "--part", "name existing examples", part)
    params = run.params if client is None else run.params_of(client)
    outputs = predict(run.model, params, data)
    leaves = jax.tree.leaves(outputs)
    names = ["outputs"] if len(leaves) == 1 else [f"outputs_{i}" for i in range(len(leaves))]
    targets = {"y": data.examples["y"]} if "y" in data.examples else {}
    output.parent.mkdir(parents=True, exist_ok=True)
    with output.open("wb") as file:
        np.savez(file, **dict(zip(names, leaves, strict=True)), **targets)
    count = int(data.num_examples)
    document: dict[str, Any] = {"file": str(output), "part": part, "client": client}
    document |= {"num_examples": count, "arrays": [*names, *targets]}
    return Answer(document, lambda out: out.say(f"wrote {output}: {count} examples"), str(output))
