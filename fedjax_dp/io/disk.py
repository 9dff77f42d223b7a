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
def reporting_full_disk(folder: pathlib.Path | None = None) -> Iterator[None]:
    """Turns errors of a full disk into DiskFull, with how to resume."""
    try:
        yield
    except (OSError, ValueError) as error:
        # Orbax raises a ValueError for it.
        words, number = str(error), getattr(error, "errno", None)
        is_full = number in _FULL or "No space left on device" in words
        if not is_full and not isinstance(error, DiskFull):
            raise
        kept = (
            "nothing was started: free some space and try again"
            if folder is None
            else "the newest intact checkpoint is kept: free some space, then fedjax-dp run "
            f"--resume {folder}"
        )
        reason = words.splitlines()[0]
        raise DiskFull(f"the disk is full: {reason}; {kept}") from error
