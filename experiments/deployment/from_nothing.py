"""Times a federation from empty environments: python -m experiments.deployment.from_nothing FOLDER.

Plays the hospitals of docs/deploy/run.md on four machines, each a virtual environment and a
home of its own: installs the package in each, then runs the commands of the page until round 1 has
ended.
"""

import argparse
import contextlib
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

ROOT = pathlib.Path(__file__).parents[2]
PAGE = ROOT / "docs" / "deploy" / "run.md"
HOSPITALS, PORT, LONGEST = ("east", "north", "west"), 8000, 1800


class Commands(NamedTuple):
    """What the page says."""

    install: str
    tables: str
    experiment: str
    export: str
    superlink: str
    supernode: str
    start: str

    def of_node(self, i: int) -> str:
        """The command of a node, with its client, file, port and states."""
        here = {"0\\": f"{i}\\", HOSPITALS[0]: HOSPITALS[i], "9094": f"{9094 + i}"}
        here["states-0"] = f"states-{i}"
        return re.sub("|".join(map(re.escape, here)), lambda old: here[old[0]], self.supernode)


def commands_of(page: str) -> Commands:
    """Finds the commands of the page, each by how it begins."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    lines = [(kind, line) for kind, block in blocks for line in _whole_lines(kind, block)]

    def one(kind: str, begin: str) -> str:
        found = [line for k, line in lines if k == kind and re.match(begin, line)]
        if len(found) != 1:
            raise ValueError(f"{PAGE.name} must have one line with {begin}, got {found}")
        return found[0]

    variables = r"(\w+=\S+\s+(\\\n\s*)?)*"
    return Commands(
        one("sh", "pip install"),
        one("python", "import pathlib"),
        one("toml", "# hospitals.toml"),
        one("", "fedjax-dp export"),
        one("sh", variables + "flower-superlink"),
        one("sh", variables + "flower-supernode"),
        one("sh", variables + "flwr run"),
    )


def _whole_lines(kind: str, block: str) -> list[str]:
    return [block] if kind in ("python", "toml") else re.split(r"(?<!\\)\n", block.strip())


def install(folder: pathlib.Path, extras: str) -> None:
    """Makes a virtual environment, and installs the package of this project in it."""
    subprocess.run([sys.executable, "-m", "venv", folder / "env"], check=True)
    pip = [folder / "env" / "bin" / "python", "-m", "pip", "install", "--quiet"]
    subprocess.run([*pip, f"{ROOT}{extras}"], check=True, cwd=folder)


class Machine:
    """A virtual environment and a home; all machines share the folder in which commands run."""

    def __init__(self, folder: pathlib.Path, work: pathlib.Path):
        """Takes a folder in which the package is installed."""
        self._folder, self._work, self._processes = folder, work, list[subprocess.Popen]()
        self.num_commands = 0
        used = ("PYTHONPATH", "JAX_", "FLWR_", "FEDJAX_DP_", "XDG_", "VIRTUAL_ENV")
        others = {n: x for n, x in os.environ.items() if not n.startswith(used)}
        path = f"{folder / 'env' / 'bin'}{os.pathsep}{os.environ['PATH']}"
        self._env = {**others, "PATH": path, "HOME": str(folder)}

    def start(self, command: str) -> subprocess.Popen:
        """Starts a command, as a person types it."""
        self.num_commands += 1
        with (self._folder / f"{self.num_commands}.log").open("w") as log:
            process = subprocess.Popen(
                ["bash", "-ec", command],
                env=self._env,
                cwd=self._work,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._processes.append(process)
        return process

    def end(self) -> None:
        """Ends what was started, and what that has started."""
        for kind in (signal.SIGTERM, signal.SIGKILL):
            for process in self._processes:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, kind)
            for process in self._processes:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(20)


@contextlib.contextmanager
def ended(machines: list[Machine]) -> Iterator[None]:
    """Ends nodes before the server, which they would look for."""
    try:
        yield
    finally:
        for machine in reversed(machines):
            machine.end()


def until(is_done: Callable[[], object], what: str) -> None:
    """Waits."""
    end = time.monotonic() + LONGEST
    while not is_done():
        if time.monotonic() > end:
            raise TimeoutError(f"no {what} within {LONGEST} s")
        time.sleep(0.2)


def is_listening() -> bool:
    """Whether the server answers."""
    with socket.socket() as attempt:
        return attempt.connect_ex(("127.0.0.1", PORT)) == 0


def from_nothing(folder: pathlib.Path) -> dict[str, object]:
    """Plays it, and returns seconds and the number of commands by machine."""
    if is_listening():
        raise ValueError(f"port {PORT} must be free")
    page = commands_of(PAGE.read_text(encoding="utf-8"))
    (work := folder / "work").mkdir(parents=True)
    subprocess.run([sys.executable, "-c", page.tables], cwd=work, check=True)
    (work / "hospitals.toml").write_text(page.experiment, encoding="utf-8")
    extras = re.search(r"\[.*\]", page.install)[0]
    begin, names = time.monotonic(), ("server", *HOSPITALS)
    for name in names:
        install(folder / name, extras)
    installed = time.monotonic()
    server, *nodes = machines = [Machine(folder / name, work) for name in names]
    with ended(machines):
        if status := server.start(page.export).wait(LONGEST):
            raise RuntimeError(f"the export must succeed, got status {status}")
        server.start(page.superlink)
        for i, node in enumerate(nodes):
            node.start(page.of_node(i))
        until(is_listening, "server")
        run = server.start(page.start)
        metrics = work / "hospitals-run" / "metrics.jsonl"
        until(lambda: run.poll() is not None or _first_row(metrics), "end of round 1")
        end = time.monotonic()
    if (replies := _first_row(metrics).get("nodes_replied", 0)) != len(nodes):
        raise RuntimeError(f"{replies} of {len(nodes)} nodes took part in round 1, see {folder}")
    return {
        "seconds to install": round(installed - begin),
        "seconds to the end of round 1": round(end - installed),
        "commands": {n: m.num_commands for n, m in zip(names, machines, strict=True)},
    }


def _first_row(metrics: pathlib.Path) -> dict[str, object]:
    """The metrics of round 1; empty before its end."""
    text = metrics.read_text(encoding="utf-8") if metrics.exists() else ""
    return json.loads(text.splitlines()[0]) if "\n" in text else {}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=pathlib.Path)
    print(json.dumps(from_nothing(parser.parse_args().folder.resolve()), indent=2))
