"""Digests of stored arrays by blocks of rows, compared when rows are first read."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from fedjax_dp.core import checks, files
from fedjax_dp.data.disk_arrays import DiskArray

# Bytes of a block, unless a row is larger.
_BLOCK_BYTES = 1 << 20
# Arrays up to this size are compared as a whole when they are opened.
AT_OPEN = 1 << 26


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
            found = _digest(np.ascontiguousarray(self._array[first : first + self._rows]))
            if found != self._digests[block]:
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
    kind, found = (facts["type"], list(facts["shape"])), (str(array.dtype), list(array.shape))
    checks.require(kind == found, name, f"be {kind[0]}{kind[1]} as it was written", found)
    guarded = CheckedArray(array, facts, name)
    if array.nbytes > (AT_OPEN if at_open is None else at_open):
        return guarded
    guarded.check_all()
    return array
