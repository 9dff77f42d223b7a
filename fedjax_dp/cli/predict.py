"""`fedjax-dp predict`: writes the outputs of a run's model."""

import csv
import pathlib
from typing import Annotated, Any

import jax
import numpy as np
import typer
from scipy.special import expit, softmax

from fedjax_dp.cli.output import Answer, ConfiguredData, Output, answering, application
from fedjax_dp.core import checks, files
from fedjax_dp.core.foreign_text import in_csv
from fedjax_dp.core.registry import grouped
from fedjax_dp.data import datasets
from fedjax_dp.data.datasets.table import cells_of_test_rows
from fedjax_dp.data.federated import FederatedData
from fedjax_dp.experiment.components.experiment import Population
from fedjax_dp.experiment.reading import config_files
from fedjax_dp.experiment.running.loading import Run, load_run, other_data, predict
from fedjax_dp.experiment.running.run_folder import CONFIG_FILE
from fedjax_dp.models.losses import Targets
from fedjax_dp.models.weights import declared

app = application()
# The parts of a run's data.
PARTS = ("test", "train", "client_test", "unseen")


@answering(app, cls=ConfiguredData)
def command(
    context: typer.Context,
    out: Output,
    folder: Annotated[pathlib.Path, typer.Argument(metavar="DIR", help="A run folder.")],
    output: Annotated[pathlib.Path, typer.Option(help="The new .npz or .csv file.")],
    part: Annotated[str, typer.Option(help=f"Examples: {', '.join(PARTS)}.")] = "test",
    client: Annotated[
        int | None,
        typer.Option(help="A client, for its personal model; by default the shared model."),
    ] = None,
    probabilities: Annotated[
        bool, typer.Option("--probabilities", help="Write the probability of each class too.")
    ] = False,
    columns: Annotated[
        list[str] | None,
        typer.Option(
            "--copy",
            metavar="COLUMN",
            help="A column of a table, such as an identifier or an input, to copy into the .csv "
            "file; repeatable.",
        ),
    ] = None,
) -> Answer:
    """Write the outputs of a run's model: `fedjax-dp predict DIR --output FILE.npz`.

    `--data.key VALUE` selects other data, which need no labels. An .npz file holds `outputs`, or
    one array for each output, and `y` if the examples have it. A .csv file has the column
    `prediction`, and `label` if the examples have it, as the names of classes or numbers, with one
    line for each example in the order of the data. Of several labels, `prediction_NAME` is 1 for
    yes and 0 for no; of several numbers, `prediction_0` is the first. `--probabilities` adds the
    array `probabilities`, or the columns `probability_NAME`. `--copy COLUMN` puts a column of the
    test rows, as their file has it, before the predictions.
    """
    checks.one_of("--part", part, PARTS)
    files.require_new(output, "--output", (".npz", ".csv"))
    copied = _copied(folder, context.args, part, output, columns or [])
    out.note("reading the run")
    run = load_run(folder, out.warn)
    other = other_data(run, context.args, needs_test_labels=False)
    population = other or run.experiment.population
    data = _examples(run, population, part)
    params = run.params if client is None else run.params_of(client)
    outputs = predict(run.model, params, data)
    loss = declared(run.model.loss_fn)
    decoded = outputs if loss is None else loss.decoded(outputs)
    targets = None if loss is None else loss.targets
    chances = _probabilities(decoded, targets, population) if probabilities else None
    output.parent.mkdir(parents=True, exist_ok=True)
    unfinished = output.with_name(f"{output.name}.tmp")
    if output.suffix == ".csv":
        predicted = _columns(decoded, data.examples.get("y"), population, targets, chances)
        twice = sorted(copied.keys() & predicted.keys())
        checks.require(not twice, "--copy", "name no column that predictions have", twice)
        table = copied | predicted
        with unfinished.open("w", newline="", encoding="utf-8") as text:
            rows = csv.writer(text, lineterminator="\n")
            rows.writerows([list(table), *zip(*table.values(), strict=True)])
        unfinished.replace(output)
        return _answer(output, part, client, data.num_examples, list(table))
    leaves = jax.tree.leaves(outputs)
    names = ["outputs"] if len(leaves) == 1 else [f"outputs_{i}" for i in range(len(leaves))]
    arrays: dict[str, Any] = dict(zip(names, leaves, strict=True))
    if chances is not None:
        arrays["probabilities"] = chances
    if "y" in data.examples:
        arrays["y"] = data.examples["y"]
    with unfinished.open("wb") as file:
        np.savez(file, **arrays)
    unfinished.replace(output)
    return _answer(output, part, client, data.num_examples, list(arrays))


def _copied(
    folder: pathlib.Path, words: list[str], part: str, output: pathlib.Path, names: list[str]
) -> dict[str, list[Any]]:
    """Reads the columns to copy, before any longer work."""
    if not names:
        return {}
    is_csv = output.suffix == ".csv"
    checks.require(is_csv, "--copy", "be left out unless --output ends in .csv", names)
    rule = "be left out unless --part is test: clients share the rows of other parts"
    checks.require(part == "test", "--copy", rule, names)
    checks.require(len(set(names)) == len(names), "--copy", "name each column once", names)
    section = config_files.load_config(folder / CONFIG_FILE, words).data
    rule = f"be left out unless the data are a table, as {section.name} has no columns"
    checks.require(section.name == "table", "--copy", rule, names)
    given = grouped(datasets.LOADERS["table"], section.options)
    data_dir = datasets.resolve_data_dir(section.data_dir)
    found = cells_of_test_rows(data_dir, names, **given)
    return {
        in_csv(name): [in_csv(cell) if isinstance(cell, str) else cell for cell in cells]
        for name, cells in found.items()
    }


def _probabilities(outputs: Any, targets: Targets | None, population: Population) -> np.ndarray:
    """Returns chances from decoded outputs, classes or labels on the last axis, float64."""
    rule = "be left out for a model whose loss declares no classes or labels"
    fits = targets in ("classes", "ordered", "probabilities")
    checks.require(fits, "--probabilities", rule, targets)
    scores = np.asarray(outputs, np.float64)
    if targets != "probabilities":
        # Logarithms of chances are logits too.
        return np.asarray(softmax(scores, axis=-1))
    chances = np.asarray(expit(scores))
    # One column of log-odds is of the second of two classes.
    return np.concatenate([1 - chances, chances], -1) if population.has_class_labels else chances


def _examples(run: Run, population: Population, part: str) -> FederatedData:
    """Returns a part of the data; an error names those that there are."""
    known = {name: getattr(population, name) for name in PARTS}
    if known[part] is None:
        names = ", ".join(name for name, data in known.items() if data is not None)
        rule = f"be one of {names}, as these data have no other parts"
        if "test_path" in datasets.options(run.config.data.name):
            rule += "; new rows are given by --data.options.test_path"
        checks.require(False, "--part", rule, part)
    return known[part]


def _columns(
    outputs: Any,
    labels: Any,
    population: Population,
    targets: Targets | None,
    chances: np.ndarray | None,
) -> dict[str, list[Any]]:
    """Returns the columns of a table of predictions: classes, numbers, or one for each target."""
    scores, classes = np.asarray(outputs), population.class_names
    is_number = targets in ("numbers", "counts", None) and not population.has_class_labels
    is_class = population.has_class_labels and targets not in ("numbers", "counts")
    # Targets of an example, of which there may be several.
    width = np.shape(population.train.examples["y"])[1:]
    is_label = targets == "probabilities" and not is_class and len(width) == 1
    is_shown = (is_class and scores.ndim == 2) or (is_number and scores.size == len(scores))
    is_shown |= (is_label or is_number) and scores.ndim == 2 and scores.shape[1:] == width
    rule = "end in .npz unless each example has one class, or numbers or labels, to predict"
    checks.require(is_shown, "--output", rule, f"outputs of shape {scores.shape}")
    # One column of log-odds is of the second of two classes, and each of labels is of "yes".
    is_odds = is_label or (is_class and scores.shape[1] == 1)
    predicted = (scores > 0).astype(int) if is_odds else scores
    if is_class and not is_odds:
        predicted = np.argmax(scores, axis=-1)

    def shown(values: Any) -> list[Any]:
        values = np.asarray(values).tolist()
        if is_class and classes:
            return [in_csv(classes[v]) if v >= 0 else "" for v in values]
        return ["" if is_label and v < 0 else v for v in values]

    columns: dict[str, list[Any]] = {}
    for what, values in (("prediction", predicted), ("label", labels)):
        if values is None:
            continue
        each = np.asarray(values).reshape(len(scores), -1).T
        names = classes if is_label and classes else range(len(each))
        ends = [""] if len(each) == 1 else [f"_{name}" for name in names]
        columns |= {in_csv(what + end): shown(v) for end, v in zip(ends, each, strict=True)}
    for i, each in enumerate(() if chances is None else chances.T):
        columns[in_csv(f"probability_{classes[i] if classes else i}")] = each.tolist()
    return columns


def _answer(
    output: pathlib.Path, part: str, client: int | None, count: int, arrays: list[str]
) -> Answer:
    """Builds the answer about a written file."""
    document: dict[str, Any] = {"file": str(output), "part": part, "client": client}
    document |= {"num_examples": int(count), "arrays": arrays}
    return Answer(document, lambda out: out.say(f"wrote {output}: {count} examples"), str(output))
