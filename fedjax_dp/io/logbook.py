"""Metrics of a run by round: JSON lines, and TensorBoard events with the extra `tensorboard`."""

import contextlib
import hashlib
import json
import math
import os
import pathlib
import shutil
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from fedjax_dp.core import files
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.files import write_text
from fedjax_dp.core.ranges import Index
from fedjax_dp.io.digests import Written, damage_of, unseal

METRICS_FILE = "metrics.jsonl"
# What follows from the failure of a tracker.
FAILED = "failed and receives nothing more, while the run continues"
# How many numbers of lines or rounds a warning lists.
_SHOWN = 5
# Seconds between writes of events to the disk.
_FLUSH_SECONDS = 10.0


class Logbook:
    """Writes one row of metrics for each round.

    Attributes:
      path: the file of JSON lines.
      rows: the rows so far, those of an earlier part of the run too.
    """

    @checked
    def __init__(
        self,
        directory: str | pathlib.Path,
        *,
        from_round: Index = 0,
        warn: Callable[[str], None] = warnings.warn,
    ):
        """Opens the logbook of a run folder; rows from `from_round` on, which run again, go."""
        directory, damages = pathlib.Path(directory), list[str]()
        self.path, self._warn = directory / METRICS_FILE, warn
        before = read_metrics(directory, damages.append)
        self.rows = [row for row in before if row["round"] <= from_round]
        lost = sorted(set(range(1, from_round + 1)) - {row["round"] for row in self.rows})
        if lost and not damages:
            damages.append(f"{self.path} lacks the rounds {in_words(lost)}")
        if damages and self.path.is_file():
            copy = self.path.with_suffix(".damaged.jsonl")
            shutil.copyfile(self.path, copy)
            damages[-1] += f"; a copy of it is {copy.name}"
        for text in damages:
            warn(text)
        unseal(directory)
        self._lines = [json.dumps(row).encode() + b"\n" for row in self.rows]
        self._digest = hashlib.sha256(b"".join(self._lines))
        self._size = sum(map(len, self._lines))
        self._open()
        self._events: _Events | None = None
        with self._without_events(), contextlib.suppress(ImportError):
            self._events = _Events(directory / "tensorboard", from_round)

    def _open(self) -> None:
        """Writes all lines and opens the file for more."""
        write_text(self.path, b"".join(self._lines).decode())
        self._file = self.path.open("ab")

    def write(self, row: dict[str, Any]) -> None:
        """Appends the metrics of a round.

        Args:
          row: `round`, from 1, and numbers or lists of numbers.
        """
        plain = {name: to_json(value) for name, value in row.items()}
        line = json.dumps(plain).encode() + b"\n"
        self._file.write(line)
        self._file.flush()
        self.rows.append(plain)
        self._lines.append(line)
        self._digest.update(line)
        self._size += len(line)
        if self._events is not None:
            with self._without_events():
                self._events.write(plain)

    def check(self) -> Written:
        """Writes the file again if another program has changed it; returns what it holds."""
        os.fsync(self._file.fileno())
        try:
            is_whole = self.path.read_bytes() == b"".join(self._lines)
        except FileNotFoundError:
            is_whole = False
        if not is_whole:
            self._warn(
                f"{self.path} was removed or changed while the run wrote it, and is written again"
            )
            self._file.close()
            self._open()
        return Written(self._size, self._digest.hexdigest())

    def close(self) -> None:
        """Flushes and closes the files."""
        self._file.close()
        if self._events is not None:
            with self._without_events():
                self._events.close()

    @contextlib.contextmanager
    def _without_events(self) -> Iterator[None]:
        """Writes no more events once TensorBoard's file cannot be written."""
        try:
            yield
        except OSError as error:
            self._events = None
            self._warn(f"the tracker tensorboard {FAILED}: {error}")


class _Events:
    """TensorBoard's file of a run; errors are those of the call, and not of a thread."""

    def __init__(self, directory: pathlib.Path, from_round: int):
        from tensorboardX import event_file_writer
        from tensorboardX.proto import event_pb2, summary_pb2

        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        directory.mkdir(exist_ok=True)
        self._writer, self._flushed = event_file_writer.EventsWriter(str(directory / "events")), 0.0
        if from_round:
            # Hides the events of later rounds, which run again.
            log = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._write(step=from_round + 1, session_log=log)

    def _write(self, **fields: Any) -> None:
        self._writer.write_event(self._event(wall_time=time.time(), **fields))

    def write(self, row: Mapping[str, Any]) -> None:
        """Writes the numbers of a round."""
        values = [
            self._summary.Value(tag=name, simple_value=value)
            for name, value in row.items()
            if isinstance(value, int | float) and name != "round"
        ]
        self._write(step=row["round"], summary=self._summary(value=values))
        if time.monotonic() > self._flushed + _FLUSH_SECONDS:
            self._writer.flush()
            self._flushed = time.monotonic()

    def close(self) -> None:
        """Writes all to the disk."""
        self._writer.close()


def to_json(value: Any) -> Any:
    """Converts to plain Python values; numbers that are not finite become None."""
    if isinstance(value, dict):
        return {str(k): to_json(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(v) for v in value]
    if hasattr(value, "tolist"):
        return to_json(np.asarray(value).tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


@checked
def read_metrics(
    directory: str | pathlib.Path, warn: Callable[[str], None] = warnings.warn
) -> list[dict[str, Any]]:
    """Reads the metrics of a run folder.

    Args:
      directory: the run folder.
      warn: receives what is damaged.

    Returns:
      One dict for each round, without damaged lines.
    """
    directory = pathlib.Path(directory)
    path, rows, wrong = directory / METRICS_FILE, list[dict[str, Any]](), list[int]()
    changed = damage_of(directory, METRICS_FILE)
    lines = path.read_bytes().splitlines(keepends=True) if path.is_file() else []
    for number, line in enumerate(lines, 1):
        try:
            row = files.parse_json(line, path)
            is_row = isinstance(row, dict) and isinstance(row.get("round"), int)
        except ValueError:
            row, is_row = None, False
        if is_row:
            rows.append(row)
        elif line.endswith(b"\n") or changed is not None:
            # One that is being written, or was when the process ended, has no end.
            wrong.append(number)
    text = f"{path} {changed}: its figures may be wrong" if changed else ""
    if wrong:
        text = f"{text or f'{path} is damaged'}; without its lines {in_words(wrong)}"
    if text:
        warn(text)
    return rows


def in_words(numbers: Sequence[int]) -> str:
    """Lists whole numbers, of which there may be many."""
    shown = ", ".join(map(str, numbers[:_SHOWN]))
    return shown + (f" and {len(numbers) - _SHOWN} more" if len(numbers) > _SHOWN else "")


@checked
def write_json(path: str | pathlib.Path, content: Any) -> None:
    """Writes a JSON file atomically.

    Args:
      path: the file.
      content: numbers, strings, arrays, dicts and lists; numbers that are not finite become null.
    """
    write_text(path, json.dumps(to_json(content), indent=2) + "\n")
