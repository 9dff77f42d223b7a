"""CPU devices, whose number is set before JAX starts."""

import contextlib
import os

import jax

from fedjax_dp.core import checks


def offer_devices(devices: int | str) -> None:
    """Splits a CPU into devices if JAX has not started; "auto" makes one for each core."""
    count = _num_cores() if devices == "auto" else devices
    checks.whole("devices", count)
    if count == 1 or "host_platform_device_count" in os.environ.get("XLA_FLAGS", ""):
        return
    # Once a backend runs, the number is fixed; the layout then reports missing devices.
    with contextlib.suppress(RuntimeError):
        jax.config.update("jax_num_cpu_devices", count)


def more_than_cores(devices: int | str) -> str | None:
    """Returns a warning if CPU devices outnumber the cores, else None."""
    if devices == "auto" or int(devices) <= _num_cores() or jax.default_backend() != "cpu":
        return None
    return (
        f"execution.devices = {devices} is more than the {_num_cores()} cores of this machine, "
        "which they share; auto makes one for each core"
    )


def _num_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
