"""Measures this machine's accelerator in steps, and continues where an earlier call stopped.

    python -m benchmarks.accelerator [--minutes 9] [--output benchmarks/results] [--only NAME ...]
                                     [--again] [--plan]

Tests, workloads, peers, steps of clients side by side, settings, scale and a trace in the order of
their worth, each step in a process of its own with a limit. Writes `accelerator-BACKEND.json` and
`.md` after every step; `--plan` lists the steps and runs none. On a CPU all steps are tiny. It
needs no network, and nothing but the files of the project and its packages.
"""

import argparse
import os
import pathlib
import signal
import sys
import tempfile
import time
from collections.abc import Sequence

from benchmarks.accelerator.page import page, plan, summary
from benchmarks.accelerator.runner import ROOT, Book, play, play_all
from benchmarks.accelerator.steps import MACHINE, on_accelerator, on_cpu


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures what is left, for as many minutes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=9.0, help="of the whole call, 9")
    parser.add_argument("--output", type=pathlib.Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--only", nargs="+", default=(), metavar="NAME", help="steps or groups")
    parser.add_argument("--again", action="store_true", help="drop results, and measure anew")
    parser.add_argument("--plan", action="store_true", help="list the steps, and run none")
    options = parser.parse_args(arguments)
    if not options.minutes > 0:
        parser.error(f"--minutes must be above 0, got {options.minutes:g}")
    names = {n for make in (on_accelerator, on_cpu) for s in make() for n in (s.name, s.group)}
    for name in options.only:
        if name not in names:
            parser.error(
                f"--only {name!r} is no step or group; there are {', '.join(sorted(names))}"
            )
    wanted = set(options.only)
    if options.plan:
        is_cpu = os.environ.get("JAX_PLATFORMS") == "cpu"
        listed = on_cpu() if is_cpu else on_accelerator()
        _say(plan([MACHINE, *(s for s in listed if not wanted or wanted & {s.name, s.group})]))
        return
    ends = time.monotonic() + 60 * options.minutes
    with tempfile.TemporaryDirectory() as compiled:
        os.environ["JAX_COMPILATION_CACHE_DIR"] = compiled
        found = play(MACHINE.command, min(MACHINE.limit, ends - time.monotonic()))
        if found["status"] != "done":
            raise SystemExit(f"JAX finds no device: {found['error']}\n{found['messages']}")
        (machine,) = found["rows"]
        steps = on_cpu() if machine["backend"] == "cpu" else on_accelerator()
        chosen = [s for s in steps if not wanted or wanted & {s.name, s.group}]
        if not chosen:
            raise SystemExit(f"a {machine['backend']} has no step {' or '.join(options.only)}")
        path = options.output.resolve() / f"accelerator-{machine['backend']}.json"
        book = Book(path, machine, page, chosen if options.again else ())
        left = play_all(steps, chosen, book, ends - time.monotonic(), _say)
    _say(f"results are in {path.with_suffix('.md')}")
    _say(summary(left))


def _say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    # Steps are ended on the way out, whatever ends the program.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    main()
