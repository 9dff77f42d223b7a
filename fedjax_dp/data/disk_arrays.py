"""Arrays on disk or in an object store, read as they are indexed, with digests of blocks."""

import abc
import math
import mmap
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from fedjax_dp.core import checks, files
from fedjax_dp.data import host_arrays

# Bytes of an array that are read at once.
_PART_BYTES = 1 << 24
# Bytes of a block, unless a row is larger.
_BLOCK_BYTES = 1 << 20
# Arrays up to this size are compared as a whole when they are opened.
AT_OPEN = 1 << 26


class DiskArray(abc.ABC):
    """An array `[rows, ...]` that is read when it is indexed."""

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype):
        """Stores what is known without reading."""
        self.shape, self.dtype = shape, dtype
        self.ndim, self.size = len(shape), math.prod(shape)
        self.nbytes = self.size * dtype.itemsize

    def __len__(self) -> int:
        """Counts the rows."""
        return self.shape[0]

    def __getitem__(self, rows: slice | np.ndarray) -> np.ndarray:
        """Reads a slice of rows, or those of an array of indices."""
        if isinstance(rows, slice):
            start, stop, step = rows.indices(len(self))
            rows = slice(start, max(start, stop)) if step == 1 else np.arange(start, stop, step)
        else:
            rows = np.asarray(rows, np.int64)
        count = rows.stop - rows.start if isinstance(rows, slice) else len(rows)
        if count == 0:
            return np.zeros((0, *self.shape[1:]), self.dtype)
        return self._read(rows)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Reads the whole array."""
        return self[:].astype(dtype or self.dtype, copy=False)

    @abc.abstractmethod
    def _read(self, rows: slice | np.ndarray) -> np.ndarray:
        """Reads rows, at least one: a slice of step 1, or indices, int64."""


class SelectedRows(DiskArray):
    """Rows of an array on disk, in an order of their own."""

    def __init__(self, array: Any, rows: np.ndarray):
        """Takes the array and the indices of its rows, int64."""
        super().__init__((len(rows), *array.shape[1:]), array.dtype)
        self._array, self._rows = array, rows

    def _read(self, rows: slice | np.ndarray) -> np.ndarray:
        return np.asarray(self._array[self._rows[rows]])


def is_on_disk(array: Any) -> bool:
    """Whether rows of an array are read when they are indexed."""
    return isinstance(array, np.memmap | DiskArray)


def parts(array: Any) -> Iterator[Any]:
    """Splits an array by rows into a few megabytes each: one on disk is not read at once."""
    count = max(1, _PART_BYTES // max(1, math.prod(array.shape[1:]) * array.dtype.itemsize))
    for i in range(0, len(array), count):
        yield array[i : i + count]
        _release(array)


def _release(array: Any) -> None:
    """Unmaps the pages that a read-only memory map has read, which stay in the system's cache."""
    is_read_only = isinstance(array, np.memmap) and array.mode == "r"
    pages = getattr(array, "_mmap", None) if is_read_only else None
    if pages is not None and hasattr(mmap, "MADV_DONTNEED"):
        pages.madvise(mmap.MADV_DONTNEED)


def take(array: Any, rows: np.ndarray) -> Any:
    """Takes rows of an array; those of an array on disk are not read yet."""
    if not is_on_disk(array):
        return host_arrays.take(np.asarray(array), rows)
    first = int(rows[0]) if len(rows) else 0
    if np.array_equal(rows, np.arange(first, first + len(rows))):
        if len(rows) == len(array):
            return array
        if isinstance(array, np.memmap):
            return array[first : first + len(rows)]
    return SelectedRows(array, rows)


def rows_of_block(array: Any) -> int:
    """Counts the rows of a block."""
    return max(1, _BLOCK_BYTES // max(1, math.prod(array.shape[1:]) * array.dtype.itemsize))


class Blocks:
    """Goes through an array by blocks; `facts` are its type, shape and digests, for `checked`."""

    def __init__(self, array: Any, dtype: Any = None):
        """Reads an array, as another type if one is given."""
        self._array, self._dtype = array, np.dtype(dtype or array.dtype)
        self._rows, self._digests = rows_of_block(array), list[str]()

    def __iter__(self) -> Iterator[np.ndarray]:
        """Yields the blocks, contiguous."""
        self._digests.clear()
        for first in range(0, len(self._array), self._rows):
            block = np.ascontiguousarray(self._array[first : first + self._rows], self._dtype)
            self._digests.append(_digest(block))
            yield block

    @property
    def facts(self) -> dict[str, Any]:
        """What was read, for JSON."""
        shape = list(map(int, self._array.shape))
        of = {"type": str(self._dtype), "shape": shape, "rows": self._rows}
        return {**of, "digests": list(self._digests)}


class CheckedArray(DiskArray):
    """An array `[rows, ...]` on disk; a block of rows is compared when one of them is read."""

    def __init__(self, array: Any, facts: Mapping[str, Any], name: str):
        """Takes the array and what `Blocks` found of it; `name` is for errors."""
        super().__init__(tuple(array.shape), array.dtype)
        self._array, self._name = array, name
        self._rows, self._digests = int(facts["rows"]), list(facts["digests"])
        self._is_checked = np.zeros(len(self._digests), bool)

    def check(self, blocks: np.ndarray) -> None:
        """Compares blocks that were not compared yet."""
        for block in blocks[~self._is_checked[blocks]].tolist():
            first = block * self._rows
            digest = _digest(np.ascontiguousarray(self._array[first : first + self._rows]))
            if digest != self._digests[block]:
                last = min(first + self._rows, len(self)) - 1
                raise ValueError(
                    f"{self._name} must be as it was written, but was damaged in its rows {first} "
                    f"to {last}; nearest valid choice: restore it from a copy"
                )
            self._is_checked[block] = True

    def check_all(self) -> None:
        """Compares the whole array."""
        self.check(np.arange(len(self._digests)))

    def _read(self, rows: slice | np.ndarray) -> np.ndarray:
        if isinstance(rows, slice):
            self.check(np.arange(rows.start // self._rows, (rows.stop - 1) // self._rows + 1))
        else:
            inside = np.where(rows < 0, rows + len(self), rows)
            self.check(np.unique(np.clip(inside, 0, len(self) - 1) // self._rows))
        return np.asarray(self._array[rows])


def _digest(block: np.ndarray) -> str:
    return files.digest_of([block.reshape(-1).view(np.uint8).data]).hex()


def checked(
    array: Any, facts: Mapping[str, Any] | None, name: str, at_open: int | None = None
) -> Any:
    """Compares an array with its facts: a small one now, a large one as its rows are read."""
    if facts is None:
        return array
    kind, actual = (facts["type"], list(facts["shape"])), (str(array.dtype), list(array.shape))
    checks.require(kind == actual, name, f"be {kind[0]}{kind[1]} as it was written", actual)
    guarded = CheckedArray(array, facts, name)
    if array.nbytes > (AT_OPEN if at_open is None else at_open):
        return guarded
    guarded.check_all()
    return array
