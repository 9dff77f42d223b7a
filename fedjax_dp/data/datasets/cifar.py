"""CIFAR-10 from its published binary archive or from an archive of image files."""

import lzma
import pathlib
import tarfile
import zlib
from collections.abc import Iterator
from typing import Literal

import numpy as np

from fedjax_dp.core import checks, files
from fedjax_dp.data.datasets.base import Dataset, ImageDtype, as_images
from fedjax_dp.data.datasets.catalog import locate
from fedjax_dp.data.datasets.formats import pixels_of

CLASS_NAMES = (
    *("airplane", "automobile", "bird", "cat", "deer"),
    *("dog", "frog", "horse", "ship", "truck"),
)

_ROW = 1 + 3 * 32 * 32
_IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp")
_ARCHIVE_DAMAGE = (tarfile.TarError, EOFError, OSError, zlib.error, lzma.LZMAError)

Part = tuple[np.ndarray, np.ndarray]


def load(
    data_dir: pathlib.Path,
    *,
    source: Literal["binary archive", "jpeg archive"] | None = None,
    dtype: ImageDtype = "float32",
) -> Dataset:
    """Loads CIFAR-10.

    Args:
      source: "binary archive" (the published file) or "jpeg archive" (a .tar.xz of folders
        `train/CLASS/` and `test/CLASS/`, whose images may be lossy copies); None takes the first
        that exists. The result's `origin` says which was read.
      dtype: "float32" for numbers in [0, 1], or "uint8" for bytes.

    Returns:
      Images `[n, 32, 32, 3]` and labels 0 to 9, without natural clients.
    """
    located = locate("cifar10", data_dir, source)
    (path,) = located.paths.values()
    is_binary = located.source.name == "binary archive"
    train, test = _from_batches(path) if is_binary else _from_images(path)
    return Dataset(
        "cifar10",
        {"x": as_images(train[0], dtype), "y": train[1]},
        {"x": as_images(test[0], dtype), "y": test[1]},
        num_classes=10,
        task="classification",
        class_names=CLASS_NAMES,
        origin=located.source.name,
    )


def parse_binary(content: bytes, name: str) -> Part:
    """Reads a binary batch: rows of one label byte and three planes of 32x32 bytes."""
    fits = len(content) > 0 and len(content) % _ROW == 0
    rule = f"hold rows of {_ROW} bytes"
    checks.require(fits, name, rule, f"{len(content)} bytes")
    rows = np.frombuffer(content, np.uint8).reshape(-1, _ROW)
    is_whole = bool(np.all(rows[:, 0] < 10))
    checks.require(is_whole, name, "hold a label from 0 to 9 for each image", "others")
    images = rows[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    return np.ascontiguousarray(images), rows[:, 0].astype(np.int32)


def _from_batches(path: pathlib.Path) -> tuple[Part, Part]:
    """Reads the five training batches, joined by name, and the test batch."""
    contents = {name: content for name, content in _members(path) if name.endswith(".bin")}
    names = sorted(contents)
    train, test = (
        [parse_binary(contents[name], f"{path}/{name}") for name in names if kind in name]
        for kind in ("data_batch", "test_batch")
    )
    rule = "hold five training batches and a test batch"
    checks.require(len(train) == 5 and len(test) == 1, str(path), rule, names)
    return (np.concatenate([x for x, _ in train]), np.concatenate([y for _, y in train])), test[0]


def _members(path: pathlib.Path) -> Iterator[tuple[str, bytes]]:
    """Reads the plain files of an archive one after another, without unpacking to disk."""
    with (
        files.reading(path, "be an intact archive", *_ARCHIVE_DAMAGE),
        tarfile.open(path) as archive,
    ):
        for member in archive:
            content = archive.extractfile(member) if member.isfile() else None
            if content is not None:
                yield member.name, content.read()
        assert archive.fileobj is not None
        # Checksums are verified where a file ends, and a damaged header ends an archive early.
        rest = archive.fileobj.read(-1)
    checks.require(not rest.strip(b"\0"), str(path), "end with its last member", "more after it")


def _from_images(path: pathlib.Path) -> tuple[Part, Part]:
    """Decodes the images of both parts, in the order of their names."""
    decoded: dict[str, list[tuple[str, int, np.ndarray]]] = {"train": [], "test": []}
    for name, content in _members(path):
        if not name.lower().endswith(_IMAGE_SUFFIXES):
            continue
        parts, place = pathlib.PurePosixPath(name).parts, f"{path}/{name}"
        part, class_name = parts[-3:-1] if len(parts) >= 3 else ("", "")
        checks.require(part in decoded, place, "be in train/CLASS/ or test/CLASS/", part)
        checks.one_of(f"the class folder of {place}", class_name, CLASS_NAMES)
        pixels = pixels_of(content, place, (32, 32))
        decoded[part].append((name, CLASS_NAMES.index(class_name), pixels))
    result = []
    for part, rows in decoded.items():
        checks.require(bool(rows), str(path), f"hold images in {part}/CLASS/", "none")
        rows.sort(key=lambda row: row[0])
        labels = np.array([label for _, label, _ in rows], dtype=np.int32)
        result.append((np.stack([pixels for _, _, pixels in rows]), labels))
    return result[0], result[1]
