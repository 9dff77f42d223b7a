"""Folders of your own images, one for each class, and above them one for each client."""

import logging
import os
import pathlib
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from fedjax_dp.core import checks, disclosure, files
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.data.cell_readers import Pictures, like_first, picture, require_pictures
from fedjax_dp.data.datasets.base import Dataset, ImageDtype, as_images

_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".webp")
# Seconds between two lines of the log.
_OFTEN = 10.0


class _Image(NamedTuple):
    """The file of an image, and the folders that it is in."""

    path: pathlib.Path
    client: str
    label: str


@checked
def load(
    data_dir: pathlib.Path,
    *,
    path: str,
    test_path: str | None = None,
    classes: Sequence[str] = (),
    clients_are_folders: bool = False,
    pictures: Pictures = Pictures(),
    dtype: ImageDtype = "float32",
) -> Dataset:
    """Loads folders of images, PATH/CLASS/FILE or PATH/CLIENT/CLASS/FILE.

    The folders are read in the order of their names; names that begin with a dot are left out.

    Guarantee: with `classes`, each example depends only on its own file and the options, and
    parties number classes alike, also those that some of them lack. Which classes occur is
    otherwise an exact statistic.

    Args:
      data_dir: where to search for a relative path that is not in the current folder.
      path: the folder.
      test_path: a folder of test images of the same kind.
      classes: the names of classes in the order of their numbers; another folder is refused. By
        default those of the folders, sorted.
      clients_are_folders: whether the first folders are clients, for the partition "natural", which
        is then the default of a run; else a partition spreads images over clients.
      pictures: how images become arrays, see `Pictures`.
      dtype: "float32" for numbers in [0, 1], or "uint8" for bytes.

    Returns:
      Images `[n, height, width, channels]` in memory, with labels and the clients' names.

    Raises:
      ValueError: naming file, rule and value, if a file is no image, a link, or in another place.
      ImportError: if pillow is not installed.
    """
    require_pictures(pictures)
    is_set = len(set(classes)) == len(classes)
    checks.require(is_set, "classes", "be different names", classes)
    parts = [
        _listed(_folder(name, where, data_dir), clients_are_folders) if where is not None else []
        for name, where in (("path", path), ("test_path", test_path))
    ]
    names = tuple(classes) or tuple(sorted({each.label for part in parts for each in part}))
    rule = "name two classes or more"
    disclosure.require(len(names) > 1, "classes, or the folders of images,", rule, names)
    number = {name: i for i, name in enumerate(names)}
    for each in (*parts[0], *parts[1]):
        rule = f"be one of {checks.shown(list(names))}, the declared classes"
        what, where = "the folder of a class", os.fspath(each.path.parent)
        disclosure.require(each.label in number, what, rule, each.label, where=where)
    first = _read(parts[0][0], pictures)
    examples, clients = [], []
    for part in parts:
        pixels = np.empty((len(part), *first.shape), np.uint8)
        for i, (each, decoded) in enumerate(zip(part, _decoded(part, pictures), strict=True)):
            like_first(first, decoded, os.fspath(each.path))
            pixels[i] = decoded
        labels = np.array([number[each.label] for each in part], np.int32)
        examples.append({"x": as_images(pixels, dtype), "y": labels})
        clients.append(np.array([each.client for each in part], str))
    exact = "which folders of classes there are, since no classes were declared"
    return Dataset(
        "image_folder",
        examples[0],
        examples[1],
        num_classes=len(names),
        task="classification",
        train_clients=clients[0] if clients_are_folders else None,
        test_clients=clients[1] if clients_are_folders else None,
        class_names=names,
        origin=path if test_path is None else f"{path}, {test_path}",
        exact_statistics=() if classes else (exact,),
    )


def _folder(name: str, where: str, data_dir: pathlib.Path) -> pathlib.Path:
    """Finds a folder, in the current one or in that of data files."""
    places = [place / os.path.expanduser(where) for place in (pathlib.Path(), data_dir)]
    found = [place for place in places if files.kind_of(place, name) == "folder"]
    rule = f"be a folder; there is none at {' or '.join(map(str, dict.fromkeys(places)))}"
    disclosure.require(bool(found), name, rule, where, public="be a folder")
    files.require_folder(found[0], name)
    return found[0]


def _listed(folder: pathlib.Path, clients_are_folders: bool) -> list[_Image]:
    """Lists the images of a folder, and refuses all else in it."""
    found = []
    for client in _folders(folder) if clients_are_folders else [folder]:
        own = [
            _Image(file, client.name if clients_are_folders else "", label.name)
            for label in _folders(client)
            for file in _entries(label)
        ]
        disclosure.require_of_file(bool(own), str(client), "hold images in CLASS/", "none")
        found += own
    for each in found:
        is_image = each.path.is_file() and each.path.suffix.lower() in _SUFFIXES
        rule = f"be an image, a file in {', '.join(_SUFFIXES)}"
        disclosure.require_of_file(is_image, str(each.path), rule, each.path.suffix)
    return found


def _folders(folder: pathlib.Path) -> list[pathlib.Path]:
    """Lists the folders in a folder, which holds nothing else."""
    entries = _entries(folder)
    for entry in entries:
        is_folder = entry.is_dir()
        disclosure.require_of_file(is_folder, str(entry), "be a folder of images", "a file")
    return entries


def _entries(folder: pathlib.Path) -> list[pathlib.Path]:
    """Lists what is in a folder, by name; links may lead out of it."""
    entries = sorted(entry for entry in folder.iterdir() if not entry.name.startswith("."))
    for entry in entries:
        disclosure.require_of_file(not entry.is_symlink(), str(entry), "be no link", "a link")
    return entries


def _read(image: _Image, pictures: Pictures) -> np.ndarray:
    return picture(image.path.read_bytes(), os.fspath(image.path), pictures)


def _decoded(part: Sequence[_Image], pictures: Pictures) -> Iterator[np.ndarray]:
    """Decodes images one after another, and logs how many are done."""
    said = time.monotonic()
    for i, image in enumerate(part):
        if time.monotonic() - said > _OFTEN:
            said = time.monotonic()
            logging.getLogger(__name__).info("decoded %d of %d images", i, len(part))
        yield _read(image, pictures)
