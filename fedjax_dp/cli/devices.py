"""Devices that are made before JAX starts: a CPU can be several."""

import contextlib
import os

import jax

from fedjax_dp.core import checks


def offer_devices(count: int) -> None:
    """Splits the CPU into as many devices as a command asks for, if JAX has not started yet.

    On accelerators this changes nothing: the devices there are those that exist.

    Args:
      count: devices that share a cohort, at least 1.

    Raises:
      ValueError: if the count is not a positive integer.
    """
    checks.whole("devices", count)
    if count == 1 or "host_platform_device_count" in os.environ.get("XLA_FLAGS", ""):
        return
    # Once a backend runs the number is fixed; whoever takes devices then says what is missing.
    with contextlib.suppress(RuntimeError):
        jax.config.update("jax_num_cpu_devices", count)
