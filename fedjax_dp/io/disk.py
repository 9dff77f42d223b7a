"""A disk without room: told before it is written to, and named when it is."""

import errno
import pathlib
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

# A full file system, a quota of a user, and a limit of a process (`ulimit -f`).
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# What a file system needs beside the bytes of a file.
_MARGIN = 2**18


class DiskFull(OSError):
    """No room is left where a run writes."""


def require_space(folder: pathlib.Path, num_bytes: int) -> None:
    """Refuses to begin a write that will not end.

    Args:
      folder: where it would go.
      num_bytes: how much, roughly.

    Raises:
      DiskFull: naming what is needed and what there is.
    """
    free = shutil.disk_usage(folder).free
    if free < num_bytes + _MARGIN:
        raise DiskFull(f"{folder} must have room for {num_bytes + _MARGIN:,} bytes, has {free:,}")


@contextmanager
def full_disk_named(folder: pathlib.Path | None = None) -> Iterator[None]:
    """Gives an error of a full disk the words of one who has to go on from it.

    Args:
      folder: the run folder that is written to; None where there is nothing in it yet.

    Raises:
      DiskFull: in the place of what a library or the system says.
    """
    try:
        yield
    except (OSError, ValueError) as error:
        # Orbax has no type of its own for it.
        words, number = str(error), getattr(error, "errno", None)
        is_full = number in _FULL or "No space left on device" in words
        if not is_full and not isinstance(error, DiskFull):
            raise
        kept = (
            "nothing was begun: make room, and try again"
            if folder is None
            else "what the newest intact checkpoint holds is kept: make room, then fedjax-dp run "
            f"--resume {folder}"
        )
        reason = words.splitlines()[0]
        raise DiskFull(f"no room is left on the disk: {reason}; {kept}") from error
