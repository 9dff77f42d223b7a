"""Readers of file formats that several data sets share."""

import gzip
import pathlib
from typing import Any

import numpy as np

from fedjax_dp.core import checks

_IDX_TYPES: dict[int, np.dtype] = {
    0x08: np.dtype(np.uint8),
    0x09: np.dtype(np.int8),
    0x0B: np.dtype(">i2"),
    0x0C: np.dtype(">i4"),
    0x0D: np.dtype(">f4"),
    0x0E: np.dtype(">f8"),
}


def read_bytes(path: pathlib.Path) -> bytes:
    """Reads a file, unpacked if its first bytes are those of gzip.

    Args:
      path: the file.

    Returns:
      Its content.
    """
    return maybe_gunzip(path.read_bytes())


def maybe_gunzip(content: bytes) -> bytes:
    """Unpacks bytes that are gzip, and passes on all others.

    Args:
      content: packed or plain bytes.

    Returns:
      Plain bytes.
    """
    return gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content


def parse_idx(content: bytes, name: str = "content") -> np.ndarray:
    """Reads an array in the IDX format of MNIST.

    The format is two zero bytes, a type byte, the number of dimensions, each dimension as a
    big-endian 32-bit number, then the values in row-major order.

    Args:
      content: the bytes of the file, not packed.
      name: what to call them in an error.

    Returns:
      The array in native byte order, read-only.

    Raises:
      ValueError: if the header is none of IDX or the length is not what it says.
    """
    checks.require(
        len(content) >= 4 and content[:2] == b"\0\0" and content[2] in _IDX_TYPES,
        name,
        "start with an IDX header (0, 0, type, dimensions)",
        content[:4],
    )
    dtype, num_dims = _IDX_TYPES[content[2]], content[3]
    start = 4 + 4 * num_dims
    checks.require(len(content) >= start, name, f"have {num_dims} IDX dimensions", len(content))
    shape = tuple(int(n) for n in np.frombuffer(content, ">u4", num_dims, 4))
    expected = start + int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    checks.require(
        len(content) == expected,
        name,
        f"hold {expected} bytes, as its IDX shape {shape} says",
        len(content),
    )
    array = np.frombuffer(content, dtype, offset=start).reshape(shape)
    return array.astype(dtype.newbyteorder("="), copy=False)


def read_idx(path: pathlib.Path) -> np.ndarray:
    """Reads an IDX file, packed with gzip or plain.

    Args:
      path: the file.

    Returns:
      The array, read-only.

    Raises:
      ValueError: if the file is damaged.
    """
    return parse_idx(read_bytes(path), str(path))


def import_h5py(path: pathlib.Path) -> Any:
    """Imports the HDF5 library, or says how to get it.

    Args:
      path: the file that needs it.

    Returns:
      The module `h5py`.

    Raises:
      ImportError: if it is not installed.
    """
    try:
        import h5py
    except ImportError as error:
        raise ImportError(
            f"{path} is an HDF5 file, which needs the package h5py: `pip install h5py`"
        ) from error
    return h5py
