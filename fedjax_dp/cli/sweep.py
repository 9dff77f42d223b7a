"""`fedjax-dp sweep`: runs a grid of experiments."""

import json
import pathlib
import tomllib
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import typer

from fedjax_dp.cli.options import Configured, answering, application
from fedjax_dp.cli.output import Answer, Output
from fedjax_dp.cli.progress import Progress, end_process
from fedjax_dp.core import checks
from fedjax_dp.core.packages import MissingPackageError
from fedjax_dp.experiment.reading.config_files import load_config, require_key
from fedjax_dp.experiment.studies.selection import select_privately
from fedjax_dp.experiment.studies.sweep import (
    Point,
    Study,
    average_over_seeds,
    grid_points,
    loaded,
    read_summaries,
    sweep,
)
from fedjax_dp.experiment.studies.tables import as_csv, as_list
from fedjax_dp.io.disk import DiskFull
from fedjax_dp.privacy.mechanisms.repetition import Repetition, repetition

app = application()
_NAME, _SEED = "sweep", "run.seed"
# Names in the summary of a run, and factors for the table.
_METRICS = {"test_accuracy": 1.0, "worst_client_accuracy": 1.0, "epsilon": 1.0}


@answering(app, cls=Configured)
def command(
    context: typer.Context,
    out: Output,
    file: Annotated[
        str | None,
        typer.Argument(metavar="FILE", help="A TOML file; without one, the defaults."),
    ] = None,
    over: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=V1,V2", help="A key and its values; several make a grid."),
    ] = None,
    output: Annotated[
        pathlib.Path | None,
        typer.Option(help="Folder of the run folders; by default runs/NAME-sweep."),
    ] = None,
    select: Annotated[
        Literal["private"] | None,
        typer.Option(help="Run a random number of trials and choose the best, at a price in ε."),
    ] = None,
    trials: Annotated[
        float | None, typer.Option(help="The expected number of trials, at least 1.")
    ] = None,
    trials_shape: Annotated[
        float | None,
        typer.Option(help="The shape of its distribution, at least 0; 1, geometric, by default."),
    ] = None,
) -> Answer:
    """Run a grid: `fedjax-dp sweep [FILE.toml] --over KEY=V1,V2 [--over …] [--section.key VALUE]`.

    Each point has a run folder of its own, with its noise, ledger and statement; points that differ
    in numbers alone run together, in one compiled program. The same command resumes a sweep that
    was interrupted. At the end there are `table.csv`, `table.md`, with means and standard
    deviations over `run.seed`, and `accuracy.png`.

    With `--select private --trials M` a random number of trials runs, M on average, each of a point
    drawn at random, and the folder `chosen` has the release of the best with the statement that
    covers the choice.
    """
    axes = dict(_axis(word) for word in over or [])
    given = [word.partition("=")[0] for word in over or []]
    checks.require(len(axes) == len(given) > 0, "--over", "name one key or more, each once", given)
    config = load_config(file, context.args)
    place = output or pathlib.Path("runs") / f"{config.title}-sweep"
    study = Study(
        name=config.title,
        file=None if file is None else pathlib.Path(file),
        axes=axes,
        rows="",
        columns="",
        metrics=_METRICS,
    )
    grid = grid_points(study, words=context.args)
    if select is None:
        given = [n for n, v in (("--trials", trials), ("--trials-shape", trials_shape)) if v]
        checks.require(not given, "--select", "be private, to draw trials", given)
    else:
        return _selected(study, grid, place, _repetition(axes, trials, trials_shape), out)
    rounds = sum(loaded(study, point).run.rounds for point in grid)
    try:
        with Progress(out, _NAME, rounds) as progress:
            sweep(study, grid, place, out.note, watcher=progress)
    except KeyboardInterrupt:
        text = f"interrupted; the same command resumes the sweep in {place}"
        end_process(out, _NAME, text, 130)
    except DiskFull as error:
        end_process(out, _NAME, f"error: {error}", 2)
    entries = average_over_seeds(study, read_summaries(grid, place))
    table = as_list(study, entries)
    (place / "table.csv").write_text(as_csv(entries), encoding="utf-8")
    (place / "table.md").write_text(f"# {study.name}\n\n{table}\n", encoding="utf-8")
    _draw(study, entries, place / "accuracy.png", out)
    document = {"folder": str(place), "points": len(grid), "entries": entries}
    return Answer(document, lambda out: out.say(f"{table}\n\ntables: {place}"), str(place))


def _repetition(axes: Mapping[str, Any], trials: float | None, shape: float | None) -> Repetition:
    """Reads the distribution of the number of trials."""
    rule = f"not name {_SEED}: every trial has noise of its own, on the same clients"
    checks.require("seed" not in axes, "--over", rule, _SEED)
    checks.require(trials is not None, "--trials", "be given, the expected number", trials)
    assert trials is not None
    return repetition(trials, shape=1.0 if shape is None else shape)


def _selected(
    study: Study, grid: Sequence[Point], place: pathlib.Path, trials: Repetition, out: Output
) -> Answer:
    """Chooses among points privately; the number of trials is in no answer."""
    try:
        choice = select_privately(study, grid, place, trials, report=lambda line: None)
    except KeyboardInterrupt:
        text = f"interrupted; the same command resumes the selection in {place}"
        end_process(out, _NAME, text, 130)
    if choice is None:
        document = {"folder": str(place), "chosen": None}
        return Answer(document, lambda out: out.say("no trial was drawn"), "")
    chosen, epsilon = choice.point.values, choice.epsilon
    answer = {"folder": str(choice.folder), "chosen": chosen, "epsilon": epsilon}
    spent = ", ".join(f"ε = {value:.4g} ({unit})" for unit, value in choice.epsilon.items())
    text = f"chosen: {choice.point.name}, {spent} with the choice\nstatement: {choice.folder}"
    return Answer(answer, lambda out: out.say(text), str(choice.folder))


def _axis(word: str) -> tuple[str, Mapping[str, Sequence[str]]]:
    """Reads a key and its values, such as "training.learning_rate=0.1,0.3"."""
    key, equals, text = word.partition("=")
    require_key(key)
    checks.require(bool(equals and text), "--over", "be KEY=V1,V2", word)
    names = _values(text)
    checks.require(len(set(names)) == len(names), f"--over {key}", "hold each value once", names)
    axis = "seed" if key == _SEED else key
    return axis, {name: (f"--{key}={name}",) for name in names}


def _values(text: str) -> list[str]:
    """Splits values, which are written as in TOML; strings need no quotes."""
    try:
        found = tomllib.loads(f"values = [{text}]")["values"]
    except tomllib.TOMLDecodeError:
        return [part.strip() for part in text.split(",")]
    if any(isinstance(value, list | dict) for value in found):
        return [json.dumps(value) for value in found]
    return [part.strip() for part in text.split(",")]


def _draw(
    study: Study, entries: Sequence[Mapping[str, Any]], file: pathlib.Path, out: Output
) -> None:
    """Draws accuracy by ε, a curve for each point of the other axes."""
    try:
        from fedjax_dp.io import plots, sweep_plots
    except MissingPackageError as missing:
        out.note(f"no picture is drawn: {missing}")
        return
    axes = [axis for axis in study.axes if axis != "seed" and not axis.endswith(".epsilon")]
    curves = curves_of(entries, axes)
    if curves:
        plots.save(sweep_plots.accuracy_by(curves, "ε", study.name), file)


def curves_of(
    entries: Sequence[Mapping[str, Any]], axes: Sequence[str]
) -> dict[str, tuple[list[float], list[float], list[float | None]]]:
    """Collects accuracy by ε of points that have both, by their values on other axes."""
    every = [axis for axis in (entries[0] if entries else ()) if axis not in _COLUMNS]
    spent = {tuple(e[a] for a in every): e["mean"] for e in entries if e["metric"] == "epsilon"}
    found: dict[str, list[tuple[float, float, float | None]]] = {}
    for entry in entries:
        point = tuple(entry[a] for a in every)
        if entry["metric"] == "test_accuracy" and point in spent:
            name = ", ".join(f"{axis} {entry[axis]}" for axis in axes)
            found.setdefault(name, []).append((spent[point], entry["mean"], entry["std"]))
    columns = {
        name: list(zip(*sorted(each, key=lambda p: p[0]), strict=True))
        for name, each in found.items()
    }
    return {name: (list(x), list(y), list(z)) for name, (x, y, z) in columns.items()}


_COLUMNS = ("metric", "mean", "std", "seeds", "published")
