"""The folder of a run: where things lie in it, and which one a run may have."""

import pathlib

from filelock import BaseFileLock, FileLock, Timeout

from fedjax_dp.core import files
from fedjax_dp.experiment.schema.constraints import ConfigError

CONFIG_FILE, CHECKPOINT_FOLDER = "config.toml", "checkpoint"
# Rows of what clients keep, where that is on the disk.
CLIENTS_FOLDER = "clients"
ENVIRONMENT_FILE = "environment.json"
# What may be published, where that was asked for.
RELEASE_FOLDER = "release"
_LOCK_FILE = ".lock"
_RUNS = pathlib.Path("runs")


def locked(folder: pathlib.Path) -> BaseFileLock:
    """Keeps other processes out of a run folder while one writes there.

    The system lets the lock go when the process ends, however it ends.

    Args:
      folder: the run folder; made where it is missing.

    Returns:
      The lock, held.

    Raises:
      ConfigError: if another process is at work there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / _LOCK_FILE, timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise ConfigError(
            f"the run folder {str(folder)!r} must be written by one process at a time, and another "
            "one is at work there"
        ) from None
    return lock


def require_free(output: pathlib.Path) -> None:
    """Requires that a folder asked for holds no run, and nothing else.

    Args:
      output: the folder.

    Raises:
      ConfigError: if it is a file or holds something.
    """
    kind = files.kind_of(output, "--output")
    is_taken = kind in ("file", "other")
    if not is_taken:
        files.require_folder(output, "--output", writable=True)
    if kind == "folder":
        is_taken = any(path.name != _LOCK_FILE for path in output.iterdir())
    if is_taken:
        raise ConfigError(
            f"--output {str(output)!r} must be a new or an empty folder; "
            "to go on with a run use --resume"
        )


def require_place(output: pathlib.Path | None, name: str) -> None:
    """Requires a place for the folder of a run, before any work.

    Args:
      output: the folder; the next free one under `runs/` where it is None.
      name: of the run.

    Raises:
      ValueError: if no folder can be made there, or it holds something.
    """
    if output is not None:
        require_free(output)
        return
    files.require_folder(_RUNS, "the folder of runs", writable=True)
    files.kind_of(f"{name}-001", "run.name")


def next_folder(name: str) -> pathlib.Path:
    """Makes the next free folder under `runs/`; runs that start together get one each.

    Args:
      name: of the run.

    Returns:
      The folder, empty.
    """
    number = 1
    while True:
        folder = _RUNS / f"{name}-{number:03d}"
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            number += 1
        else:
            return folder
