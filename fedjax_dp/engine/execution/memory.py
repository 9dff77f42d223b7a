"""Estimates a round's memory before it is allocated."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import jax

from fedjax_dp.core import trees
from fedjax_dp.core.devices import memory_of_host, memory_per_device
from fedjax_dp.core.trees import PyTree
from fedjax_dp.engine.federation import Federation
from fedjax_dp.engine.layout import Layout
from fedjax_dp.engine.model_axis import ModelAxis
from fedjax_dp.engine.round import ByClient


class Memory(NamedTuple):
    """The least number of bytes that one device holds at the same time, without activations."""

    state: int  # The server's state.
    training: int  # A model for each client of a chunk; 0 where the server has no one model.
    stack: int  # An update for each slot of a cohort, for a stacked aggregator; 0 as above.
    clients: int  # The clients' states.
    examples: int  # The examples, where they are resident.
    wrappers: int = 0  # The states of wrappers.
    frozen: int = 0  # The frozen parameters.

    def __str__(self) -> str:
        """Lists the parts, largest first."""
        names = (
            "the server's state",
            "clients in training",
            "stacked updates",
            "clients' states",
            "examples",
            "states of wrappers",
            "frozen parameters",
        )
        parts = sorted(zip(self, names, strict=True), reverse=True)
        listed = ", ".join(f"{name} {_readable(count)}" for count, name in parts if count)
        return f"at least {_readable(sum(self))} ({listed})"


def memory_of(
    federation: Federation,
    layout: Layout,
    *,
    outer: PyTree = (),
    clients: int = 0,
    examples: int = 0,
    model_axis: ModelAxis | None = None,
) -> Memory:
    """Estimates a round's memory on one device, where `clients` and `examples` take these bytes."""
    facts, shared = federation.facts, federation.algorithm.views.shared
    server = facts.server
    model = 0 if shared is None else trees.num_bytes(jax.eval_shape(shared.read, server))
    slots = layout.slots_per_device(federation.cohorts.participation) if facts.is_stacked else 0
    at_once = min(layout.chunk, federation.cohorts.participation.capacity)
    training, stack = model * at_once, model * slots
    wrappers = sum(
        trees.num_bytes(part) // (layout.num_devices if isinstance(part, ByClient) else 1)
        for part in jax.tree.leaves(outer, is_leaf=lambda x: isinstance(x, ByClient))
    )
    if model_axis is None:
        frozen = trees.num_bytes([part.constants for part in facts.frozen])
    else:
        frozen = model_axis.bytes_per_device(facts.frozen)
    return Memory(trees.num_bytes(server), training, stack, clients, examples, wrappers, frozen)


def require_memory(memory: Memory, num_devices: int = 1) -> None:
    """Refuses an estimate for one device that it cannot hold, before anything is allocated."""
    room = memory_per_device(num_devices)
    if sum(memory) > room:
        raise MemoryError(
            f"a round must fit in the {_readable(room)} of a device, but takes {memory}"
        )


def require_host_memory(num_clients: int, num_bytes: int) -> None:
    """Refuses clients' states, of `num_bytes` each, that host memory cannot hold."""
    room, needed = memory_of_host(), num_clients * num_bytes
    if needed > room:
        raise MemoryError(
            f"the states of {num_clients:,} clients, {_readable(num_bytes)} each and "
            f"{_readable(needed)} in all, must fit the {_readable(room)} of this machine; "
            "placement='disk' stores them in a file, which holds those of participants alone"
        )


@contextmanager
def explained(memory: Memory) -> Iterator[None]:
    """Adds the estimate to an error of the device or the system about memory."""
    try:
        yield
    except MemoryError as error:
        raise MemoryError(_message(error, memory)) from error
    except RuntimeError as error:
        # JAX has no type of its own for it.
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise MemoryError(_message(error, memory)) from error


def _message(error: Exception, memory: Memory) -> str:
    words = str(error).splitlines()[0] if str(error) else "the system has no more memory"
    return f"{words}; a round takes {memory}, and the model's activations"


def _readable(count: float) -> str:
    power = min(4, int(math.log10(max(count, 1))) // 3)
    return f"{count / 1000**power:,.3g} {('bytes', 'kB', 'MB', 'GB', 'TB')[power]}"
