"""Digests of files, to detect damage, and free space, before a file is used or written."""

import errno
import json
import pathlib
import shlex
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from fedjax_dp.core import checks, files
from fedjax_dp.core.files import digest_of, digest_of_file

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
    except Exception as error:
        # Orbax raises a ValueError for it, and safetensors an error of its own.
        text, number = str(error), getattr(error, "errno", None)
        is_full = number in _FULL or "No space left on device" in text
        if text.startswith(_BEGINNING) or not (is_full or isinstance(error, DiskFull)):
            raise
        raise DiskFull(f"{_BEGINNING}: {text.splitlines()[0]}; {kept}") from error


# What a full disk leaves of a sweep, a search or a selection.
STUDY_KEPT = "what was saved is kept: free some space; the same call resumes"


def resumed_by(folder: pathlib.Path) -> str:
    """Says what a full disk leaves of a run, and how to resume it."""
    command = f"fedjax-dp run --resume {shlex.quote(str(folder))}"
    return f"the newest intact checkpoint is kept: free some space, then {command}"


# In a folder, such as that of a run: the digests of files beside it.
DIGESTS_FILE = "digests.json"
# A reader may come between a file and its digest while a run writes both.
_TRIES, _PAUSE = 20, 0.05


class Written(NamedTuple):
    """The bytes of a file, and their SHA-256; a file of JSON lines may grow after them."""

    bytes: int
    sha256: str


def seal(folder: pathlib.Path, names: Iterable[str], known: Mapping[str, Written] = {}) -> None:
    """Records the digests of files that exist; what is `known`, whatever the disk holds."""
    # Of a folder in the folder only the files of the last call are recorded.
    names = [name for name in names if (folder / name).is_file()]
    parts = {name.rpartition("/")[0] for name in names} - {""}
    before = {n: x for n, x in _sealed(folder).items() if n.rpartition("/")[0] not in parts}
    _write(folder, {**before, **{name: _written(folder / name) for name in names}, **known})


def unseal(folder: pathlib.Path, *, but: Iterable[str] = ()) -> None:
    """Forgets the records of files, before these are written again."""
    if (folder / DIGESTS_FILE).is_file():
        _write(folder, {name: each for name, each in _sealed(folder).items() if name in but})


def sealed_names(folder: pathlib.Path) -> list[str]:
    """Lists the files that `seal` recorded."""
    return list(_sealed(folder))


def damage_of(folder: pathlib.Path, name: str) -> str | None:
    """Says how a file differs from what `seal` recorded; None if it does not."""
    path = folder / name
    for _ in range(_TRIES):
        before = _sealed(folder)
        if name not in before:
            return None
        size, digest = before[name]
        if not path.is_file():
            wrong = "is missing"
        else:
            whole = path.read_bytes()
            first = whole[:size] if path.suffix == ".jsonl" else whole
            if len(first) == size and digest_of([first]).hex() == digest:
                return None
            wrong = "has changed since it was written"
        if _sealed(folder) == before:
            return wrong
        time.sleep(_PAUSE)
    return wrong


def read_sealed(folder: pathlib.Path, name: str) -> str:
    """Reads a text file; a ValueError if it is not as `seal` recorded it."""
    require_undamaged_files(folder, [name])
    return files.read_text(folder / name)


def require_undamaged_files(folder: pathlib.Path, names: Iterable[str] | None = None) -> None:
    """Requires files, all that `seal` recorded by default, to be as it recorded them."""
    for name in sealed_names(folder) if names is None else sorted(names):
        if (wrong := damage_of(folder, name)) is not None:
            raise ValueError(
                f"{folder / name} must be as it was written, but it {wrong}; nearest valid "
                f"choices: restore it from a copy, or remove {folder / DIGESTS_FILE} to use it as "
                "it is"
            )


def read_sealed_object(folder: pathlib.Path, name: str) -> dict[str, Any]:
    """Reads a JSON object as `read_sealed` does; empty if there is and was no such file."""
    if not (folder / name).is_file() and damage_of(folder, name) is None:
        return {}
    content = files.parse_json(read_sealed(folder, name), folder / name)
    checks.require(isinstance(content, dict), str(folder / name), "hold an object", content)
    return dict(content)


def _written(path: pathlib.Path) -> Written:
    return Written(path.stat().st_size, digest_of_file(path))


def _sealed(folder: pathlib.Path) -> dict[str, Written]:
    """Reads the records of a folder; none if it has none."""
    path = folder / DIGESTS_FILE
    try:
        records = files.parse_json(path.read_bytes(), path)
        return {str(name): Written(int(n), str(digest)) for name, (n, digest) in records.items()}
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (ValueError, TypeError, AttributeError):
        raise ValueError(
            f"{path} must hold the digests of the files beside it, but it was damaged; nearest "
            "valid choices: restore it from a copy, or remove it to use these files as they are"
        ) from None


def _write(folder: pathlib.Path, records: Mapping[str, Written]) -> None:
    text = json.dumps({name: [*each] for name, each in sorted(records.items())}, indent=1)
    files.write_text(folder / DIGESTS_FILE, text + "\n")


def write_digests(folder: pathlib.Path, record: pathlib.Path) -> None:
    """Writes the digests of all files below a folder to a JSON file outside of it."""
    record.parent.mkdir(exist_ok=True)
    files.write_text(record, json.dumps(_digests(folder), indent=2) + "\n")


def damage(folder: pathlib.Path, record: pathlib.Path) -> str | None:
    """Returns the first difference from what `write_digests` recorded, or None."""
    try:
        expected = files.parse_json(record.read_bytes(), record)
        digests = _digests(folder)
    except FileNotFoundError:
        return f"{record.name} is missing"
    except (OSError, ValueError):
        return f"{record.name} cannot be read"
    if not isinstance(expected, dict):
        return f"{record.name} cannot be read"
    for name in sorted({*expected, *digests}):
        if name not in digests:
            return f"{name} is missing"
        if name not in expected:
            return f"{name} was not there when it was written"
        if expected[name] != digests[name]:
            return f"{name} has changed"
    return None


def _digests(folder: pathlib.Path) -> dict[str, str]:
    paths = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {path.relative_to(folder).as_posix(): digest_of_file(path) for path in paths}
