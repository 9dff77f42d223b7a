"""Arrays on disk or in an object store, of which indexing reads what is asked for alone."""

import abc
import math
import mmap
from collections.abc import Iterator
from typing import Any

import numpy as np

from fedjax_dp.data import host_arrays

# Bytes of an array that are read at once.
_PART_BYTES = 1 << 24


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
