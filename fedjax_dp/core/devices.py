"""The memory of the devices of this process and of its machine."""

import math
import os

import jax


def memory_per_device(num_devices: int | None = None) -> float:
    """Reads a device's memory in bytes (a CPU's share of the host's); infinity if unknown."""
    limit = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
    if limit is not None:
        return float(limit)
    return memory_of_host() / (num_devices or jax.local_device_count())


def memory_of_host() -> float:
    """Reads the memory of the machine in bytes; infinity if unknown."""
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return math.inf
