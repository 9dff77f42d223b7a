"""A file of records of one size, such as client state: copy-on-write, with digests."""

import os
import pathlib
import shutil
import weakref
from collections.abc import Iterable

import jax
import numpy as np

from fedjax_dp.core import checks, files
from fedjax_dp.core.trees import PyTree

FILE, OWNER = "rows.bin", "owner"
# The unit of `st_blocks` on any file system.
_BLOCK_BYTES = 512
Folder = str | os.PathLike[str]


class RecordFile:
    """A file of records of one structure and of `num_bytes` each, in numbered slots."""

    def __init__(self, structure: PyTree, folder: Folder | None = None):
        """Describes a file in a folder; it is created by `open`."""
        self.structure = structure
        self.folder = None if folder is None else pathlib.Path(folder).absolute()
        is_free = self.folder is None or not self.folder.is_file()
        checks.require(is_free, "folder", "be a folder, or not exist yet", str(folder))
        leaves = jax.tree.leaves(structure)
        sizes = [int(np.prod(s.shape)) * np.dtype(s.dtype).itemsize for s in leaves]
        self._ends = np.cumsum([0, *sizes])
        self.num_bytes = int(self._ends[-1])
        # Slots of saved states by rounds done, which are not overwritten.
        self.pinned: dict[int, np.ndarray] = {}
        self._token: str | None = None
        self._descriptor: int | None = None

    @property
    def path(self) -> pathlib.Path:
        """The file; raises if no folder is known."""
        if self.folder is None:
            raise ValueError("folder must be given when client state is stored on disk, got None")
        return self.folder / FILE

    def open(self) -> None:
        """Opens the file for writing; an earlier owner can no longer write."""
        owner = self.path.parent / OWNER
        if self._token is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._token = os.urandom(16).hex()
            owner.write_text(self._token)
            self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | files.BINARY, 0o600)
            weakref.finalize(self, os.close, self._descriptor)
            files.sync_folder(self.path.parent)
        is_ours = owner.exists() and owner.read_text() == self._token
        rule = "belong to one simulation at a time; another one is writing there"
        checks.require(is_ours, "folder", rule, str(self.folder))

    def num_allocated(self) -> int:
        """Counts the records whose space is allocated; 0 before the file exists."""
        if self.num_bytes == 0 or not self.path.exists():
            return 0
        stat = os.stat(self.path)
        # Without counts of blocks, as if the file had no holes.
        blocks = getattr(stat, "st_blocks", None)
        allocated = stat.st_size if blocks is None else blocks * _BLOCK_BYTES
        return int(allocated // self.num_bytes)

    def require_space(self, num_records: int, *, name: str = "folder") -> None:
        """Requires free disk space for `num_records` more records; `name` is for errors."""
        place, needed = self.path.parent, max(0, num_records) * self.num_bytes
        while not place.exists():
            place = place.parent
        free = shutil.disk_usage(place).free
        rule = (
            f"be on a disk with {needed:,} bytes free, for {num_records:,} records of "
            f"{self.num_bytes:,} bytes of client state"
        )
        checks.require(needed <= free, name, rule, f"{free:,} bytes free in {place}")

    def write(self, slot: int, record: PyTree) -> bytes:
        """Writes a record and returns its SHA-256 digest."""
        assert self._descriptor is not None
        parts = [bytes_of(np.ascontiguousarray(leaf)) for leaf in jax.tree.leaves(record)]
        for part, end in zip(parts, self._ends, strict=False):
            files.write_at(self._descriptor, part, slot * self.num_bytes + int(end))
        return files.digest_of(parts)

    def read(self, slot: int, into: Iterable[np.ndarray], which: Iterable[int]) -> None:
        """Reads the leaves numbered `which` of a record into contiguous arrays."""
        descriptor = self._descriptor
        opened = descriptor
        if opened is None:
            opened = os.open(self.path, os.O_RDONLY | files.BINARY)
        try:
            for array, leaf in zip(into, which, strict=True):
                view, offset = bytes_of(array), slot * self.num_bytes + int(self._ends[leaf])
                read = files.read_at(opened, view, offset)
                if read < len(view):
                    raise ValueError(
                        f"{self.path} must not be truncated, but ends at byte {offset + read:,}"
                    )
        finally:
            if descriptor is None:
                os.close(opened)

    def sync(self) -> None:
        """Waits until all writes are on the disk."""
        if self._descriptor is not None:
            os.fsync(self._descriptor)

    def pin(self, states: dict[int, np.ndarray]) -> None:
        """Protects the slots `[num_clients]` of saved states, by rounds done, from overwriting."""
        self.pinned = {rounds: np.unique(slots) for rounds, slots in states.items()}


def bytes_of(array: np.ndarray) -> memoryview:
    """Views a contiguous array as bytes, without a copy."""
    return array.reshape(-1).view(np.uint8).data
