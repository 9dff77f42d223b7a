"""Streaming: the examples and client states of cohorts, from host memory or disk."""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from fedjax_dp.core.trees import PyTree
from fedjax_dp.data.disk_arrays import is_on_disk
from fedjax_dp.data.federated import FederatedData, nested
from fedjax_dp.data.participants import Participation
from fedjax_dp.engine.client_store import UNWRITTEN, ClientStore
from fedjax_dp.engine.cohort import Cohort, Examples
from fedjax_dp.engine.execution.placement import Placement
from fedjax_dp.engine.layout import Layout, power_of_two
from fedjax_dp.engine.record import Fate
from fedjax_dp.evaluation.evaluate import require_rows
from fedjax_dp.models.losses import Allowed


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
