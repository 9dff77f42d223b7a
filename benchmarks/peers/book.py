"""The results of all workloads: one JSON file, and the table, page and plot made of it."""

import json
import math
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import report


class Book:
    """Results that are written after every workload, so that a stopped run can be continued.

    `peers.json` has the rows of each workload, what did not run, and, until a run has measured
    all of its workloads, which ones it has. The same run, started again, measures the rest; any
    other run starts anew. Rows are kept until their workload is measured again.

    Args:
      folder: of the results.
      workloads: what this run measures, in order.
      settings: what else makes two runs the same: peers, repeats, hardware, ….
      again: whether to measure all workloads, even if the same run was stopped.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        workloads: Sequence[str],
        settings: Mapping[str, Any],
        *,
        again: bool = False,
    ):
        self._folder = folder
        path = folder / "peers.json"
        stored = json.loads(path.read_text("utf-8")) if path.exists() else {}
        self._workloads: dict[str, dict[str, Any]] = stored.get("workloads", {})
        run = {"workloads": [*workloads], "settings": dict(settings)}
        stopped = stored.get("unfinished", {})
        is_same = not again and {key: stopped.get(key) for key in run} == run
        self._run: dict[str, Any] = {**run, "measured": stopped["measured"] if is_same else []}

    @property
    def left(self) -> list[str]:
        """The workloads that are still to be measured, in order."""
        return [name for name in self._run["workloads"] if name not in self._run["measured"]]

    @property
    def rows(self) -> list[report.Row]:
        """All rows, by workload and time per client."""
        kept = [report.Row(**_read(row)) for one in self._workloads.values() for row in one["rows"]]
        return report.merge(kept, [])

    @property
    def notes(self) -> list[str]:
        """What did not run, by workload."""
        return [f"{name}, {note}" for name, one in self._sorted() for note in one["did_not_run"]]

    def put(self, name: str, rows: Sequence[report.Row], notes: Sequence[str]) -> None:
        """Adds the results of a workload, and writes all files.

        Args:
          name: the workload.
          rows: replace those of the workload, unless there are none.
          notes: what did not run: the implementation, and why.
        """
        before = self._workloads.get(name, {"rows": []})
        fresh = [_written(row) for row in rows] or before["rows"]
        self._workloads[name] = {"rows": fresh, "did_not_run": [*notes]}
        self._run["measured"].append(name)
        self.write()

    def write(self) -> None:
        """Writes JSON, CSV, Markdown and, if ours was measured, the plot."""
        self._folder.mkdir(parents=True, exist_ok=True)
        stored = {"workloads": dict(self._sorted())}
        if self.left:
            stored["unfinished"] = self._run
        rows = self.rows
        _replace(self._folder / "peers.json", json.dumps(stored, indent=1, allow_nan=False) + "\n")
        report.write_csv(self._folder / "peers.csv", rows)
        _replace(self._folder / "peers.md", report.markdown(rows, self.notes, self.left))
        report.plot(self._folder / "peers.png", rows)

    def _sorted(self) -> list[tuple[str, dict[str, Any]]]:
        return sorted(self._workloads.items())


def _written(row: report.Row) -> dict[str, Any]:
    """Turns a row into values of JSON, with six digits as in the table.

    JSON has no infinity: numbers that are not finite become texts.
    """

    def value(of: Any) -> Any:
        if not isinstance(of, float):
            return of
        return float(f"{of:.6g}") if math.isfinite(of) else str(of)

    return {name: value(of) for name, of in row._asdict().items()}


def _read(values: Mapping[str, Any]) -> dict[str, Any]:
    kinds = report.Row.__annotations__
    return {
        name: float(value) if isinstance(value, str) and kinds[name] is not str else value
        for name, value in values.items()
    }


def _replace(path: pathlib.Path, text: str) -> None:
    """Writes a file whole, or not at all."""
    unfinished = path.with_name(f"{path.name}.unfinished")
    unfinished.write_text(text, encoding="utf-8")
    os.replace(unfinished, path)
