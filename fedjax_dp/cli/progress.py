"""Shows the progress of a run: a live bar on a terminal, lines elsewhere."""

import contextlib
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

import rich.progress

from fedjax_dp.cli.output import Output, print_document
from fedjax_dp.core.foreign_text import visible
from fedjax_dp.experiment.running.run import Watcher, round_in_words
from fedjax_dp.io.digests import DiskFull

# The least time between two lines: in seconds, and as a share of the elapsed time.
_SECONDS, _PART = 5.0, 0.02
INTERRUPTED = "interrupted; the last checkpoint is kept"


class Progress(Watcher):
    """Shows phase, round, accuracy, the ε spent so far, and the time left."""

    def __init__(
        self, out: Output, command: str, rounds: int, clock: Callable[[], float] = time.monotonic
    ):
        """Prepares the display; `clock` returns seconds."""
        self._out, self._command, self._rounds, self._clock = out, command, rounds, clock
        self._is_live = out.has_progress and out.notes.is_terminal
        self._bar = rich.progress.Progress(
            rich.progress.TextColumn("{task.description}", markup=False),
            rich.progress.BarColumn(),
            rich.progress.MofNCompleteColumn(),
            rich.progress.TimeElapsedColumn(),
            rich.progress.TimeRemainingColumn(),
            console=out.notes,
            disable=not self._is_live,
        )
        self._task = self._bar.add_task("starting", total=rounds)
        # When rounds began, the rounds completed by then, and when the last line was printed.
        self._began, self._before, self._printed = clock(), 0, -math.inf

    def __enter__(self) -> "Progress":
        """Starts the display."""
        self._bar.start()
        return self

    def __exit__(self, *exception: Any) -> None:
        """Stops the display."""
        self._bar.stop()

    def end(self) -> None:
        """Ends the process, which a compiled round may block."""
        self._bar.stop()
        end_process(self._out, self._command, INTERRUPTED, 130)

    def phase(self, name: str) -> None:
        """Shows the phase."""
        self._bar.update(self._task, description=name)
        if not self._is_live:
            self._out.note(name)

    def done(self, rounds: int, row: Mapping[str, Any]) -> None:
        """Shows the completed rounds and the newest metrics."""
        text = round_in_words(rounds, self._rounds, row)
        self._bar.update(self._task, completed=rounds, description=text)
        now = self._clock()
        if not row:
            self._began, self._before = now, rounds
        elif not self._is_live and self._is_due(now, rounds):
            self._printed = now
            self._out.note(text + self._left(now, rounds))

    def _is_due(self, now: float, rounds: int) -> bool:
        wait = max(_SECONDS, _PART * (now - self._began))
        return rounds >= self._rounds or now - self._printed >= wait

    def _left(self, now: float, rounds: int) -> str:
        """Estimates the time left from the rounds of this process."""
        ran, left = rounds - self._before, self._rounds - rounds
        if ran <= 0 or left <= 0:
            return ""
        return f", about {duration((now - self._began) * left / ran)} left"

    def warn(self, text: str) -> None:
        """Shows a warning above the bar."""
        self._out.warn(text)


def duration(seconds: float) -> str:
    """Formats seconds by the two largest units: "42 s", "3 min 20 s", "2 h 5 min"."""
    whole = round(seconds)
    units = (("d", 86400), ("h", 3600), ("min", 60), ("s", 1))
    first = next((i for i, (_, size) in enumerate(units) if whole >= size), len(units) - 1)
    parts: list[str] = []
    for name, size in units[first : first + 2]:
        count, whole = divmod(whole, size)
        if count or not parts:
            parts.append(f"{count} {name}")
    return " ".join(parts)


@contextlib.contextmanager
def ending(out: Output, command: str, if_interrupted: str) -> Iterator[None]:
    """Ends the process at once where it was interrupted or the disk is full."""
    try:
        yield
    except KeyboardInterrupt:
        # Python would wait for the round to end.
        end_process(out, command, if_interrupted, 130)
    except DiskFull as error:
        # Closing files would only fail again.
        end_process(out, command, f"error: {error}", 2)


def end_process(out: Output, command: str, text: str, status: int) -> NoReturn:
    """Ends the process at once, even if threads are running."""
    print(visible(text, keeps_lines=True), file=sys.stderr)
    if out.as_json:
        content = {"error": text.removeprefix("error: ")}
        print_document(out.answers.file, command, status, content)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
