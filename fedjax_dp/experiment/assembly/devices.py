"""Devices that are made before JAX starts: a CPU can be several."""

import contextlib
import os

import jax

from fedjax_dp.core import checks


def offer_devices(devices: int | str) -> None:
    """Splits the CPU into as many devices as a command asks for, if JAX has not started yet.

    On accelerators this changes nothing: the devices there are those that exist.

    Args:
      devices: how many devices share a cohort, at least 1, or "auto" for one a core.

    Raises:
      ValueError: if the count is neither.
    """
    count = _num_cores() if devices == "auto" else devices
    checks.whole("devices", count)
    if count == 1 or "host_platform_device_count" in os.environ.get("XLA_FLAGS", ""):
        return
    # Once a backend runs the number is fixed; whoever takes devices then says what is missing.
    with contextlib.suppress(RuntimeError):
        jax.config.update("jax_num_cpu_devices", count)


def more_than_cores(devices: int | str) -> str | None:
    """Says that devices outnumber cores, if the devices are those of a CPU.

    Args:
      devices: how many devices share a cohort, or "auto".

    Returns:
      The warning, or None.
    """
    if devices == "auto" or int(devices) <= _num_cores() or jax.default_backend() != "cpu":
        return None
    return (
        f"execution.devices = {devices} is more than the {_num_cores()} cores of this machine, "
        "which they take turns at; auto takes one a core"
    )


def _num_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
