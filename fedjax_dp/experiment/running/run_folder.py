"""Run folders: the names in them, their lock, and the choice of a free one."""

import contextlib
import os
import pathlib
import shutil
from collections.abc import Iterator

from filelock import BaseFileLock, FileLock, Timeout

from fedjax_dp.core import files
from fedjax_dp.experiment.schema.constraints import ConfigError
from fedjax_dp.io.checkpoint import require_usable

CONFIG_FILE, CHECKPOINT_FOLDER = "config.toml", "checkpoint"
# Client state that is stored on disk.
CLIENTS_FOLDER = "clients"
ENVIRONMENT_FILE, SUMMARY_FILE = "environment.json", "summary.json"
# Sizes, types and digests of the data, which a resumed run compares.
DATA_FILE = "data.json"
# What a statement says of the sweep that the run is part of.
SWEEP_FILE = "sweep.json"
# What a run writes when it starts, and does not write again.
AT_START = (CONFIG_FILE, DATA_FILE, SWEEP_FILE, ENVIRONMENT_FILE)
# What the ledgers of the nodes of a deployment claim, and the scores that scripts report.
NODES_FILE, SCORES_FILE = "nodes.json", "scores.jsonl"
# The publishable part of a run.
RELEASE_FOLDER = "release"
REPORT_FILE = "report.html"
_LOCK_FILE = ".lock"
# In the checkpoint folder of a deployment: what nodes reported of their data, and the rounds that
# were sent; who was drawn is as secret as checkpoints are.
REGISTERED_FILE, JOURNAL_FILE = "registered.json", "sent.jsonl"
# A reader that asks whether a folder is in use holds its lock for a moment.
_PATIENCE = 0.2
_RUNS = pathlib.Path("runs")


def locked(folder: pathlib.Path) -> BaseFileLock:
    """Locks a run folder for this process and makes it if it is missing."""
    # The system releases the lock when the process ends, however it ends.
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / _LOCK_FILE, timeout=_PATIENCE)
    try:
        lock.acquire()
    except Timeout:
        raise ConfigError(
            f"the run folder {str(folder)!r} is already in use by another process"
        ) from None
    return lock


@contextlib.contextmanager
def locked_if_started(folder: pathlib.Path) -> Iterator[BaseFileLock]:
    """Locks a run folder, and unlocks it if no run is started or resumed in it."""
    lock = locked(folder)
    try:
        yield lock
    except BaseException:
        # The exception, which may be kept, holds the lock alive.
        lock.release()
        raise


@contextlib.contextmanager
def emptied_unless_started(folder: pathlib.Path) -> Iterator[None]:
    """Requires a folder that is new or empty, and empties it again if no run starts in it."""
    require_free(folder)
    try:
        yield
    except BaseException:
        for path in folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name != _LOCK_FILE:
                path.unlink()
        raise


def is_run(folder: pathlib.Path) -> bool:
    """Whether a folder has a run; other programs have files named `config.toml` too."""
    # The first is written when a run starts; a folder for publication may lack it.
    beside = any((folder / name).is_file() for name in (ENVIRONMENT_FILE, SUMMARY_FILE))
    return beside and (folder / CONFIG_FILE).is_file()


def is_in_use(folder: pathlib.Path) -> bool:
    """Whether a process has locked a run folder, which a run does until its end."""
    if not (folder / _LOCK_FILE).is_file():
        return False
    try:
        with FileLock(folder / _LOCK_FILE, timeout=0):
            return False
    except Timeout:
        return True
    except OSError:
        # A folder that can only be read, such as a copy.
        return False


def is_deployed(folder: pathlib.Path) -> bool:
    """Whether the rounds of a run ran on nodes."""
    # False for those who may not read checkpoints.
    return os.path.exists(folder / CHECKPOINT_FOLDER / JOURNAL_FILE)


def require_free(output: pathlib.Path) -> None:
    """Requires a folder that is new or empty."""
    kind = files.kind_of(output, "--output")
    is_taken = kind in ("file", "other")
    if not is_taken:
        files.require_folder(output, "--output", writable=True)
    if kind == "folder":
        is_taken = any(path.name != _LOCK_FILE for path in output.iterdir())
    if is_taken:
        raise ConfigError(
            f"--output {str(output)!r} must be a new or an empty folder; "
            "use --resume to resume a run"
        )
    require_usable(output, "--output")


def require_place(output: pathlib.Path | None, name: str) -> None:
    """Requires that a run folder can be made, before any work."""
    if output is not None:
        require_free(output)
        return
    files.require_folder(_RUNS, "the folder of runs", writable=True)
    # Below a folder that is missing, no name is too long.
    files.kind_of(f"{name}-001", "run.name")
    require_usable(_RUNS / f"{name}-001", "run.name")


def next_folder(name: str) -> pathlib.Path:
    """Makes the next free folder under `runs/`; runs that start together get one each."""
    number = 1
    while True:
        folder = _RUNS / f"{name}-{number:03d}"
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            number += 1
        else:
            return folder
