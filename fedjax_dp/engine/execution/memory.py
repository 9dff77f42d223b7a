"""How much memory a round takes, told before it is taken."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import jax

from fedjax_dp.core import trees
from fedjax_dp.core.devices import memory_of_host, memory_per_device
from fedjax_dp.engine.execution.layout import Layout
from fedjax_dp.engine.federation import Federation
from fedjax_dp.engine.round import ByClient
from fedjax_dp.server.base import Stacked


class Memory(NamedTuple):
    """Bytes that one device holds at the same time, and at the very least.

    What a model computes on its way to a gradient is not counted.

    Attributes:
      state: what the server keeps.
      training: a model for each client of a chunk; 0 where the server's state has no one model.
      stack: an update for each slot of a cohort, where the aggregator reads them side by side; 0 as
        above.
      clients: what the clients keep.
      examples: the examples, where they are resident.
      wrappers: the states of wrappers.
    """

    state: int
    training: int
    stack: int
    clients: int
    examples: int
    wrappers: int = 0

    def __str__(self) -> str:
        """Says how much of what there is, largest first."""
        names = (
            "the server's state",
            "clients in training",
            "updates side by side",
            "what clients keep",
            "examples",
            "states of wrappers",
        )
        parts = sorted(zip(self, names, strict=True), reverse=True)
        listed = ", ".join(f"{name} {_readable(count)}" for count, name in parts if count)
        return f"at least {_readable(sum(self))} ({listed})"


def memory_of(
    federation: Federation, layout: Layout, *, clients: int = 0, examples: int = 0
) -> Memory:
    """Estimates from shapes alone what a round of a federation takes.

    Args:
      federation: what is run.
      layout: how it is laid out.
      clients: bytes of what the clients of one device keep there.
      examples: bytes of the examples that a device holds.

    Returns:
      The estimate, for one device.
    """
    algorithm = federation.algorithm
    server = jax.eval_shape(algorithm.init, jax.random.key(0))
    shared = algorithm.views.shared
    model = 0 if shared is None else trees.num_bytes(jax.eval_shape(shared.read, server))
    is_stacked = isinstance(algorithm.aggregator, Stacked)
    slots = layout.slots_per_device(federation.participation) if is_stacked else 0
    side_by_side = min(layout.chunk, federation.participation.capacity)
    training, stack = model * side_by_side, model * slots
    outer = jax.eval_shape(federation.init, jax.random.key(0)).outer
    wrappers = sum(
        trees.num_bytes(part) // (layout.num_devices if isinstance(part, ByClient) else 1)
        for part in jax.tree.leaves(outer, is_leaf=lambda x: isinstance(x, ByClient))
    )
    return Memory(trees.num_bytes(server), training, stack, clients, examples, wrappers)


def require_room(memory: Memory, num_devices: int = 1) -> None:
    """Refuses what cannot fit, before any of it is made.

    Args:
      memory: the estimate, for one device.
      num_devices: how many devices are used.

    Raises:
      MemoryError: if it is above what a device has; with the estimate, largest part first.
    """
    room = memory_per_device(num_devices)
    if sum(memory) > room:
        raise MemoryError(f"a round must fit a device of {_readable(room)}, and takes {memory}")


def require_host_room(num_clients: int, num_bytes: int) -> None:
    """Refuses a table of what clients keep that the machine's memory cannot hold.

    Args:
      num_clients: how many there are.
      num_bytes: what one of them keeps.

    Raises:
      MemoryError: if it is larger.
    """
    room, needed = memory_of_host(), num_clients * num_bytes
    if needed > room:
        raise MemoryError(
            f"what {num_clients:,} clients keep, {_readable(num_bytes)} each and "
            f"{_readable(needed)} in all, must fit the {_readable(room)} of this machine; "
            "placement='disk' keeps it in a file, and takes room for those who take part alone"
        )


@contextmanager
def explained(memory: Memory) -> Iterator[None]:
    """Adds to an error of memory what was estimated, largest part first.

    Args:
      memory: the estimate.

    Raises:
      MemoryError: in the place of what the device or the system says.
    """
    try:
        yield
    except MemoryError as error:
        raise MemoryError(_said(error, memory)) from error
    except RuntimeError as error:
        # JAX has no type of its own for it.
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise MemoryError(_said(error, memory)) from error


def _said(error: Exception, memory: Memory) -> str:
    words = str(error).splitlines()[0] if str(error) else "the system gave no more"
    return f"{words}; a round takes {memory}, beside what the model computes"


def _readable(count: float) -> str:
    power = min(4, int(math.log10(max(count, 1))) // 3)
    return f"{count / 1000**power:,.3g} {('bytes', 'kB', 'MB', 'GB', 'TB')[power]}"
