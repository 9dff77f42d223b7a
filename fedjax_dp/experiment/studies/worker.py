"""What a worker of a cluster does: checks or runs some points of a study, given as data."""

import contextlib
import json
import os
import pathlib
import socket
import sys
import time
import traceback
from collections.abc import Mapping
from typing import Any, NamedTuple

from fedjax_dp.core import checks, files
from fedjax_dp.core.keys import require_settings
from fedjax_dp.core.packages import MissingPackageError
from fedjax_dp.experiment.assembly.devices import offer_devices
from fedjax_dp.experiment.components.experiment import Callback
from fedjax_dp.experiment.reading import config_files
from fedjax_dp.experiment.running.metric_names import MetricError
from fedjax_dp.experiment.running.run_folder import SUMMARY_FILE
from fedjax_dp.experiment.running.watcher import Watcher
from fedjax_dp.experiment.schema.constraints import ConfigError
from fedjax_dp.experiment.studies.batched_runs import (
    Continued,
    Job,
    assembled,
    program_of,
    run_together,
)
from fedjax_dp.io.digests import STUDY_KEPT, DiskFull, read_sealed_object, reporting_full_disk
from fedjax_dp.io.logbook import to_json

# In the folder that workers share: what shows that they do, and the word to end.
WORD_FILE, STOP_FILE = "word", "stop"
# Seconds between two files of progress, and between two looks for the word to end.
_PAUSE = 1.0
# Errors that keep their kind on the way back, the narrower ones first.
KINDS: dict[str, type[Exception]] = {
    kind.__name__: kind
    for kind in (
        ConfigError,
        DiskFull,
        MetricError,
        ValueError,
        OSError,
        MemoryError,
        MissingPackageError,
    )
}
# What a line of progress shows of the newest metrics.
_SHOWN = (
    *("test_accuracy", "shared_test_accuracy", "padding_share"),
    *("epsilon_record", "epsilon_client"),
)


class Part(NamedTuple):
    """A point of a study as data."""

    config: str  # Its configuration, as TOML.
    folder: str  # Its run folder.
    callbacks: Mapping[str, Callback]  # Of functions that their modules' names lead to.


class Place(NamedTuple):
    """Where the tasks of a study work, and with what."""

    folder: str  # What workers and the study share, for progress and the word to end.
    word: str  # What `WORD_FILE` has there.
    working_folder: str  # Which relative paths of a configuration start from.
    import_path: tuple[str, ...]  # Where the user's own parts may be.
    settings: Mapping[str, Any]  # Of JAX, which random numbers follow from.


class Task(NamedTuple):
    """Points that one worker checks or runs."""

    name: str  # The name of its file of progress.
    parts: Mapping[int, Part]  # By place in the study.
    place: Place
    is_check: bool  # Whether to assemble the points alone, for their errors and programs.
    is_sharing: bool  # Whether the devices of the worker are for several points.
    stated: Mapping[str, Any]  # The facts of the study that statements have.


class Error(NamedTuple):
    """What ended a task."""

    kind: str  # A name in `KINDS`, or another.
    text: str  # The message; of an error of another kind with its traceback.


class Result(NamedTuple):
    """What a task gives back."""

    host: str  # The machine.
    # By place: the summaries of points that have one, or the programs of those that were checked.
    found: Mapping[int, Any]
    error: Error | None = None


def work(task: Task) -> Result:
    """Checks or runs the points of a task; errors come back as values, so all others are deaths."""
    host = socket.gethostname()
    try:
        with reporting_full_disk(STUDY_KEPT):
            _require_shared(task.place, host)
            with contextlib.chdir(task.place.working_folder):
                return Result(host, _worked(task, host))
    except KeyboardInterrupt:
        # Of this process: the study decides whether others are interrupted too.
        return Result(host, {})
    except Exception as error:
        kind = next((name for name, each in KINDS.items() if isinstance(error, each)), "")
        text = str(error) if kind else traceback.format_exc()
        return Result(host, {}, Error(kind or type(error).__name__, text))


def _require_shared(place: Place, host: str) -> None:
    """Requires the folders of the study."""
    file = pathlib.Path(place.folder) / WORD_FILE
    is_same = file.is_file() and files.read_text(file) == place.word
    rule = f"be in a folder that all machines share; {host} does not have {file.parent}"
    checks.require(is_same, "--output", rule, str(file.parent.parent))
    rule = f"be one that all machines share; {host} does not have it"
    is_there = pathlib.Path(place.working_folder).is_dir()
    checks.require(is_there, "the working directory", rule, place.working_folder)


def _worked(task: Task, host: str) -> dict[int, Any]:
    """Checks or runs the points; returns what a result has of them."""
    require_settings(task.place.settings)
    sys.path += [path for path in task.place.import_path if path not in sys.path]
    jobs = {
        place: Job(
            config_files.from_toml(part.config, pathlib.Path(part.folder).name),
            pathlib.Path(part.folder),
            part.callbacks,
        )
        for place, part in task.parts.items()
    }
    done = {} if task.is_check else summaries_of(jobs)
    watcher = _Reporting(task, host, sum(each["rounds"] for each in done.values()))
    left = {place: job for place, job in jobs.items() if place not in done}
    if not left or watcher.should_stop():
        return done
    if task.is_sharing:
        # Of which each point has one, as its configuration says.
        offer_devices("auto")
    if task.is_check:
        programs = {}
        for place, experiment in assembled(left, watcher):
            programs[place] = program_of(place, experiment)
            if watcher.should_stop():
                break
        return programs
    outcomes, _ = run_together(left, Continued(watcher), stated=task.stated)
    watcher.phase("ended")
    return done | {place: outcome.summary for place, outcome in outcomes.items()}


def summaries_of(jobs: Mapping[int, Job]) -> dict[int, dict[str, Any]]:
    """Reads the summaries of runs that have ended; one that was interrupted has not."""
    found = {}
    for place, job in jobs.items():
        # One that was removed is written again.
        if (job.folder / SUMMARY_FILE).is_file():
            summary = read_sealed_object(job.folder, SUMMARY_FILE)
            if summary.get("ended") != "interrupted":
                found[place] = summary
    return found


class Progress(NamedTuple):
    """How far a task is."""

    host: str
    process: int
    phase: str
    rounds: int  # Of all its points.
    row: Mapping[str, Any]  # The newest metrics.


def progress_of(task: Task) -> Progress | None:
    """Reads how far a task is; None before a worker has begun it."""
    try:
        content = files.parse_json(files.read_text(file_of(task)), file_of(task))
        return Progress(*(content[name] for name in Progress._fields))
    except (OSError, ValueError, KeyError):
        return None


def file_of(task: Task) -> pathlib.Path:
    """Returns the file of progress of a task."""
    return pathlib.Path(task.place.folder) / f"{task.name}.json"


class _Reporting(Watcher):
    """Writes the progress of a task to a file, and looks for the word to end."""

    def __init__(self, task: Task, host: str, before: int) -> None:
        """Begins a task, of whose points `before` rounds ran in earlier attempts."""
        self._file, self._stop = file_of(task), file_of(task).with_name(STOP_FILE)
        self._host, self._before = host, before
        self._phase, self._rounds, self._row = "starting", 0, dict[str, Any]()
        self._is_stopped = False
        self._looked = self._wrote = -_PAUSE
        self._write()

    def phase(self, name: str) -> None:
        """Writes the phase."""
        self._phase = name
        self._write()

    def done(self, rounds: int, row: Mapping[str, Any]) -> None:
        """Writes the completed rounds."""
        self._rounds = rounds
        shown = {name: to_json(row[name]) for name in _SHOWN if name in row}
        self._row = {name: value for name, value in shown.items() if value is not None}
        if time.monotonic() >= self._wrote + _PAUSE:
            self._write()

    def should_stop(self) -> bool:
        """Looks for the word to end, which stays; a study that has ended has no folder."""
        if not self._is_stopped and time.monotonic() >= self._looked + _PAUSE:
            self._looked = time.monotonic()
            self._is_stopped = self._stop.exists() or not self._stop.parent.exists()
        return self._is_stopped

    def _write(self) -> None:
        now = self._before + self._rounds
        progress = Progress(self._host, os.getpid(), self._phase, now, self._row)
        # Without it, the study only shows less.
        with contextlib.suppress(OSError):
            files.write_text(self._file, json.dumps(progress._asdict()))
            self._wrote = time.monotonic()
