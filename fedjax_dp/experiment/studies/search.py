"""Lets Optuna choose the points of a sweep by the results of those before them."""

import functools
import itertools
import json
import math
import pathlib
import shutil
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from fedjax_dp.core import checks, files
from fedjax_dp.core.packages import needed_for
from fedjax_dp.experiment.assembly.assemble import checked_config
from fedjax_dp.experiment.components.experiment import Callback, Progress
from fedjax_dp.experiment.components.keeping import is_larger_better, loss_of, require_direction
from fedjax_dp.experiment.running.metric_names import OBJECTIVE, MetricError
from fedjax_dp.experiment.running.watcher import Watcher
from fedjax_dp.experiment.studies.batched_runs import Continued, Job
from fedjax_dp.experiment.studies.cluster import Cluster
from fedjax_dp.experiment.studies.sweep import SUMMARY_FILE, Point, Study, loaded, run_all
from fedjax_dp.io.digests import read_sealed_object

with needed_for("a search", "search"):
    import optuna
    import sqlalchemy
    from optuna.storages.journal import JournalFileBackend
    from optuna.storages.journal._storage import JournalOperation
    from optuna.trial import TrialState

# In the folder of a search: Optuna's journal, from which it resumes.
STUDY_FILE = "optuna.journal"
HALVING = "successive_halving"
# The most points that are checked for a listed value.
_MOST_TRIED = 200


class Span(NamedTuple):
    """The numbers of an axis: between two ends, both included."""

    low: int | float  # The smaller end.
    high: int | float  # The larger end.
    is_log: bool = False  # Whether numbers are drawn on a logarithmic scale.


class Plan(NamedTuple):
    """How points are chosen.

    Source: Bergstra and others 2011 (TPE); Li and others 2020 (asynchronous successive halving).
    """

    space: Mapping[str, Span | Sequence[str]]  # By key of the configuration; values as words.
    trials: int  # The number of runs.
    sampler: Literal["tpe", "random"] = "tpe"  # "tpe" models the results so far.
    is_halving: bool = False  # Whether runs that are not among the best so far end early.
    at_once: int = 4  # The runs that are chosen together, before any of them has a result.
    seed: int = 0  # Of the choices.
    metric: str = "test_accuracy"  # What is compared; its name says whether larger is better.

    @property
    def facts(self) -> dict[str, Any]:
        """What a resumed search may not change; it may have more trials."""
        space = {
            key: list(values) if not isinstance(values, Span) else [*values]
            for key, values in self.space.items()
        }
        return {**self._asdict(), "space": space, "trials": None}


def search(
    study: Study,
    plan: Plan,
    output: pathlib.Path,
    words: Sequence[str] = (),
    report: Callable[[str], None] = print,
    watcher: Watcher | None = None,
    cluster: Cluster | None = None,
    database: str | None = None,
) -> list[dict[str, Any]]:
    """Runs points that Optuna chooses, for the best value of a metric of evaluations.

    Workers of a cluster run those that are chosen together, which this process chooses; a pruner
    reads and writes the journal, or the `database` of an address of SQLAlchemy, from all of them.

    Nothing that the choice reads is private: the statement of each run says that neither its
    setting, which results of runs before it have chosen, nor the choice among all is covered.
    """
    files.require_folder(output, "--output", writable=True)
    require_direction(plan.metric, "--metric", plan.metric)
    for point in _ends(plan):
        config = loaded(study, point._replace(words=(*point.words, *words)))
        rule = "not be combined with --pruner, which ends runs by exact results of others"
        release = config.run.release
        checks.require(not plan.is_halving or release is None, "run.release", rule, release)
    _require_possible(study, plan, words)
    output.mkdir(parents=True, exist_ok=True)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    if database is None:
        _repair(output / STUDY_FILE, report)
    _running.cache_clear()
    stored = _Stored(str(output.absolute()), database, plan.metric)
    history = stored.opened()
    _require_same(history, {**plan.facts, "words": list(words)}, output)
    _require_runs(history, output)
    counted = Continued(watcher or Watcher())
    stated = {"sweep": plan.trials, "search": "Optuna", OBJECTIVE: plan.metric}
    if plan.is_halving:
        stated["pruner"] = HALVING
    while trials := _asked(history, plan):
        settings = {trial.number: _made(_setting(trial, plan)) for trial in trials}
        points = {
            number: point._replace(words=(*point.words, *words))
            for number, point in settings.items()
        }
        jobs = {
            number: Job(
                loaded(study, point),
                output / f"trial-{number + 1:04d}",
                {HALVING: _halving(stored, number)} if plan.is_halving else {},
            )
            for number, point in points.items()
        }
        labels = {n: f"[{n + 1}/{plan.trials}] {point.name}" for n, point in points.items()}

        def run(some: Mapping[int, Job], labels: Mapping[int, str] = labels) -> None:
            run_all(study, some, labels, report, watcher=counted, stated=stated, cluster=cluster)

        try:
            refused = _run_or_refused(jobs, run)
        except MetricError:
            if not any(trial.state.is_finished() for trial in history.get_trials(deepcopy=False)):
                # The folder can have a search by another metric.
                stored.remove()
            raise
        for trial in trials:
            if trial.number in refused:
                report(f"{labels[trial.number]}: refused: {refused[trial.number]}")
                history.tell(trial, state=TrialState.FAIL)
            else:
                summary = read_sealed_object(jobs[trial.number].folder, SUMMARY_FILE)
                _tell(history, trial, summary, plan.metric)
    return _entries(history, plan, output)


def _values(plan: Plan) -> dict[str, list[str]]:
    """Lists the values of each axis; the ends of a range."""
    return {
        key: [_text(axis.low), _text(axis.high)] if isinstance(axis, Span) else list(axis)
        for key, axis in plan.space.items()
    }


class _Stored(NamedTuple):
    """The place of a search, which several processes may write; data that workers can be sent."""

    folder: str  # The folder of the search, which has the journal.
    database: str | None  # The address of a database in place of it, which has several searches.
    metric: str  # What its runs are compared by.

    def opened(self) -> Any:
        """Opens the search; begins it if it is new."""
        return optuna.create_study(
            storage=self._storage(),
            study_name=self._name,
            direction="maximize" if is_larger_better(self.metric) else "minimize",
            # Without a pruner there is no callback that asks for it.
            pruner=optuna.pruners.SuccessiveHalvingPruner(1),
            load_if_exists=True,
        )

    def remove(self) -> None:
        """Removes the search, of which no run has ended."""
        optuna.delete_study(study_name=self._name, storage=self._storage())

    @property
    def _name(self) -> str:
        return "search" if self.database is None else self.folder

    def _storage(self) -> Any:
        if self.database is None:
            journal = pathlib.Path(self.folder) / STUDY_FILE
            return optuna.storages.JournalStorage(_Journal(str(journal)))
        try:
            url = sqlalchemy.make_url(self.database)
            in_memory = "sqlite" in url.drivername and url.database in (None, "", ":memory:")
            rule = "be a file or a server, which several processes can open"
            checks.require(not in_memory, "--storage", rule, "an SQLite database in memory")
            # Without a pool no connection is left open at the end.
            unpooled = {"poolclass": sqlalchemy.pool.NullPool}
            return optuna.storages.RDBStorage(self.database, engine_kwargs=unpooled)
        except (sqlalchemy.exc.SQLAlchemyError, ImportError, RuntimeError) as error:
            # The address, and what a driver says of it, may hold a password.
            rule = f"be the address of a database that can be opened ({type(error).__name__})"
            shown = self.database.partition(":")[0]
            raise ValueError(f"--storage must {rule}, got one that begins {shown!r}") from None


def _repair(path: pathlib.Path, report: Callable[[str], None]) -> None:
    """Cuts a journal at its first line that is damaged, and reports such a line."""
    lines = path.read_bytes().splitlines(keepends=True) if path.is_file() else []
    intact = list(itertools.takewhile(_is_intact, lines))
    if len(intact) < len(lines):
        copy = path.with_name(f"{path.name}.damaged")
        shutil.copyfile(path, copy)
        files.write_private(path, b"".join(_whole_batches(intact)))
        report(
            f"{files.at_line(path, len(intact) + 1)}, is damaged: the search resumes from the "
            f"lines before it and from the runs that have ended; {copy.name} is the whole file"
        )


class _Journal(JournalFileBackend):
    """Optuna's journal, each line with its digest, which Optuna does not read."""

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        """Appends lines."""
        super().append_logs([files.with_digest(log) for log in logs])


def _whole_batches(lines: Sequence[bytes]) -> Sequence[bytes]:
    """Returns the lines up to the last moment at which no trial was running."""
    running, num_trials, count = set[int](), 0, 0
    for number, line in enumerate(lines, 1):
        log = json.loads(line)
        if log["op_code"] == JournalOperation.CREATE_TRIAL:
            running.add(num_trials)
            num_trials += 1
        elif log["op_code"] == JournalOperation.SET_TRIAL_STATE_VALUES:
            running -= {log["trial_id"]} if TrialState(log["state"]).is_finished() else set()
        if not running:
            count = number
    return lines[:count]


def _is_intact(line: bytes) -> bool:
    """Whether a line of the journal is whole."""
    try:
        files.without_digest(files.parse_json(line, STUDY_FILE), STUDY_FILE)
    except ValueError:
        return False
    return line.endswith(b"\n")


def _ends(plan: Plan) -> list[Point]:
    """Lists points that have every end and every value of each axis."""
    values = _values(plan)
    first = {key: each[0] for key, each in values.items()}
    return [_made({**first, key: value}) for key, each in values.items() for value in each]


def _require_possible(study: Study, plan: Plan, words: Sequence[str]) -> None:
    """Requires for each listed value some others with which a run is not refused."""
    values = _values(plan)
    for key, value in ((key, value) for key, each in values.items() for value in each):
        if isinstance(plan.space[key], Span):
            continue
        refused: ValueError | None = None
        beside = itertools.product(*({**values, key: [value]}).values())
        for some in itertools.islice(beside, _MOST_TRIED):
            point = _made(dict(zip(values, some, strict=True)))
            try:
                checked_config(loaded(study, point._replace(words=(*point.words, *words))))
            except ValueError as error:
                refused = refused or error
            else:
                break
        else:
            raise ValueError(f"{key}={value}: {refused}") from refused


def _made(values: Mapping[str, str]) -> Point:
    return Point(dict(values), tuple(f"--{key}={value}" for key, value in values.items()))


def _text(value: Any) -> str:
    return value if isinstance(value, str) else repr(value)


def _require_same(found: Any, facts: Mapping[str, Any], output: pathlib.Path) -> None:
    """Requires that a search is resumed as it began."""
    before = found.user_attrs.get("facts")
    if before is None:
        found.set_user_attr("facts", dict(facts))
        return
    differing = [name for name in facts if facts[name] != before.get(name)]
    rule = "be resumed with the same keys, sampler and overrides, or use another folder"
    checks.require(not differing, f"the search in {output}", rule, f"other {differing}")


def _require_runs(found: Any, output: pathlib.Path) -> None:
    """Requires the runs of all trials that have ended, which a database has apart from them."""
    for trial in found.get_trials(deepcopy=False, states=(TrialState.COMPLETE, TrialState.PRUNED)):
        name = f"trial-{trial.number + 1:04d}"
        rule = f"have the runs of its trials, or begin in another folder or {STUDY_FILE}"
        is_there = (output / name / SUMMARY_FILE).is_file()
        checks.require(is_there, f"the search in {output}", rule, f"none in {name}")


def _asked(found: Any, plan: Plan) -> list[Any]:
    """Lists the trials to run next: those that an interrupted search has left, or new ones."""
    every = found.get_trials(deepcopy=False)
    left = [each for each in every if each.state == TrialState.RUNNING]
    numbers = [each.number for each in left]
    if not left:
        numbers = list(range(len(every), min(plan.trials, len(every) + plan.at_once)))
    asked = []
    for place, number in enumerate(numbers):
        # Of the number, so that a resumed search draws what an uninterrupted one draws.
        seed = int(np.random.SeedSequence([plan.seed, number]).generate_state(1)[0])
        found.sampler = optuna.samplers.RandomSampler(seed=seed)
        if plan.sampler == "tpe":
            found.sampler = optuna.samplers.TPESampler(seed=seed)
        trial = optuna.trial.Trial(found, left[place]._trial_id) if left else found.ask()
        # What the journal lacks of an interrupted trial is drawn as before.
        _setting(trial, plan)
        asked.append(trial)
    return asked


def _setting(trial: Any, plan: Plan) -> dict[str, str]:
    """Returns the values of a trial, which are drawn once."""
    values = {}
    for key, axis in plan.space.items():
        if not isinstance(axis, Span):
            value = trial.suggest_categorical(key, list(axis))
        elif isinstance(axis.low, int) and isinstance(axis.high, int):
            value = trial.suggest_int(key, axis.low, axis.high, log=axis.is_log)
        else:
            value = trial.suggest_float(key, axis.low, axis.high, log=axis.is_log)
        values[key] = _text(value)
    return values


def _halving(stored: _Stored, number: int) -> Callback:
    """Ends a run early; of data and a function alone, as another process may call it."""
    return Callback(functools.partial(_is_worse, stored, number))


def _is_worse(stored: _Stored, number: int, progress: Progress) -> bool:
    """Reports the evaluations of a run, which are the steps of a trial; true ends it."""
    trial = _running(stored, number)
    known = trial.study.trials[number].intermediate_values
    name = stored.metric
    scores = [row[name] for row in progress.rows if row.get(name) is not None]
    for step, score in enumerate(scores, 1):
        if step not in known:
            trial.report(float(score), step)
    is_last = progress.rows[-1]["round"] >= progress.experiment.config.run.rounds
    return not is_last and bool(trial.should_prune())


@functools.lru_cache(maxsize=64)
def _running(stored: _Stored, number: int) -> Any:
    """Opens a trial that runs in this process."""
    found = stored.opened()
    # Its values are drawn; nothing is left to choose.
    found.sampler = optuna.samplers.RandomSampler(seed=0)
    return optuna.trial.Trial(found, found.get_trials(deepcopy=False)[number]._trial_id)


def _run_or_refused(
    jobs: Mapping[int, Job], run: Callable[[Mapping[int, Job]], None]
) -> dict[int, ValueError]:
    """Runs experiments together; if one is refused, each alone. Returns the refusals.

    A metric that none of them has is no mistake of their settings.
    """
    refused: dict[int, ValueError] = {}
    try:
        run(jobs)
    except ValueError:
        for number, job in jobs.items():
            try:
                run({number: job})
            except ValueError as error:
                # A run that was not refused has a folder: the error is not of its setting.
                if job.folder.exists():
                    raise
                refused[number] = error
        if all(isinstance(refused.get(number), MetricError) for number in jobs):
            raise
    return refused


def _tell(found: Any, trial: Any, summary: Mapping[str, Any], metric: str) -> None:
    """Records the result of a run."""
    score = summary.get(metric)
    if summary.get("stopped_by") == HALVING:
        found.tell(trial, state=TrialState.PRUNED)
    elif score is not None and math.isfinite(score):
        found.tell(trial, float(score))
    else:
        found.tell(trial, state=TrialState.FAIL)


def _entries(found: Any, plan: Plan, output: pathlib.Path) -> list[dict[str, Any]]:
    """Lists the runs, best first, those that ended early after the others."""
    entries = []
    for trial in found.get_trials(deepcopy=False):
        folder = output / f"trial-{trial.number + 1:04d}"
        # A run that was refused has none.
        summary = read_sealed_object(folder, SUMMARY_FILE)
        entries.append(
            {
                "trial": trial.number + 1,
                **{key: _text(trial.params[key]) for key in plan.space},
                "state": {TrialState.COMPLETE: "complete", TrialState.PRUNED: "ended early"}.get(
                    trial.state, "failed"
                ),
                "rounds": summary.get("rounds"),
                plan.metric: summary.get(plan.metric),
                "epsilon": summary.get("epsilon"),
            }
        )

    def place(entry: Mapping[str, Any]) -> tuple[Any, ...]:
        value = entry[plan.metric]
        loss = math.inf if value is None else loss_of(plan.metric, value)
        return entry["state"] != "complete", loss, entry["trial"]

    return sorted(entries, key=place)
