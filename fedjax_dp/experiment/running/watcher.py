"""Receives the progress of a run."""

from collections.abc import Mapping
from typing import Any


class Watcher:
    """Receives the progress of a run; this one ignores it.

    Subclasses override methods to show it.
    """

    def phase(self, name: str) -> None:
        """Receives the current phase.

        Args:
          name: a few words, such as "compiling".
        """

    def done(self, rounds: int, row: Mapping[str, Any]) -> None:
        """Receives the number of completed rounds.

        Args:
          rounds: completed rounds.
          row: the newest metrics; empty before the first round.
        """

    def warn(self, text: str) -> None:
        """Receives a warning, which the summary has too.

        Args:
          text: the warning.
        """

    def end(self) -> None:
        """Ends the process; called from a thread when an interrupted run cannot end by itself."""
