"""What the devices of this process are."""

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
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        bytes_of_all = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return float(bytes_of_all) / (num_devices or jax.local_device_count())
    return math.inf
