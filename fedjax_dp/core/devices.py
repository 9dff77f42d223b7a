"""The processes of a program, and the memory of their devices and machines."""

import math
import os
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

from fedjax_dp.core.backend import target_facts
from fedjax_dp.core.trees import PyTree

# The mesh axis of devices that hold parts of a model.
MODEL_AXIS = "model"


def undivided(tree: PyTree) -> PyTree:
    """Keeps traced arrays, and their gradients, whole on each device where a model is divided.

    Otherwise the compiler would divide what is computed with them too, by messages between all
    devices in loops that end at different times.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if MODEL_AXIS not in mesh.axis_names:
        return tree
    return jax.lax.with_sharding_constraint(tree, NamedSharding(mesh, PartitionSpec()))


def memory_per_device(num_devices: int | None = None) -> float:
    """Reads a device's bytes (a CPU's share of the host's); infinity if unknown.

    All processes have to ask, and get the least of theirs, so that they choose the same layout.
    """
    target = target_facts()
    if target is not None:
        return target.memory
    limit = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
    if limit is not None:
        return _least(float(limit))
    if num_devices is None or is_distributed():
        num_devices = jax.local_device_count()
    return _least(memory_of_host() / num_devices)


def num_cores() -> int:
    """Counts the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def is_distributed() -> bool:
    """Whether the program runs in several processes."""
    return jax.process_count() > 1


def whole(x: Any) -> np.ndarray:
    """Copies an array whose parts are on the devices of several processes; all have to call it."""
    return np.asarray(multihost_utils.process_allgather(x, tiled=True))


def of_all_processes(array: np.ndarray) -> np.ndarray:
    """Gathers an array from each process, `[processes, ...]`; all of them have to call it."""
    if not is_distributed():
        return np.asarray(array)[None]
    return np.asarray(multihost_utils.process_allgather(array))


def of_first_process(tree: PyTree) -> PyTree:
    """Returns host arrays of the first process; all call it, with the same structure and shapes."""
    if not is_distributed():
        return tree

    def first(x: Any) -> np.ndarray:
        own = np.asarray(x)
        sent = of_all_processes(np.frombuffer(own.tobytes(), np.uint8))[0]
        return np.frombuffer(sent.tobytes(), own.dtype).reshape(own.shape)

    return jax.tree.map(first, tree)


def any_of_processes(flag: bool) -> bool:
    """Whether a flag is true in any process; all of them have to ask."""
    return bool(np.any(of_all_processes(np.asarray(flag))))


def _least(number: float) -> float:
    """Returns the least of the numbers of all processes."""
    if not is_distributed():
        return number
    return float(np.min(of_all_processes(np.asarray(number, np.float32))))


def memory_of_host() -> float:
    """Reads the memory of the machine in bytes; infinity if unknown."""
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return math.inf
