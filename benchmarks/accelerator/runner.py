"""Plays steps, each in a process of its own, and stores what they find after every one."""

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from fedjax_dp.core import files
from fedjax_dp.experiment.studies.measuring import Results

ROOT = pathlib.Path(__file__).resolve().parents[2]
# Seconds in which a step that is ended may end what it started.
_GRACE = 10.0
# Characters of a failed step's messages that are stored.
_MESSAGES = 2000


class Step(NamedTuple):
    """One measurement.

    Attributes:
      name: what `--only` selects, unique.
      group: the table that it belongs to, which `--only` selects too.
      command: arguments of Python; the file for rows, lines of JSON, is added at the end.
      seconds: the usual duration; the step is left for later where less time is left.
      limit: after so many seconds the step is ended; rows that it wrote until then count.
      missing: why it cannot run here; empty if it can.
      decides: what its figures decide, in a few words.
    """

    name: str
    group: str
    command: tuple[str, ...]
    seconds: float
    limit: float
    missing: str = ""
    decides: str = ""


class Book(Results):
    """The results of all steps on one machine, and a page beside them."""

    def __init__(
        self,
        path: pathlib.Path,
        machine: dict[str, Any],
        page: Callable[[dict[str, Any]], str],
        forgotten: Sequence[Step] = (),
    ):
        """Keeps the results of the file but those `forgotten`; `page` makes Markdown of them."""
        try:
            super().__init__(path, machine, [step.name for step in forgotten])
        except ValueError as error:
            hint = "choose another --output, or measure everything anew by --again without --only"
            raise SystemExit(f"{error}: {hint}") from None
        self._page = page
        self.document.setdefault("usual", {})
        self.document["left"] = []

    def is_left(self, step: Step) -> bool:
        """Whether a step can run here and came to no end, by a result or by its own error."""
        return not step.missing and self.status(step) not in ("done", "failed")

    def status(self, step: Step) -> str:
        """Says what became of a step; empty if nothing."""
        return str(self.document["steps"].get(step.name, {}).get("status", ""))

    def usual_seconds(self, step: Step) -> float:
        """The seconds that a step took here, or that it is expected to take."""
        return self.document["usual"].get(step.name, step.seconds)

    def add(self, step: Step, found: dict[str, Any]) -> None:
        """Adds the result of a step."""
        self.put(step.name, step.group, found)
        if found["status"] == "done":
            self.document["usual"][step.name] = found["seconds"]

    def write_all(self, steps: Sequence[Step]) -> list[str]:
        """Writes both files, and returns the names of those `steps` that are left."""
        left = [step.name for step in steps if self.is_left(step)]
        self.document["left"] = left
        self.write()
        files.write_text(self.path.with_suffix(".md"), self._page(self.document))
        return left


def play_all(
    steps: Sequence[Step],
    chosen: Sequence[Step],
    book: Book,
    seconds: float,
    say: Callable[[str], None],
) -> list[str]:
    """Plays the `chosen` of all steps that are left and fit the time; returns what is left."""
    ends = time.monotonic() + seconds
    # One that an earlier call cut off might take the whole of this call as well.
    for step in sorted(chosen, key=lambda step: book.status(step) == "cut off"):
        if step.missing:
            say(f"{step.name}: skipped, {step.missing}")
            book.add(step, {"status": "skipped", "error": step.missing, "seconds": 0.0, "rows": []})
        elif book.is_left(step):
            usual, remaining = book.usual_seconds(step), ends - time.monotonic()
            if usual > remaining:
                rest = max(remaining, 0)
                say(f"{step.name}: not started, needs {usual:.0f} s of {rest:.0f} s left")
                continue
            limit = min(step.limit, remaining)
            say(f"{step.name}: at most {limit:.0f} s")
            found = play(step.command, limit)
            if found["status"] == "late":
                is_own = limit == step.limit
                found["status"] = "failed" if is_own else "cut off"
            book.add(step, found)
            took = f"{found['seconds']:.1f} s ({found['processor_seconds']:.1f} s of processors)"
            say(f"{step.name}: {found['status']} in {took} {found['error']}".rstrip())
        book.write_all(steps)
    return book.write_all(steps)


def play(command: Sequence[str], limit: float) -> dict[str, Any]:
    """Runs one command of Python to its end or to the limit, with what it started.

    Returns:
      `status` (done, failed, late), `error`, `seconds`, `processor_seconds` of all cores together,
      `rows`, and `messages` of one that failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        rows, log = pathlib.Path(folder) / "rows", pathlib.Path(folder) / "log"
        started, before = time.monotonic(), _processor_seconds()
        paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, *command, str(rows)],
                cwd=ROOT,
                env=os.environ | {"PYTHONPATH": paths},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                code = process.wait(timeout=limit)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                _end(process)
        text = log.read_text(errors="replace")
        found: dict[str, Any] = {
            "status": "done" if code == 0 else "late" if code is None else "failed",
            "error": "",
            "seconds": round(time.monotonic() - started, 1),
            "processor_seconds": round(_processor_seconds() - before, 1),
            "rows": _rows(rows),
        }
    if code is None:
        found["error"] = f"no end within {limit:.0f} s"
    elif code < 0:
        found["error"] = f"ended by signal {-code} ({signal.Signals(-code).name})"
    elif code > 0:
        found["error"] = _last_words(text)
    return found if code == 0 else found | {"messages": text[-_MESSAGES:]}


def _processor_seconds() -> float:
    """Adds up what processes have used that were waited for."""
    used = os.times()
    return used.children_user + used.children_system


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a process and all that it started, which may outlive it and hold the device."""
    ends = time.monotonic() + _GRACE
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
        while time.monotonic() < ends:
            # A process that ended stays in its group until it is waited for.
            process.poll()
            os.killpg(process.pid, 0)
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _rows(path: pathlib.Path) -> list[dict[str, Any]]:
    """Reads the rows; the last line of a process that was ended may be cut off."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        with contextlib.suppress(json.JSONDecodeError):
            rows.append(json.loads(line))
    return rows


def _last_words(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()] or ["no message"]
    errors = [line for line in lines if "Error" in line or "RESOURCE_EXHAUSTED" in line]
    return (errors or lines)[-1][:300]
