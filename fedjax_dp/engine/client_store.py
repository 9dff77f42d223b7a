"""Client state on disk: records that take space only once they are written."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import numpy as np

from fedjax_dp.core import trees
from fedjax_dp.core.files import digest_of
from fedjax_dp.core.trees import PyTree
from fedjax_dp.data.record_file import Folder, RecordFile, bytes_of

# The slot of a client whose state is still the initial one.
UNWRITTEN = -1
_DIGEST_BYTES = 32


@jax.tree_util.register_pytree_with_keys_class
class ClientStore:
    """The state of all clients: the initial one, and where on disk each of the others is.

    As a pytree, and in a checkpoint, it holds no record of the file.
    """

    def __init__(self, slots: Any, digests: Any, first: PyTree, file: RecordFile):
        """Combines the parts, unchecked, since a pytree may hold anything."""
        self.slots = slots  # In the file, `[num_clients]`, int32; -1 where never written.
        self.digests = digests  # SHA-256 of these records, `[num_clients, 32]`, uint8.
        self.first, self.file = first, file

    @classmethod
    def unwritten(
        cls, first: PyTree, num_clients: int, folder: Folder | None = None
    ) -> "ClientStore":
        """Makes the store before the first round; `stored_in` may name the folder later."""
        first = jax.tree.map(np.array, first)
        structure = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), first)
        slots = np.full(num_clients, UNWRITTEN, np.int32)
        digests = np.zeros((num_clients, _DIGEST_BYTES), np.uint8)
        return cls(slots, digests, first, RecordFile(structure, folder))

    def tree_flatten_with_keys(self) -> Any:
        """Names the parts that a checkpoint holds."""
        names = ("slots", "digests", "first")
        return [(jax.tree_util.GetAttrKey(n), getattr(self, n)) for n in names], self.file

    @classmethod
    def tree_unflatten(cls, file: RecordFile, children: Any) -> "ClientStore":
        """Combines the parts again."""
        slots, digests, first = children
        return cls(slots, digests, first, file)

    def many(self, clients: Iterable[int], select: Callable[[PyTree], PyTree] | None = None) -> Any:
        """Reads clients' states, or a part of each, as NumPy arrays `[clients, ...]`.

        A client below 0 has the initial state; `select` is `(own) -> part`, some of the leaves as
        they are. Whole records are checked against their digests: one that was damaged, or written
        over since the state was donated, raises a ValueError.
        """
        clients = np.asarray(list(clients), np.int64)
        leaves, structure = jax.tree.flatten(self.first)
        numbers = jax.tree.unflatten(structure, range(len(leaves)))
        which, shape = jax.tree.flatten(numbers if select is None else select(numbers))
        is_whole = which == list(range(len(leaves)))
        arrays = [np.empty((len(clients), *leaves[i].shape), leaves[i].dtype) for i in which]
        for place, client in enumerate(clients):
            slot = int(self.slots[client]) if client >= 0 else UNWRITTEN
            into = [array[place : place + 1] for array in arrays]
            if slot == UNWRITTEN:
                for array, i in zip(into, which, strict=True):
                    array[0] = leaves[i]
                continue
            self.file.read(slot, into, which)
            digest = np.asarray(self.digests)[client].tobytes()
            if is_whole and digest_of(map(bytes_of, into)) != digest:
                raise ValueError(
                    f"the state of client {client} must be as it was written in {self.file.path}: "
                    "it has changed"
                )
        return jax.tree.unflatten(shape, arrays)

    def of_all(self, select: Callable[[PyTree], PyTree]) -> PyTree:
        """Reads a part of every client's state, as `ClientStates` declares."""
        return self.many(range(len(self.slots)), select)

    def of(self, client: int) -> PyTree:
        """Reads one client's state, as `ClientStates` declares."""
        return jax.tree.map(lambda x: x[0], self.many([client]))

    def damage(self) -> str | None:
        """Describes the first record that is not as it was written; None if all are."""
        for client in np.flatnonzero(np.asarray(self.slots) != UNWRITTEN):
            try:
                self.of(int(client))
            except (OSError, ValueError) as error:
                return str(error)
        return None


class StorePart(NamedTuple):
    """The states in memory, `[clients, ...]`, of clients whose indices count up from `start`."""

    start: Any
    states: PyTree


def state_of(clients: PyTree, index: Any) -> PyTree:
    """Selects one client's state; on disk by a Python index, elsewhere a traced one will do."""
    if isinstance(clients, ClientStore):
        return clients.of(int(index))
    if isinstance(clients, StorePart):
        return trees.take(clients.states, index - clients.start)
    return trees.take(clients, index)


def stored_in(state: Any, folder: Folder) -> Any:
    """Names the folder of client state on disk, before a run; in memory it needs none."""
    store = state.clients
    if not isinstance(store, ClientStore):
        return state
    file = RecordFile(store.file.structure, folder)
    return state._replace(clients=ClientStore(store.slots, store.digests, store.first, file))
