"""EMNIST in the IDX files of NIST; they name no writers (see `femnist` for those)."""

import dataclasses
import pathlib
import zipfile
import zlib
from typing import Literal

import numpy as np

from fedjax_dp.core import checks, files
from fedjax_dp.data.datasets.base import Dataset, ImageDtype, as_images
from fedjax_dp.data.datasets.catalog import CATALOG, Located, locate
from fedjax_dp.data.datasets.formats import (
    maybe_gunzip,
    parse_idx,
    read_idx,
    require_classes,
    require_labelled_images,
)

Split = Literal["byclass", "bymerge", "balanced", "letters", "digits", "mnist"]
NUM_CLASSES = {
    "byclass": 62,
    "bymerge": 47,
    "balanced": 47,
    "letters": 26,
    "digits": 10,
    "mnist": 10,
}


def load(
    data_dir: pathlib.Path, *, split: Split = "byclass", dtype: ImageDtype = "float32"
) -> Dataset:
    """Loads EMNIST (Cohen et al. 2017).

    The published files hold each image with rows and columns exchanged; they are put upright here.
    In "byclass", classes are digits (0 to 9), capitals (10 to 35) and small letters (36 to 61).
    The labels of "letters", which the files count from 1, start at 0 here.

    Args:
      data_dir: the data directory.
      split: "byclass", "bymerge", "balanced", "letters", "digits" or "mnist".
      dtype: "float32" for numbers in [0, 1], or "uint8" for bytes.

    Returns:
      Images `[n, 28, 28, 1]`, bright on dark, and labels, without natural clients.
    """
    checks.one_of("split", split, NUM_CLASSES)
    idx, archive = CATALOG["emnist"].sources
    names = tuple(name.replace("byclass", split) for name in idx.files)
    sources = (dataclasses.replace(idx, files=names), archive)
    located = locate(dataclasses.replace(CATALOG["emnist"], sources=sources), data_dir)
    arrays = {name: _read(located, name) for name in names}
    parts = []
    for images_name, labels_name in (names[:2], names[2:]):
        (images, images_place), (labels, labels_place) = arrays[images_name], arrays[labels_name]
        require_labelled_images(images, labels, images_place, labels_place)
        first = int(split == "letters")
        require_classes(labels, NUM_CLASSES[split], labels_place, first)
        upright = np.ascontiguousarray(images.swapaxes(1, 2))[..., np.newaxis]
        parts.append({"x": as_images(upright, dtype), "y": labels.astype(np.int32) - first})
    return Dataset(
        "emnist",
        parts[0],
        parts[1],
        num_classes=NUM_CLASSES[split],
        task="classification",
        origin=f"{located.source.name}, {split}",
    )


def _read(located: Located, name: str) -> tuple[np.ndarray, str]:
    """Reads an array; returns it and its location for errors."""
    if located.source.name == "idx":
        return read_idx(located.paths[name]), str(located.paths[name])
    path = located.paths["gzip.zip"]
    # A damaged entry may require a password or an unknown method.
    damage = (zipfile.BadZipFile, zlib.error, EOFError, OSError, NotImplementedError, RuntimeError)
    rule = f"be an intact zip archive that holds {name}"
    with files.reading(path, rule, *damage, KeyError), zipfile.ZipFile(path) as archive:
        members = [m for m in archive.namelist() if pathlib.PurePosixPath(m).name == name]
        content = archive.read(members[0]) if members else b""
    checks.require(bool(members), str(path), f"hold {name}", "no such member")
    place = f"{path}: {members[0]}"
    return parse_idx(maybe_gunzip(content, place), place), place
