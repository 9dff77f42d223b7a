"""Metrics of a run by round: JSON lines, and TensorBoard events with the extra `tensorboard`."""

import json
import math
import os
import pathlib
from typing import Any

import numpy as np

from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.ranges import Index

METRICS_FILE = "metrics.jsonl"


class Logbook:
    """Writes one row of metrics for each round.

    Attributes:
      path: the file of JSON lines.
    """

    @checked
    def __init__(self, directory: str | pathlib.Path, *, from_round: Index = 0):
        """Opens the logbook of a run folder.

        Args:
          directory: the run folder.
          from_round: rows of later rounds are removed, since these will run again.
        """
        directory = pathlib.Path(directory)
        self.path = directory / METRICS_FILE
        kept = [row for row in read_metrics(directory) if row["round"] <= from_round]
        write_text(self.path, "".join(json.dumps(row) + "\n" for row in kept))
        self._file = self.path.open("a", encoding="utf-8")
        self._events = _tensorboard_writer(directory / "tensorboard", from_round)

    def write(self, row: dict[str, Any]) -> None:
        """Appends the metrics of a round.

        Args:
          row: `round`, from 1, and numbers or lists of numbers.
        """
        plain = {name: to_json(value) for name, value in row.items()}
        self._file.write(json.dumps(plain) + "\n")
        self._file.flush()
        if self._events is not None:
            for name, value in plain.items():
                if isinstance(value, int | float) and name != "round":
                    self._events.add_scalar(name, value, plain["round"])

    def close(self) -> None:
        """Flushes and closes the files."""
        self._file.close()
        if self._events is not None:
            self._events.close()


def _tensorboard_writer(directory: pathlib.Path, from_round: int) -> Any:
    try:
        from tensorboardX import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(directory), purge_step=from_round + 1 if from_round else None)


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
