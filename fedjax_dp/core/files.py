"""Reading files: every failure names the file, the line where there is one, and the rule."""

import codecs
import contextlib
import json
import os
from collections.abc import Iterator
from typing import Any

from fedjax_dp.core import checks

Path = str | os.PathLike[str]


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
