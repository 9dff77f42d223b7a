"""The placement of a simulation's arrays on devices, in host memory or on disk."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from fedjax_dp.core import checks
from fedjax_dp.core.devices import is_distributed, of_all_processes, whole
from fedjax_dp.core.trees import PyTree
from fedjax_dp.engine.client_store import ClientStore
from fedjax_dp.engine.layout import AXIS, Layout
from fedjax_dp.engine.round import ByClient, SimulationState

# Tables of processes are joined in blocks of about so many bytes of each.
_BLOCK_BYTES = 2**26


@dataclasses.dataclass(frozen=True)
class Spread:
    """A table of all clients over several processes, as a checkpoint saves and restores it."""

    array: jax.Array  # The table; each process holds the rows of its own clients.
    num_clients: int  # The number of clients; rows after them are padding.

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape without padding."""
        return self.num_clients, *self.array.shape[1:]

    @property
    def dtype(self) -> Any:
        """The type of the numbers."""
        return self.array.dtype


class Placement(NamedTuple):
    """The devices or shardings of a state's parts."""

    everywhere: Any  # Of all that clients share.
    by_client: Any  # Of what has an entry for each client, if it is in device memory.
    num_clients: int  # The population.
    num_rows: int  # The clients and the padding up to a multiple of the devices.
    own_rows: range  # Those of this process's devices.
    is_resident: bool  # Whether client states are in device memory.
    kind: str  # As in `ExecutionConfig.placement`; "disk" holds client states in a file.

    @property
    def is_on_disk(self) -> bool:
        """Whether client states are on disk."""
        return self.kind == "disk"

    def share(self, tree: PyTree) -> PyTree:
        """Places what all clients share; every process passes the same values."""
        return _placed(tree, self.everywhere)

    def put(self, state: Any) -> SimulationState:
        """Converts and places every leaf as the program was traced for."""
        # A state from a checkpoint holds host arrays, that of a sweep may hold Python numbers;
        # neither may cause a second trace.
        clients, outer = state.clients, state.outer
        shared = jax.tree.map(_typed, state._replace(clients=None, outer=()))
        state = self.share(shared)._replace(outer=by_part(self._put_wrapper, outer))
        if clients is None:
            return state
        rule = "be that of the state: client state is not moved between memory and disk"
        fits = isinstance(clients, ClientStore) == self.is_on_disk
        checks.require(fits, "placement", rule, self.kind)
        if not self.is_resident:
            return state._replace(clients=jax.tree.map(self._put_table, clients))
        return state._replace(clients=self._put_clients(clients))

    def by_slot(self, tree: PyTree) -> PyTree:
        """Places what has an entry for each slot; each process passes those of its devices."""
        if self.by_client.is_fully_addressable:
            return jax.device_put(tree, self.by_client)
        place = partial(jax.make_array_from_process_local_data, self.by_client)
        return jax.tree.map(place, tree)

    def _put_table(self, x: Any) -> Any:
        """Returns the clients of this process, from a table of all or of these."""
        table = own_part(x.array if isinstance(x, Spread) else x)
        if not is_distributed() or len(table) != self.num_clients:
            return table
        return table[np.minimum(self.own_rows, self.num_clients - 1)]

    def _put_clients(self, table: PyTree) -> PyTree:
        def wide(x: Any) -> Any:
            return x.array if isinstance(x, Spread) else _padded(_typed(x), self.num_rows)

        return _placed(jax.tree.map(wide, table), self.by_client)

    def _put_wrapper(self, part: Any) -> Any:
        if isinstance(part, ByClient):
            return self._put_clients(part)
        return self.share(_typed(part))

    def portable(self, state: Any, *, copies: bool = True) -> SimulationState:
        """Copies a state to the host, as one device would hold it; all processes must call it."""
        if isinstance(state.clients, ClientStore):
            return jax.device_get(state)

        def of_clients(x: Any) -> np.ndarray:
            # Once written, a table in host memory is written in place by later rounds.
            is_written = isinstance(x, np.ndarray) and x.flags.writeable
            if isinstance(x, np.ndarray) and len(x) < self.num_clients:
                x = _joined(x)
            part = _whole(x)[: self.num_clients]
            return part.copy() if copies and is_written else part

        clients = jax.tree.map(of_clients, state.clients)
        outer = by_part(
            lambda x: jax.tree.map(of_clients, x) if isinstance(x, ByClient) else x, state.outer
        )
        return jax.device_get(state._replace(clients=clients, outer=outer))

    def for_checkpoint(self, state: Any) -> SimulationState:
        """Returns a state as checkpoints hold it, see `Simulation.for_checkpoint`."""
        if not is_distributed():
            return self.portable(state, copies=False)

        def of_clients(x: Any) -> Spread:
            return Spread(x if isinstance(x, jax.Array) else self._on_hosts(x), self.num_clients)

        outer = by_part(
            lambda x: jax.tree.map(of_clients if isinstance(x, ByClient) else jax.device_get, x),
            state.outer,
        )
        shared = jax.device_get(state._replace(clients=None, outer=()))
        clients = jax.tree.map(of_clients, state.clients)
        return shared._replace(clients=clients, outer=outer)

    def _on_hosts(self, table: np.ndarray) -> jax.Array:
        """Joins the tables of all processes to one array, without a copy to another process."""
        own = self._put_table(table)
        shape = self.num_rows, *own.shape[1:]
        return jax.make_array_from_process_local_data(_by_process(), own, shape)

    def of_state(self, outer: PyTree) -> SimulationState:
        """Returns the sharding of every part of a state in device memory."""
        of_wrappers = by_part(
            lambda x: self.by_client if isinstance(x, ByClient) else self.everywhere, outer
        )
        return SimulationState(
            self.everywhere, self.everywhere, self.by_client, self.everywhere, of_wrappers
        )


def placement_of(
    layout: Layout, device: Any, num_clients: int, *, is_resident: bool, kind: str
) -> Placement:
    """Returns the placement on the devices of a layout, or on one device."""
    everywhere: Any = SingleDeviceSharding(device)
    by_client: Any = everywhere
    if layout.mesh is not None:
        everywhere, by_client = (NamedSharding(layout.mesh, spec) for spec in (P(), P(AXIS)))
    per_device, own = layout.clients_per_device(num_clients), layout.own_devices
    num_rows, own_rows = (
        per_device * layout.num_devices,
        range(per_device * own.start, per_device * own.stop),
    )
    return Placement(everywhere, by_client, num_clients, num_rows, own_rows, is_resident, kind)


def _by_process() -> NamedSharding:
    """Returns the sharding of host arrays over all processes."""
    first = {device.process_index: device for device in reversed(jax.devices("cpu"))}
    return NamedSharding(Mesh([first[i] for i in range(jax.process_count())], AXIS), P(AXIS))


def by_part(function: Callable[[Any], Any], outer: PyTree) -> PyTree:
    """Maps a function over the arrays of wrappers' states, each `ByClient` as a whole."""
    return jax.tree.map(function, outer, is_leaf=lambda x: isinstance(x, ByClient))


def _placed(tree: PyTree, sharding: Any) -> PyTree:
    if sharding.is_fully_addressable:
        return jax.device_put(tree, sharding)
    return jax.tree.map(partial(_over_processes, sharding=sharding), tree)


def _over_processes(x: Any, sharding: Any) -> jax.Array:
    """Places an array that each process holds whole; each copies the part of its own devices."""
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        return jax.device_put(x, sharding)
    if jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key):
        words = _over_processes(jax.random.key_data(x), sharding)
        return jax.random.wrap_key_data(words, impl=jax.random.key_impl(x))
    array = np.asarray(x, jax.dtypes.canonicalize_dtype(np.asarray(x).dtype))
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def _whole(x: Any) -> np.ndarray:
    """Copies an array to the host, where it may span the devices of several processes."""
    if isinstance(x, jax.Array) and not (x.is_fully_addressable or x.is_fully_replicated):
        return whole(x)
    return np.asarray(x)


def own_part(x: Any) -> np.ndarray:
    """Copies the part of an array by client or slot that is on this process's devices."""
    if not isinstance(x, jax.Array) or x.is_fully_addressable:
        return np.asarray(x)
    shards = sorted(x.addressable_shards, key=lambda shard: shard.index[0].start)
    return np.concatenate([np.asarray(shard.data) for shard in shards])


def _joined(table: np.ndarray) -> np.ndarray:
    """Joins the tables of all processes, by blocks, since they may not fit into device memory."""
    rows = max(1, _BLOCK_BYTES * len(table) // max(1, table.nbytes))
    blocks = [of_all_processes(table[i : i + rows]) for i in range(0, len(table), rows)]
    return np.concatenate(blocks, axis=1).reshape(-1, *table.shape[1:])


def _typed(x: Any) -> Any:
    return jnp.asarray(x, jnp.result_type(x))


def _padded(x: Any, rows: int) -> Any:
    missing = rows - len(x)
    return x if missing <= 0 else jnp.concatenate([x, jnp.repeat(x[:1], missing, axis=0)])
