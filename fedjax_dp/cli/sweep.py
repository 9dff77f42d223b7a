"""`fedjax-dp sweep`: runs a grid of experiments, or those that a search chooses."""

import contextlib
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

import typer

from fedjax_dp.cli.output import (
    Answer,
    ConfigFile,
    Configured,
    Output,
    answering,
    application,
    completed_keys,
)
from fedjax_dp.cli.progress import Progress, ending
from fedjax_dp.core import checks
from fedjax_dp.core.decimals import shown
from fedjax_dp.core.files import write_text
from fedjax_dp.core.packages import MissingPackageError
from fedjax_dp.experiment.reading.config_files import load_config, overlap, require_key, value_of
from fedjax_dp.experiment.schema.config import Config
from fedjax_dp.experiment.studies import executors, paper
from fedjax_dp.experiment.studies.cluster import Cluster
from fedjax_dp.experiment.studies.point_settings import with_settings
from fedjax_dp.experiment.studies.selection import select_privately
from fedjax_dp.experiment.studies.sweep import (
    Point,
    Study,
    as_csv,
    as_list,
    as_rows,
    average_over_seeds,
    grid_points,
    loaded,
    read_summaries,
    sweep,
)
from fedjax_dp.io.digests import STUDY_KEPT, reporting_full_disk
from fedjax_dp.privacy.mechanisms.selection import Repetition, repetition

app = application()
_NAME, _SEED = "sweep", "run.seed"
# Axes that change the clients.
_OF_CLIENTS = {"seed", "data.seed"}
_QUOTES = ("'", '"')
# The options of the arguments of a distribution of trials.
_OPTIONS = {"mean": "--trials", "shape": "--trials-shape"}
# Names in the summary of a run, and factors for the table.
_METRIC = "test_accuracy"
_METRICS = {_METRIC: 1.0, "worst_client_accuracy": 1.0, "epsilon": 1.0}


class Choosing(NamedTuple):
    """How points are chosen, where they are not a grid."""

    select: Annotated[
        Literal["private"] | None,
        typer.Option(help="Run a random number of trials and choose the best, at a price in ε."),
    ] = None
    search: Annotated[
        Literal["optuna"] | None,
        typer.Option(help="Let Optuna choose the points, by exact figures on the test data."),
    ] = None
    metric: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="What --search or --select compares, such as test_mae; else test_accuracy.",
        ),
    ] = None
    trials: Annotated[
        float | None,
        typer.Option(help="The number of runs of a search, or the expected one of --select."),
    ] = None
    trials_shape: Annotated[
        float | None,
        typer.Option(help="The shape of its distribution, at least 0; 1, geometric, by default."),
    ] = None
    sampler: Annotated[
        Literal["tpe", "random"] | None,
        typer.Option(help="How a search chooses: by a model of the results (default), or random."),
    ] = None
    pruner: Annotated[
        Literal["halving"] | None,
        typer.Option(help="End the worse runs of a search early, by successive halving."),
    ] = None
    at_once: Annotated[
        int | None, typer.Option(help="Points that a search chooses together, by default 4.")
    ] = None
    storage: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="The database of a search, such as sqlite:///search.db; by default a journal in "
            "its folder.",
        ),
    ] = None

    def require_fitting(self) -> None:
        """Refuses options of another way to choose."""
        if self.search is not None:
            rule = (
                "not be combined with --search, whose points depend on the results of others: the "
                "cost of a choice is known only of points that are drawn at random"
            )
            checks.require(self.select is None, "--select", rule, self.select)
            rule = "be left out with --search: it is an option of --select private"
            checks.require(self.trials_shape is None, "--trials-shape", rule, self.trials_shape)
            return
        of_search = {
            "--sampler": self.sampler,
            "--pruner": self.pruner,
            "--at-once": self.at_once,
            "--storage": self.storage,
        }
        names = [name for name, value in of_search.items() if value is not None]
        checks.require(not names, "--search", "be optuna, for options of a search", names)
        is_compared = self.metric is None or self.select is not None
        checks.require(is_compared, "--select or --search", "be given, for --metric", self.metric)


class Where(NamedTuple):
    """Where points run, if not in this process."""

    on: Annotated[
        Literal["ray", "slurm", "local"] | None,
        typer.Option(
            help="Run on workers: of the Ray cluster that is there, else one started here; Slurm "
            "jobs; or processes of this machine."
        ),
    ] = None
    workers: Annotated[
        int | None, typer.Option(help="Workers that run at the same time, by default 2.")
    ] = None
    worker: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="An option of each worker: of a task of Ray, such as num_gpus=1, or of submitit, "
            "such as timeout_min=240.",
        ),
    ] = None

    @contextlib.contextmanager
    def opened(self, folder: pathlib.Path) -> Iterator[Cluster | None]:
        """Opens the cluster for a study in a folder; None for this process."""
        if self.on is None:
            given = {"--workers": self.workers, "--worker": self.worker or None}
            names = [name for name, value in given.items() if value is not None]
            checks.require(not names, "--on", "be given, for options of workers", names)
            yield None
            return
        workers = 2 if self.workers is None else self.workers
        with executors.opened(self.on, folder, workers, self.worker or []) as cluster:
            yield cluster


@answering(app, cls=Configured)
def command(
    context: typer.Context,
    out: Output,
    file: ConfigFile = None,
    over: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=V1,V2",
            help="A key and its values; several make a grid. Under --search also a range, "
            "LOW..HIGH or LOW..HIGH:log.",
            autocompletion=lambda incomplete: completed_keys(incomplete),
        ),
    ] = None,
    settings: Annotated[
        pathlib.Path | None,
        typer.Option(
            metavar="FILE",
            help="A CSV file of settings by point, such as a learning rate for each method: "
            "columns of axes, whose values select points, and of keys.",
        ),
    ] = None,
    output: Annotated[
        pathlib.Path | None,
        typer.Option(help="Folder of the run folders; by default runs/NAME-sweep."),
    ] = None,
    choosing: Choosing = Choosing(),
    where: Where = Where(),
) -> Answer:
    """Run a grid: `fedjax-dp sweep [FILE.toml] --over KEY=V1,V2 [--over …] [--section.key VALUE]`.

    Each point has a run folder of its own, with its noise, ledger and statement; points that differ
    in numbers alone run together, in one compiled program. The same command resumes a sweep that
    was interrupted. At the end there are `table.csv` and `table.md`, with means and standard
    deviations over `run.seed`, `table.tex` for a paper, and `accuracy.png` with its PDF.

    With `--select private --trials M` a random number of trials runs, M on average, each of a point
    drawn at random, and the folder `chosen` has the release of the best with the statement that
    covers the choice.

    With `--search optuna --trials N` Optuna chooses N points, which no statement covers. The table
    then has a row for each run, the best first.

    With `--on ray`, `--on slurm` or `--on local` workers run the points, in a folder that all of
    them share, with the results of one process.
    """
    choosing.require_fitting()
    overrides = context.args
    if choosing.search is not None:
        rule = "be left out with --search, whose points are of no grid"
        checks.require(settings is None, "--settings", rule, settings)
        return _searched(file, overrides, output, over or [], choosing, where, out)
    axes = dict(_axis(word) for word in over or [])
    keys = [word.partition("=")[0] for word in over or []]
    checks.require(len(axes) == len(keys) > 0, "--over", "name one key or more, each once", keys)
    _require_apart(keys, overrides)
    config = load_config(file, overrides)
    folder = output or pathlib.Path("runs") / f"{config.title}-sweep"
    study = _study(config, file, axes)
    grid = grid_points(study, words=overrides)
    if settings is not None:
        grid, set_keys = with_settings(grid, settings)
        _require_apart(set_keys, overrides, "--settings")
        shared = [key for key in set_keys if any(overlap(key, axis) for axis in keys)]
        rule = "set no key of an axis, of which run.seed is named seed"
        checks.require(not shared, "--settings", rule, shared)
    trials, shape = choosing.trials, choosing.trials_shape
    if choosing.select is not None:
        drawn = _repetition(axes, trials, shape)
        return _selected(study, grid, folder, drawn, choosing.metric or _METRIC, where, out)
    both = ("--trials", trials), ("--trials-shape", shape)
    names = [name for name, value in both if value is not None]
    checks.require(not names, "--select or --search", "be given, to have trials", names)
    rounds = sum(loaded(study, point).run.rounds for point in grid)
    with _resumable(out, "sweep", folder):
        try:
            with where.opened(folder) as cluster, Progress(out, _NAME, rounds) as progress:
                sweep(study, grid, folder, out.note, watcher=progress, cluster=cluster)
        except KeyboardInterrupt:
            if folder.is_dir():
                _tabulate(study, grid, folder)
            raise
        entries, table = _tabulate(study, grid, folder)
        _draw(study, entries, folder / "accuracy.png", out)
    return _tabled(folder, len(grid), entries, table)


def _study(config: Config, file: str | None, axes: Mapping[str, Any]) -> Study:
    """Makes the study of a grid, whose table has the metrics of `run.metrics` too."""
    path = None if file is None else pathlib.Path(file)
    names = [name.rpartition(":")[2] for name in config.run.metrics]
    metrics = _METRICS | {f"test_{name}": 1.0 for name in names}
    return Study(name=config.title, file=path, axes=axes, rows="", columns="", metrics=metrics)


def _tabulate(
    study: Study, grid: Sequence[Point], folder: pathlib.Path
) -> tuple[list[dict[str, Any]], str]:
    """Writes the tables of the points that have ended; returns their entries, and one table."""
    rows = [row for row in read_summaries(grid, folder) if row.get("ended") != "interrupted"]
    entries = average_over_seeds(study, rows)
    table = as_list(study, entries)
    _write_tables(folder, study, entries, table)
    write_text(folder / "table.tex", paper.as_latex(study, rows))
    return entries, table


def _tabled(
    folder: pathlib.Path, points: int, entries: Sequence[Mapping[str, Any]], table: str
) -> Answer:
    """Answers with the entries of a study and the table that was written of them."""
    document = {"folder": str(folder), "points": points, "entries": entries}
    return Answer(document, lambda out: out.say(f"{table}\n\ntables: {folder}"), str(folder))


@contextlib.contextmanager
def _resumable(out: Output, what: str, folder: pathlib.Path) -> Iterator[None]:
    """Ends the process, with how to resume, where it was interrupted or the disk is full."""
    text = f"interrupted; the same command resumes the {what} in {folder}"
    with ending(out, _NAME, text), reporting_full_disk(STUDY_KEPT):
        yield


def _write_tables(
    folder: pathlib.Path, study: Study, entries: Sequence[Mapping[str, Any]], table: str
) -> None:
    write_text(folder / "table.csv", as_csv(entries))
    write_text(folder / "table.md", f"# {study.name}\n\n{table}\n")


def _searched(
    file: str | None,
    overrides: Sequence[str],
    output: pathlib.Path | None,
    over: Sequence[str],
    choosing: Choosing,
    where: Where,
    out: Output,
) -> Answer:
    """Runs the points that Optuna chooses."""
    from fedjax_dp.experiment.studies.search import Plan, Span, search

    def axis_of(word: str) -> tuple[str, Span | Sequence[str]]:
        key, values = _axis(word)
        ends = _ends(word)
        rule = f"not name {_SEED} or data.seed: the best result would be that of a lucky seed"
        checks.require(key not in _OF_CLIENTS, "--over", rule, word)
        return key, Span(*ends) if ends else [word.partition("=")[2] for (word,) in values.values()]

    space, trials, at_once = dict(map(axis_of, over)), choosing.trials, choosing.at_once
    _require_apart([word.partition("=")[0] for word in over], overrides)
    config = load_config(file, overrides)
    rule = "name one key or more, each once"
    checks.require(len(space) == len(over) > 0, "--over", rule, list(over))
    rule = "be given, the whole number of runs"
    checks.require(
        trials is not None and trials.is_integer() and trials >= 1, "--trials", rule, trials
    )
    assert trials is not None
    checks.whole("--trials", int(trials))
    if at_once is not None:
        checks.whole("--at-once", at_once)
    plan = Plan(
        space,
        int(trials),
        choosing.sampler or "tpe",
        is_halving=choosing.pruner is not None,
        at_once=at_once or 4,
        seed=config.run.seed,
        metric=choosing.metric or _METRIC,
    )
    folder = output or pathlib.Path("runs") / f"{config.title}-search"
    study = _study(config, file, {})
    study = study._replace(metrics={plan.metric: 1.0, **study.metrics})
    with _resumable(out, "search", folder):
        rounds = plan.trials * config.run.rounds
        with where.opened(folder) as cluster, Progress(out, _NAME, rounds) as progress:
            entries = search(
                study, plan, folder, overrides, out.note, progress, cluster, choosing.storage
            )
        table = as_rows(entries)
        _write_tables(folder, study, entries, table)
    return _tabled(folder, len(entries), entries, table)


def _ends(word: str) -> tuple[Any, Any, bool] | None:
    """Reads a range, such as "training.learning_rate=0.01..1:log"; None for listed values."""
    text = word.partition("=")[2]
    ends, _, scale = text.partition(":")
    low, dots, high = ends.partition("..")
    if not dots or "," in text or text[:1] in _QUOTES:
        return None
    rule = "be a range of numbers, LOW..HIGH or LOW..HIGH:log, of LOW < HIGH, above 0 for log"
    numbers = [_number(each) for each in (low, high)]
    is_range = None not in numbers and numbers[0] < numbers[1] and scale in ("", "log")
    checks.require(is_range and (not scale or numbers[0] > 0), "--over", rule, word)
    return numbers[0], numbers[1], bool(scale)


def _number(text: str) -> Any:
    """Reads a finite number; whole if it is written so."""
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text) if checks.is_finite_number(kind(text)) else None
    return None


def _repetition(axes: Mapping[str, Any], trials: float | None, shape: float | None) -> Repetition:
    """Reads the distribution of the number of trials."""
    rule = f"not name {_SEED} or data.seed: every trial has noise of its own, on the same clients"
    checks.require(not _OF_CLIENTS & {*axes}, "--over", rule, list(axes))
    checks.require(trials is not None, "--trials", "be given, the expected number", trials)
    assert trials is not None
    try:
        return repetition(trials, shape=1.0 if shape is None else shape)
    except ValueError as error:
        name, _, rest = str(error).partition(" ")
        raise ValueError(f"{_OPTIONS[name]} {rest}") from None


def _selected(
    study: Study,
    grid: Sequence[Point],
    folder: pathlib.Path,
    trials: Repetition,
    metric: str,
    where: Where,
    out: Output,
) -> Answer:
    """Chooses among points privately; the number of trials is in no answer."""
    with _resumable(out, "selection", folder), where.opened(folder) as cluster:
        choice = select_privately(
            study, grid, folder, trials, lambda line: None, out.warn, cluster, metric
        )
    if choice is None:
        document = {"folder": str(folder), "chosen": None}
        return Answer(document, lambda out: out.say("no trial was drawn"), "")
    chosen, epsilon = choice.point.values, choice.epsilon
    answer = {"folder": str(choice.folder), "chosen": chosen, "epsilon": epsilon}
    spent = ", ".join(
        f"ε = {shown('epsilon', value)} ({unit})" for unit, value in choice.epsilon.items()
    )
    text = f"chosen: {choice.point.name}, {spent} with the choice\nstatement: {choice.folder}"
    return Answer(answer, lambda out: out.say(text), str(choice.folder))


def _axis(word: str) -> tuple[str, Mapping[str, Sequence[str]]]:
    """Reads a key and its values, such as "training.learning_rate=0.1,0.3"."""
    key, equals, text = word.partition("=")
    require_key(key)
    checks.require(bool(equals and text), "--over", "be KEY=V1,V2", word)
    parts = _parts(text)
    checks.require(all(parts), f"--over {key}", "have a value between any two commas", text)
    values = [value_of(key, part) for part in parts]
    is_once = all(value not in values[:i] for i, value in enumerate(values))
    names = [
        value if isinstance(value, str) else part for value, part in zip(values, parts, strict=True)
    ]
    is_once &= len(set(names)) == len(names)
    checks.require(is_once, f"--over {key}", "hold each value once", parts)
    axis = "seed" if key == _SEED else key
    return axis, {name: (f"--{key}={part}",) for name, part in zip(names, parts, strict=True)}


def _parts(text: str) -> list[str]:
    """Splits values at commas, but those in quotes and brackets of TOML."""
    found, quote, depth = [""], "", 0
    for i, letter in enumerate(text):
        if quote:
            is_escaped = quote == '"' and text[:i].endswith("\\")
            quote = "" if letter == quote and not is_escaped else quote
        elif letter in _QUOTES and not found[-1].strip(" [{,="):
            quote = letter
        else:
            depth += (letter in "[{") - (letter in "]}")
            if letter == "," and not depth:
                found.append("")
                continue
        found[-1] += letter
    return [part.strip() for part in found]


def _require_apart(keys: Sequence[str], words: Sequence[str], option: str = "--over") -> None:
    """Requires that no override replaces the values of an option."""
    fixed = {word[2:].partition("=")[0] for word in words}
    both = [key for key in keys if any(overlap(key, each) for each in fixed)]
    checks.require(not both, option, "name no key that is also given one value", both)


def _draw(
    study: Study, entries: Sequence[Mapping[str, Any]], file: pathlib.Path, out: Output
) -> None:
    """Draws the accuracies of a grid, if there is what draws."""
    try:
        paper.draw(study, entries, file)
    except MissingPackageError as missing:
        out.note(f"no picture is drawn: {missing}")
