"""What the devices of this process are, and the machine that they are in."""

import math
import os

import jax


def memory_per_device(num_devices: int | None = None) -> float:
    """Reads how much memory a device has; those of a CPU share what the machine has.

    Args:
      num_devices: how many devices are used; None for all that there are.

    Returns:
      Bytes; infinity where nothing tells.
    """
    limit = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
    if limit is not None:
        return float(limit)
    return memory_of_host() / (num_devices or jax.local_device_count())


def memory_of_host() -> float:
    """Reads how much memory the machine has.

    Returns:
      Bytes; infinity where nothing tells.
    """
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return math.inf
