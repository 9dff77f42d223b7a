"""Compiles all workloads' rounds for devices that are not here, and continues where it stopped.

    python -m benchmarks.compiled [--only WORD ...] [--again] [--plan] [--output FOLDER]

Each pair of workload and target, ours and by hand, in a process of its own. A result is added to
`compiled.jsonl` as it comes; at the end `compiled.md` is written. Programs for TPUs and for GPUs
are compiled side by side. Needs `libtpu` and `jax[cuda13]`; runs nothing, and needs no device.
"""

import argparse
import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from importlib import metadata
from typing import Any, NamedTuple

from benchmarks.compiled.by_hand import has_method
from benchmarks.compiled.page import RESULTS, page
from fedjax_dp.core import targets
from fedjax_dp.experiment.studies.workloads import WORKLOADS

ROOT = pathlib.Path(__file__).parents[2]
_MAIN = ("W1", "W2", "P1", "W3nodp", "W3", "W5nodp", "W5", "users", "F1", "P2", "W4dp")
_FIRST, _SECOND = ("h100", "v5e"), ("a100", "v6e", "v5p")
_SEVERAL, _TOGETHER = ("W1", "P1", "W4dp"), ("h100x8", "v5e:4x4")
_PROGRAMS = {"ours": (), "by hand": ("--by-hand",), "by hand, exact": ("--by-hand", "--exact")}
# Seconds that a program usually takes, and the most that it may.
_USUAL, _LIMIT = 45.0, 1800.0
_RUNNING: set["subprocess.Popen[str]"] = set()
_DOES_NOT_FIT = "does not fit in the memory"


class Pair(NamedTuple):
    """A program to compile: of a workload, written by whom, for a target."""

    workload: str
    program: str
    target: str


def pairs() -> list[Pair]:
    """Lists all programs, those of the main workloads for the two main targets first."""
    others = [name for name in WORKLOADS if name not in _MAIN]
    first = [(name, target) for name in _MAIN for target in _FIRST]
    second = [(name, target) for name in _MAIN for target in _SECOND]
    third = [(name, target) for name in others for target in _FIRST]
    found = []
    for name, target in (*first, *second, *third):
        programs = ["ours"]
        if has_method(WORKLOADS[name]):
            programs.append("by hand")
        if WORKLOADS[name].unit == "record":
            programs.append("by hand, exact")
        found += [Pair(name, program, target) for program in programs]
    return found + [Pair(name, "ours", target) for name in _SEVERAL for target in _TOGETHER]


def main(arguments: Sequence[str] | None = None) -> None:
    """Compiles what is left."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    words = sorted({word for pair in pairs() for word in pair})
    parser.add_argument(
        "--only",
        nargs="+",
        default=(),
        metavar="WORD",
        help=f"workloads, programs, targets; of each kind those that are named: {', '.join(words)}",
    )
    parser.add_argument("--again", action="store_true", help="drop results, and compile anew")
    parser.add_argument("--plan", action="store_true", help="list what is left, with its seconds")
    parser.add_argument("--output", type=pathlib.Path, default=RESULTS)
    options = parser.parse_args(arguments)
    for word in options.only:
        if word not in words:
            parser.error(f"--only {word!r} is none of {', '.join(words)}")
    chosen = _chosen(pairs(), options.only)
    options.output.mkdir(parents=True, exist_ok=True)
    book = _Book(options.output / "compiled.jsonl")
    left = [pair for pair in chosen if options.again or not book.has(pair)]
    if options.plan:
        for pair in left:
            _say(f"{_name(pair)}: {book.usual(pair):.0f} s")
    _say(f"{len(left)} of {len(chosen)} programs are left: {_duration(book, left)}")
    if options.plan:
        return
    if options.again:
        book.drop(left)
    failed: list[Pair] = []
    workers = [
        threading.Thread(target=_compile_all, args=(of_backend, book, failed), daemon=True)
        for of_backend in _by_backend(left)
    ]
    for worker in workers:
        worker.start()
    try:
        for worker in workers:
            # An interruption reaches a thread that waits for a while, not one that waits for ever.
            while worker.is_alive():
                worker.join(1.0)
    finally:
        for process in list(_RUNNING):
            process.kill()
    book.sort()
    (options.output / "compiled.md").write_text(page(book.rows), encoding="utf-8")
    if failed:
        raise SystemExit("failed: " + "; ".join(map(_name, failed)))


def _chosen(all_pairs: Iterable[Pair], words: Sequence[str]) -> list[Pair]:
    """Takes the pairs that have, of each of their parts, one of the words that name such a part."""
    known = [set(part) for part in zip(*all_pairs, strict=True)]
    asked = [part & set(words) for part in known]
    return [
        pair
        for pair in all_pairs
        if all(not some or own in some for own, some in zip(pair, asked, strict=True))
    ]


def _by_backend(left: Sequence[Pair]) -> list[list[Pair]]:
    backends = ("tpu", "gpu")
    return [[p for p in left if targets.target(p.target).device.backend == b] for b in backends]


def _compile_all(left: Sequence[Pair], book: "_Book", failed: list[Pair]) -> None:
    for pair in left:
        begin = time.perf_counter()
        row = _compiled(pair)
        row["seconds"] = round(time.perf_counter() - begin, 1)
        if "error" in row and row.get("fits", True):
            failed.append(pair)
        book.add(row)
        _say(f"{_name(pair)}: {row['seconds']:.0f} s {row.get('error', '')}")


def _compiled(pair: Pair) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.compiled.one", pair.workload, pair.target]
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    process = subprocess.Popen(
        [*command, *_PROGRAMS[pair.program]],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    _RUNNING.add(process)
    try:
        output, errors = process.communicate(timeout=_LIMIT)
    except subprocess.TimeoutExpired:
        process.kill()
        return _failed(pair, f"no end within {_LIMIT:.0f} s")
    finally:
        _RUNNING.discard(process)
    lines = [line for line in output.splitlines() if line.startswith("{")]
    if process.returncode == 0 and lines:
        return json.loads(lines[-1])
    messages = [line.strip() for line in errors.splitlines() if line.strip()]
    for line in reversed(messages):
        if "RESOURCE_EXHAUSTED" in line or _DOES_NOT_FIT in line:
            return _failed(pair, line[:300]) | {"fits": False}
    named = [line for line in messages if "Error" in line]
    last = (named or messages or ["no message"])[-1]
    return _failed(pair, f"status {process.returncode}: {last[:300]}")


def _failed(pair: Pair, error: str) -> dict[str, Any]:
    return {**pair._asdict(), "jax": metadata.version("jax"), "error": error}


class _Book:
    """The results: lines of JSON, one for each program."""

    def __init__(self, path: pathlib.Path) -> None:
        self._path, self._lock = path, threading.Lock()
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        self.rows: list[dict[str, Any]] = [json.loads(line) for line in text.splitlines()]

    def has(self, pair: Pair) -> bool:
        """Whether there is a result of the installed version of JAX."""
        row = self._row(pair)
        if row is None or row["jax"] != metadata.version("jax"):
            return False
        return "error" not in row or row.get("fits") is False

    def usual(self, pair: Pair) -> float:
        """The seconds that a program took before, or that programs usually take."""
        return (self._row(pair) or {}).get("seconds", _USUAL)

    def add(self, row: dict[str, Any]) -> None:
        """Adds a result, in place of an older one."""
        with self._lock:
            is_new = self._row(_key(row)) is None
            self.rows = [other for other in self.rows if _key(other) != _key(row)] + [row]
            if not is_new:
                self._write()
                return
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row, ensure_ascii=False) + "\n")

    def drop(self, left: Sequence[Pair]) -> None:
        """Drops results that are to be measured anew."""
        self.rows = [row for row in self.rows if _key(row) not in left]
        self._write()

    def sort(self) -> None:
        """Sorts the results as `pairs` does, and drops those of programs that are no more."""
        place = {pair: i for i, pair in enumerate(pairs())}
        self.rows = sorted((r for r in self.rows if _key(r) in place), key=lambda r: place[_key(r)])
        self._write()

    def _row(self, pair: Pair) -> dict[str, Any] | None:
        return next((row for row in self.rows if _key(row) == pair), None)

    def _write(self) -> None:
        lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in self.rows]
        unfinished = self._path.with_name(f"{self._path.name}.unfinished")
        unfinished.write_text("".join(lines), encoding="utf-8")
        unfinished.replace(self._path)


def _key(row: dict[str, Any]) -> Pair:
    return Pair(row["workload"], row["program"], row["target"])


def _duration(book: _Book, left: Sequence[Pair]) -> str:
    """Says how long it takes, TPUs and GPUs side by side."""
    longest = max(sum(map(book.usual, some)) for some in _by_backend(left))
    return f"about {longest / 60:.0f} minutes, those for TPUs and for GPUs side by side"


def _name(pair: Pair) -> str:
    return f"{pair.workload}, {pair.program}, {pair.target}"


def _say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    # Compilers are ended on the way out, whatever ends the program.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    main()
