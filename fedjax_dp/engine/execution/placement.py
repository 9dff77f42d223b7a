"""The placement of arrays, and the streaming of cohorts from host memory or disk."""

import dataclasses
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
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
from fedjax_dp.data.disk_arrays import is_on_disk
from fedjax_dp.data.federated import FederatedData, nested
from fedjax_dp.data.participants import Participation
from fedjax_dp.engine.client_store import UNWRITTEN, ClientStore
from fedjax_dp.engine.cohort import Cohort, Examples
from fedjax_dp.engine.layout import AXIS, Layout, power_of_two
from fedjax_dp.engine.record import Fate
from fedjax_dp.engine.round import ByClient, SimulationState
from fedjax_dp.evaluation.evaluate import require_rows
from fedjax_dp.models.losses import Allowed

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


class Slabs:
    """The examples of cohorts, as slabs of few sizes, one for each device."""

    def __init__(
        self,
        data: FederatedData,
        participation: Participation,
        layout: Layout,
        place: Placement,
        validation: FederatedData | None = None,
        targets: Sequence[Allowed] = (),
    ):
        """Measures the slab that nearly every cohort fits into; checks `targets` on disk."""
        self._data, self._layout, self._place = data, layout, place
        self._targets = [t for t in targets if is_on_disk(data.examples.get(t.name))]
        self._limit = max(1, int(data.sizes.max()))
        # No device has more records than the largest possible cohort.
        largest = np.sort(data.sizes)[::-1][: participation.capacity]
        self._most_records = max(1, int(largest.sum()))
        expected = participation.cohort_size * data.num_examples / data.num_clients
        expected /= layout.num_devices
        self._usual_records = min(self._most_records, power_of_two(2 * expected))
        self._validation = None
        if validation is not None:
            self._validation = Slabs(validation, participation, layout, place, targets=targets)

    def gather(self, cohort: Cohort) -> Examples:
        """Reads the examples of this process's slots and puts them on its devices."""
        return self._place.by_slot(self._on_host(cohort))

    def _on_host(self, cohort: Cohort) -> Examples:
        is_drawn = _is_drawn(cohort).reshape(self._layout.num_devices, -1)
        ids = np.where(is_drawn, np.asarray(cohort.ids).reshape(is_drawn.shape), 0)
        sizes = np.where(is_drawn, self._data.sizes[ids], 0).astype(np.int32)
        starts = np.where(is_drawn, np.cumsum(sizes, axis=1) - sizes, 0).astype(np.int32)
        num_records, own = sizes.sum(axis=1), self._layout.own_devices
        # Few widths, none as large as the population, since a round is compiled for each.
        needed = power_of_two(int(num_records.max()))
        width = max(self._usual_records, min(self._most_records, needed))
        slab = {
            name: np.zeros((len(own), width, *array.shape[1:]), array.dtype)
            for name, array in self._data.examples.items()
        }
        for place, device in enumerate(own):
            clients = ids[device][is_drawn[device]]
            part = self._data.examples_of(clients) if len(clients) else {}
            require_rows("data", part, self._targets)
            for name, array in part.items():
                slab[name][place, : num_records[device]] = array
        flat = {name: array.reshape(-1, *array.shape[2:]) for name, array in slab.items()}
        second = None if self._validation is None else self._validation._on_host(cohort)
        return Examples(
            nested(flat),
            starts[own].reshape(-1),
            sizes[own].reshape(-1),
            second,
            self._limit,
            is_by_slot=True,
        )


def narrowed(cohort: Cohort, layout: Layout, participation: Participation) -> Cohort:
    """Drops the last slots of each device if empty, in few widths, multiples of the chunk."""
    is_drawn = _is_drawn(cohort).reshape(layout.num_devices, -1)
    slots = is_drawn.shape[1]
    needed = int(np.max(np.where(is_drawn, np.arange(1, slots + 1), 0)))
    width = max(layout.usual_slots(participation), power_of_two(needed))
    width = min(slots, -(-width // layout.chunk) * layout.chunk)

    def cut(x: Any) -> Any:
        return np.asarray(x).reshape(layout.num_devices, -1)[:, :width].reshape(-1)

    return cohort._replace(ids=cut(cohort.ids), fate=cut(cohort.fate))


class TableStream:
    """Client state in host memory; a cohort's part is copied to the device and back."""

    def __init__(self, table: PyTree, first: int):
        """Takes NumPy arrays `[clients, ...]`, from a client on, to write to; None for no state."""
        self._table, self._first = table, first

    def __enter__(self) -> "TableStream":
        """Enters."""
        return self

    def __exit__(self, *error: object) -> None:
        """Exits; no work is pending."""

    def require_space(self, participation: Participation, num_rounds: int) -> None:
        """Does nothing, since the table exists."""

    def ahead(self, cohort: Cohort, under_way: Cohort) -> None:
        """Does nothing, since memory needs no prefetching."""

    def gather(self, cohort: Cohort) -> PyTree:
        """Returns the states of the clients of all slots, `[slots, ...]`."""
        rows = np.where(_is_drawn(cohort), np.asarray(cohort.ids) - self._first, 0)
        return jax.tree.map(lambda a: a[rows], self._table)

    def scatter(self, cohort: Cohort, part: PyTree) -> None:
        """Writes back the states of the clients of all slots, `[slots, ...]`."""
        is_drawn = _is_drawn(cohort)
        rows = np.asarray(cohort.ids)[is_drawn] - self._first
        for array, new in zip(jax.tree.leaves(self._table), jax.tree.leaves(part), strict=True):
            array[rows] = new[is_drawn]

    def left(self) -> PyTree:
        """Returns the table."""
        return self._table


class StoreStream:
    """Client state on disk, read ahead of its round and written after it by one thread."""

    def __init__(self, store: ClientStore):
        """Opens the store's file and finds its free slots."""
        store.file.open()
        self._store = ClientStore(
            np.array(store.slots), np.array(store.digests), store.first, store.file
        )
        self._pinned = {int(slot) for slots in store.file.pinned.values() for slot in slots}
        taken = self._pinned | set(self._store.slots.tolist())
        self._end = max(taken, default=UNWRITTEN) + 1
        self._free = sorted(set(range(self._end)) - taken, reverse=True)
        self._thread = ThreadPoolExecutor(1, "client state")
        self._ahead: Future[PyTree] | None = None
        self._writing: Future[None] | None = None
        self._last: tuple[dict[int, int], PyTree] = {}, None

    def __enter__(self) -> "StoreStream":
        """Enters."""
        return self

    def __exit__(self, *error: object) -> None:
        """Waits for pending work, also after an error."""
        self._thread.shutdown(wait=True)

    def require_space(self, participation: Participation, num_rounds: int) -> None:
        """Requires the disk space that some rounds may need."""
        slots = self._store.slots
        # An entry that nothing else refers to is freed once its successor is written.
        is_replaced = ~np.isin(slots, [UNWRITTEN, *self._pinned])
        new = min(participation.most_drawn(num_rounds), int(np.sum(~is_replaced)))
        self._store.file.require_space(new + participation.most_drawn(1) - len(self._free))

    def ahead(self, cohort: Cohort, under_way: Cohort) -> None:
        """Starts to read the states of a cohort, except for clients of the current one."""
        ids = _clients(cohort)
        wanted = np.where(np.isin(ids, _clients(under_way)), -1, ids)
        self._ahead = self._thread.submit(self._store.many, wanted)

    def gather(self, cohort: Cohort) -> PyTree:
        """Returns the states of the last `ahead`, `[slots, ...]`; initial ones in empty slots."""
        # States of the current round are in memory, and may not be written yet.
        if self._ahead is None:
            return self._thread.submit(self._store.many, _clients(cohort)).result()
        part, self._ahead = self._ahead.result(), None
        places, states = self._last
        for place, client in enumerate(_clients(cohort).tolist()):
            if client in places:
                for array, state in zip(
                    jax.tree.leaves(part), jax.tree.leaves(states), strict=True
                ):
                    array[place] = state[places[client]]
        return part

    def scatter(self, cohort: Cohort, part: PyTree) -> None:
        """Starts to write the states of the clients of all slots, `[slots, ...]`."""
        if self._writing is not None:
            self._writing.result()  # At most one round waits for the disk.
        places = {c: place for place, c in enumerate(_clients(cohort).tolist()) if c >= 0}
        self._last = places, part
        self._writing = self._thread.submit(self._write, *self._last)

    def left(self) -> ClientStore:
        """Returns the store after the last write; raises the error of a failed one."""
        if self._writing is not None:
            self._writing.result()
        return self._store

    def _write(self, places: dict[int, int], part: PyTree) -> None:
        """Writes states to unused slots, then frees the old slots."""
        slots, digests, file = self._store.slots, self._store.digests, self._store.file
        for client, place in places.items():
            if self._free:
                slot = self._free.pop()
            else:
                slot, self._end = self._end, self._end + 1
            digest = file.write(slot, jax.tree.map(lambda x, place=place: x[place], part))
            digests[client] = np.frombuffer(digest, np.uint8)
            old, slots[client] = int(slots[client]), slot
            if old != UNWRITTEN and old not in self._pinned:
                self._free.append(old)


def stream_of(clients: PyTree, first: int) -> TableStream | StoreStream:
    """Chooses the stream of clients' states: on disk, in host memory from a client on, or None."""
    if isinstance(clients, ClientStore):
        return StoreStream(clients)
    return TableStream(clients, first)


def _is_drawn(cohort: Cohort) -> np.ndarray:
    return np.asarray(cohort.fate) != Fate.EMPTY


def _clients(cohort: Cohort) -> np.ndarray:
    """Lists the clients of all slots, `[slots]`; -1 in empty ones."""
    return np.where(_is_drawn(cohort), np.asarray(cohort.ids), -1)
