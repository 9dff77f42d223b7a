"""What the devices of this process are."""

import math
import os

import jax


def memory_per_device() -> float:
    """Reads how much memory a device has; those of a CPU share what the machine has.

    Returns:
      Bytes; infinity where nothing tells.
    """
    limit = (jax.devices()[0].memory_stats() or {}).get("bytes_limit")
    if limit is not None:
        return float(limit)
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")) / jax.device_count()
    return math.inf
