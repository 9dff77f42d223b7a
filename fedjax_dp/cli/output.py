"""What commands print, and where: answers to the output stream, all else to the error stream."""

import contextlib
import json
import logging
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import StrEnum
from typing import IO, Any, NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

# Of the documents that `--json` prints: raised when a key changes its meaning or is gone.
DOCUMENT_VERSION = 1


class LogLevel(StrEnum):
    """How much is said beside the answer."""

    debug = "debug"
    info = "info"
    warning = "warning"
    error = "error"


class Output(NamedTuple):
    """Where a command prints, and how much.

    Attributes:
      answers: the console of what was asked for; the output stream.
      notes: the console of progress, warnings and errors; the error stream.
      as_json: whether the answer is one JSON document.
      is_quiet: whether the answer is printed in its shortest form, without progress.
      level: what is said beside the answer.
    """

    answers: Console
    notes: Console
    as_json: bool = False
    is_quiet: bool = False
    level: LogLevel = LogLevel.info

    @property
    def has_progress(self) -> bool:
        """Whether progress is shown."""
        return not self.is_quiet and self.level in (LogLevel.debug, LogLevel.info)

    def say(self, text: str) -> None:
        """Prints a part of the answer."""
        self.answers.print(text)

    def note(self, text: str) -> None:
        """Prints a step of the work."""
        if self.has_progress:
            self.notes.print(text)

    def warn(self, text: str) -> None:
        """Prints a warning."""
        if self.level != LogLevel.error:
            self.notes.print(f"warning: {text}", style="yellow")

    def table(self, heads: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
        """Prints a table: framed on a terminal, elsewhere lines of cells between tabs."""
        if self.answers.is_terminal:
            framed = Table(*heads)
            for row in rows:
                framed.add_row(*(Text(str(cell)) for cell in row))
            self.answers.print(framed, soft_wrap=False)
            return
        for row in (heads, *rows):
            cells = (" ".join(str(cell).split()) for cell in row)
            self.answers.file.write("\t".join(cells) + "\n")


class Answer(NamedTuple):
    """What a command has found.

    Attributes:
      document: what `--json` prints, beside version, command and status.
      show: prints the answer for people.
      shortest: what `--quiet` prints, one line or several; nothing where it is empty.
      status: the exit status.
    """

    document: dict[str, Any]
    show: Callable[[Output], None]
    shortest: str
    status: int = 0


def console(*, is_error: bool = False) -> Console:
    """Makes a console that prints words as they are, and breaks no line in a pipe.

    Args:
      is_error: whether it is that of the error stream.

    Returns:
      The console.
    """
    # That of answers stays where it is when other prints are sent elsewhere.
    file = None if is_error else sys.stdout
    return Console(
        file=file, stderr=is_error, soft_wrap=True, markup=False, emoji=False, highlight=False
    )


@contextlib.contextmanager
def logging_at(level: LogLevel) -> Iterator[None]:
    """Lets libraries log to the error stream while a command runs.

    Args:
      level: what is said beside the answer.
    """
    least = {LogLevel.debug: logging.DEBUG, LogLevel.error: logging.ERROR}
    root, handler = logging.getLogger(), logging.StreamHandler()
    before = root.level
    handler.setLevel(least.get(level, logging.WARNING))
    handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    root.addHandler(handler)
    root.setLevel(handler.level)
    logging.captureWarnings(True)
    try:
        yield
    finally:
        logging.captureWarnings(False)
        root.setLevel(before)
        root.removeHandler(handler)


def print_answer(out: Output, command: str, answer: Answer) -> None:
    """Prints an answer in the form that was asked for.

    Args:
      out: where to.
      command: the name of the command.
      answer: what it has found.
    """
    if out.as_json:
        print_document(out.answers.file, command, answer.status, answer.document)
    elif not out.is_quiet:
        answer.show(out)
    elif answer.shortest:
        out.say(answer.shortest)


def print_document(file: IO[str], command: str, status: int, content: dict[str, Any]) -> None:
    """Prints the one JSON document of a command.

    Args:
      file: where to.
      command: the name of the command.
      status: the exit status.
      content: its own keys.
    """
    head = {"version": DOCUMENT_VERSION, "command": command, "status": status}
    file.write(json.dumps(plain(head | content), allow_nan=False) + "\n")
    file.flush()


def plain(value: Any) -> Any:
    """Turns figures into what JSON can hold.

    Args:
      value: a number, a text, an array, or nested dicts and lists of them.

    Returns:
      Plain Python values; what is infinite is the text "inf" or "-inf", what is not a number None.
    """
    if isinstance(value, dict):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else repr(value)
    return value
