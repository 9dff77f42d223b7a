"""Readers of file formats that several data sets share."""

import contextlib
import gzip
import io
import math
import pathlib
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from fedjax_dp.core import checks, files
from fedjax_dp.core.packages import needed_for

_IDX_TYPES: dict[int, np.dtype] = {
    0x08: np.dtype(np.uint8),
    0x09: np.dtype(np.int8),
    0x0B: np.dtype(">i2"),
    0x0C: np.dtype(">i4"),
    0x0D: np.dtype(">f4"),
    0x0E: np.dtype(">f8"),
}

HDF5_DAMAGE = (OSError, RuntimeError, LookupError, ValueError, TypeError)
# MNIST's have three.
_MOST_DIMENSIONS = 8


def read_bytes(path: pathlib.Path) -> bytes:
    """Reads a file, unpacked if its first bytes are those of gzip."""
    return maybe_gunzip(path.read_bytes(), str(path))


def maybe_gunzip(content: bytes, name: str) -> bytes:
    """Unpacks gzip bytes and passes on all others; `name` is for errors."""
    if content[:2] != b"\x1f\x8b":
        return content
    with files.reading(name, "be an intact gzip file", OSError, EOFError, zlib.error):
        return gzip.decompress(content)


def parse_idx(content: bytes, name: str = "content") -> np.ndarray:
    """Parses unpacked IDX bytes into a read-only array in native byte order."""
    checks.require(
        len(content) >= 4
        and content[:2] == b"\0\0"
        and content[2] in _IDX_TYPES
        and 1 <= content[3] <= _MOST_DIMENSIONS,
        name,
        "start with an IDX header (0, 0, type, dimensions)",
        content[:4],
    )
    dtype, num_dims = _IDX_TYPES[content[2]], content[3]
    start = 4 + 4 * num_dims
    checks.require(len(content) >= start, name, f"have {num_dims} IDX dimensions", len(content))
    shape = tuple(int(n) for n in np.frombuffer(content, ">u4", num_dims, 4))
    expected = start + math.prod(shape) * dtype.itemsize
    rule = f"hold {expected} bytes, as its IDX shape {shape} says"
    checks.require(len(content) == expected, name, rule, len(content))
    array = np.frombuffer(content, dtype, offset=start).reshape(shape)
    return array.astype(dtype.newbyteorder("="), copy=False)


def read_idx(path: pathlib.Path) -> np.ndarray:
    """Reads an IDX file, packed with gzip or plain."""
    return parse_idx(read_bytes(path), str(path))


def require_labelled_images(
    images: np.ndarray, labels: np.ndarray, images_name: str, labels_name: str
) -> None:
    """Requires images `[n, 28, 28]` and labels `[n]`, both bytes, and at least one."""
    fits = images.dtype == np.uint8 and images.shape[1:] == (28, 28) and len(images) > 0
    rule = "hold images of 28x28 bytes"
    checks.require(fits, images_name, rule, f"{images.dtype}{list(images.shape)}")
    fits = labels.dtype == np.uint8 and labels.shape == images.shape[:1]
    rule = f"hold a byte for each of the {len(images)} images in {images_name}"
    checks.require(fits, labels_name, rule, f"{labels.dtype}{list(labels.shape)}")


def require_classes(labels: np.ndarray, num_classes: int, name: str, first: int = 0) -> None:
    """Requires labels from `first` to `first + num_classes - 1`, naming the first wrong row."""
    wrong = np.flatnonzero((labels < first) | (labels >= first + num_classes))
    if len(wrong):
        rule = f"hold labels of {num_classes} classes, from {first} to {first + num_classes - 1}"
        checks.require(False, name, rule, f"{labels[wrong[0]]} in row {wrong[0]}")


def hdf5_clients(
    path: pathlib.Path,
    *fields: str,
    group: str = "examples",
    read: Callable[[Any], Any] = lambda stored: np.asarray(stored[()]),
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Reads what is stored of each client in the layout `examples/CLIENT/FIELD`, which TFF uses."""
    h5py = import_h5py(path)
    with contextlib.ExitStack() as stack:
        with files.reading(path, "be an intact HDF5 file", *HDF5_DAMAGE):
            file = stack.enter_context(h5py.File(path, "r"))
            groups = file.get(group)
            names = list(groups) if isinstance(groups, h5py.Group) else []
        checks.require(bool(names), str(path), f"hold clients under `{group}`", "none")
        for name in names:
            with files.reading(path, f"hold {', '.join(fields)} of client {name!r}", *HDF5_DAMAGE):
                arrays = {field: read(groups[name][field]) for field in fields}
            yield name, arrays


def import_h5py(path: pathlib.Path) -> Any:
    """Imports h5py for a file; the error says how to install it."""
    with needed_for(f"reading {path}", "hdf5"):
        import h5py
    return h5py


def pixels_of(content: bytes, place: str, size: tuple[int, int]) -> np.ndarray:
    """Decodes an image of a given width and height to uint8 `[height, width, 3]`."""
    with needed_for("reading image files", "images"):
        from PIL import Image
    damage = (OSError, SyntaxError, ValueError, Image.DecompressionBombError)
    with files.reading(place, "be an image", *damage):
        opened = Image.open(io.BytesIO(content))
    # Before decoding, which could take any amount of memory if the size is damaged.
    checks.require(opened.size == size, place, f"be {size[0]}x{size[1]} pixels", opened.size)
    with files.reading(place, "be an intact image", *damage):
        return np.asarray(opened if opened.mode == "RGB" else opened.convert("RGB"))
