"""Digests of files, to detect damage before a file is used."""

import json
import pathlib

from fedjax_dp.core.files import digest_of_file
from fedjax_dp.io.logbook import write_json


def write_digests(folder: pathlib.Path, record: pathlib.Path) -> None:
    """Writes the digests of all files below a folder to a JSON file outside of it."""
    record.parent.mkdir(exist_ok=True)
    write_json(record, _digests(folder))


def damage(folder: pathlib.Path, record: pathlib.Path) -> str | None:
    """Returns the first difference from what `write_digests` recorded, or None."""
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


def _digests(folder: pathlib.Path) -> dict[str, str]:
    paths = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {path.relative_to(folder).as_posix(): digest_of_file(path) for path in paths}
