"""Arrays in host memory that devices on a CPU read in place.

JAX copies an array that does not start at a multiple of `ALIGNMENT` bytes, once for each device.
NumPy promises 16.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

ALIGNMENT = 64


def empty(shape: Sequence[int], dtype: Any) -> np.ndarray:
    """Allocates an array without setting its entries."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    memory = np.empty(size + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + size].view(dtype).reshape(shape)


def take(array: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Copies rows, which all have to exist."""
    out = empty((len(rows), *array.shape[1:]), array.dtype)
    # With "raise", NumPy would write to a buffer first.
    return np.take(array, rows, axis=0, out=out, mode="clip") if len(rows) else out


def joined(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Copies arrays one after another, in the type that NumPy would join them in."""
    num_rows = sum(len(part) for part in parts)
    out = empty((num_rows, *parts[0].shape[1:]), np.result_type(*parts))
    return np.concatenate(parts, out=out)
