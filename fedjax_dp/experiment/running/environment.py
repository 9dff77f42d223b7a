"""What a run stands on: libraries, machine, and the place where compiled programs are kept."""

import os
import platform
import sys
from typing import Any

import jax
import platformdirs

from fedjax_dp.core.versions import libraries

# Programs in the user's cache may take this room; the oldest make way.
_CACHE_BYTES = 4 * 2**30


def environment() -> dict[str, Any]:
    """Describes where a run is computed.

    Returns:
      Versions of Python and of all libraries, system, processor, cores, and JAX's devices.
    """
    devices = jax.devices()
    return {
        "python": sys.version.split()[0],
        "libraries": libraries(),
        "system": platform.platform(),
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "backend": devices[0].platform,
        "devices": [device.device_kind for device in devices],
    }


def keep_programs(folder: str | None) -> None:
    """Lets JAX keep compiled programs between processes, unless it is told of a place already.

    Args:
      folder: where; "auto" is the user's cache, None keeps none.
    """
    is_told = jax.config.jax_compilation_cache_dir is not None  # type: ignore[attr-defined]
    if folder is None or (folder == "auto" and is_told):
        return
    if folder == "auto":
        path = platformdirs.user_cache_path("fedjax_dp") / "programs"
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError:
            return  # Nobody asked for it: without such a place, programs are compiled again.
        folder = str(path)
        jax.config.update("jax_compilation_cache_max_size", _CACHE_BYTES)
    jax.config.update("jax_compilation_cache_dir", folder)
