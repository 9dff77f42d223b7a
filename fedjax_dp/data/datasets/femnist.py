"""FEMNIST: handwritten digits and letters with their writers as natural clients."""

import pathlib
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np

from fedjax_dp.core import checks, files
from fedjax_dp.data.datasets.base import Dataset, ImageDtype, as_images
from fedjax_dp.data.datasets.catalog import locate
from fedjax_dp.data.datasets.formats import hdf5_clients, require_classes

# images [n, 28, 28] as bytes, dark on bright; labels [n]; the writer
_Writer = tuple[np.ndarray, np.ndarray, str]


def load(
    data_dir: pathlib.Path,
    *,
    only_digits: bool = False,
    inverted: bool = True,
    source: Literal["leaf", "hdf5"] | None = None,
    dtype: ImageDtype = "float32",
) -> Dataset:
    """Loads FEMNIST (Caldas et al. 2018) from LEAF's JSON files or from the HDF5 copy of them.

    Classes are digits (0 to 9), capitals (10 to 35) and small letters (36 to 61). The files define
    the test part: the HDF5 copy has the same writers in both parts, LEAF can also split by writer.

    Args:
      data_dir: the data directory.
      only_digits: keep only the ten digits.
      inverted: return bright ink on a dark ground, as in MNIST; False keeps the dark ink on white
        of the files, which much of the literature uses.
      source: "leaf" or "hdf5"; None takes the first that exists.
      dtype: "float32" for numbers in [0, 1], or "uint8" for bytes.

    Returns:
      Images `[n, 28, 28, 1]` and labels, with the writers' names as client ids.
    """
    located = locate("femnist", data_dir, source)
    read = _read_leaf if located.source.name == "leaf" else _read_hdf5
    parts, clients = [], []
    for path in located.paths.values():
        images, labels, writers = _collect(read(path), only_digits, path)
        if inverted:
            np.subtract(255, images, out=images)
        parts.append({"x": as_images(images[..., np.newaxis], dtype), "y": labels})
        clients.append(writers)
    return Dataset(
        "femnist",
        parts[0],
        parts[1],
        num_classes=10 if only_digits else 62,
        task="classification",
        train_clients=clients[0],
        test_clients=clients[1],
        origin=located.source.name,
    )


def _collect(
    writers: Iterator[_Writer], only_digits: bool, path: pathlib.Path
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    images, labels, names = [], [], []
    for x, y, name in writers:
        keep = y < 10 if only_digits else slice(None)
        images.append(x[keep])
        labels.append(y[keep])
        names.append(name)
    checks.require(bool(names), str(path), "hold writers", "none")
    sizes = [len(y) for y in labels]
    return np.concatenate(images), np.concatenate(labels), np.repeat(np.asarray(names), sizes)


def _writer(x: Any, y: Any, user: str, place: str) -> _Writer:
    """Requires images of 28x28 numbers in [0, 1], each with a class."""
    with files.reading(place, "hold rows of one length in `x` and `y`", ValueError):
        pixels, labels = np.asarray(x), np.asarray(y)
    checks.require(pixels.dtype.kind in "iuf", place, "hold numbers as pixels", pixels.dtype)
    labels = labels.reshape(-1) if labels.size else np.zeros(0, np.int32)
    checks.require(labels.dtype.kind in "iu", place, "hold integers as labels", labels.dtype)
    require_classes(labels, 62, place)
    fits = pixels.size == 28 * 28 * len(labels) and pixels.shape[:1] == labels.shape
    rule = f"hold an image of 28x28 pixels for each of its {len(labels)} labels"
    checks.require(fits, place, rule, pixels.shape)
    # NaN is not in any range.
    is_inside = bool(np.all((pixels >= 0) & (pixels <= 1)))
    checks.require(is_inside, place, "hold pixels in [0, 1]", "others")
    pixels = np.rint(pixels.reshape(-1, 28, 28) * np.float32(255)).astype(np.uint8)
    return pixels, labels.astype(np.int32), user


def _read_leaf(folder: pathlib.Path) -> Iterator[_Writer]:
    for path in sorted(folder.glob("*.json")):
        content = files.parse_json(files.read_text(path), path)
        whole: dict[str, Any] = content if isinstance(content, dict) else {}
        users, data = whole.get("users"), whole.get("user_data")
        if not isinstance(users, list) or not isinstance(data, dict):
            raise ValueError(f"{path} must hold `users`, a list, and `user_data`, an object")
        # Compared as strings: not every JSON value can be sorted.
        are_same = sorted(map(repr, users)) == sorted(map(repr, data))
        checks.require(are_same, str(path), "hold once each of `users` in `user_data`", users)
        for user in users:
            place, own = f"{path}, user {user!r},", data[user]
            has_both = isinstance(own, dict) and own.keys() >= {"x", "y"}
            checks.require(has_both, place, "hold `x` and `y`", type(own))
            # NumPy would take a boolean for a number.
            are_whole = isinstance(own["y"], list) and all(type(y) is int for y in own["y"])
            checks.require(are_whole, place, "hold a list of integers in `y`", own["y"])
            yield _writer(own["x"], own["y"], user, place)


def _read_hdf5(path: pathlib.Path) -> Iterator[_Writer]:
    for user, arrays in hdf5_clients(path, "pixels", "label"):
        yield _writer(arrays["pixels"], arrays["label"], user, f"{path}, user {user!r},")
