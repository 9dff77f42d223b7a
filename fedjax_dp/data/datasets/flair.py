"""FLAIR: photographs with several labels, and their users as natural clients."""

import itertools
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import numpy as np

from fedjax_dp.core import checks, files
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.ranges import Count
from fedjax_dp.data.datasets.base import Dataset
from fedjax_dp.data.datasets.catalog import Located, locate
from fedjax_dp.data.datasets.formats import HDF5_DAMAGE, hdf5_clients, import_h5py, pixels_of
from fedjax_dp.data.datasets.stores import Source, as_dataset, opened
from fedjax_dp.data.federated import FederatedData
from fedjax_dp.data.store_writer import write_store

# Pixels along a side of the images that are published as small.
SIDE = 256
# Images that are decoded at once.
_TOGETHER = 64
_PARTS = ("train", "val", "test")
# The user, the numbers of the labels, and a function that reads the image.
_Example = tuple[str, list[int], Callable[[], np.ndarray]]


@checked
def load(
    data_dir: pathlib.Path,
    *,
    labels: Literal["coarse", "fine"] = "coarse",
    test_part: Literal["val", "test"] = "test",
    max_clients: Count | None = None,
    max_test_clients: Count | None = None,
    max_images: Count | None = None,
    source: Literal["files", "hdf5"] | None = None,
    store: str | None = None,
) -> Dataset:
    """Loads FLAIR (Song et al. 2022), from its published files or the HDF5 file of pfl-research.

    Each target has a 1 for every label of the image, for the loss "sigmoid_binary_cross_entropy".
    Users of the parts are disjoint. Images are read a few at a time into a store on disk, 70 GB for
    all training images, which later runs open.

    Args:
      labels: "coarse" for the 17 categories, "fine" for the 1,628 labels of the taxonomy; numbered
        in alphabetical order.
      test_part: the part for testing, "test" or "val".
      max_clients: how many users are read, the first of the files; None for all.
      max_test_clients: the same of the test part.
      max_images: how many images of a user are read, the first; None for all.
      source: "files" for labels_and_metadata.json and small_images/, "hdf5" for
        flair_federated.hdf5; None takes the first that exists.
      store: the folder for stores; by default flair/stores in the data directory.

    Returns:
      Images `[n, 256, 256, 3]` and targets `[n, classes]`, both uint8 and memory-mapped, with the
      users as client ids. Divide images by 255 where the model reads them.

    Source: README.md of github.com/apple/ml-flair; benchmarks/dataset/flair/prepare_dataset.py and
    download_preprocess.py of github.com/apple/pfl-research.
    """
    located = locate("flair", data_dir, source)
    key = "labels" if labels == "coarse" else "fine_grained_labels"
    is_hdf5 = located.source.name == "hdf5"
    classes, read = (_from_hdf5 if is_hdf5 else _from_files)(located, key)
    known = [path for path in located.paths.values() if path.is_file()]
    folder = data_dir / "flair" / "stores" if store is None else pathlib.Path(store)

    def part(name: str, most: int | None) -> FederatedData:
        def examples() -> Iterator[_Example]:
            return _limited(read(name), most, max_images)

        def write(directory: pathlib.Path) -> None:
            ids = (np.array([user]) for user, _, _ in examples())
            write_store(directory, ids, _batches(examples(), len(classes)))

        return opened(folder, Source(known, [name, key, most, max_images]), write)

    return as_dataset(
        "flair",
        part("train", max_clients),
        part(test_part, max_test_clients),
        num_classes=len(classes),
        task="classification",
        class_names=classes,
        origin=located.source.name,
    )


def _limited(
    examples: Iterator[_Example], most: int | None, max_images: int | None
) -> Iterator[_Example]:
    """Keeps the first users, and the first images of each."""
    counts: dict[str, int] = {}
    for example in examples:
        user = example[0]
        if user not in counts and most is not None and len(counts) == most:
            continue
        counts[user] = counts.get(user, 0) + 1
        if max_images is None or counts[user] <= max_images:
            yield example


def _batches(
    examples: Iterator[_Example], num_classes: int
) -> Iterator[tuple[np.ndarray, dict[str, np.ndarray]]]:
    """Reads a few images at a time, each before the next example, while its file is open."""
    read = ((user, found, image()) for user, found, image in examples)
    while together := list(itertools.islice(read, _TOGETHER)):
        users, labels, images = zip(*together, strict=True)
        targets = np.zeros((len(together), num_classes), np.uint8)
        for row, found in zip(targets, labels, strict=True):
            row[found] = 1
        yield np.array(users), {"x": np.stack(images), "y": targets}


def _from_files(located: Located, key: str) -> tuple[tuple[str, ...], Callable[..., Any]]:
    """Reads labels_and_metadata.json; returns the classes and `(part) -> examples`."""
    path = located.paths["labels_and_metadata.json"]
    entries = files.parse_json(files.read_text(path), path)
    is_list = isinstance(entries, list) and bool(entries)
    checks.require(is_list, str(path), "hold a list with an object for each image", type(entries))
    for i, entry in enumerate(entries):
        fields = entry if isinstance(entry, dict) else {}
        names, given = ("user_id", "image_id", "partition"), fields.get(key)
        are_texts = all(isinstance(fields.get(name), str) for name in names)
        has_labels = isinstance(given, list) and all(isinstance(label, str) for label in given)
        rule = f"hold strings in {', '.join(names)} and a list of strings in {key}"
        checks.require(are_texts and has_labels, f"{path}, image {i},", rule, entry)
        what, part = f"partition of image {i} in {path}", fields["partition"]
        checks.one_of(what, part, _PARTS)
    classes = tuple(sorted({label for entry in entries for label in entry[key]}))
    number = {label: i for i, label in enumerate(classes)}
    folder = located.paths["small_images"]

    def image_of(name: str) -> Callable[[], np.ndarray]:
        # A name in a file must not lead out of the folder.
        file = folder / f"{pathlib.PurePath(name).name}.jpg"
        return lambda: pixels_of(file.read_bytes(), str(file), (SIDE, SIDE))

    def read(part: str) -> Iterator[_Example]:
        for entry in entries:
            if entry["partition"] == part:
                numbers = [number[label] for label in entry[key]]
                yield entry["user_id"], numbers, image_of(entry["image_id"])

    return classes, read


def _array(stored: Any) -> Any:
    """Returns an array of an HDF5 file as it is, to be read later."""
    stored.shape[0]
    return stored


def _from_hdf5(located: Located, key: str) -> tuple[tuple[str, ...], Callable[..., Any]]:
    """Reads the labels of the HDF5 file; returns the classes and `(part) -> examples`."""
    path = located.paths["flair_federated.hdf5"]
    name = f"metadata/{key.removesuffix('s')}_mapping"
    with (
        files.reading(path, f"hold {name}", *HDF5_DAMAGE),
        import_h5py(path).File(path, "r") as file,
    ):
        mapping = files.parse_json(file[name][()].decode(), f"{path}, {name}")
    is_numbered = isinstance(mapping, Mapping) and sorted(mapping.values()) == [
        *range(len(mapping))
    ]
    checks.require(is_numbered, f"{path}, {name},", "number the labels from 0", mapping)
    classes = tuple(sorted(mapping, key=lambda label: mapping[label]))
    fields = ("images", f"{key}_row", f"{key}_col")

    def image_at(images: Any, i: int, place: str) -> Callable[[], np.ndarray]:
        def image() -> np.ndarray:
            with files.reading(place, "hold intact images", *HDF5_DAMAGE):
                return np.asarray(images[i])

        return image

    def read(part: str) -> Iterator[_Example]:
        for user, stored in hdf5_clients(path, *fields, group=part, read=_array):
            place = f"{path}, user {user!r},"
            images, rows, columns = (stored[field] for field in fields)
            shown = f"{images.dtype}{list(images.shape)}"
            is_image = images.dtype == np.uint8 and images.shape[1:] == (SIDE, SIDE, 3)
            checks.require(is_image, place, f"hold images of {SIDE}x{SIDE}x3 bytes", shown)
            row, column = np.asarray(rows[()], np.int64), np.asarray(columns[()], np.int64)
            fits = row.shape == column.shape and row.ndim == 1
            for index, size in ((row, len(images)), (column, len(classes))):
                fits = fits and bool(np.all((index >= 0) & (index < size)))
            rule = f"hold a known image and label in each entry of {fields[1]} and {fields[2]}"
            checks.require(fits, place, rule, "others")
            for i in range(len(images)):
                yield user, column[row == i].tolist(), image_at(images, i, place)

    return classes, read
