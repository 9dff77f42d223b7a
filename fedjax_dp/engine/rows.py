"""What clients keep, on the disk: rows that only take room once they are written."""

import hashlib
import os
import pathlib
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import numpy as np

from fedjax_dp.core import checks, trees
from fedjax_dp.core.trees import PyTree

FILE, OWNER = "rows.bin", "owner"
# The place of a row that is still the first one.
UNTOUCHED = -1
_DIGEST_BYTES = 32


class RowFile:
    """A file of rows of one shape, each in a numbered slot.

    A row is never written where a row lies that somebody still refers to: a crash at any time
    leaves all rows whole that a checkpoint knows.

    Attributes:
      folder: where the file is; None before it is known.
      structure: shapes and types of a row.
      num_bytes: size of a row.
    """

    def __init__(self, structure: PyTree, folder: str | os.PathLike[str] | None = None):
        """Describes a file; it is made when it is first written.

        Args:
          structure: shapes and types of a row.
          folder: where the file is, or will be.
        """
        self.structure = structure
        self.folder = None if folder is None else pathlib.Path(folder).absolute()
        leaves = jax.tree.leaves(structure)
        sizes = [int(np.prod(s.shape)) * np.dtype(s.dtype).itemsize for s in leaves]
        self._ends = np.cumsum([0, *sizes])
        self.num_bytes = int(self._ends[-1])
        self._pinned: dict[int, np.ndarray] = {}
        self._token: str | None = None
        self._descriptor: int | None = None

    @property
    def path(self) -> pathlib.Path:
        """Gives the file; raises where no folder is known."""
        rule = "be named where what clients keep is on the disk: rows have no place to go to"
        checks.require(self.folder is not None, "folder", rule, self.folder)
        assert self.folder is not None
        return self.folder / FILE

    def open(self) -> None:
        """Opens the file to write; whoever else had it open may not go on.

        Raises:
          ValueError: if it belongs by now to another simulation, or no folder is known.
        """
        owner = self.path.parent / OWNER
        if self._token is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._token = os.urandom(16).hex()
            owner.write_text(self._token)
            self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600)
        is_ours = owner.exists() and owner.read_text() == self._token
        rule = "belong to one simulation at a time; another state writes there since"
        checks.require(is_ours, "folder", rule, str(self.folder))

    def write(self, slot: int, row: PyTree) -> bytes:
        """Writes a row.

        Args:
          slot: where.
          row: NumPy arrays of the file's structure.

        Returns:
          Its digest.
        """
        assert self._descriptor is not None
        digest = hashlib.sha256()
        for leaf, end in zip(jax.tree.leaves(row), self._ends, strict=False):
            data = _bytes_of(np.ascontiguousarray(leaf))
            digest.update(data)
            _write_all(self._descriptor, data, slot * self.num_bytes + int(end))
        return digest.digest()

    def read(self, slot: int, into: Iterable[np.ndarray], which: Iterable[int]) -> None:
        """Reads leaves of a row.

        Args:
          slot: where.
          into: an array for each leaf, contiguous, which is filled.
          which: the leaves' numbers.

        Raises:
          ValueError: if the file ends before.
        """
        descriptor = self._descriptor
        opened = os.open(self.path, os.O_RDONLY) if descriptor is None else descriptor
        try:
            for array, leaf in zip(into, which, strict=True):
                offset = slot * self.num_bytes + int(self._ends[leaf])
                _read_all(opened, _bytes_of(array), offset, self.path)
        finally:
            if descriptor is None:
                os.close(opened)

    def sync(self) -> None:
        """Waits until what was written is on the disk."""
        if self._descriptor is not None:
            os.fsync(self._descriptor)

    def pin(self, states: dict[int, np.ndarray]) -> None:
        """Says which rows are not to be written over, beside those of the state at hand.

        Args:
          states: slots of all clients, `[num_clients]`, by the number of rounds done in each.
        """
        self._pinned = {rounds: np.unique(slots) for rounds, slots in states.items()}

    @property
    def pinned(self) -> dict[int, np.ndarray]:
        """Gives what was pinned."""
        return dict(self._pinned)

    def __del__(self) -> None:
        """Closes the file."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


@jax.tree_util.register_pytree_with_keys_class
class Rows:
    """What all clients keep: the first row of everybody, and where the others lie.

    As a pytree it is small, whatever lies in the file, and so is a checkpoint of it.

    Attributes:
      slots: where each client's row lies, `[num_clients]`, int32; -1 for those never written.
      digests: SHA-256 of these rows, `[num_clients, 32]`, uint8.
      first: the row that everybody starts with.
      file: the file.
    """

    def __init__(self, slots: Any, digests: Any, first: PyTree, file: RowFile):
        """Puts the parts together, unseen."""
        self.slots, self.digests, self.first, self.file = slots, digests, first, file

    @classmethod
    def untouched(
        cls, first: PyTree, num_clients: int, folder: str | os.PathLike[str] | None = None
    ) -> "Rows":
        """Gives the rows before the first round.

        Args:
          first: the row that everybody starts with.
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
        found = hashlib.sha256()
        for leaf in leaves:
            found.update(_bytes_of(leaf))
        if found.digest() != np.asarray(self.digests)[client].tobytes():
            raise ValueError(
                f"the row of client {client} must be as it was written in {self.file.path}: it "
                "has changed"
            )

    def of_all(self, select: Callable[[PyTree], PyTree]) -> PyTree:
        """Reads a part of every row, as `Kept` says."""
        return self.many(range(len(self.slots)), select)

    def of(self, client: int) -> PyTree:
        """Reads one client's row, as `Kept` says."""
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


def kept_in(state: Any, folder: str | os.PathLike[str]) -> Any:
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


def _bytes_of(array: np.ndarray) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


def _write_all(descriptor: int, data: memoryview, offset: int) -> None:
    while len(data):
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written


def _read_all(descriptor: int, view: memoryview, offset: int, path: pathlib.Path) -> None:
    while len(view):
        read = os.preadv(descriptor, [view], offset)
        if read == 0:
            raise ValueError(f"{path} must hold what was written to it, and ends at {offset:,}")
        view, offset = view[read:], offset + read
