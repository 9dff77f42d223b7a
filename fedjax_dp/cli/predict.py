"""`fedjax-dp predict`: what the model of a run says of examples."""

import pathlib
from typing import Annotated

import jax
import numpy as np
import typer
from rich.console import Console

from fedjax_dp.core import checks
from fedjax_dp.experiment.loading import load_run, other_data, predict

app = typer.Typer(add_completion=False)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def command(
    context: typer.Context,
    folder: Annotated[pathlib.Path, typer.Argument(help="A run folder.")],
    output: Annotated[pathlib.Path, typer.Option(help="The .npz file to write; must be new.")],
    part: Annotated[str, typer.Option(help="Examples: test, train or client_test.")] = "test",
    client: Annotated[
        int | None, typer.Option(help="Whose model; the shared one if not given.")
    ] = None,
) -> None:
    """Write what a run's model says: `fedjax-dp predict DIR --output FILE.npz`.

    With `--data.key VALUE` it speaks of other data. The file holds `outputs`, or one array for each
    output, and `y` where the examples have it.
    """
    checks.one_of("--part", part, ("test", "train", "client_test"))
    is_new = output.suffix == ".npz" and not output.exists()
    checks.require(is_new, "--output", "be a new file that ends in .npz", str(output))
    run = load_run(folder)
    population = other_data(run, context.args) or run.experiment.population
    data = getattr(population, part)
    checks.require(data is not None, "--part", "name examples that there are", part)
    params = run.params if client is None else run.params_of(client)
    outputs = predict(run.model, params, data)
    leaves = jax.tree.leaves(outputs)
    names = ["outputs"] if len(leaves) == 1 else [f"outputs_{i}" for i in range(len(leaves))]
    targets = {"y": data.examples["y"]} if "y" in data.examples else {}
    output.parent.mkdir(parents=True, exist_ok=True)
    with output.open("wb") as file:
        np.savez(file, **dict(zip(names, leaves, strict=True)), **targets)
    Console().print(f"wrote {output}: {data.num_examples} examples", soft_wrap=True)
