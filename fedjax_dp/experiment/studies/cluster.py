"""Runs the points of a study on workers, which an executor starts on this or other machines."""

import contextlib
import math
import os
import pathlib
import pickle
import secrets
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedjax_dp.core import checks, files
from fedjax_dp.core.keys import settings
from fedjax_dp.experiment.assembly.assemble import checked_config
from fedjax_dp.experiment.reading import config_files
from fedjax_dp.experiment.running.run_folder import (
    CHECKPOINT_FOLDER,
    SUMMARY_FILE,
    differing_machines,
    is_in_use,
)
from fedjax_dp.experiment.running.watcher import Watcher, interruptions
from fedjax_dp.experiment.studies.batched_runs import AT_ONCE, Job, naming, on_one_device
from fedjax_dp.experiment.studies.worker import (
    KINDS,
    STOP_FILE,
    WORD_FILE,
    Error,
    Part,
    Place,
    Progress,
    Result,
    Task,
    file_of,
    progress_of,
    work,
)

# Seconds between two looks at the workers.
_PAUSE = 0.5
# How often workers of a task may die in a row without anything new that is saved.
_TRIES = 3
# How long the locks of a machine that was lost may stay, and files of another machine be unseen.
_LEASE_SECONDS = 120.0


class WorkerError(ChildProcessError):
    """A worker failed, or died again and again; the message names its points."""


class Cluster(NamedTuple):
    """Workers for the points of a study.

    Attributes:
      executor: what has `submit(function, argument)` and returns a future with `done()` and
        `result()`, as executors of `concurrent.futures` do; its workers see the folder of the
        study, at the same path, and have this package.
      workers: the number of tasks that run at the same time, at least 1.
    """

    executor: Any
    workers: int = 2


def run_on_cluster(
    cluster: Cluster,
    jobs: Mapping[int, Job],
    groups: Sequence[Sequence[int]],
    watcher: Watcher,
    ended: Callable[[int, Mapping[str, Any]], None],
    report: Callable[[str], None],
    stated: Mapping[str, Any],
    may_start: Callable[[], bool],
) -> list[int]:
    """Runs groups of points, all of which are checked before any runs; returns those skipped.

    `ended` receives the summary of a point that has ended, and `may_start` says whether another
    task may begin.
    """
    checks.require(
        callable(getattr(cluster.executor, "submit", None)),
        "executor",
        "have the method submit of concurrent.futures",
        type(cluster.executor).__name__,
    )
    checks.whole("workers", cluster.workers)
    wanted = {place: jobs[place] for group in groups for place in group}
    for job in wanted.values():
        with naming(job):
            config = checked_config(job.config)
            rule = "be none on a cluster, whose workers run points of their own"
            coordinator = config.execution.coordinator
            checks.require(coordinator is None, "execution.coordinator", rule, coordinator)
    if not wanted:
        return []
    with _shared_place(next(iter(wanted.values())).folder.parent) as place:
        parts = _parts(wanted, groups)
        whole = Task("check-1", parts, place, True, _is_sharing(wanted, groups), stated)
        _require_data(whole)
        programs: dict[int, str] = {}
        if len(parts) > 1:
            # A task that has all points assembles them before it runs one.
            run = _Run(
                cluster, watcher, lambda found, host: programs.update(found), report, lambda: True
            )
            run.all_of(_checks(cluster, whole), "checked")

        def note(summaries: Mapping[int, Any], host: str) -> None:
            for number, summary in summaries.items():
                _await(wanted[number].folder / SUMMARY_FILE, host)
                ended(number, summary)

        watcher.done(0, {})
        run = _Run(cluster, watcher, note, report, may_start)
        skipped = run.all_of(_tasks(cluster, whole, programs), "run")
    folders = [job.folder for place, job in wanted.items() if place not in skipped]
    if differing := differing_machines(folders):
        report(
            "warning: points ran on machines that round differently, so that their table is not "
            f"bit for bit that of one machine: {'; '.join(differing)}"
        )
    return skipped


@contextlib.contextmanager
def _shared_place(output: pathlib.Path) -> Iterator[Place]:
    """Makes the folder of progress in that of the study, and removes it once all have ended."""
    output.mkdir(parents=True, exist_ok=True)
    folder = pathlib.Path(tempfile.mkdtemp(prefix=".workers-", dir=output.absolute()))
    word = secrets.token_hex(8)
    files.write_text(folder / WORD_FILE, word)
    here = str(pathlib.Path.cwd())
    paths = tuple(path or here for path in sys.path)
    try:
        yield Place(str(folder), word, here, paths, settings())
    finally:
        # Its absence asks workers that were left behind to end.
        shutil.rmtree(folder, ignore_errors=True)


def _parts(jobs: Mapping[int, Job], groups: Sequence[Sequence[int]]) -> dict[int, Part]:
    """Writes points as data; those with the same data, by seed, follow each other."""
    parts = {}
    for group in groups:
        for place in group:
            # As in one process.
            config = on_one_device(jobs[place].config) if len(group) > 1 else jobs[place].config
            folder = str(jobs[place].folder.absolute())
            parts[place] = Part(config_files.to_toml(config), folder, jobs[place].callbacks)
    return {n: parts[n] for n in sorted(parts, key=lambda n: jobs[n].config.data_seed)}


def _is_sharing(jobs: Mapping[int, Job], groups: Sequence[Sequence[int]]) -> bool:
    """Whether "auto" means the devices of several points, as in one process."""
    several = [place for group in groups if len(group) > 1 for place in group]
    return any(jobs[place].config.execution.devices == "auto" for place in several)


def _checks(cluster: Cluster, whole: Task) -> list[Task]:
    """Divides all points over the workers, which assemble them."""
    count = min(cluster.workers, len(whole.parts))
    return [_of_some(whole, f"check-{i}", some) for i, some in _divided(whole.parts, count)]


def _tasks(cluster: Cluster, whole: Task, programs: Mapping[int, str]) -> list[Task]:
    """Divides points into tasks: those of one program stay together, as far as workers are few."""
    classes: dict[str, list[int]] = {}
    for place in whole.parts:
        classes.setdefault(programs.get(place, ""), []).append(place)
    tasks: list[Task] = []
    for members in classes.values():
        share = math.ceil(cluster.workers * len(members) / len(whole.parts))
        count = max(min(share, len(members)), math.ceil(len(members) / AT_ONCE))
        for _, some in _divided(members, count):
            tasks.append(_of_some(whole, f"task-{len(tasks) + 1}", some)._replace(is_check=False))
    return tasks


def _divided(places: Iterable[int], count: int) -> Iterator[tuple[int, list[int]]]:
    """Divides places into numbered parts of about the same size, each of neighbours."""
    for i, some in enumerate(np.array_split(list(places), count), 1):
        yield i, [int(place) for place in some]


def _of_some(whole: Task, name: str, places: Iterable[int]) -> Task:
    return whole._replace(name=name, parts={place: whole.parts[place] for place in places})


def _require_data(task: Task) -> None:
    """Requires a task that can be sent to another process."""
    try:
        pickle.dumps(task)
    except Exception as error:
        rule = "be data that can be pickled, and functions that a module names, on a cluster"
        raise ValueError(f"{_names(task)} must {rule}, got {error}") from error


def _names(task: Task) -> str:
    """Names the points of a task."""
    names = [pathlib.Path(part.folder).name for part in task.parts.values()]
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _await(file: pathlib.Path, host: str) -> None:
    """Waits until a file of another machine is seen here, which caches delay."""
    until = time.monotonic() + _LEASE_SECONDS
    while not _is_seen(file):
        rule = f"be in a folder that all machines share; {host} wrote {file}, which is not here"
        checks.require(time.monotonic() < until, "--output", rule, str(file.parent.parent))
        time.sleep(_PAUSE)


def _is_seen(file: pathlib.Path) -> bool:
    """Whether a file is there; to open its folder asks a server for what is new."""
    try:
        return file.name in os.listdir(file.parent)
    except FileNotFoundError:
        return False


def _saved(task: Task) -> int:
    """Counts what a task has saved: rounds in checkpoints, and summaries."""
    count = 0
    for part in task.parts.values():
        folder = pathlib.Path(part.folder)
        steps = [entry.name for entry in (folder / CHECKPOINT_FOLDER).glob("*")]
        count += max([int(step) for step in steps if step.isdecimal()], default=0)
        count += (folder / SUMMARY_FILE).is_file()
    return count


class _Attempt:
    """A task, and the worker that has it."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.future: Any = None
        self.rounds = 0  # The most that were ever reported.
        self.deaths, self.saved = 0, -1  # Since anything new was saved.
        self.died_at = -math.inf

    def is_free(self) -> bool:
        """Whether no process has its folders, as a machine may that is only cut off."""
        if not self.deaths:
            return True
        return not any(is_in_use(pathlib.Path(each.folder)) for each in self.task.parts.values())

    def has_ended(self) -> bool:
        """Whether there is a result, or an error in its place."""
        try:
            return bool(self.future.done())
        except Exception:
            return True


class _Run:
    """Tasks on their workers, until all have ended."""

    def __init__(
        self,
        cluster: Cluster,
        watcher: Watcher,
        note: Callable[[Mapping[int, Any], str], None],
        report: Callable[[str], None],
        may_start: Callable[[], bool],
    ) -> None:
        self._cluster, self._watcher = cluster, watcher
        self._note, self._report, self._may_start = note, report, may_start
        self._error: Exception | None = None
        self._is_interrupted = False
        self._phase, self._rounds = "", 0

    def all_of(self, tasks: Sequence[Task], what: str) -> list[int]:
        """Runs tasks; returns the points of those that may not start any more."""
        waiting = [_Attempt(task) for task in tasks]
        running: list[_Attempt] = []
        every, skipped = list(waiting), list[int]()
        stop = pathlib.Path(tasks[0].place.folder) / STOP_FILE
        with interruptions(self._watcher) as is_asked:
            try:
                while waiting or running:
                    self._is_interrupted |= is_asked()
                    if self._is_interrupted or self._error is not None:
                        waiting.clear()
                        self._stop(stop, running)
                    elif not self._may_start():
                        skipped += [n for each in waiting for n in each.task.parts]
                        waiting.clear()
                    self._submit(waiting, running)
                    ended = [each for each in running if each.has_ended()]
                    self._show(every, len(running), len(waiting), what)
                    for each in ended:
                        running.remove(each)
                        self._take(each, waiting)
                    if running or waiting:
                        time.sleep(_PAUSE)
            except BaseException:
                # A second interruption ends without waiting for workers.
                stop.touch()
                for each in running:
                    _cancel(each)
                raise
        if self._error is not None:
            raise self._error
        if self._is_interrupted:
            raise KeyboardInterrupt
        return skipped

    def _stop(self, stop: pathlib.Path, running: Sequence[_Attempt]) -> None:
        """Asks workers to end with checkpoints; tasks that none has begun are taken back."""
        if stop.exists():
            return
        stop.touch()
        for each in running:
            if progress_of(each.task) is None:
                _cancel(each)

    def _submit(self, waiting: list[_Attempt], running: list[_Attempt]) -> None:
        """Hands tasks to the executor, as many as there are workers."""
        for each in list(waiting):
            if len(running) == self._cluster.workers:
                return
            if not each.is_free():
                if time.monotonic() > each.died_at + _LEASE_SECONDS:
                    rule = "be free once the worker that had them is dead"
                    names = _names(each.task)
                    self._error = WorkerError(f"the run folders of {names} must {rule}")
                continue
            waiting.remove(each)
            each.saved = _saved(each.task)
            # Without a file, no worker has begun the task.
            file_of(each.task).unlink(missing_ok=True)
            try:
                with _without_interruptions():
                    each.future = self._cluster.executor.submit(work, each.task)
            except Exception as error:
                self._error = WorkerError(
                    f"the executor takes no more tasks, and {_names(each.task)} "
                    f"did not end; the same call with a new executor resumes them: {error!r}"
                )
                return
            running.append(each)

    def _take(self, each: _Attempt, waiting: list[_Attempt]) -> None:
        """Takes the result of a task, or has it run again if its worker died."""
        is_ending = self._is_interrupted or self._error is not None
        try:
            result: Result = each.future.result()
        except Exception as death:
            if not is_ending:
                self._retry(each, waiting, f"{type(death).__name__}: {death}".strip())
            return
        if result.error is not None:
            if self._error is None:
                self._error = self._as_raised(each.task, result.host, result.error)
            return
        is_check, found = each.task.is_check, result.found
        # Those that were checked, or whose runs were not interrupted.
        done = {n for n, of in found.items() if is_check or of["ended"] != "interrupted"}
        if each.task.parts.keys() != done and not is_ending:
            self._retry(each, waiting, f"{result.host} asked it to end")
            return
        rounds = 0 if is_check else sum(of["rounds"] for of in found.values())
        each.rounds = max(each.rounds, rounds)
        self._note(found, result.host)

    def _retry(self, each: _Attempt, waiting: list[_Attempt], reason: str) -> None:
        """Has a task run again, unless it dies again and again."""
        names = _names(each.task)
        each.deaths = each.deaths + 1 if _saved(each.task) <= each.saved else 1
        each.died_at = time.monotonic()
        if each.deaths >= _TRIES:
            self._error = WorkerError(
                f"{names}: {each.deaths} workers in a row died before they saved anything new; "
                f"the same call resumes. The last one: {reason}"
            )
            return
        self._report(f"{names}: a worker died, and another resumes: {reason.splitlines()[0]}")
        waiting.insert(0, each)

    def _as_raised(self, task: Task, host: str, error: Error) -> Exception:
        """Makes the error of a worker one of this process, which names points of the task."""
        text = error.text
        if not any(pathlib.Path(part.folder).name in text for part in task.parts.values()):
            text = f"{_names(task)}: {text}"
        if error.kind in KINDS:
            return KINDS[error.kind](text)
        return WorkerError(f"a worker on {host} failed: {text}")

    def _show(self, every: Sequence[_Attempt], running: int, waiting: int, what: str) -> None:
        """Shows the progress of all tasks."""
        newest: Progress | None = None
        for each in every:
            progress = progress_of(each.task)
            if progress is not None and progress.rounds > each.rounds:
                each.rounds, newest = progress.rounds, progress
        phase = f"{running} of {len(every)} tasks are being {what}"
        phase += f", {waiting} wait" if waiting else ""
        if running and phase != self._phase:
            self._watcher.phase(phase)
        rounds = sum(each.rounds for each in every)
        if rounds != self._rounds:
            # Without metrics the first time, from which the time left is estimated.
            self._watcher.done(rounds, newest.row if newest is not None and self._rounds else {})
        self._phase, self._rounds = phase, rounds


def _cancel(attempt: _Attempt) -> None:
    """Takes a task back where the executor can."""
    cancel = getattr(attempt.future, "cancel", None)
    # Best effort: the worker may have ended, and finds the word to end otherwise.
    with contextlib.suppress(Exception):
        if cancel is not None:
            cancel()


@contextlib.contextmanager
def _without_interruptions() -> Iterator[None]:
    """Keeps the terminal's Ctrl-C from processes that start within, which end by its word."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
