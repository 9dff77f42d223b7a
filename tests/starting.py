"""How the processes of a suite start: XLA's flags, and the reason if one of them ends early."""

import contextlib
import os
import subprocess
import sys

import pytest

# The module of jaxlib takes a sixth of the time that JAX takes.
_START = """
try:
    from jaxlib.xla_client import make_cpu_client as start
except ImportError:
    from jax import devices as start
start()
"""

_WATCH = """
import os, sys
if not sys.stdin.buffer.read():
    os.lseek(1, 0, os.SEEK_SET)
    os.write(2, b"\\nA process of the suite ended early. It wrote last:\\n" + os.read(1, 10_000))
"""


def known_flags(flags: tuple[str, ...], given: str = "") -> list[str]:
    """Those that XLA takes beside the given ones: any other ends the process that starts it."""

    def errors_with(*more: str) -> str | None:
        environment = os.environ | {
            "XLA_FLAGS": " ".join([given, *(f"--{flag}" for flag in more)]),
            "JAX_PLATFORMS": "cpu",
        }
        command = [sys.executable, "-c", _START]
        ended = subprocess.run(command, env=environment, capture_output=True, text=True)
        return ended.stderr if ended.returncode else None

    known = list(flags)
    while known and (errors := errors_with(*known)) is not None:
        # XLA names those that it does not know.
        unknown = [flag for flag in known if flag in errors]
        known = [flag for flag in known if flag not in unknown] if unknown else []
    if not known and (errors := errors_with()) is not None:
        raise pytest.UsageError(f"JAX does not start with XLA_FLAGS={given!r}:\n{errors[:2000]}")
    return known


def show_last_words(config: pytest.Config) -> None:
    """Shows what this process wrote if it ends in the middle of a test, where pytest holds it.

    XLA gives its reason and ends the process at once, without Python's or C's handlers.
    """
    capture = config.pluginmanager.getplugin("capturemanager")
    if config.getoption("capture") != "fd":
        return
    capture.resume_global_capture()
    held = os.dup(2)
    capture.suspend_global_capture()
    watch = subprocess.Popen(
        [sys.executable, "-S", "-c", _WATCH],
        stdin=subprocess.PIPE,
        stdout=held,
        start_new_session=True,
    )
    os.close(held)

    def dismiss() -> None:
        with contextlib.suppress(OSError):
            watch.communicate(b"in order")

    config.add_cleanup(dismiss)
