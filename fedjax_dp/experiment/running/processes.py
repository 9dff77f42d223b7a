"""The processes of one run: their start, what they agree on, and which of them writes files."""

import contextlib
import hashlib
import os
import pathlib
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import jax
import numpy as np

from fedjax_dp.core import checks
from fedjax_dp.core.devices import any_of_processes, of_all_processes, of_first_process
from fedjax_dp.experiment.assembly.devices import devices_here, offer_devices
from fedjax_dp.experiment.reading.validate import check_processes
from fedjax_dp.experiment.schema.config import Config, ExecutionSection

# A process that dies ends the others within about so many seconds, and an end waits for the others.
HEARTBEAT_SECONDS, _SHUTDOWN_SECONDS = 20, 60
# How long the first process may take to start, and to answer a connection; where none answers, JAX
# ends a process by a signal after some minutes.
_START_SECONDS, _ANSWER_SECONDS = 120.0, 5.0
# What opens a connection to an HTTP/2 server, such as that of the first process, which answers it.
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
# The longest path on Linux, in bytes.
_PATH_BYTES = 4096


def start_processes(config: Config) -> None:
    """Connects this process to the others of its run, once and before JAX has started."""
    section = config.execution
    # The connection needs them before the rest of the configuration is checked.
    check_processes(section)
    if section.coordinator is None or jax.distributed.is_initialized():
        return
    connect = partial(
        jax.distributed.initialize,
        heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
        shutdown_timeout_seconds=_SHUTDOWN_SECONDS,
    )
    if section.coordinator == "auto":
        try:
            connect()
        except ValueError as error:
            rule = "be an address where JAX finds no other processes by itself"
            raise ValueError(f"execution.coordinator must {rule}, got 'auto'") from error
    else:
        if section.process_id:
            _await_first(section.coordinator)
        is_local = section.coordinator.startswith("127.0.0.1:")
        connect(
            section.coordinator,
            section.num_processes,
            section.process_id,
            # By default it would listen on every interface.
            coordinator_bind_address=section.coordinator if is_local else None,
        )
    # Before anything asks for devices, which starts JAX.
    offer_devices(devices_here(section))


def _await_first(address: str) -> None:
    """Waits for the first process, and refuses an address where it does not answer."""
    host, _, port = address.rpartition(":")
    end, found = time.monotonic() + _START_SECONDS, ""
    while not found or time.monotonic() < end:
        try:
            with socket.create_connection((host.strip("[]"), int(port)), _ANSWER_SECONDS) as link:
                link.sendall(_PREFACE)
                if link.recv(len(_PREFACE)):
                    return
            found = "it closed the connection"
        except OSError as error:
            found = str(error)
        time.sleep(min(0.5, _START_SECONDS))
    rule = f"be the address of the first process, which answers within {_START_SECONDS:g} seconds"
    checks.require(False, "execution.coordinator", rule, f"{address} ({found})")


def is_first_process() -> bool:
    """Whether this process writes the files of a run and shows its progress."""
    # The question for the index starts JAX, which would be too early in a process of its own.
    return not jax.distributed.is_initialized() or jax.process_index() == 0


@contextlib.contextmanager
def place_of_process(place: pathlib.Path | None) -> Iterator[pathlib.Path | None]:
    """Yields the run folder: that which was given, or in other processes one that is removed."""
    if is_first_process():
        yield place
        return
    with tempfile.TemporaryDirectory() as folder:
        yield pathlib.Path(folder)


def folder_of_first(folder: pathlib.Path) -> pathlib.Path:
    """Returns the folder of the first process."""
    own = os.fsencode(folder.absolute())[:_PATH_BYTES].ljust(_PATH_BYTES, b"\0")
    sent = of_first_process(np.frombuffer(own, np.uint8)).tobytes()
    return pathlib.Path(os.fsdecode(sent.rstrip(b"\0")))


def require_same(what: str, text: str) -> None:
    """Requires that a text is the same in all processes; each waits until all have it."""
    own = hashlib.sha256(text.encode()).digest()
    digests = of_all_processes(np.frombuffer(own, np.uint8))
    same = bool(np.all(digests == digests[0]))
    checks.require(same, what, "be the same in all processes", f"SHA-256 {own.hex()[:16]}")


def require_one_process(section: ExecutionSection, what: str) -> None:
    """Refuses several processes where they do not work."""
    is_one = section.coordinator is None and (
        not jax.distributed.is_initialized() or jax.process_count() == 1
    )
    rule = f"be none for {what}, in one process"
    checks.require(is_one, "execution.coordinator", rule, section.coordinator)


def chosen_by_first(choose: Callable[[], str | None], names: Sequence[str]) -> str | None:
    """Lets the first process choose a name, or none, for all."""
    found = [None, *names]
    own = found.index(choose()) if is_first_process() else 0
    return found[int(of_all_processes(np.asarray(own))[0])]


def agreed(is_interrupted: Callable[[], bool]) -> Callable[[], bool]:
    """Makes an interruption of one process one of all, after the same round."""
    return lambda: any_of_processes(is_interrupted())
