"""The rounds whose messages have left the server, written before they leave."""

import itertools
import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from fedjax_dp.engine.record import RoundRecord


class Journal(Protocol):
    """The rounds that were sent, in order."""

    def append(self, round: int, record: RoundRecord) -> None:
        """Writes a round that is about to be sent.

        Args:
          round: rounds done before it.
          record: its record, as it is known before messages leave.
        """

    def num_attempts(self, round: int) -> int:
        """Counts the earlier attempts of a round.

        Args:
          round: rounds done before it.

        Returns:
          The number of attempts.
        """

    def num_released(self, round: int) -> int:
        """Counts the earlier attempts of a round whose aggregate was sent to nodes afterwards.

        Args:
          round: rounds done before it.

        Returns:
          The number of attempts.
        """


class JournalFile:
    """A journal in a file, one line for each attempt of a round."""

    def __init__(self, path: str | pathlib.Path) -> None:
        """Opens a journal.

        Args:
          path: the file; made with the first round.
        """
        self._path, self._lines = pathlib.Path(path), list[dict[str, Any]]()
        if self._path.exists():
            for line in self._path.read_text(encoding="utf-8").splitlines():
                try:
                    self._lines.append(json.loads(line))
                except json.JSONDecodeError:  # Cut off, so that nothing of it was sent.
                    continue

    def append(self, round: int, record: RoundRecord) -> None:
        """Writes a round that is about to be sent, and waits until it is on the disk.

        Args:
          round: rounds done before it.
          record: its record, as it is known before messages leave.
        """
        fields = {name: np.asarray(x).tolist() for name, x in record._asdict().items()}
        line = {"round": round, **fields}
        self._lines.append(line)
        # A line feed first: the line before may be cut off.
        with os.fdopen(
            os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "w"
        ) as file:
            file.write("\n" + json.dumps(line))
            file.flush()
            os.fsync(file.fileno())

    def num_attempts(self, round: int) -> int:
        """Counts the earlier attempts of a round.

        Args:
          round: rounds done before it.

        Returns:
          The number of attempts.
        """
        return sum(line["round"] == round for line in self._lines)

    def num_released(self, round: int) -> int:
        """Counts the earlier attempts of a round whose aggregate was sent to nodes afterwards.

        Args:
          round: rounds done before it.

        Returns:
          The number of attempts.
        """
        rounds = [line["round"] for line in self._lines]
        following = itertools.pairwise(rounds)
        return sum(one == round and other == round + 1 for one, other in following)

    def records(self) -> list[RoundRecord]:
        """Returns the records of all attempts.

        Returns:
          The records in order, each `[1, ...]`.
        """
        kinds = {"fate": np.int8, "is_released": bool, "digest": np.uint32}

        def field(line: Mapping[str, Any], name: str) -> Any:
            return np.asarray(line[name], kinds.get(name, np.int32))

        names = RoundRecord._fields
        return [RoundRecord(**{name: field(line, name) for name in names}) for line in self._lines]
