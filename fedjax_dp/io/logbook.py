"""Metrics of a run by round: JSON lines, and TensorBoard events with the extra `tensorboard`."""

import contextlib
import json
import math
import os
import pathlib
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.ranges import Index
from fedjax_dp.io.aside import FAILED

METRICS_FILE = "metrics.jsonl"
# Seconds between writes of events to the disk.
_FLUSH_SECONDS = 10.0


class Logbook:
    """Writes one row of metrics for each round.

    Attributes:
      path: the file of JSON lines.
    """

    @checked
    def __init__(
        self,
        directory: str | pathlib.Path,
        *,
        from_round: Index = 0,
        warn: Callable[[str], None] = warnings.warn,
    ):
        """Opens the logbook of a run folder.

        Args:
          directory: the run folder.
          from_round: rows of later rounds are removed, since these will run again.
          warn: receives warnings, such as that TensorBoard's file cannot be written, which then
            gets no more events.
        """
        directory = pathlib.Path(directory)
        self.path = directory / METRICS_FILE
        kept = [row for row in read_metrics(directory) if row["round"] <= from_round]
        write_text(self.path, "".join(json.dumps(row) + "\n" for row in kept))
        self._file = self.path.open("a", encoding="utf-8")
        self._warn = warn
        self._events: _Events | None = None
        with self._without_events(), contextlib.suppress(ImportError):
            self._events = _Events(directory / "tensorboard", from_round)

    def write(self, row: dict[str, Any]) -> None:
        """Appends the metrics of a round.

        Args:
          row: `round`, from 1, and numbers or lists of numbers.
        """
        plain = {name: to_json(value) for name, value in row.items()}
        self._file.write(json.dumps(plain) + "\n")
        self._file.flush()
        if self._events is not None:
            with self._without_events():
                self._events.write(plain)

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
def read_metrics(directory: str | pathlib.Path) -> list[dict[str, Any]]:
    """Reads the metrics of a run folder.

    Args:
      directory: the run folder.

    Returns:
      One dict for each round, without damaged lines.
    """
    path = pathlib.Path(directory) / METRICS_FILE
    if not path.is_file():
        return []
    rows = []
    for line in path.read_bytes().splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and isinstance(row.get("round"), int):
            rows.append(row)
    return rows


@checked
def write_json(path: str | pathlib.Path, content: Any) -> None:
    """Writes a JSON file atomically.

    Args:
      path: the file.
      content: numbers, strings, arrays, dicts and lists; numbers that are not finite become null.
    """
    write_text(path, json.dumps(to_json(content), indent=2) + "\n")


def write_text(path: str | pathlib.Path, text: str) -> None:
    """Writes a text file atomically."""
    path = pathlib.Path(path)
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
