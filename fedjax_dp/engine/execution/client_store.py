"""What clients keep, on the disk: rows that only take room once they are written."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import numpy as np

from fedjax_dp.core import trees
from fedjax_dp.core.files import digest_of
from fedjax_dp.core.trees import PyTree
from fedjax_dp.data.row_file import Folder, RowFile, bytes_of

# The place of a row that is still the first one.
UNTOUCHED = -1
_DIGEST_BYTES = 32


@jax.tree_util.register_pytree_with_keys_class
class Rows:
    """What all clients keep: the initial state of all, and where the others lie.

    As a pytree it is small, whatever lies in the file, and so is a checkpoint of it.

    Attributes:
      slots: where each client's row lies, `[num_clients]`, int32; -1 for those never written.
      digests: SHA-256 of these rows, `[num_clients, 32]`, uint8.
      first: the row that all clients start with.
      file: the file.
    """

    def __init__(self, slots: Any, digests: Any, first: PyTree, file: RowFile):
        """Puts the parts together, unseen."""
        self.slots, self.digests, self.first, self.file = slots, digests, first, file

    @classmethod
    def untouched(cls, first: PyTree, num_clients: int, folder: Folder | None = None) -> "Rows":
        """Gives the rows before the first round.

        Args:
          first: the row that all clients start with.
          num_clients: how many there are.
          folder: where rows will lie; None where that is said later, by `kept_in`.

        Returns:
          The rows.
        """
        first = jax.tree.map(np.array, first)
        structure = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), first)
        slots = np.full(num_clients, UNTOUCHED, np.int32)
        digests = np.zeros((num_clients, _DIGEST_BYTES), np.uint8)
        return cls(slots, digests, first, RowFile(structure, folder))

    def tree_flatten_with_keys(self) -> Any:
        """Names what a checkpoint holds."""
        key = jax.tree_util.GetAttrKey
        children = (self.slots, self.digests, self.first)
        names = (key("slots"), key("digests"), key("first"))
        return tuple(zip(names, children, strict=True)), self.file

    @classmethod
    def tree_unflatten(cls, file: RowFile, children: Any) -> "Rows":
        """Puts the parts together again."""
        slots, digests, first = children
        return cls(slots, digests, first, file)

    def many(self, clients: Iterable[int], select: Callable[[PyTree], PyTree] | None = None) -> Any:
        """Reads rows, or a part of each.

        Args:
          clients: whose; the first row where it is below 0.
          select: `(row) -> part`, some of the row's leaves as they are; all where it is None.

        Returns:
          NumPy arrays, `[clients, ...]`.

        Raises:
          ValueError: if a row is not the one that was written: it was damaged, or the state was
            taken over and has been written over since. Of parts of rows this is not seen.
        """
        clients = np.asarray(list(clients), np.int64)
        leaves, structure = jax.tree.flatten(self.first)
        numbers = jax.tree.unflatten(structure, range(len(leaves)))
        chosen = numbers if select is None else select(numbers)
        which, shape = jax.tree.flatten(chosen)
        arrays = [np.empty((len(clients), *leaves[i].shape), leaves[i].dtype) for i in which]
        for place, client in enumerate(clients):
            slot = int(self.slots[client]) if client >= 0 else UNTOUCHED
            into = [array[place : place + 1] for array in arrays]
            if slot == UNTOUCHED:
                for array, i in zip(into, which, strict=True):
                    array[0] = leaves[i]
            else:
                self.file.read(slot, into, which)
                if which == list(range(len(leaves))):
                    self._require_unchanged(int(client), into)
        return jax.tree.unflatten(shape, arrays)

    def _require_unchanged(self, client: int, leaves: Iterable[np.ndarray]) -> None:
        if digest_of(map(bytes_of, leaves)) != np.asarray(self.digests)[client].tobytes():
            raise ValueError(
                f"the row of client {client} must be as it was written in {self.file.path}: it "
                "has changed"
            )

    def of_all(self, select: Callable[[PyTree], PyTree]) -> PyTree:
        """Reads a part of every row, of `ClientStates`."""
        return self.many(range(len(self.slots)), select)

    def of(self, client: int) -> PyTree:
        """Reads one client's row, of `ClientStates`."""
        return jax.tree.map(lambda x: x[0], self.many([client]))

    def damage(self) -> str | None:
        """Looks for rows that are not as they were written.

        Returns:
          The first difference in words, or None where there is none.
        """
        for client in np.flatnonzero(np.asarray(self.slots) != UNTOUCHED):
            try:
                self.of(int(client))
            except (OSError, ValueError) as error:
                return str(error)
        return None


class Neighbours(NamedTuple):
    """The rows of clients with neighbouring indices, in memory.

    Attributes:
      start: index of the first of them.
      rows: what they keep, `[clients, ...]`.
    """

    start: Any
    rows: PyTree


def row_of(clients: PyTree, index: Any) -> PyTree:
    """Takes what one client keeps out of what all keep.

    Args:
      clients: a table `[num_clients, ...]`, rows on the disk, or neighbours in memory.
      index: the client's index; a number, not a traced one, where rows are on the disk.

    Returns:
      The client's row.
    """
    if isinstance(clients, Rows):
        return clients.of(int(index))
    if isinstance(clients, Neighbours):
        return trees.take(clients.rows, index - clients.start)
    return trees.take(clients, index)


def kept_in(state: Any, folder: Folder) -> Any:
    """Says where rows lie of a state whose clients keep them on the disk.

    Args:
      state: a simulation's state that has not been run.
      folder: the folder.

    Returns:
      The state; as it was where rows are in memory.
    """
    rows = state.clients
    if not isinstance(rows, Rows):
        return state
    file = RowFile(rows.file.structure, folder)
    return state._replace(clients=Rows(rows.slots, rows.digests, rows.first, file))
