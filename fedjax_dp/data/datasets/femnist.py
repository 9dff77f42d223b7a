"""FEMNIST: handwritten digits and letters with their writers as natural clients."""

import json
import pathlib
from collections.abc import Iterator
from typing import Literal

import numpy as np

from fedjax_dp.core import checks
from fedjax_dp.data.datasets.base import Dataset, ImageDtype, as_images
from fedjax_dp.data.datasets.catalog import CATALOG
from fedjax_dp.data.datasets.files import locate
from fedjax_dp.data.datasets.formats import import_h5py

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
    checks.require(
        bool(np.all((flat >= 0) & (flat < 62))), str(path), "hold labels from 0 to 61", "another"
    )
    return np.concatenate(images), flat, np.repeat(np.asarray(names), sizes)


def _as_bytes(pixels: np.ndarray) -> np.ndarray:
    return np.rint(pixels.reshape(-1, 28, 28) * 255).astype(np.uint8)


def _read_leaf(folder: pathlib.Path) -> Iterator[_Writer]:
    for path in sorted(folder.glob("*.json")):
        content = json.loads(path.read_text(encoding="utf-8"))
        for user in content["users"]:
            data = content["user_data"][user]
            pixels = np.asarray(data["x"], dtype=np.float32)
            yield _as_bytes(pixels), np.asarray(data["y"], dtype=np.int32), user


def _read_hdf5(path: pathlib.Path) -> Iterator[_Writer]:
    with import_h5py(path).File(path, "r") as file:
        for name, group in file["examples"].items():
            labels = np.asarray(group["label"][()], dtype=np.int32).reshape(-1)
            yield _as_bytes(group["pixels"][()]), labels, name
