"""Progress that says what is being done: a live bar on a terminal, lines elsewhere."""

import math
import os
import sys
from collections.abc import Mapping
from typing import Any, NoReturn

import rich.progress
from rich.console import Console

# Share of the work of a round that is worth a word, since it is done for nothing.
_MUCH_PADDING = 0.5


class Progress:
    """Shows the phase, the round, the accuracy and the ε spent so far."""

    def __init__(self, console: Console, rounds: int):
        """Prepares the display.

        Args:
          console: where it goes.
          rounds: number of rounds of the run.
        """
        self._console, self._rounds = console, rounds
        self._bar = rich.progress.Progress(
            rich.progress.TextColumn("{task.description}"),
            rich.progress.BarColumn(),
            rich.progress.MofNCompleteColumn(),
            rich.progress.TimeElapsedColumn(),
            rich.progress.TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("starting", total=rounds)

    def __enter__(self) -> "Progress":
        """Starts the display."""
        self._bar.start()
        return self

    def __exit__(self, *exception: Any) -> None:
        """Stops the display."""
        self._bar.stop()

    def end(self) -> None:
        """Ends the process: a compiled round that never ends would keep it."""
        self._bar.stop()
        end_process("interrupted; what the last checkpoint holds is kept", 130)

    def phase(self, name: str) -> None:
        """Names what is being done now.

        Args:
          name: a few words.
        """
        self._bar.update(self._task, description=name)
        if not self._console.is_terminal:
            self._console.print(name)

    def done(self, rounds: int, row: Mapping[str, Any]) -> None:
        """Tells how many rounds are done.

        Args:
          rounds: rounds done.
          row: the newest metrics; empty before the first.
        """
        text = f"round {rounds} of {self._rounds}"
        if math.isfinite(row.get("test_accuracy", math.nan)):
            text += f", accuracy {row['test_accuracy']:.3f}"
        for name in ("epsilon_record", "epsilon_client"):
            if row.get(name) is not None:
                text += f", ε {row[name]:.2f} ({name.removeprefix('epsilon_')})"
        if row.get("padding_share") is not None and row["padding_share"] > _MUCH_PADDING:
            text += f", padding {row['padding_share']:.2f}"
        self._bar.update(self._task, completed=rounds, description=text)
        if row and not self._console.is_terminal:
            self._console.print(text)

    def warn(self, text: str) -> None:
        """Shows a warning above the bar.

        Args:
          text: the warning.
        """
        self._console.print(f"warning: {text}", soft_wrap=True, markup=False, style="yellow")


def end_process(text: str, status: int) -> NoReturn:
    """Ends the process where it stands, whatever still runs in it or waits to be closed.

    Args:
      text: the last words, to the error stream.
      status: the exit status.
    """
    print(text, file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
