"""FEMNIST: handwritten digits and letters with their writers as natural clients."""

import json
import pathlib
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np

from fedjax_dp.core import checks
from fedjax_dp.core.damage import damage_named
from fedjax_dp.data.datasets.base import Dataset, ImageDtype, as_images
from fedjax_dp.data.datasets.catalog import CATALOG
from fedjax_dp.data.datasets.files import locate
from fedjax_dp.data.datasets.formats import check_labels, groups_of, open_hdf5

# images [n, 28, 28] as bytes, dark on bright; labels [n]; the writer
_Writer = tuple[np.ndarray, np.ndarray, str]
_LEAF = ("users", "user_data")


def load(
    data_dir: pathlib.Path,
    *,
    only_digits: bool = False,
    inverted: bool = True,
    source: Literal["leaf", "hdf5"] | None = None,
    dtype: ImageDtype = "float32",
) -> Dataset:
    """Loads FEMNIST (Caldas et al. 2018) from LEAF's JSON files or from the HDF5 copy of them.

    Classes are digits (0 to 9), capitals (10 to 35) and small letters (36 to 61). Which writers and
    images are for testing is as the files say: the HDF5 copy holds images of the same writers in
    both parts, LEAF can also part the writers.

    Args:
      data_dir: the data directory.
      only_digits: keep the ten digits alone.
      inverted: return bright ink on a dark ground, as in MNIST; False keeps the dark ink on white
        of the files, which much of the literature uses.
      source: "leaf" or "hdf5"; None takes the first that is there.
      dtype: "float32" for numbers in [0, 1], or "uint8" for bytes.

    Returns:
      Images `[n, 28, 28, 1]` and labels, with the writers' names as client ids.

    Raises:
      MissingDataError: if files are missing.
      ImportError: if an HDF5 file is read and h5py is not installed.
      ValueError: if a file is damaged.
    """
    located = locate(CATALOG["femnist"], data_dir, source)
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
    flat = np.concatenate(labels)
    return np.concatenate(images), flat, np.repeat(np.asarray(names), sizes)


def _writer(pixels: Any, labels: Any, name: str, place: str) -> _Writer:
    x, y = _as_bytes(pixels, place), _as_labels(labels, place)
    checks.require(len(x) == len(y), place, f"have one label for each of {len(x)} images", len(y))
    return x, y, name


def _as_bytes(pixels: Any, place: str) -> np.ndarray:
    pixels = _as_array(pixels, np.float32, place)
    is_image = pixels.ndim > 0 and pixels[:1].size in (0, 28 * 28)
    checks.require(is_image, place, "have images of 28 x 28 pixels", pixels.shape)
    inside = bool(np.all((pixels >= 0) & (pixels <= 1)))
    checks.require(inside, place, "have pixels in [0, 1]", "another")
    return np.rint(pixels.reshape(-1, 28, 28) * 255).astype(np.uint8)


def _as_labels(labels: Any, place: str) -> np.ndarray:
    labels = _as_array(labels, None, place)
    labels = labels.astype(np.int32) if labels.size == 0 else labels
    check_labels(labels, 62, place)
    return labels.astype(np.int32)


def _as_array(values: Any, dtype: Any, place: str) -> np.ndarray:
    try:
        return np.asarray(values, dtype)
    except (ValueError, TypeError, OverflowError) as error:
        raise ValueError(f"{place} must hold arrays of numbers: {error}") from error


def _is_leaf(content: Any) -> bool:
    users, data = (content.get(k) if isinstance(content, dict) else None for k in _LEAF)
    if not isinstance(users, list) or not isinstance(data, dict):
        return False
    known = [isinstance(u, str) and isinstance(data.get(u), dict) for u in users]
    return bool(users) and all(known) and all({"x", "y"} <= set(data[user]) for user in users)


def _read_leaf(folder: pathlib.Path) -> Iterator[_Writer]:
    for path in sorted(folder.glob("*.json")):
        with damage_named(path, "JSON file"):
            content = json.loads(path.read_text(encoding="utf-8"))
        rule = "hold `users`, and `x` and `y` of each in `user_data`"
        checks.require(_is_leaf(content), str(path), rule, str(type(content).__name__))
        for user in content["users"]:
            data, place = content["user_data"][user], f"{path}, user {user!r},"
            yield _writer(data["x"], data["y"], user, place)


def _read_hdf5(path: pathlib.Path) -> Iterator[_Writer]:
    with open_hdf5(path) as file:
        for name, group in groups_of(file, path, ("pixels", "label")):
            place = f"{path}, writer {name!r},"
            yield _writer(group["pixels"], group["label"].reshape(-1), name, place)
