"""Prints answers to the output stream, and everything else to the error stream."""

import contextlib
import json
import logging
import math
import pathlib
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import StrEnum
from typing import IO, Any, NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fedjax_dp.core.foreign_text import visible

# Version of `--json` documents, raised when a key changes its meaning or is removed.
DOCUMENT_VERSION = 1


class LogLevel(StrEnum):
    """How much is printed besides the answer."""

    debug = "debug"
    info = "info"
    warning = "warning"
    error = "error"


class Output(NamedTuple):
    """Where a command prints, and how much."""

    answers: Console  # The output stream.
    notes: Console  # The error stream, for progress and warnings.
    as_json: bool = False  # Whether to print the answer as one JSON document.
    is_quiet: bool = False  # Whether to print the shortest answer, without progress.
    level: LogLevel = LogLevel.info  # How much is printed besides the answer.

    @property
    def has_progress(self) -> bool:
        """Whether progress is shown."""
        return not self.is_quiet and self.level in (LogLevel.debug, LogLevel.info)

    def say(self, text: str) -> None:
        """Prints a part of the answer, with control characters escaped."""
        self.answers.print(visible(text, keeps_lines=True))

    def note(self, text: str) -> None:
        """Prints a step of the work."""
        if self.has_progress:
            self.notes.print(visible(text, keeps_lines=True))

    def warn(self, text: str) -> None:
        """Prints a warning."""
        if self.level != LogLevel.error:
            self.notes.print(f"warning: {visible(text, keeps_lines=True)}", style="yellow")

    def table(self, heads: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
        """Prints a table: framed on a terminal, elsewhere lines of cells between tabs."""
        if self.answers.is_terminal:
            framed = Table(*heads)
            for row in rows:
                framed.add_row(*(Text(visible(str(cell))) for cell in row))
            self.answers.print(framed, soft_wrap=False)
            return
        for row in (heads, *rows):
            cells = (visible(" ".join(str(cell).split())) for cell in row)
            self.answers.file.write("\t".join(cells) + "\n")


class Answer(NamedTuple):
    """The answer of a command."""

    document: dict[str, Any]  # Printed by `--json`, with version, command and status.
    show: Callable[[Output], None]  # Prints the answer for people.
    shortest: str  # Printed by `--quiet`, if it is not empty.
    status: int = 0  # The exit status.


def console(*, is_error: bool = False) -> Console:
    """Makes a console that prints text as it is and wraps no lines in a pipe."""
    # Bound now: other prints may be redirected later.
    file = None if is_error else sys.stdout
    return Console(
        file=file, stderr=is_error, soft_wrap=True, markup=False, emoji=False, highlight=False
    )


class _Visible(logging.Formatter):
    """Formats records, with control characters escaped."""

    def format(self, record: logging.LogRecord) -> str:
        return visible(super().format(record), keeps_lines=True)


@contextlib.contextmanager
def logging_at(level: LogLevel) -> Iterator[None]:
    """Logs what libraries report to the error stream, each once."""
    least = {LogLevel.debug: logging.DEBUG, LogLevel.error: logging.ERROR}
    root, handler = logging.getLogger(), logging.StreamHandler()
    before, handlers = root.level, root.handlers[:]
    # absl, on Orbax's import, adds a handler of the same stream.
    root.handlers[:] = [each for each in handlers if type(each) is not logging.StreamHandler]
    handler.setLevel(least.get(level, logging.WARNING))
    handler.setFormatter(_Visible("%(levelname)s %(name)s: %(message)s"))
    root.addHandler(handler)
    root.setLevel(handler.level)
    logging.captureWarnings(True)
    try:
        yield
    finally:
        logging.captureWarnings(False)
        root.setLevel(before)
        root.handlers[:] = handlers


def print_answer(out: Output, command: str, answer: Answer) -> None:
    """Prints an answer as JSON, in short, or for people."""
    if out.as_json:
        print_document(out.answers.file, command, answer.status, answer.document)
    elif not out.is_quiet:
        answer.show(out)
    elif answer.shortest:
        out.say(answer.shortest)


def shown_path(path: pathlib.Path) -> str:
    """Writes a path from the current folder, if it is below it."""
    here = pathlib.Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def print_document(file: IO[str], command: str, status: int, content: dict[str, Any]) -> None:
    """Prints the one JSON document of a command."""
    head = {"version": DOCUMENT_VERSION, "command": command, "status": status}
    file.write(json.dumps(plain(head | content), allow_nan=False) + "\n")
    file.flush()


def plain(value: Any) -> Any:
    """Converts to JSON values: infinities become "inf" or "-inf", NaN becomes None."""
    if isinstance(value, dict):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else repr(value)
    return value
