"""CIFAR-10 from its published batches or from a tree of image files."""

import io
import lzma
import pathlib
import pickle
import tarfile
import zlib
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np

from fedjax_dp.core import checks, files
from fedjax_dp.data.datasets.base import Dataset, ImageDtype, as_images
from fedjax_dp.data.datasets.catalog import CATALOG
from fedjax_dp.data.datasets.files import Located, locate
from fedjax_dp.data.datasets.images import pixels_of

CLASS_NAMES = (
    "airplane",
    "automobile",
    "bird",
    "cat",
    "deer",
    "dog",
    "frog",
    "horse",
    "ship",
    "truck",
)

_ROW = 1 + 3 * 32 * 32
_IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp")

# The types that NumPy arrays are made of; a pickle that asks for anything else is refused.
_SAFE_GLOBALS = {
    ("_codecs", "encode"),
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "_reconstruct"),
}

# What unpickling raises for bytes that are no pickle, by the manual, and what a wrong length does.
_PICKLE_DAMAGE = (
    pickle.UnpicklingError,
    EOFError,
    AttributeError,
    ImportError,
    LookupError,
    MemoryError,
    OverflowError,
    TypeError,
    ValueError,
)
_ARCHIVE_DAMAGE = (tarfile.TarError, EOFError, OSError, zlib.error, lzma.LZMAError)

Part = tuple[np.ndarray, np.ndarray]


Source = Literal["binary", "binary archive", "python", "python archive", "images", "jpeg archive"]


def load(
    data_dir: pathlib.Path, *, source: Source | None = None, dtype: ImageDtype = "float32"
) -> Dataset:
    """Loads CIFAR-10.

    Args:
      data_dir: the data directory.
      source: "binary", "binary archive", "python", "python archive" (the published files, unpacked
        or not), "images" (folders `train/CLASS/` and `test/CLASS/`) or "jpeg archive" (the same in
        a .tar.xz); None takes the first that is there. Image files may be lossy copies; the
        result's `origin` says which was read.
      dtype: "float32" for numbers in [0, 1], or "uint8" for bytes.

    Returns:
      Images `[n, 32, 32, 3]` and labels 0 to 9, without natural clients.

    Raises:
      MissingDataError: if files are missing.
      ImportError: if image files are read and pillow is not installed.
      ValueError: if a file is damaged.
    """
    located = locate(CATALOG["cifar10"], data_dir, source)
    readers = {
        "binary": _from_binary,
        "binary archive": _from_binary_archive,
        "python": _from_python,
        "python archive": _from_python_archive,
        "images": _from_tree,
        "jpeg archive": _from_image_archive,
    }
    train, test = readers[located.source.name](located)
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
    """Reads a binary batch: rows of one label byte and three planes of 32x32 bytes.

    Args:
      content: the bytes of the batch.
      name: what to call them in an error.

    Returns:
      Images `[n, 32, 32, 3]`, uint8, and labels `[n]`, int32.

    Raises:
      ValueError: if the length is no multiple of a row or a label is above 9.
    """
    checks.require(
        len(content) > 0 and len(content) % _ROW == 0,
        name,
        f"hold rows of {_ROW} bytes",
        f"{len(content)} bytes",
    )
    rows = np.frombuffer(content, np.uint8).reshape(-1, _ROW)
    return _from_planes(rows[:, 1:], rows[:, 0], name)


def parse_python(content: bytes, name: str) -> Part:
    """Reads a pickled batch without running anything that it might hold.

    Args:
      content: the bytes of the batch.
      name: what to call them in an error.

    Returns:
      Images `[n, 32, 32, 3]`, uint8, and labels `[n]`, int32.

    Raises:
      ValueError: if the pickle asks for anything but NumPy arrays, or holds no batch.
    """
    with files.reading(name, "be a pickled CIFAR batch", *_PICKLE_DAMAGE):
        batch = _ArrayUnpickler(io.BytesIO(content), encoding="bytes").load()
    # Python 2 wrote the published batches, whose keys are bytes.
    held = batch if isinstance(batch, dict) else {}
    planes, labels = (held.get(key.encode(), held.get(key)) for key in ("data", "labels"))
    if not (isinstance(planes, np.ndarray) and isinstance(labels, list)):
        found = type(planes), type(labels)
        raise ValueError(f"{name} must hold `data` and `labels`, an array and a list, got {found}")
    checks.require(
        planes.dtype == np.uint8 and planes.shape[1:] == (_ROW - 1,),
        name,
        f"hold uint8 rows of {_ROW - 1} values",
        (planes.dtype, planes.shape),
    )
    # A truth value is an int to Python.
    are_whole = all(type(label) is int for label in labels)
    checks.require(are_whole, name, "hold whole numbers as `labels`", "others")
    return _from_planes(planes, np.array(labels), name)


class _ArrayUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _SAFE_GLOBALS:
            raise pickle.UnpicklingError(f"{module}.{name} is not allowed in a data file")
        if name == "_reconstruct":
            module = "numpy._core.multiarray"
        return super().find_class(module, name)


def _from_planes(planes: np.ndarray, labels: np.ndarray, name: str) -> Part:
    is_whole = len(labels) == len(planes) > 0 and bool(np.all((labels >= 0) & (labels < 10)))
    checks.require(is_whole, name, "hold a label from 0 to 9 for each image", "others")
    images = planes.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    return np.ascontiguousarray(images), labels.astype(np.int32)


def _join(parts: list[Part]) -> Part:
    return np.concatenate([x for x, _ in parts]), np.concatenate([y for _, y in parts])


def _from_batches(contents: dict[str, bytes], parse: Any, where: str) -> tuple[Part, Part]:
    train = [
        parse(contents[name], f"{where}/{name}")
        for name in sorted(contents)
        if "data_batch" in name
    ]
    test = [
        parse(contents[name], f"{where}/{name}")
        for name in sorted(contents)
        if "test_batch" in name
    ]
    checks.require(
        len(train) == 5 and len(test) == 1,
        where,
        "hold five training batches and a test batch",
        sorted(contents),
    )
    return _join(train), test[0]


def _from_binary(located: Located) -> tuple[Part, Part]:
    return _from_files(located, parse_binary)


def _from_python(located: Located) -> tuple[Part, Part]:
    return _from_files(located, parse_python)


def _from_files(located: Located, parse: Any) -> tuple[Part, Part]:
    folder = str(next(iter(located.paths.values())).parent)
    contents = {name: path.read_bytes() for name, path in located.paths.items()}
    return _from_batches(contents, parse, folder)


def _from_binary_archive(located: Located) -> tuple[Part, Part]:
    (path,) = located.paths.values()
    batches = {name: content for name, content in _members(path, "_batch") if ".bin" in name}
    return _from_batches(batches, parse_binary, str(path))


def _from_python_archive(located: Located) -> tuple[Part, Part]:
    (path,) = located.paths.values()
    return _from_batches(dict(_members(path, "_batch")), parse_python, str(path))


def _members(path: pathlib.Path, pattern: str = "") -> Iterator[tuple[str, bytes]]:
    """Reads the plain files of an archive one after the other, without unpacking to disk."""
    with files.reading(path, "be a whole archive", *_ARCHIVE_DAMAGE), tarfile.open(path) as archive:
        for member in archive:
            content = archive.extractfile(member) if member.isfile() else None
            if content is not None and pattern in member.name:
                yield member.name, content.read()
        assert archive.fileobj is not None
        # Checksums are looked at where a file ends, and a damaged header ends an archive early.
        rest = archive.fileobj.read(-1)
    checks.require(not rest.strip(b"\0"), str(path), "end with its last member", "more behind it")


def _from_image_archive(located: Located) -> tuple[Part, Part]:
    (path,) = located.paths.values()
    return _from_images(_members(path), str(path))


def _from_tree(located: Located) -> tuple[Part, Part]:
    root = located.paths["train"].parent
    return _from_images(
        (
            (path.relative_to(root).as_posix(), path.read_bytes())
            for part in ("train", "test")
            for path in sorted(located.paths[part].rglob("*"))
            if _is_image(path.name)
        ),
        str(root),
    )


def _is_image(name: str) -> bool:
    return name.lower().endswith(_IMAGE_SUFFIXES)


def _from_images(images: Iterator[tuple[str, bytes]], where: str) -> tuple[Part, Part]:
    decoded: dict[str, list[tuple[str, int, np.ndarray]]] = {"train": [], "test": []}
    for name, content in images:
        if not _is_image(name):
            continue
        path, place = pathlib.PurePosixPath(name), f"{where}/{name}"
        part, class_name = path.parts[-3:-1] if len(path.parts) >= 3 else ("", "")
        checks.require(part in decoded, place, "lie in train/CLASS/ or test/CLASS/", part)
        checks.one_of(f"the class folder of {place}", class_name, CLASS_NAMES)
        pixels = pixels_of(content, place, (32, 32))
        decoded[part].append((name, CLASS_NAMES.index(class_name), pixels))
    result = []
    for part, rows in decoded.items():
        checks.require(bool(rows), where, f"hold images in {part}/CLASS/", "none")
        rows.sort(key=lambda row: row[0])
        labels = np.array([label for _, label, _ in rows], dtype=np.int32)
        result.append((np.stack([pixels for _, _, pixels in rows]), labels))
    return result[0], result[1]
