"""The processes of one run: their start, what they agree on, and which of them writes files."""

import contextlib
import hashlib
import os
import pathlib
import tempfile
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
# The longest path on Linux, in bytes.
_PATH_BYTES = 4096


def start_processes(config: Config) -> None:
    """Connects this process to the others of its run, once and before JAX has started."""
    check_processes(config)
    section = config.execution
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
