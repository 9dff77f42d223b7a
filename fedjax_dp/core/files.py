"""Reading files: every failure names the file, the line if any, and the rule."""

import codecs
import contextlib
import csv
import hashlib
import json
import os
import pathlib
import stat
import tempfile
import threading
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

from fedjax_dp.core import checks
from fedjax_dp.core.disclosure import GuardedError

Path = str | os.PathLike[str]
# How much of a path an error shows.
_SHOWN = 200
# Windows would otherwise translate line breaks.
BINARY = getattr(os, "O_BINARY", 0)
# Systems without reads and writes at a place have one place for each file, which threads share.
_SEEKING = threading.Lock()
# Bytes of a file that are read at once for its digest.
_BLOCK = 2**20
# The name of the digest of a JSON object in it.
_DIGEST = "sha256"


def expanded(path: Path) -> pathlib.Path:
    """Replaces a leading ~ as a shell does, which leaves the name of an unknown user as it is."""
    return pathlib.Path(os.path.expanduser(path))


def kind_of(path: Path, name: str) -> Literal["file", "folder", "other", "missing"]:
    """Determines the kind of file at a path, links followed; `name` is for errors."""
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return "missing"
    except (OSError, ValueError) as error:
        # Too long, a loop of links, below a file or an unreadable folder, or with a NUL.
        reason = error.strerror if isinstance(error, OSError) else str(error)
        refused = f"{checks.shown(os.fspath(path), _SHOWN)} ({reason})"
        public = f"{name} must be a path that can be opened"
        raise GuardedError(f"{public}, got {refused}", public) from None
    return "folder" if stat.S_ISDIR(mode) else "file" if stat.S_ISREG(mode) else "other"


def require_file(path: Path, name: str) -> None:
    """Requires a file that can be read; `name` is the key, option or argument in errors."""
    kind = kind_of(path, name)
    can_be_read = kind != "file" or os.access(path, os.R_OK)
    kinds = {"folder": "a folder", "missing": "no such file", "other": "a device or a pipe"}
    reason = kinds.get(kind, "" if can_be_read else "no permission to read it")
    if reason:
        text = checks.shown(os.fspath(path), _SHOWN)
        public = f"{name} must be a file that can be read"
        raise GuardedError(f"{public}, got {text} ({reason})", public)


def require_new(path: Path, name: str, endings: Sequence[str]) -> None:
    """Requires the path of a file that can be made, with one of these endings; "" is any."""
    is_new = kind_of(path, name) == "missing" and os.fspath(path).endswith(tuple(endings))
    rule = f"be a new file that ends in {' or '.join(endings)}" if any(endings) else "be new"
    checks.require(is_new, name, rule, os.fspath(path))
    require_folder(os.path.dirname(os.path.abspath(path)), f"the folder of {name}", writable=True)


def require_folder(path: Path, name: str, *, writable: bool = False) -> None:
    """Requires a folder, or a path for a new one; `name` as in `require_file`."""
    path = os.fspath(path)
    if not path:
        raise ValueError(f"{name} must be a folder, or a path for a new one, got an empty path")
    kind = kind_of(path, name)
    if kind in ("file", "other"):
        reason = "a file" if kind == "file" else "a device or a pipe"
    elif kind == "folder":
        mode = os.R_OK | os.X_OK | (os.W_OK if writable else 0)
        reason = "" if os.access(path, mode) else "no permission to use it"
    else:
        above, part = os.path.split(os.path.abspath(path))
        require_folder(above, name, writable=writable)
        if kind_of(above, name) == "missing":
            # A part that is too long shows where a folder is.
            try:
                kind_of(os.path.join(os.sep, part), name)
            except ValueError:
                refused = f"{checks.shown(path, _SHOWN)} (a part of it is too long)"
                raise ValueError(
                    f"{name} must be a path that can be opened, got {refused}"
                ) from None
        reason = ""
    if reason:
        refused = f"{checks.shown(path, _SHOWN)} ({reason})"
        raise ValueError(f"{name} must be a folder, or a path for a new one, got {refused}")


def parse_toml(text: str, where: Path) -> dict[str, Any]:
    """Parses TOML; errors begin with `where`, the file or a place in it."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{os.fspath(where)} is not valid TOML: {error}") from None
    except RecursionError:
        raise ValueError(f"{os.fspath(where)} must not nest brackets hundreds deep") from None
    except ValueError:
        # Python reads no integer of more than some thousand digits.
        rule = "must hold no number of thousands of digits"
        raise ValueError(f"{os.fspath(where)} {rule}") from None


def entry_of(tables: Any, *keys: str) -> Any:
    """Returns an entry of nested tables, or None."""
    for key in keys:
        tables = tables.get(key) if isinstance(tables, Mapping) else None
    return tables


@contextlib.contextmanager
def reading(where: Path, rule: str, *errors: type[Exception]) -> Iterator[None]:
    """Turns the exceptions of a format's reader into an error with the file and its rule."""
    try:
        yield
    except errors as error:
        if isinstance(error, OSError) and error.filename is not None:
            raise
        reason = str(error) or type(error).__name__
        text = f"{os.fspath(where)} must {rule}: {reason}"
        raise GuardedError(text, f"a file must {rule}") from error


def at_line(where: Path, number: int) -> str:
    """Names a line of a file, counted from 1, for errors."""
    return f"{os.fspath(where)}, line {number}"


def as_text(content: bytes, where: Path) -> str:
    """Decodes UTF-8, without a byte order mark; CRLF becomes LF."""
    content = content.removeprefix(codecs.BOM_UTF8)
    try:
        text = content.decode("utf-8")
        wrong = content.find(b"\0")
    except UnicodeDecodeError as error:
        text, wrong = "", error.start
    if wrong >= 0:
        place = at_line(where, content.count(b"\n", 0, wrong) + 1)
        raise ValueError(f"{place} must be text in UTF-8, got the byte {content[wrong]:#04x}")
    return text.replace("\r\n", "\n")


def read_text(path: Path) -> str:
    """Reads a text file, decoded by `as_text`."""
    with open(path, "rb") as file:
        return as_text(file.read(), path)


def lines(text: str) -> Iterator[tuple[int, str]]:
    """Iterates over lines that are not blank, stripped, with their numbers from 1."""
    for number, line in enumerate(text.split("\n"), 1):
        if stripped := line.strip():
            yield number, stripped


def cells(line: str, where: Path) -> list[str]:
    """Splits a line of a CSV file into cells, stripped; errors begin with `where`."""
    with reading(where, "be a line of a CSV file", csv.Error):
        return [cell.strip() for cell in next(csv.reader([line]))]


def digest_of(parts: Iterable[Any]) -> bytes:
    """Computes the SHA-256 of concatenated bytes or buffers."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.digest()


def digest_of_file(path: Path) -> str:
    """Computes the SHA-256 of a file, in hexadecimal digits."""
    with open(path, "rb") as file:
        return digest_of(iter(lambda: file.read(_BLOCK), b"")).hex()


def write_text(path: Path, text: str) -> None:
    """Writes a text file, which appears whole."""
    temporary = f"{os.fspath(path)}.tmp"
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def write_private(path: Path, content: bytes) -> None:
    """Writes a file for its owner alone, which appears whole and outlasts a loss of power."""
    folder, name = os.path.split(os.path.abspath(path))
    number, unfinished = tempfile.mkstemp(dir=folder, prefix=f".{name}-")
    with os.fdopen(number, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(unfinished, path)
    sync_folder(folder)


def append_line(path: Path, line: str) -> None:
    """Appends a line to a file for its owner alone; a cut off line before it stays apart."""
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | BINARY, 0o600)
    with os.fdopen(descriptor, "r+b") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(size - 1, 0))
        is_cut = file.read(1) not in (b"", b"\n")
        file.write(b"\n" * is_cut + line.encode() + b"\n")


def sync_folder(folder: Path) -> None:
    """Waits until the names in a folder are on the disk, on systems that can open a folder."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_at(descriptor: int, data: memoryview, offset: int) -> None:
    """Writes bytes at a place of a file."""
    while len(data):
        if hasattr(os, "pwrite"):
            count = os.pwrite(descriptor, data, offset)
        else:
            with _SEEKING:
                os.lseek(descriptor, offset, os.SEEK_SET)
                count = os.write(descriptor, data)
        data, offset = data[count:], offset + count


def read_at(descriptor: int, into: memoryview, offset: int) -> int:
    """Reads bytes at a place of a file, as many as it has up to the length of a buffer."""
    start = offset
    while len(into):
        if hasattr(os, "preadv"):
            count = os.preadv(descriptor, [into], offset)
        else:
            with _SEEKING:
                os.lseek(descriptor, offset, os.SEEK_SET)
                chunk = os.read(descriptor, len(into))
            count = len(chunk)
            into[:count] = chunk
        if count == 0:
            break
        into, offset = into[count:], offset + count
    return offset - start


def parse_json(text: str | bytes, where: Path) -> Any:
    """Parses JSON; a ValueError for all that is none, and for repeated names."""
    with reading(where, "be JSON", ValueError, RecursionError):
        return json.loads(text, object_pairs_hook=_once)


def with_digest(content: Mapping[str, Any]) -> dict[str, Any]:
    """Adds the digest of a JSON object to it, so that `without_digest` detects damage."""
    return {**content, _DIGEST: _digest_of_json(content)}


def without_digest(content: Any, where: Path) -> dict[str, Any]:
    """Requires an object as it was written, if it has a digest; errors begin with `where`."""
    checks.require(isinstance(content, dict), os.fspath(where), "hold an object", content)
    rest = {name: value for name, value in content.items() if name != _DIGEST}
    if _DIGEST in content and content[_DIGEST] != _digest_of_json(rest):
        raise ValueError(f"{os.fspath(where)} must be as it was written, but was damaged")
    return rest


def _digest_of_json(content: Mapping[str, Any]) -> str:
    return digest_of([json.dumps(content, sort_keys=True).encode()]).hex()


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    names = [name for name, _ in pairs]
    twice = [name for name in members if names.count(name) > 1] if len(members) < len(pairs) else []
    checks.require(not twice, "an object", "have distinct names", twice)
    return members
