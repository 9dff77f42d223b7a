"""The journal of a deployed run: the rounds whose messages have left, written before they leave."""

import itertools
import json
import os
import pathlib
import secrets
from collections.abc import Mapping
from typing import Any

import numpy as np

from fedjax_dp.core import checks, files
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.files import BINARY, sync_folder
from fedjax_dp.engine.record import RoundRecord

_KINDS: Mapping[str, Any] = {"fate": np.int8, "is_released": bool, "digest": np.uint32}


class JournalFile:
    """A journal in a file, one line for each attempt of a round.

    Attributes:
      run: a random name of the run, the same when it is resumed.
    """

    @checked
    def __init__(self, path: str | pathlib.Path, facts: Mapping[str, str] = {}) -> None:
        """Opens a journal, damaged at most in its last line; each new round has `facts` besides."""
        self._path, self._facts = pathlib.Path(path), dict(facts)
        self._lines, self._size = list[dict[str, Any]](), 0
        whole = self._path.read_bytes() if self._path.exists() else b""
        # Without a line feed a line was cut off.
        for line in whole.split(b"\n")[:-1]:
            entry = _parsed(line)
            rule = f"be intact in line {len(self._lines) + 1}, to charge its round; {_COPY}"
            shown = line[:40].decode(errors="replace")
            checks.require(entry is not None, str(self._path), rule, shown)
            assert entry is not None
            self._lines.append(entry)
            self._size += len(line) + 1
        self.run: str = self._lines[0].get("run", "") if self._lines else secrets.token_hex(8)

    def make(self) -> None:
        """Makes the file before the first round, so that one that is missing later was lost."""
        self._write(b"")

    def append(self, round: int, record: RoundRecord) -> None:
        """Writes a round that is about to be sent, and waits until it is on the disk.

        Args:
          round: rounds done before it.
          record: its record, as it is known before messages leave.
        """
        fields = {name: np.asarray(x).tolist() for name, x in record._asdict().items()}
        line = {"round": round, "run": self.run, **fields, **self._facts}
        self._write(json.dumps(files.with_digest(line)).encode() + b"\n")
        self._lines.append(line)

    def _write(self, text: bytes) -> None:
        is_new = not self._path.exists()
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | BINARY, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            # In place of a line that was cut off.
            file.truncate(self._size)
            file.seek(self._size)
            self._size += file.write(text)
            file.flush()
            os.fsync(file.fileno())
        if is_new:
            sync_folder(self._path.parent)

    def require(self, rounds: int) -> None:
        """Requires all completed rounds of a run.

        Args:
          rounds: their number.

        Raises:
          ValueError: if one is missing, which would not be charged.
        """
        done = {line["round"] for line in self._lines}
        found = [each for each in range(rounds) if each in done] if self._path.exists() else None
        rule = f"hold all {rounds} rounds of the newest checkpoint, to charge them; {_COPY}"
        checks.require(found == [*range(rounds)], str(self._path), rule, found)

    def values(self, name: str) -> set[str]:
        """Returns the values of a fact in all rounds so far.

        Args:
          name: the name of the fact.

        Returns:
          The values.
        """
        return {line[name] for line in self._lines if name in line}

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

        names = RoundRecord._fields
        return [RoundRecord(**{n: _field(line, n) for n in names}) for line in self._lines]


_COPY = (
    "nearest valid choice: a new run in another folder, since a copy lacks the rounds that were "
    "sent after it"
)


def _parsed(line: bytes) -> dict[str, Any] | None:
    """Reads a line; None if it is damaged."""
    try:
        entry = files.without_digest(files.parse_json(line, ""), "")
    except ValueError:
        return None
    if not {"round", *RoundRecord._fields} <= entry.keys():
        return None
    try:
        checks.whole("round", entry["round"], at_least=0)
        for name in RoundRecord._fields:
            # An array of another type would be rounded, or wrapped.
            exact = np.array_equal(_field(entry, name), np.asarray(entry[name]))
            is_alike = (_kind(name) is bool) == (np.asarray(entry[name]).dtype.kind == "b")
            checks.require(exact and is_alike, name, "be whole numbers", entry[name])
    except (ValueError, OverflowError, TypeError):
        return None
    return entry


def _kind(name: str) -> Any:
    """Returns the type of a field of a record."""
    return _KINDS.get(name, np.int32)


def _field(line: Mapping[str, Any], name: str) -> Any:
    """Reads a field of a record."""
    return np.asarray(line[name], _kind(name))
