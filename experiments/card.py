"""Runs what needs a GPU, and continues where an earlier call stopped.

    python -m experiments.card [--minutes 8] [--only NAME ...] [--again] [--plan] [--cpu]

`card.toml` lists the commands in the order of their worth. A call runs as many as fit: the command
that is under way when its time is up is asked to stop, writes a checkpoint, and continues in the
next call. `runs/card/journal.json` records which have ended, and a log of each is beside it.
`FEDJAX_DP_DATA` names the folder of data files.
"""

import argparse
import functools
import itertools
import json
import os
import pathlib
import shlex
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from fedjax_dp.core import files

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parent
OUTPUT = ROOT / "runs" / "card"
# Seconds of a call that are left to a command for the rounds under way and its checkpoint.
GRACE = 75.0
_BACKEND = "import jax; print(jax.default_backend())"
Status = Literal["done", "stopped", "failed"]


class Command(NamedTuple):
    """A command of the list.

    Attributes:
      name: what `--only` selects, unique.
      words: what follows `python -m`.
      decides: which rows its results decide.
      minutes: an estimate for one H100.
    """

    name: str
    words: tuple[str, ...]
    decides: str
    minutes: float

    @property
    def text(self) -> str:
        """The command as it is typed."""
        return shlex.join(("python", "-m", *self.words))


def commands(file: pathlib.Path = HERE / "card.toml") -> list[Command]:
    """Reads the list, in which a command with seeds stands for one of each."""
    found = []
    for entry in tomllib.loads(file.read_text(encoding="utf-8"))["command"]:
        for seed in entry.get("seeds", [""]):
            name = f"{entry['name']}_{seed}" if "seeds" in entry else entry["name"]
            words = tuple(shlex.split(entry["words"].replace("{seed}", str(seed))))
            found.append(Command(name, words, entry["decides"], entry["minutes"]))
    return found


def table(file: pathlib.Path = HERE / "card.toml") -> str:
    """Writes the list as a table of Markdown."""
    lines = ["| name | decides | minutes | command |", "| --- | --- | --- | --- |"]
    listed = commands(file)
    for decides, group in itertools.groupby(listed, key=lambda each: each.decides):
        # Seeds of a command stand in one line.
        first, *others = group
        names = ", ".join(each.name for each in (first, *others))
        minutes = sum(each.minutes for each in (first, *others))
        lines.append(f"| {names} | {decides} | {minutes:g} | `{first.text}` |")
    lines.append(f"| all | | {sum(each.minutes for each in listed):g} | |")
    return "\n".join(lines)


class Journal:
    """What became of each command, in a file that is written after every one."""

    def __init__(self, file: pathlib.Path):
        """Continues the journal of the file, if there is one."""
        self._file = file
        self._entries: dict[str, dict[str, Any]] = {}
        if file.is_file():
            self._entries = json.loads(file.read_text(encoding="utf-8"))

    def status(self, command: Command) -> str:
        """Says how a command ended; empty if it did not run, or with other words."""
        entry = self._entries.get(command.name, {})
        return str(entry.get("status", "")) if entry.get("command") == command.text else ""

    def add(self, command: Command, status: Status, seconds: float) -> None:
        """Adds a call of a command."""
        is_continued = bool(self.status(command))
        before = self._entries[command.name] if is_continued else {"seconds": 0.0, "calls": 0}
        self._entries[command.name] = {
            "command": command.text,
            "status": status,
            "seconds": round(before["seconds"] + seconds, 1),
            "calls": before["calls"] + 1,
        }
        self._write()

    def forget(self, some: Sequence[Command]) -> None:
        """Forgets how commands ended."""
        for command in some:
            self._entries.pop(command.name, None)
        self._write()

    def _write(self) -> None:
        self._file.parent.mkdir(parents=True, exist_ok=True)
        files.write_text(self._file, json.dumps(self._entries, indent=1) + "\n")


def play(
    command: Command,
    output: pathlib.Path,
    seconds: float,
    grace: float = GRACE,
    environment: Mapping[str, str] = {},
) -> Status:
    """Runs a command; after so many seconds it is asked to stop, and ended after the grace."""
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    with (output / f"{command.name}.log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", *command.words],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": paths} | environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            # A signal to this process is passed on once, by `_stop`.
            start_new_session=True,
        )
        is_asked = False
        try:
            process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            is_asked = True
        finally:
            if process.poll() is None:
                _stop(process, grace)
    if process.returncode == 0:
        return "done"
    return "stopped" if is_asked else "failed"


def _stop(process: subprocess.Popen[bytes], grace: float) -> None:
    """Asks a process to stop, and ends it and all that it started if it does not."""
    # A sweep ends after the rounds under way, with a checkpoint.
    process.terminate()
    try:
        process.wait(timeout=grace)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def play_all(
    listed: Sequence[Command],
    output: pathlib.Path,
    seconds: float,
    grace: float = GRACE,
    say: Callable[[str], None] = functools.partial(print, flush=True),
) -> list[Command]:
    """Runs what is left of a list, for so many seconds, and returns what is left then."""
    ends = time.monotonic() + seconds
    output.mkdir(parents=True, exist_ok=True)
    journal = Journal(output / "journal.json")
    # A command that continues finds its programs compiled.
    environment = {"JAX_COMPILATION_CACHE_DIR": str(output / "programs")}
    for command in listed:
        # One that failed would fail again.
        if (status := journal.status(command)) in ("done", "failed"):
            say(f"{command.name}: {status} in an earlier call")
            continue
        started = time.monotonic()
        # Time for the grace, and at least as much to get somewhere.
        if ends - started < 2 * grace:
            break
        result = play(command, output, ends - started - grace, grace, environment)
        took = time.monotonic() - started
        journal.add(command, result, took)
        where = output / f"{command.name}.log"
        hint = f", see {where}" if result == "failed" else ""
        say(f"{command.name}: {result} after {took:.0f} s{hint}")
    return [each for each in listed if journal.status(each) not in ("done", "failed")]


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs what is left, for as many minutes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=8.0, help="of the whole call, 8")
    parser.add_argument("--only", nargs="+", default=(), metavar="NAME", help="some commands")
    parser.add_argument("--again", action="store_true", help="also those that ended before")
    parser.add_argument("--plan", action="store_true", help="list the commands, and run none")
    parser.add_argument("--cpu", action="store_true", help="run on a machine without a GPU too")
    options = parser.parse_args(arguments)
    listed = commands()
    names = [command.name for command in listed]
    for name in options.only:
        if name not in names:
            parser.error(f"--only must name commands of {', '.join(names)}, got {name!r}")
    if not 60 * options.minutes >= 2 * GRACE:
        parser.error(f"--minutes must be at least {2 * GRACE / 60:g}, got {options.minutes:g}")
    if options.plan:
        print(table())
        return
    chosen = [command for command in listed if not options.only or command.name in options.only]
    found = subprocess.run([sys.executable, "-c", _BACKEND], capture_output=True, text=True)
    backend = found.stdout.strip()
    if backend in ("", "cpu") and not options.cpu:
        reason = (
            "JAX finds no GPU here" if backend else f"JAX does not start: {found.stderr[-300:]}"
        )
        raise SystemExit(f"error: {reason}; --cpu runs the list all the same, for days")
    if options.again:
        Journal(OUTPUT / "journal.json").forget(chosen)
    left = play_all(chosen, OUTPUT, 60 * options.minutes)
    minutes = sum(command.minutes for command in left)
    print(
        f"{len(left)} of {len(chosen)} commands are left, estimated at {minutes:g} minutes in all"
    )
    if not left:
        print("`python -m experiments.reproduction` writes the pages anew")


if __name__ == "__main__":
    # The command under way is stopped on the way out, whatever ends this program.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    main()
