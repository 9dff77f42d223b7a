"""CPU devices, whose number is set before JAX starts."""

import contextlib
import os

import jax

from fedjax_dp.core import checks
from fedjax_dp.core.backend import require_backend
from fedjax_dp.core.devices import is_distributed, num_cores
from fedjax_dp.experiment.schema.config import ExecutionSection


def offer_devices(devices: int | str) -> None:
    """Splits a CPU into devices if JAX has not started, and starts it; "auto": one by core."""
    count = num_cores() if devices == "auto" else devices
    checks.whole("devices", count)
    if count != 1 and "host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        # Once a backend runs, the number is fixed; the layout then reports missing devices.
        with contextlib.suppress(RuntimeError):
            jax.config.update("jax_num_cpu_devices", count)
    require_backend()


def devices_here(section: ExecutionSection) -> int | str:
    """Returns how many devices this process adds to those of a run."""
    if section.num_processes is None or section.devices == "auto":
        return section.devices
    return int(section.devices) // section.num_processes


def require_connected(section: ExecutionSection) -> None:
    """Refuses several processes for commands that do not connect them."""
    is_connected = section.coordinator is None or jax.distributed.is_initialized()
    rule = "be none except for `fedjax-dp run`, which alone connects several processes"
    checks.require(is_connected, "execution.coordinator", rule, section.coordinator)


def more_than_cores(devices: int | str) -> str | None:
    """Returns a warning if CPU devices outnumber the cores, else None."""
    if devices == "auto" or int(devices) <= num_cores() or jax.default_backend() != "cpu":
        return None
    if is_distributed():
        return None
    return (
        f"execution.devices = {devices} is more than the {num_cores()} cores of this machine, "
        "which they share; auto makes one for each core"
    )
