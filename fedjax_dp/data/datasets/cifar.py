"""CIFAR-10 from its published batches or from a tree of image files."""

import contextlib
import io
import pathlib
import pickle
import tarfile
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Literal

import numpy as np

from fedjax_dp.core import checks
from fedjax_dp.core.damage import damage_named
from fedjax_dp.data.datasets.base import Dataset, ImageDtype, as_images
from fedjax_dp.data.datasets.catalog import CATALOG
from fedjax_dp.data.datasets.files import Located, locate
from fedjax_dp.data.datasets.formats import check_images, open_packed

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

_BLOCK = 2**20
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
    readers: dict[str, Callable[[Located], tuple[Part, Part]]] = {
        "binary": partial(_from_files, parse=parse_binary),
        "binary archive": partial(_from_archive, parse=parse_binary, ending=".bin"),
        "python": partial(_from_files, parse=parse_python),
        "python archive": partial(_from_archive, parse=parse_python),
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
    try:
        batch = _ArrayUnpickler(io.BytesIO(content), encoding="bytes").load()
    except Exception as error:
        # A harmed pickle calls the constructors of arrays with anything, and so raises anything.
        raise ValueError(f"{name} must be a pickled CIFAR batch, got: {error}") from error
    batch = {
        key.decode() if isinstance(key, bytes) else key: value
        for key, value in (batch.items() if isinstance(batch, dict) else ())
    }
    checks.require(
        {"data", "labels"} <= set(batch), name, "hold `data` and `labels`", sorted(batch)
    )
    planes = np.asarray(batch["data"], None if isinstance(batch["data"], np.ndarray) else object)
    checks.require(
        planes.dtype == np.uint8 and planes.shape[1:] == (_ROW - 1,),
        name,
        f"hold uint8 rows of {_ROW - 1} values",
        (str(planes.dtype), planes.shape),
    )
    labels = batch["labels"]
    is_list = isinstance(labels, list) and all(type(label) is int for label in labels)
    rule = "hold a list of whole numbers as labels"
    checks.require(is_list, name, rule, type(labels).__name__)
    return _from_planes(planes, np.asarray(labels), name)


class _ArrayUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _SAFE_GLOBALS:
            raise pickle.UnpicklingError(f"{module}.{name} is not allowed in a data file")
        if name == "_reconstruct":
            module = "numpy._core.multiarray"
        return super().find_class(module, name)


def _from_planes(planes: np.ndarray, labels: np.ndarray, name: str) -> Part:
    images = np.ascontiguousarray(planes.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))
    check_images(images[..., 0], labels, 10, side=32, names=(name, name))
    return images, labels.astype(np.int32)


def _join(parts: list[Part]) -> Part:
    return np.concatenate([x for x, _ in parts]), np.concatenate([y for _, y in parts])


def _from_batches(contents: dict[str, bytes], parse: Any, place: pathlib.Path) -> tuple[Part, Part]:
    def named(start: str) -> list[Part]:
        names = [n for n in sorted(contents) if pathlib.PurePosixPath(n).name.startswith(start)]
        return [parse(contents[name], name) for name in names]

    train, test = named("data_batch"), named("test_batch")
    is_whole = len(train) == 5 and len(test) == 1
    rule = "hold five training batches and a test batch"
    checks.require(is_whole, str(place), rule, sorted(contents))
    return _join(train), test[0]


def _from_files(located: Located, parse: Any) -> tuple[Part, Part]:
    paths = list(located.paths.values())
    return _from_batches({str(p): p.read_bytes() for p in paths}, parse, paths[0].parent)


def _from_archive(located: Located, parse: Any, ending: str = "") -> tuple[Part, Part]:
    (path,) = located.paths.values()
    contents = {n: c for n, c in _members(path) if n.endswith(ending)}
    return _from_batches(contents, parse, path)


def _members(path: pathlib.Path) -> Iterator[tuple[str, bytes]]:
    """Reads the plain files of an archive one after the other, without unpacking to disk."""
    with damage_named(path, "tar archive"), open_packed(path) as packed:
        with tarfile.open(fileobj=packed, mode="r|") as archive:
            for member in archive:
                content = archive.extractfile(member) if member.isfile() else None
                if content is not None:
                    yield f"{path}/{member.name}", content.read()
        # The checksum of what is packed stands behind the end of the archive.
        while packed.read(_BLOCK):
            pass


def _from_image_archive(located: Located) -> tuple[Part, Part]:
    (path,) = located.paths.values()
    return _from_images(_members(path), path)


def _from_tree(located: Located) -> tuple[Part, Part]:
    files = (
        (path.as_posix(), path.read_bytes())
        for part in ("train", "test")
        for path in sorted(located.paths[part].rglob("*"))
        if path.is_file() or path.suffix.lower() in _IMAGE_SUFFIXES
    )
    return _from_images(files, located.paths["train"].parent)


@contextlib.contextmanager
def _image_named(name: str) -> Iterator[None]:
    """Names an image that cannot be decoded."""
    try:
        yield
    except Exception as error:
        # The library raises errors of many kinds for images that are cut off or none.
        raise ValueError(f"{name} must be a whole image: {error}") from error


def _from_images(files: Iterator[tuple[str, bytes]], place: pathlib.Path) -> tuple[Part, Part]:
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError(
            "reading image files needs the package pillow: `pip install 'fedjax-dp[images]'`"
        ) from error
    decoded: dict[str, list[tuple[str, int, np.ndarray]]] = {"train": [], "test": []}
    for name, content in files:
        path = pathlib.PurePosixPath(name)
        if path.suffix.lower() not in _IMAGE_SUFFIXES:
            continue
        part, class_name = path.parts[-3:-1] if len(path.parts) >= 3 else ("", "")
        checks.require(part in decoded, name, "lie in train/CLASS/ or test/CLASS/", part)
        checks.one_of(f"the class folder of {name}", class_name, CLASS_NAMES)
        with _image_named(name), Image.open(io.BytesIO(content)) as image:
            pixels = np.asarray(image if image.mode == "RGB" else image.convert("RGB"))
        checks.require(pixels.shape == (32, 32, 3), name, "be 32x32 pixels", pixels.shape)
        decoded[part].append((name, CLASS_NAMES.index(class_name), pixels))
    result = []
    for part, rows in decoded.items():
        checks.require(bool(rows), f"{place}: {part}", "hold images", 0)
        rows.sort(key=lambda row: row[0])
        labels = np.array([label for _, label, _ in rows], dtype=np.int32)
        result.append((np.stack([pixels for _, _, pixels in rows]), labels))
    return result[0], result[1]
