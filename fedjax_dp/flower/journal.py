"""The rounds whose messages have left the server, written before they leave."""

import itertools
import json
import os
import pathlib
from typing import Protocol

import numpy as np

from fedjax_dp.engine.record import RoundRecord


class Journal(Protocol):
    """The rounds that were sent, in order."""

    def append(self, round: int, record: RoundRecord) -> None:
        """Writes a round that is about to be sent."""

    def num_released(self, round: int) -> int:
        """Counts the earlier attempts of a round whose aggregate was sent to nodes afterwards."""


class JournalFile:
    """A journal in a file, one line for each attempt of a round."""

    def __init__(self, path: str | pathlib.Path) -> None:
        """Opens a journal; the file is made with the first round."""
        self._path, self._lines = pathlib.Path(path), list[dict[str, object]]()
        if self._path.exists():
            for line in self._path.read_text(encoding="utf-8").splitlines():
                try:
                    self._lines.append(json.loads(line))
                except json.JSONDecodeError:  # Cut off, so that nothing of it was sent.
                    continue

    def append(self, round: int, record: RoundRecord) -> None:
        """Writes a round that is about to be sent, and waits until it is on the disk."""
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

    def num_released(self, round: int) -> int:
        """Counts the earlier attempts of a round whose aggregate was sent to nodes afterwards."""
        rounds = [line["round"] for line in self._lines]
        following = itertools.pairwise(rounds)
        return sum(one == round and other == round + 1 for one, other in following)

    def records(self) -> list[RoundRecord]:
        """Returns the records of all attempts, each `[1, ...]`."""
        kinds = {"fate": np.int8, "is_released": bool, "digest": np.uint32}
        return [
            RoundRecord(
                **{n: np.asarray(line[n], kinds.get(n, np.int32)) for n in RoundRecord._fields}
            )
            for line in self._lines
        ]
