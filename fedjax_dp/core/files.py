"""Reading files: every failure names the file, the line where there is one, and the rule."""

import codecs
import contextlib
import json
import os
import stat
import tomllib
from collections.abc import Iterator
from typing import Any, Literal

from fedjax_dp.core import checks

Path = str | os.PathLike[str]
# How much of a path an error shows.
_SHOWN = 200


def kind_of(path: Path, name: str) -> Literal["file", "folder", "other", "missing"]:
    """Finds out what lies at a path.

    Args:
      path: the path.
      name: the key, option or argument that gave it, for the error.

    Returns:
      What it is, links followed; "other" is a device, a pipe or a socket.

    Raises:
      ValueError: if no file can lie there, naming key and path.
    """
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return "missing"
    except (OSError, ValueError) as error:
        # Too long, a loop of links, below a file, behind a closed folder, a NUL in it.
        reason = error.strerror if isinstance(error, OSError) else str(error)
        found = f"{checks.shown(os.fspath(path), _SHOWN)} ({reason})"
        raise ValueError(f"{name} must be a path that can be opened, got {found}") from None
    return "folder" if stat.S_ISDIR(mode) else "file" if stat.S_ISREG(mode) else "other"


def require_file(path: Path, name: str) -> None:
    """Requires a file that can be read.

    Args:
      path: the file.
      name: the key, option or argument that gave it, for the error.

    Raises:
      ValueError: if there is none, naming key, path and what there is.
    """
    kind = kind_of(path, name)
    can_be_read = kind != "file" or os.access(path, os.R_OK)
    found = {"folder": "a folder", "missing": "nothing there", "other": "a device or a pipe"}
    reason = found.get(kind, "" if can_be_read else "no permission to read it")
    if reason:
        text = checks.shown(os.fspath(path), _SHOWN)
        raise ValueError(f"{name} must be a file that can be read, got {text} ({reason})")


def require_folder(path: Path, name: str, *, writable: bool = False) -> None:
    """Requires a folder, or a path where one can be made.

    Args:
      path: the folder.
      name: the key, option or argument that gave it, for the error.
      writable: whether it will be written to.

    Raises:
      ValueError: if something else is there, or no folder can be made, naming key and path.
    """
    path = os.fspath(path)
    if not path:
        raise ValueError(f"{name} must be a folder, or where one can be made, got an empty path")
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
                found = f"{checks.shown(path, _SHOWN)} (a part of it is too long)"
                raise ValueError(f"{name} must be a path that can be opened, got {found}") from None
        reason = ""
    if reason:
        found = f"{checks.shown(path, _SHOWN)} ({reason})"
        raise ValueError(f"{name} must be a folder, or where one can be made, got {found}")


def parse_toml(text: str, where: Path) -> dict[str, Any]:
    """Reads TOML.

    Args:
      text: the text.
      where: the file, and the place in it where that is known.

    Returns:
      The tables.

    Raises:
      ValueError: if it is no TOML, nests too deeply, or holds a number of thousands of digits.
    """
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{os.fspath(where)} is not valid TOML: {error}") from None
    except RecursionError:
        raise ValueError(f"{os.fspath(where)} must not nest brackets hundreds deep") from None
    except ValueError:
        # Python reads no whole number of more than some thousand digits.
        rule = "must hold no number of thousands of digits"
        raise ValueError(f"{os.fspath(where)} {rule}") from None


@contextlib.contextmanager
def reading(where: Path, rule: str, *errors: type[Exception]) -> Iterator[None]:
    """Says of what a format's reader raises which file it was, and what it must be.

    What the system says of a file, such as that it is a folder, names it already and is passed on.

    Args:
      where: the file, and the place in it where that is known.
      rule: what must hold, completing the phrase "must …".
      *errors: what the reader raises for a file that is none of its format.

    Raises:
      ValueError: naming file, rule and what was wrong.
    """
    try:
        yield
    except errors as error:
        if isinstance(error, OSError) and error.filename is not None:
            raise
        found = str(error) or type(error).__name__
        raise ValueError(f"{os.fspath(where)} must {rule}: {found}") from error


def at_line(where: Path, number: int) -> str:
    """Names a line of a file.

    Args:
      where: the file.
      number: the line, counted from 1.

    Returns:
      The words for an error.
    """
    return f"{os.fspath(where)}, line {number}"


def as_text(content: bytes, where: Path) -> str:
    """Decodes the bytes of a text file.

    Args:
      content: the bytes.
      where: the file.

    Returns:
      The text without a byte order mark, its lines ended by line breaks alone.

    Raises:
      ValueError: if it is no text in UTF-8, naming file and line.
    """
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
    """Reads a text file.

    Args:
      path: the file.

    Returns:
      The text, its lines ended by line breaks alone.

    Raises:
      ValueError: if it is no text in UTF-8, naming file and line.
      OSError: if it cannot be read.
    """
    with open(path, "rb") as file:
        return as_text(file.read(), path)


def lines(text: str) -> Iterator[tuple[int, str]]:
    """Numbers the lines of a text that hold anything.

    Args:
      text: the text.

    Yields:
      The number, counted from 1, and the line without white space around it.
    """
    for number, line in enumerate(text.split("\n"), 1):
        if stripped := line.strip():
            yield number, stripped


def parse_json(text: str, where: Path) -> Any:
    """Reads JSON.

    Args:
      text: the text.
      where: the file, and the place in it where that is known.

    Returns:
      The value.

    Raises:
      ValueError: if it is no JSON, or names something twice.
    """
    with reading(where, "be JSON", ValueError, RecursionError):
        return json.loads(text, object_pairs_hook=_once)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    names = [name for name, _ in pairs]
    twice = [name for name in found if names.count(name) > 1] if len(found) < len(pairs) else []
    checks.require(not twice, "an object", "name everything once", twice)
    return found
