"""Checks free disk space before writing; reports a full disk clearly."""

import errno
import pathlib
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

# A full file system, a quota of a user, and a limit of a process (`ulimit -f`).
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# Overhead of the file system, besides the bytes of a file.
_MARGIN = 2**18
_BEGINNING = "the disk is full"


class DiskFull(OSError):
    """The disk that a run writes to is full."""


def require_space(folder: pathlib.Path, num_bytes: int) -> None:
    """Raises DiskFull if the disk of a folder has less free space."""
    free = shutil.disk_usage(folder).free
    if free < num_bytes + _MARGIN:
        raise DiskFull(
            f"{folder} must have {num_bytes + _MARGIN:,} bytes of free space, has {free:,}"
        )


@contextmanager
def reporting_full_disk(
    kept: str = "nothing was started: free some space and try again",
) -> Iterator[None]:
    """Turns errors of a full disk into DiskFull, with what is kept and what to do."""
    try:
        yield
    except (OSError, ValueError) as error:
        # Orbax raises a ValueError for it.
        text, number = str(error), getattr(error, "errno", None)
        is_full = number in _FULL or "No space left on device" in text
        if text.startswith(_BEGINNING) or not (is_full or isinstance(error, DiskFull)):
            raise
        raise DiskFull(f"{_BEGINNING}: {text.splitlines()[0]}; {kept}") from error


# What a full disk leaves of a sweep, a search or a selection.
STUDY_KEPT = "what was saved is kept: free some space; the same call resumes"


def resumed_by(folder: pathlib.Path) -> str:
    """Says what a full disk leaves of a run, and how to resume it."""
    command = f"fedjax-dp run --resume {folder}"
    return f"the newest intact checkpoint is kept: free some space, then {command}"
