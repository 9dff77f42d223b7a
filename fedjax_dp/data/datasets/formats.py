"""Readers of file formats that several data sets share."""

import bz2
import contextlib
import gzip
import lzma
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import IO, Any

import numpy as np

from fedjax_dp.core import checks
from fedjax_dp.core.damage import damage_named

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

    Raises:
      ValueError: if it is packed and damaged.
    """
    return maybe_gunzip(path.read_bytes(), str(path))


def read_text(path: pathlib.Path) -> str:
    """Reads a text, unpacked if its first bytes are those of gzip.

    Args:
      path: the file.

    Returns:
      Its text.

    Raises:
      ValueError: if it is damaged, or not in UTF-8.
    """
    content = read_bytes(path)
    with damage_named(path, "text in UTF-8"):
        return content.decode("utf-8")


def maybe_gunzip(content: bytes, name: str = "content") -> bytes:
    """Unpacks bytes that are gzip, and passes on all others.

    Args:
      content: packed or plain bytes.
      name: what to call them in an error.

    Returns:
      Plain bytes.

    Raises:
      ValueError: if they are packed and damaged.
    """
    if content[:2] != b"\x1f\x8b":
        return content
    with damage_named(name, "gzip file"):
        return gzip.decompress(content)


def check_images(
    images: np.ndarray,
    labels: np.ndarray,
    num_classes: int,
    *,
    side: int = 28,
    names: tuple[str, str],
) -> None:
    """Checks what image files hold.

    Args:
      images: `[examples, side, side]`, uint8.
      labels: `[examples]`, integers from 0 on.
      num_classes: how many classes there are.
      side: height and width in pixels.
      names: the files of images and labels.

    Raises:
      ValueError: naming the file, the rule and what was found.
    """
    is_image = images.dtype == np.uint8 and images.ndim == 3 and images.shape[1:] == (side, side)
    rule = f"hold images of {side} x {side} bytes"
    checks.require(is_image, names[0], rule, (str(images.dtype), images.shape))
    checks.require(len(images) > 0, names[0], "hold at least one image", 0)
    rule = f"hold one label for each of the {len(images)} images in {names[0]}"
    checks.require(labels.shape == images.shape[:1], names[1], rule, labels.shape)
    check_labels(labels, num_classes, names[1])


def check_labels(labels: np.ndarray, num_classes: int, name: str) -> None:
    """Checks that labels are classes.

    Args:
      labels: `[examples]`.
      num_classes: how many classes there are.
      name: the file that they are from.

    Raises:
      ValueError: naming the file, the first wrong label and its place.
    """
    checks.require(labels.dtype.kind in "iu", name, "hold whole numbers as labels", labels.dtype)
    wrong = np.flatnonzero((labels < 0) | (labels >= num_classes))
    if len(wrong):
        rule = f"hold labels from 0 to {num_classes - 1}"
        checks.require(False, name, rule, f"{labels[wrong[0]]} as label {wrong[0]}")


def open_packed(path: pathlib.Path) -> IO[bytes]:
    """Opens a file, unpacked if its first bytes are those of gzip, xz or bzip2.

    Args:
      path: the file.

    Returns:
      The open file; reading to its end checks what is packed.
    """
    with path.open("rb") as file:
        start = file.read(6)
    openers: dict[bytes, Callable[..., Any]] = {
        b"\x1f\x8b": gzip.open,
        b"\xfd7zXZ\0": lzma.open,
        b"BZh": bz2.open,
    }
    opener = next((found for magic, found in openers.items() if start.startswith(magic)), None)
    return path.open("rb") if opener is None else opener(path, "rb")


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


@contextlib.contextmanager
def open_hdf5(path: pathlib.Path) -> Iterator[Any]:
    """Opens an HDF5 file for reading.

    Args:
      path: the file.

    Yields:
      The open file.

    Raises:
      ImportError: if the package h5py is not installed.
      ValueError: if the file is damaged.
    """
    try:
        import h5py
    except ImportError as error:
        raise ImportError(
            f"{path} is an HDF5 file, which needs the package h5py: `pip install h5py`"
        ) from error
    with damage_named(path, "HDF5 file"), contextlib.ExitStack() as stack:
        yield stack.enter_context(h5py.File(path, "r"))


def groups_of(
    file: Any, path: pathlib.Path, names: Sequence[str]
) -> Iterator[tuple[str, dict[str, np.ndarray]]]:
    """Reads the groups of `examples` in an HDF5 file, as TensorFlow Federated writes clients.

    Args:
      file: the open file.
      path: what to call it in an error.
      names: the arrays that every group has.

    Yields:
      The name of a group, and its arrays.

    Raises:
      ValueError: naming what is missing.
    """
    examples = file.get("examples")
    has_groups = hasattr(examples, "items")
    checks.require(has_groups, str(path), "hold a group `examples`", sorted(file))
    # What the library raises for descriptions that are harmed.
    with damage_named(path, "HDF5 file", KeyError, RuntimeError, TypeError):
        for client, group in examples.items():
            found = sorted(group) if hasattr(group, "items") else []
            rule = f"hold {' and '.join(names)}"
            checks.require(set(names) <= set(found), f"{path}, examples/{client},", rule, found)
            yield client, {name: np.asarray(group[name][()]) for name in names}
