"""The environment of a run: libraries, machine, and the cache of compiled programs."""

import os
import platform
import sys
from typing import Any

import jax
import platformdirs

from fedjax_dp.core.versions import libraries

# Limit of the user's cache of programs; the oldest are deleted.
_CACHE_BYTES = 4 * 2**30


def environment() -> dict[str, Any]:
    """Describes libraries, system, processor, cores and JAX devices."""
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


def use_compilation_cache(folder: str | None, least_seconds: float | None = None) -> None:
    """Sets JAX's cache of compiled programs, unless "auto" finds one set already.

    Programs that compile faster than `least_seconds` are not cached; None for JAX's default.
    """
    is_set = jax.config.jax_compilation_cache_dir is not None  # type: ignore[attr-defined]
    if folder is None or (folder == "auto" and is_set):
        return
    if folder == "auto":
        path = platformdirs.user_cache_path("fedjax_dp") / "programs"
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError:
            return  # The cache is optional: without it, programs are compiled again.
        folder = str(path)
        jax.config.update("jax_compilation_cache_max_size", _CACHE_BYTES)
    jax.config.update("jax_compilation_cache_dir", folder)
    if least_seconds is not None:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", least_seconds)
