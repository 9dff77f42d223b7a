"""A SuperLink and its SuperNodes as processes of this machine, for tests over a real network."""

import contextlib
import json
import os
import pathlib
import re
import signal
import socket
import ssl
import subprocess
import sys
import time
import urllib.request
from typing import Any

import pytest

# Seconds: far more than a quiet machine takes.
_START, _RUN, _END = 600, 1200, 30
_BIN = pathlib.Path(sys.executable).parent
_HOST = "127.0.0.1"
_PAGE = pathlib.Path(__file__).parents[2] / "docs" / "deploy" / "trust.md"


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind((_HOST, 0))
        return taken.getsockname()[1]


def until(is_done, what: str, seconds: float = _START, every: float = 0.2):
    """Waits for a true value, and returns it."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if found := is_done():
            return found
        time.sleep(every)
    pytest.fail(f"no {what} within {seconds} s")


class Loopback:
    """A federation on 127.0.0.1; a context manager that ends all of its processes.

    Node `i` of `n` holds every client whose index leaves the remainder `i`, stores its states in a
    folder of its own, and uses the server's keys. A secure one has TLS and registered nodes.
    """

    def __init__(self, folder: pathlib.Path, *, num_nodes: int = 2, is_secure: bool = False):
        self.folder, self.num_nodes, self.is_secure = folder, num_nodes, is_secure
        self._port = free_port()
        self._processes: dict[str, subprocess.Popen] = {}
        self._env = {
            # The cache of compiled programs is that of the tests, see conftest.py.
            **os.environ,
            "PATH": f"{_BIN}{os.pathsep}{os.environ['PATH']}",
            "FLWR_HOME": str(folder / "home"),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
        }

    def __enter__(self) -> "Loopback":
        try:
            self._start_all()
        except BaseException:
            self._end_all(is_failed=True)
            raise
        return self

    def __exit__(self, kind: Any, *rest: Any) -> None:
        self._end_all(is_failed=kind is not None)

    def _start_all(self) -> None:
        home = self.folder / "home"
        home.mkdir(parents=True)
        trust, link = "insecure = true", ["--insecure"]
        if self.is_secure:
            self._make_secrets()
            trust = f'root-certificates = "{self.folder / "ca.crt"}"'
            link = ["--ssl-certfile", "server.crt", "--ssl-keyfile", "server.key"]
            link += ["--ssl-ca-certfile", "ca.crt", "--enable-supernode-auth"]
        connection = f'[superlink.loop]\naddress = "{_HOST}:{self._port}"\n{trust}\n'
        (home / "config.toml").write_text(connection)
        self._start(
            *("link", "flower-superlink", *link, "--host", _HOST, "--port", str(self._port)),
            "--disable-runtime-dependency-installation",
        )
        until(self._is_healthy, "healthy SuperLink")
        for node in range(self.num_nodes):
            if self.is_secure:
                self.flwr("supernode", "register", f"node{node}.pub", "loop")
            self.start_node(node)
        self.until_nodes(self.num_nodes)

    def _make_secrets(self) -> None:
        """Makes the certificates, and a key for each node and one more, as the page says."""
        part = _PAGE.read_text().partition("## Certificates and keys")[2]
        *commands, key = part.partition("```sh\n")[2].partition("\n```")[0].splitlines()
        assert "-f node0" in key
        keys = [key.replace("node0", f"node{node}") for node in range(self.num_nodes + 1)]
        subprocess.run(
            ["bash", "-ec", "\n".join([*commands, *keys])],
            cwd=self.folder,
            check=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def _is_healthy(self) -> bool:
        assert self._processes["link"].poll() is None, self.log("link")
        scheme, context = "http", None
        if self.is_secure:
            scheme = "https"
            context = ssl.create_default_context(cafile=self.folder / "ca.crt")
        address = f"{scheme}://{_HOST}:{self._port}/health"
        try:
            with urllib.request.urlopen(address, timeout=5, context=context) as reply:
                return reply.status == 200
        except OSError:
            return False

    def start_node(self, node: int) -> None:
        """Starts a SuperNode, whose log is called `node{node}`."""
        trust = ["--insecure"]
        if self.is_secure:
            trust = ["--root-certificates", "ca.crt"]
            trust += ["--auth-supernode-private-key", f"node{node}"]
        config = f'partition-id={node} num-partitions={self.num_nodes} keys="parity"'
        self._start(
            *(f"node{node}", "flower-supernode", *trust),
            *("--superlink", f"{_HOST}:{self._port}"),
            *("--host", _HOST, "--port", str(free_port())),
            *("--node-config", f'{config} state-dir="{self.states(node)}"'),
        )

    def states(self, node: int) -> pathlib.Path:
        """The folder of a node's client states."""
        return self.folder / f"states{node}"

    def until_nodes(self, num: int) -> None:
        """Waits until this many SuperNodes have been activated since the start."""
        until(lambda: self.log("link").count("Activated node_id") >= num, f"{num} nodes")

    def _start(self, name: str, program: str, *options: str) -> None:
        with (self.folder / f"{name}.log").open("a") as log:
            self._processes[name] = subprocess.Popen(
                [str(_BIN / program), *options],
                env=self._env,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def kill_node(self, node: int) -> None:
        """Ends a SuperNode and its apps at once, as a power cut does."""
        name = f"node{node}"
        apps = self._below(name)
        process = self._processes.pop(name)
        process.kill()
        process.wait(_END)
        _kill(apps)

    def status_of(self, node: int) -> int:
        """Waits for a SuperNode to end by itself, and returns its exit status."""
        return self._processes.pop(f"node{node}").wait(_START)

    def _end_all(self, *, is_failed: bool) -> None:
        # Nodes before the link, which they would look for again and again.
        for name in sorted(self._processes, reverse=True):
            # An app whose run has ended may wait for an answer without an end.
            apps = self._below(name)
            process = self._processes.pop(name)
            process.terminate()
            try:
                process.wait(_END)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(_END)
            _kill(apps)
        if is_failed:
            self.show_logs()

    def show_logs(self) -> None:
        """Prints the end of every log, which pytest shows for a test that failed."""
        for path in sorted(self.folder.glob("*.log")):
            print(
                f"--- {path.name}", *path.read_text(errors="replace").splitlines()[-60:], sep="\n"
            )

    def log(self, name: str) -> str:
        """The log of a process so far."""
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def flwr(self, *words: str) -> str:
        """Runs a command of `flwr`, and returns what it prints."""
        done = subprocess.run(
            [str(_BIN / "flwr"), *words],
            env=self._env,
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=_START,
        )
        assert done.returncode == 0, done.stdout
        return done.stdout

    def submit(self, app: pathlib.Path, output: pathlib.Path, timeout: float = 120.0) -> str:
        """Starts a run of an app; returns its identity."""
        config = f'keys="parity" output="{output}" timeout={timeout}'
        text = self.flwr("run", str(app), "loop", "--run-config", config)
        found = re.search(r"\b(\d{10,})\b", text)
        assert found, text
        return found[1]

    def run(self, app: pathlib.Path, output: pathlib.Path) -> dict[str, Any]:
        """Runs an app to its end; returns what `flwr ls` says of it."""
        return self.until_ended(self.submit(app, output))

    def until_ended(self, identity: str) -> dict[str, Any]:
        """Waits for the end of a run; returns what `flwr ls` says of it."""

        # Asking `flwr ls` again and again would take a processor from the federation.
        is_ended = rf"Finished task \d+ of run {identity}"
        until(lambda: re.search(is_ended, self.log("link")), f"end of run {identity}", _RUN)
        text = self.flwr("ls", "loop", "--run-id", identity, "--format", "json")
        (found,) = json.loads(text)["runs"]
        return found

    def log_of_run(self, identity: str) -> str:
        """What the server app of a run has logged."""
        return self.flwr("log", identity, "loop", "--show")

    def kill_server_app(self) -> None:
        """Ends the process of the server app at once, as a crash does."""
        found = [pid for pid, args in self._below("link").items() if "flwr-serverapp" in args]
        assert found, self.log("link")
        _kill(found)

    def _below(self, name: str) -> dict[int, str]:
        """The processes that a process has started, and those they have: number and command."""
        command = ["ps", "-eo", "pid=,ppid=,args="]
        text = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
        rows = [line.split(None, 2) for line in text.splitlines()]
        commands = {int(row[0]): row[-1] for row in rows}
        inside = {self._processes[name].pid}
        while more := {int(pid) for pid, parent, *_ in rows if int(parent) in inside} - inside:
            inside |= more
        return {pid: commands[pid] for pid in inside - {self._processes[name].pid}}


def _kill(numbers) -> None:
    for pid in numbers:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
