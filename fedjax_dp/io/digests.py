"""Digests of files, by which damage on the disk is seen before it becomes a number."""

import hashlib
import json
import pathlib

from fedjax_dp.io.logbook import write_json


def write_digests(folder: pathlib.Path, record: pathlib.Path) -> None:
    """Writes down what a folder holds.

    Args:
      folder: all files below it are read.
      record: the JSON file to write, outside of the folder.
    """
    record.parent.mkdir(exist_ok=True)
    write_json(record, _digests(folder))


def damage(folder: pathlib.Path, record: pathlib.Path) -> str | None:
    """Looks for differences between a folder and what was written down of it.

    Args:
      folder: the folder.
      record: what `write_digests` wrote.

    Returns:
      The first difference in words, or None where there is none.
    """
    try:
        expected = json.loads(record.read_bytes())
        found = _digests(folder)
    except FileNotFoundError:
        return f"{record.name} is missing"
    except (OSError, ValueError):
        return f"{record.name} cannot be read"
    if not isinstance(expected, dict):
        return f"{record.name} cannot be read"
    for name in sorted({*expected, *found}):
        if name not in found:
            return f"{name} is missing"
        if name not in expected:
            return f"{name} was not there when it was written"
        if expected[name] != found[name]:
            return f"{name} has changed"
    return None


def digest_of(data: bytes) -> str:
    """Computes the digest of some bytes.

    Args:
      data: the bytes.

    Returns:
      SHA-256 in hexadecimal digits.
    """
    return hashlib.sha256(data).hexdigest()


def _digests(folder: pathlib.Path) -> dict[str, str]:
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            with path.open("rb") as file:
                name = path.relative_to(folder).as_posix()
                found[name] = hashlib.file_digest(file, "sha256").hexdigest()
    return found
