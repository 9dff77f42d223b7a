"""The folder of a run: where things lie in it, and which one a run may have."""

import pathlib

from filelock import BaseFileLock, FileLock, Timeout

from fedjax_dp.experiment.values import ConfigError

CONFIG_FILE, CHECKPOINT_FOLDER = "config.toml", "checkpoint"
# Rows of what clients keep, where that is on the disk.
CLIENTS_FOLDER = "clients"
ENVIRONMENT_FILE = "environment.json"
_LOCK_FILE = ".lock"


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
    is_taken = output.is_dir() and any(path.name != _LOCK_FILE for path in output.iterdir())
    if output.is_file() or is_taken:
        raise ConfigError(
            f"--output {str(output)!r} must be a new or an empty folder; "
            "to go on with a run use --resume"
        )


def next_folder(name: str) -> pathlib.Path:
    """Makes the next free folder under `runs/`; runs that start together get one each.

    Args:
      name: of the run.

    Returns:
      The folder, empty.
    """
    number = 1
    while True:
        folder = pathlib.Path("runs") / f"{name}-{number:03d}"
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            number += 1
        else:
            return folder
