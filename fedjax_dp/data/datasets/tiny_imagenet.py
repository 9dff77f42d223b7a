"""Tiny ImageNet from its published folder."""

import pathlib
from collections.abc import Iterator

import numpy as np

from fedjax_dp.core import checks, files
from fedjax_dp.core.ranges import Count, Index
from fedjax_dp.data.datasets.base import Dataset, ImageDtype, as_images
from fedjax_dp.data.datasets.catalog import locate
from fedjax_dp.data.datasets.formats import pixels_of

_SIZE = (64, 64)
_BOX = 4
_SIDES = frozenset(str(side) for side in range(max(_SIZE) + 1))

Part = tuple[np.ndarray, np.ndarray]


def load(
    data_dir: pathlib.Path,
    *,
    num_classes: Count | None = None,
    class_seed: Index = 0,
    dtype: ImageDtype = "float32",
) -> Dataset:
    """Loads Tiny ImageNet.

    The published test part has no labels; the validation part takes its place.

    Args:
      num_classes: the number of classes drawn at random; all if None. Images of others are not
        read.
      class_seed: chooses these classes.
      dtype: "float32" for numbers in [0, 1], which for all classes take 5 GB, or "uint8" for bytes.

    Returns:
      Images `[n, 64, 64, 3]` and labels that number the drawn classes in the order of `wnids.txt`;
      without natural clients.

    Source: Le and Yang 2015.
    """
    located = locate("tiny_imagenet", data_dir)
    paths = located.paths
    known = _classes(paths["wnids.txt"])
    names = _names(paths["words.txt"], known)
    drawn = known
    if num_classes is not None:
        rule = f"be at most {len(known)}, the number of classes in {paths['wnids.txt']}"
        checks.require(num_classes <= len(known), "num_classes", rule, num_classes)
        rng = np.random.default_rng(class_seed)
        drawn = [known[i] for i in np.sort(rng.choice(len(known), num_classes, replace=False))]
    train, test = _train(paths["train"], drawn), _test(paths["val"], known, drawn)
    return Dataset(
        "tiny_imagenet",
        {"x": as_images(train[0], dtype), "y": train[1]},
        {"x": as_images(test[0], dtype), "y": test[1]},
        num_classes=len(drawn),
        task="classification",
        class_names=tuple(names[wnid] for wnid in drawn),
        origin=located.source.name,
    )


def _classes(path: pathlib.Path) -> list[str]:
    """Reads the ids of all classes."""
    ids: list[str] = []
    for number, wnid in files.lines(files.read_text(path)):
        place = files.at_line(path, number)
        is_id = len(wnid) == 9 and wnid[0] == "n" and wnid[1:].isdecimal() and wnid.isascii()
        checks.require(is_id, place, "be an id of WordNet, n and eight digits", wnid)
        checks.require(wnid not in ids, place, "name each class once", wnid)
        ids.append(wnid)
    checks.require(bool(ids), str(path), "name at least one class", "none")
    return ids


def _names(path: pathlib.Path, known: list[str]) -> dict[str, str]:
    """Reads the names of the classes."""
    names = {}
    for number, line in files.lines(files.read_text(path)):
        wnid, tab, name = line.partition("\t")
        place = files.at_line(path, number)
        checks.require(bool(tab and name), place, "hold an id, a tab and a name", line)
        names[wnid] = name
    lacking = [wnid for wnid in known if wnid not in names]
    checks.require(not lacking, str(path), "name every class of wnids.txt", f"none for {lacking}")
    return names


def _train(folder: pathlib.Path, drawn: list[str]) -> Part:
    """Reads the images of each class, as its list of boxes names them."""
    images, labels = [], []
    for label, wnid in enumerate(drawn):
        boxes, where = folder / wnid / f"{wnid}_boxes.txt", folder / wnid / "images"
        held = _held(where)
        checks.require(boxes.is_file(), str(boxes), "be a file", "none")
        named = [name for _, (name, *_) in _rows(boxes, 1 + _BOX, held)]
        _require_all_named(boxes, held, named)
        images += [pixels_of((where / n).read_bytes(), str(where / n), _SIZE) for n in named]
        labels += [label] * len(named)
    return np.stack(images), np.array(labels, np.int32)


def _test(folder: pathlib.Path, known: list[str], drawn: list[str]) -> Part:
    """Reads the images of the validation part, whose classes are in one list."""
    annotations, where = folder / "val_annotations.txt", folder / "images"
    held = _held(where)
    checks.require(annotations.is_file(), str(annotations), "be a file", "none")
    label_of = {wnid: label for label, wnid in enumerate(drawn)}
    images, labels, named, all_known = [], [], [], set(known)
    for place, (name, wnid, *_) in _rows(annotations, 2 + _BOX, held):
        checks.require(wnid in all_known, place, "name a class of wnids.txt", wnid)
        named.append(name)
        if wnid in label_of:
            images.append(pixels_of((where / name).read_bytes(), str(where / name), _SIZE))
            labels.append(label_of[wnid])
    _require_all_named(annotations, held, named)
    checks.require(bool(images), str(annotations), f"name images of {drawn}", "none")
    return np.stack(images), np.array(labels, np.int32)


def _held(folder: pathlib.Path) -> set[str]:
    """Lists the images in a folder."""
    checks.require(folder.is_dir(), str(folder), "be a folder of images", "none")
    images = {path.name for path in folder.iterdir() if path.suffix.lower() in (".jpeg", ".jpg")}
    checks.require(bool(images), str(folder), "hold images in .JPEG", "none")
    return images


def _rows(path: pathlib.Path, num_columns: int, held: set[str]) -> Iterator[tuple[str, list[str]]]:
    """Reads a list of images, each once, whose last columns are a box; with the place of each."""
    named = set()
    for number, line in files.lines(files.read_text(path)):
        place, row = files.at_line(path, number), line.split("\t")
        rule = f"have {num_columns} columns, separated by tabs"
        checks.require(len(row) == num_columns, place, rule, len(row))
        name, box = row[0], row[-_BOX:]
        checks.require(name in held, place, "name an image of the folder images", name)
        checks.require(name not in named, place, "name each image once", name)
        named.add(name)
        inside = all(side in _SIDES for side in box)
        checks.require(inside, place, f"hold a box in pixels from 0 to {max(_SIZE)}", box)
        yield place, row


def _require_all_named(path: pathlib.Path, held: set[str], named: list[str]) -> None:
    left = sorted(held - set(named))
    rule = "name every image of the folder images"
    checks.require(not left, str(path), rule, f"none of {len(left)} such as {left[:1]}")
