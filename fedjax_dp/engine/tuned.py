"""Layouts that are chosen by timing, and where the times are kept."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol


class Trial(NamedTuple):
    """The seconds that a layout takes.

    Attributes:
      clients_per_chunk: the layout.
      seconds: those of a round, the better of two.
      compile_seconds: those of its compilation.
    """

    clients_per_chunk: int
    seconds: float
    compile_seconds: float


class KeptTrials(Protocol):
    """Trials that outlast a process, of this machine and these versions alone."""

    def read(self, work: Mapping[str, str], chunks: Sequence[int]) -> tuple[Trial, ...] | None:
        """Reads trials.

        Args:
          work: all that speed depends on besides machine and versions.
          chunks: the candidates, numbers of clients per chunk.

        Returns:
          A trial for each of the candidates, fastest first; None if there are none.
        """
        ...

    def write(self, work: Mapping[str, str], trials: Sequence[Trial]) -> None:
        """Keeps trials for later processes.

        Args:
          work: as for `read`.
          trials: a trial for each candidate.
        """
        ...


class Tuned(NamedTuple):
    """A number of clients per chunk that two rounds of each candidate choose, by their time.

    Attributes:
      kept: where trials are kept from one process to the next, such as `io.TrialFiles`; None keeps
        them within this process.
    """

    kept: KeptTrials | None = None
