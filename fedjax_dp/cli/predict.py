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
# What `--copy` names besides the columns of a table.
_OWN = ("row", "client")
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
            help="row (the number of the example in its part, from 0), client (its name or "
            "number), or a column of a table's test rows; repeatable.",
        ),
    ] = None,
) -> Answer:
    """Write the outputs of a run's model: `fedjax-dp predict DIR --output FILE.npz`.

    `--data.key VALUE` selects other data, which need no labels. An .npz file holds `outputs`, or
    one array for each output, and `y` if the examples have it. A .csv file has the column
    `prediction`, and `label` if the examples have it, as the names of classes or numbers, with one
    line for each example in the order of the data. Of several labels, `prediction_NAME` is 1 for
    yes and 0 for no; of several numbers, `prediction_0` is the first. `--probabilities` adds the
    array `probabilities`, or the columns `probability_NAME`. `--copy` adds arrays, or columns
    before the predictions, that tell the examples apart: `row`, `client`, and columns of a table's
    test rows as their file has them.
    """
    checks.one_of("--part", part, PARTS)
    files.require_new(output, "--output", (".npz", ".csv"))
    names = columns or []
    checks.require(len(set(names)) == len(names), "--copy", "name each column once", names)
    of_table = [name for name in names if name not in _OWN]
    copied = _copied(folder, context.args, part, of_table)
    out.note("reading the run")
    run = load_run(folder, out.warn)
    other = other_data(run, context.args, needs_test_labels=False)
    population = other or run.experiment.population
    data = _examples(run, population, part)
    copied |= _own(data, part, names) if names else {}
    copied = {name: copied[name] for name in names}
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
        table = {
            in_csv(name): [in_csv(cell) if isinstance(cell, str) else cell for cell in cells]
            for name, cells in copied.items()
        } | predicted
        with unfinished.open("w", newline="", encoding="utf-8") as text:
            rows = csv.writer(text, lineterminator="\n")
            rows.writerows([list(table), *zip(*table.values(), strict=True)])
        unfinished.replace(output)
        return _answer(output, part, client, data.num_examples, list(table))
    leaves = jax.tree.leaves(outputs)
    names = ["outputs"] if len(leaves) == 1 else [f"outputs_{i}" for i in range(len(leaves))]
    arrays: dict[str, Any] = {name: _array(cells) for name, cells in copied.items()}
    twice = sorted({"y", "probabilities", *names} & arrays.keys())
    checks.require(not twice, "--copy", "name no column that predictions have", twice)
    arrays |= dict(zip(names, leaves, strict=True))
    if chances is not None:
        arrays["probabilities"] = chances
    if "y" in data.examples:
        arrays["y"] = data.examples["y"]
    with unfinished.open("wb") as file:
        np.savez(file, **arrays)
    unfinished.replace(output)
    return _answer(output, part, client, data.num_examples, list(arrays))


def _own(data: FederatedData, part: str, names: list[str]) -> dict[str, list[Any]]:
    """Numbers the examples of a part, and names the client of each."""
    rule = "be row or a column of a table for --part test, whose examples are of no client"
    checks.require(part != "test" or "client" not in names, "--copy", rule, "client")
    of_rows = np.repeat(np.arange(data.num_clients), data.sizes).tolist()
    clients = [data.client_names[i] for i in of_rows] if data.client_names else of_rows
    return {"row": list(range(data.num_examples)), "client": clients}


def _array(cells: list[Any]) -> np.ndarray:
    """Makes an array of cells: of numbers, or else of text, in which missing ones are empty."""
    array = np.asarray(cells)
    is_plain = array.dtype.kind in "biufU"
    return array if is_plain else np.asarray(["" if each is None else str(each) for each in cells])


def _copied(
    folder: pathlib.Path, words: list[str], part: str, names: list[str]
) -> dict[str, list[Any]]:
    """Reads the columns of a table to copy, before any longer work."""
    if not names:
        return {}
    rule = "be row or client unless --part is test: clients share the rows of other parts"
    checks.require(part == "test", "--copy", rule, names)
    section = config_files.load_config(folder / CONFIG_FILE, words).data
    rule = f"be row or client unless the data are a table, as {section.name} has no columns"
    checks.require(section.name == "table", "--copy", rule, names)
    given = grouped(datasets.LOADERS["table"], section.options)
    data_dir = datasets.resolve_data_dir(section.data_dir)
    return cells_of_test_rows(data_dir, names, **given)


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
        shares = [f"{chance:.7g}" for chance in each]
        columns[in_csv(f"probability_{classes[i] if classes else i}")] = shares
    return columns


def _answer(
    output: pathlib.Path, part: str, client: int | None, count: int, arrays: list[str]
) -> Answer:
    """Builds the answer about a written file."""
    document: dict[str, Any] = {"file": str(output), "part": part, "client": client}
    document |= {"num_examples": int(count), "arrays": arrays}
    return Answer(document, lambda out: out.say(f"wrote {output}: {count} examples"), str(output))
