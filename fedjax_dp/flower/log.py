"""What a server app writes to Flower's log, which `flwr run --stream` and `flwr log` show."""

import logging
from collections.abc import Mapping
from typing import Any

from fedjax_dp.experiment.running.run import (
    Outcome,
    Watcher,
    describe_early_end,
    round_in_words,
    summary_in_words,
)

# Flower's own logger, whose lines it uploads.
LOG = logging.getLogger("flwr")
# absl, which orbax imports, gives the root logger a handler that would print each line again.
LOG.propagate = False


class LoggedProgress(Watcher):
    """Logs the phases, rounds and warnings of a run."""

    def __init__(self, rounds: int) -> None:
        """Prepares the log of a run of this many rounds."""
        self._rounds = rounds

    def phase(self, name: str) -> None:
        """Logs the phase."""
        LOG.info(name)

    def done(self, rounds: int, row: Mapping[str, Any]) -> None:
        """Logs the completed rounds and the newest metrics."""
        LOG.info(round_in_words(rounds, self._rounds, row))

    def warn(self, text: str) -> None:
        """Logs a warning."""
        LOG.warning(text)


def close(outcome: Outcome) -> None:
    """Logs the result of a run; raises, for `flwr ls`, if it failed or was interrupted."""
    LOG.info(f"{outcome.folder}: {summary_in_words(outcome.summary)}")
    early = describe_early_end(outcome)
    if outcome.ended == "interrupted":
        raise RuntimeError(f"{early}; another `flwr run` resumes it in {outcome.folder}")
    if outcome.is_futile:
        raise RuntimeError("no client's work entered the model in any round")
    if early:
        LOG.info(early)
