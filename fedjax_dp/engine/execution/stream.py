"""Streaming: the examples of cohorts, and what their clients keep, from host memory or disk."""

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from fedjax_dp.core.trees import PyTree
from fedjax_dp.data.federated import FederatedData, nested
from fedjax_dp.data.participants import Participation
from fedjax_dp.engine.cohort import Cohort, Examples
from fedjax_dp.engine.execution.client_store import UNTOUCHED, Rows
from fedjax_dp.engine.execution.layout import Layout, power_of_two
from fedjax_dp.engine.record import Fate


class Slabs:
    """Gathers the examples of cohorts into slabs of few sizes."""

    def __init__(
        self,
        data: FederatedData,
        participation: Participation,
        placement: Any,
        validation: FederatedData | None = None,
    ):
        """Measures the slab that nearly every cohort fits into.

        Args:
          data: the population.
          participation: who joins a round.
          placement: the device or sharding that slabs go to.
          validation: a second split of the same clients.
        """
        self._data, self._placement = data, placement
        self._limit = max(1, int(data.sizes.max()))
        # No cohort can hold more rows than its largest possible members do together.
        largest = np.sort(data.sizes)[::-1][: participation.capacity]
        self._most_rows = max(1, int(largest.sum()))
        expected = participation.cohort_size * data.num_examples / data.num_clients
        self._usual_rows = min(self._most_rows, power_of_two(2 * expected))
        self._validation = None
        if validation is not None:
            self._validation = Slabs(validation, participation, placement)

    def gather(self, cohort: Cohort) -> Examples:
        """Reads a cohort's examples and puts them on the device.

        The slab has room for twice the expected rows, or for the next power of two where a cohort
        needs more, so that a round is compiled once or for very few sizes and no slab is as large
        as the population because a sampler might draw all of it.

        Args:
          cohort: the cohort, on the host.

        Returns:
          The examples by slot.
        """
        return jax.device_put(self._on_host(cohort), self._placement)

    def _on_host(self, cohort: Cohort) -> Examples:
        is_drawn = _is_drawn(cohort)
        ids = np.asarray(cohort.ids)[is_drawn]
        sizes = self._data.sizes[ids]
        num_rows = int(sizes.sum())
        slab_rows = max(self._usual_rows, min(self._most_rows, power_of_two(num_rows)))
        starts, sizes_by_slot = np.zeros((2, len(is_drawn)), np.int32)
        starts[is_drawn], sizes_by_slot[is_drawn] = np.cumsum(sizes) - sizes, sizes
        part = self._data.select(ids).examples if len(ids) else {}
        slab = {}
        for name, array in self._data.examples.items():
            slab[name] = np.zeros((slab_rows, *array.shape[1:]), array.dtype)
            if len(ids):
                slab[name][:num_rows] = part[name]
        second = None if self._validation is None else self._validation._on_host(cohort)
        return Examples(nested(slab), starts, sizes_by_slot, second, self._limit, is_by_slot=True)


def narrowed(cohort: Cohort, layout: Layout, participation: Participation) -> Cohort:
    """Leaves out the empty slots at the end of each device.

    An exact Poisson draw has a slot for every client, nearly all of them empty. Only few widths are
    used, so that few programs are compiled.

    Args:
      cohort: the cohort, on the host.
      layout: chunk and devices.
      participation: who joins a round.

    Returns:
      The cohort, in slots that are a multiple of the chunk on each device.
    """
    is_drawn = _is_drawn(cohort).reshape(layout.num_devices, -1)
    slots = is_drawn.shape[1]
    needed = int(np.max(np.where(is_drawn, np.arange(1, slots + 1), 0)))
    width = max(layout.usual_slots(participation), power_of_two(needed))
    width = min(slots, -(-width // layout.chunk) * layout.chunk)

    def cut(x: Any) -> Any:
        return np.asarray(x).reshape(layout.num_devices, -1)[:, :width].reshape(-1)

    return cohort._replace(ids=cut(cohort.ids), fate=cut(cohort.fate))


class TableStream:
    """What clients keep, in host memory; a cohort's rows come to the device and go back."""

    def __init__(self, table: PyTree):
        """Takes a table over.

        Args:
          table: what clients keep, `[num_clients, ...]`, NumPy arrays that may be written to; None
            where they keep nothing.
        """
        self._table = table

    def __enter__(self) -> "TableStream":
        """Begins."""
        return self

    def __exit__(self, *error: object) -> None:
        """Ends; nothing is under way."""

    def require_room(self, participation: Participation, num_rounds: int) -> None:
        """Does nothing: the table is there."""

    def ahead(self, cohort: Cohort, under_way: Cohort) -> None:
        """Does nothing: rows in memory are at hand."""

    def gather(self, cohort: Cohort) -> PyTree:
        """Gives a cohort's part.

        Args:
          cohort: the cohort, on the host.

        Returns:
          What the clients of all slots keep, `[slots, ...]`.
        """
        ids = np.asarray(cohort.ids)
        return jax.tree.map(lambda a: a[ids], self._table)

    def scatter(self, cohort: Cohort, part: PyTree) -> None:
        """Takes a cohort's part back.

        Args:
          cohort: the cohort, on the host.
          part: what the clients of all slots keep, `[slots, ...]`.
        """
        is_drawn = _is_drawn(cohort)
        ids = np.asarray(cohort.ids)[is_drawn]
        for array, new in zip(jax.tree.leaves(self._table), jax.tree.leaves(part), strict=True):
            array[ids] = np.asarray(new)[is_drawn]

    def left(self) -> PyTree:
        """Gives the table back."""
        return self._table


class RowStream:
    """What clients keep, on the disk; rows come ahead of their round and go back behind it.

    One thread reads and writes, in turn, while rounds are computed: what it reads was written by
    all rounds but the one under way, whose rows are in memory.
    """

    def __init__(self, rows: Rows):
        """Takes rows over.

        Args:
          rows: what clients keep.
        """
        rows.file.open()
        self._rows = Rows(np.array(rows.slots), np.array(rows.digests), rows.first, rows.file)
        self._pinned = {int(slot) for slots in rows.file.pinned.values() for slot in slots}
        taken = self._pinned | set(self._rows.slots.tolist())
        self._end = max(taken, default=UNTOUCHED) + 1
        self._free = sorted(set(range(self._end)) - taken, reverse=True)
        self._thread = ThreadPoolExecutor(1, "rows")
        self._ahead: Future[PyTree] | None = None
        self._writing: Future[None] | None = None
        self._last: tuple[dict[int, int], PyTree] = {}, None

    def __enter__(self) -> "RowStream":
        """Begins."""
        return self

    def __exit__(self, *error: object) -> None:
        """Ends, after an error too: what is under way is waited for, and the disk left alone."""
        self._thread.shutdown(wait=True)

    def require_room(self, participation: Participation, num_rounds: int) -> None:
        """Requires a disk with room for what some rounds may come to write.

        Args:
          participation: who joins a round.
          num_rounds: how many rounds.

        Raises:
          ValueError: if it has less.
        """
        slots = self._rows.slots
        # A row that nobody else needs makes room for the one that is written after it.
        is_replaced = ~np.isin(slots, [UNTOUCHED, *self._pinned])
        new = min(participation.most_drawn(num_rounds), int(np.sum(~is_replaced)))
        self._rows.file.require_room(new + participation.most_drawn(1) - len(self._free))

    def ahead(self, cohort: Cohort, under_way: Cohort) -> None:
        """Begins to read the rows of a cohort.

        Args:
          cohort: the cohort, on the host.
          under_way: that of the round that is computed now, whose rows are not read.
        """
        ids = _clients(cohort)
        wanted = np.where(np.isin(ids, _clients(under_way)), -1, ids)
        self._ahead = self._thread.submit(self._rows.many, wanted)

    def gather(self, cohort: Cohort) -> PyTree:
        """Gives the rows of the cohort that was asked for last, or of another if there is none.

        Args:
          cohort: the cohort, on the host.

        Returns:
          What the clients of all slots keep, `[slots, ...]`; the first row in empty slots.
        """
        if self._ahead is None:
            return self._thread.submit(self._rows.many, _clients(cohort)).result()
        part, self._ahead = self._ahead.result(), None
        places, rows = self._last
        for place, client in enumerate(_clients(cohort).tolist()):
            if client in places:
                for array, row in zip(jax.tree.leaves(part), jax.tree.leaves(rows), strict=True):
                    array[place] = row[places[client]]
        return part

    def scatter(self, cohort: Cohort, part: PyTree) -> None:
        """Begins to write the rows of a cohort.

        Args:
          cohort: the cohort, on the host.
          part: what the clients of all slots keep, `[slots, ...]`.
        """
        if self._writing is not None:
            self._writing.result()  # No more than one round waits for the disk.
        places = {c: place for place, c in enumerate(_clients(cohort).tolist()) if c >= 0}
        self._last = places, jax.tree.map(np.asarray, part)
        self._writing = self._thread.submit(self._write, *self._last)

    def left(self) -> Rows:
        """Gives the rows as they are in the end; raises what writing them has raised."""
        if self._writing is not None:
            self._writing.result()
        return self._rows

    def _write(self, places: dict[int, int], part: PyTree) -> None:
        """Writes rows to slots that nobody refers to, then lets the old ones go."""
        slots, digests, file = self._rows.slots, self._rows.digests, self._rows.file
        for client, place in places.items():
            if self._free:
                slot = self._free.pop()
            else:
                slot, self._end = self._end, self._end + 1
            digest = file.write(slot, jax.tree.map(lambda x, place=place: x[place], part))
            digests[client] = np.frombuffer(digest, np.uint8)
            old, slots[client] = int(slots[client]), slot
            if old != UNTOUCHED and old not in self._pinned:
                self._free.append(old)


def stream_of(clients: PyTree) -> TableStream | RowStream:
    """Chooses how what clients keep comes to the device.

    Args:
      clients: rows on the disk, a table in memory, or None.

    Returns:
      The stream, to be entered.
    """
    return RowStream(clients) if isinstance(clients, Rows) else TableStream(clients)


def _is_drawn(cohort: Cohort) -> np.ndarray:
    return np.asarray(cohort.fate) != Fate.EMPTY


def _clients(cohort: Cohort) -> np.ndarray:
    """Names the clients of all slots, `[slots]`; -1 in empty ones."""
    return np.where(_is_drawn(cohort), np.asarray(cohort.ids), -1)
