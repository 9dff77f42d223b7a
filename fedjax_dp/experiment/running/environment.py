"""The environment of a run: libraries, machine, and the cache of compiled programs."""

import contextlib
import os
import pathlib
import platform
import re
import sys
from typing import Any

import filelock
import jax
import platformdirs

from fedjax_dp.core.backend import programs_folder
from fedjax_dp.core.keys import settings
from fedjax_dp.core.packages import libraries

# Limits of the user's cache of programs, of all and of those below a size; the oldest are deleted.
_CACHE_BYTES = 4 * 2**30
_SMALL_BYTES, _SMALL_PROGRAMS = 2**14, 500
# What `environment` calls the settings that random numbers follow from.
RANDOM = "random numbers"
_PRECISION = "jax_default_matmul_precision"
# How JAX names the file of a program.
_PROGRAM = "-cache"


def environment() -> dict[str, Any]:
    """Describes libraries, system, processor, cores, JAX devices, and what decides bits.

    It may be published, and names no folder.
    """
    devices = jax.devices()
    flags = {name: os.environ.get(name, "").split() for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")}
    return {
        "python": sys.version.split()[0],
        "libraries": libraries(),
        "system": platform.platform(),
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "backend": devices[0].platform,
        "devices": [device.device_kind for device in devices],
        "device kinds": sorted({device.device_kind for device in devices}),
        RANDOM: settings(),
        "compiler": {
            _PRECISION: getattr(jax.config, _PRECISION, None),
            # But those that write files.
            **{
                name: sorted(re.sub(r"=.*[/\\]", "=", f) for f in each if "dump" not in f)
                for name, each in flags.items()
            },
        },
    }


def cache_folder() -> pathlib.Path:
    """Returns the folder of compiled programs that runs use unless another one is set."""
    return platformdirs.user_cache_path("fedjax_dp") / "programs"


def use_compilation_cache(folder: str | None) -> None:
    """Sets JAX's cache of all compiled programs, unless "auto" finds one set already."""
    if folder is None or (folder == "auto" and programs_folder() is not None):
        return
    if folder == "auto":
        path = cache_folder()
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError:
            return  # The cache is optional: without it, programs are compiled again.
        forget_small_programs(path)
        folder = str(path)
        jax.config.update("jax_compilation_cache_max_size", _CACHE_BYTES)
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def forget_small_programs(folder: pathlib.Path, most: int = _SMALL_PROGRAMS) -> None:
    """Deletes small programs from JAX's cache, but those that were used last."""
    # JAX reads the times of all programs before it writes one, which would take longer than
    # compiling. It writes none after one without a time, which a killed process may leave.
    with (
        contextlib.suppress(OSError, filelock.Timeout),
        filelock.FileLock(folder / ".lockfile", 10),
    ):
        programs = [entry for entry in os.scandir(folder) if entry.name.endswith(_PROGRAM)]
        for entry in [each for each in programs if not os.path.exists(_time_of(each.path))]:
            os.unlink(entry.path)
            programs.remove(entry)
        small = [entry.path for entry in programs if entry.stat().st_size < _SMALL_BYTES]
        if len(small) <= most:
            return
        pairs = [(path, _time_of(path)) for path in small]
        pairs.sort(key=lambda pair: os.stat(pair[1]).st_mtime)
        for pair in pairs[: len(pairs) - most]:
            for path in pair:
                os.unlink(path)


def _time_of(program: str) -> str:
    """Names the file by whose age JAX knows when it last used a program."""
    return program.removesuffix(_PROGRAM) + "-atime"
