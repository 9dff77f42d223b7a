"""Data sets of image files: CIFAR-10, CIFAR-100, Tiny ImageNet, FLAIR."""

import itertools
import lzma
import pathlib
import tarfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import numpy as np

from fedjax_dp.core import checks, files
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.ranges import Count, Index
from fedjax_dp.data.datasets.base import Dataset, ImageDtype, ImageScaling, as_images, scaled_images
from fedjax_dp.data.datasets.catalog import Located, locate
from fedjax_dp.data.datasets.formats import HDF5_DAMAGE, hdf5_clients, import_h5py, pixels_of
from fedjax_dp.data.datasets.stores import Source, as_dataset, opened
from fedjax_dp.data.federated import FederatedData
from fedjax_dp.data.store_writer import write_store

CLASS_NAMES = (
    *("airplane", "automobile", "bird", "cat", "deer"),
    *("dog", "frog", "horse", "ship", "truck"),
)

_BINARY_PIXELS = 3 * 32 * 32
_IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp")
_ARCHIVE_DAMAGE = (tarfile.TarError, EOFError, OSError, zlib.error, lzma.LZMAError)

Part = tuple[np.ndarray, np.ndarray]
_SIZE = (64, 64)
_BOX = 4
_SIDES = frozenset(str(side) for side in range(max(_SIZE) + 1))

# Pixels along a side of the images that are published as small.
SIDE = 256
# Images that are decoded at once.
_TOGETHER = 64
_PARTS = ("train", "val", "test")
# The user, the numbers of the labels, and a function that reads the image.
_Example = tuple[str, list[int], Callable[[], np.ndarray]]


def load_cifar10(
    data_dir: pathlib.Path,
    *,
    source: Literal["binary archive", "jpeg archive"] | None = None,
    dtype: ImageDtype = "float32",
    scaling: ImageScaling = "unit",
) -> Dataset:
    """Loads CIFAR-10.

    Args:
      source: "binary archive" (the published file) or "jpeg archive" (a .tar.xz of folders
        `train/CLASS/` and `test/CLASS/`, whose images may be lossy copies); None takes the first
        that exists. The result's `origin` says which was read.
      dtype: "float32" for numbers, or "uint8" for bytes.
      scaling: "unit" for numbers in [0, 1], "symmetric" in [-1, 1], or "standard" for channels of
        mean 0 and deviation 1 in the training part, exact figures that no ε covers.

    Returns:
      Images `[n, 32, 32, 3]` and labels 0 to 9, without natural clients.
    """
    located = locate("cifar10", data_dir, source)
    (path,) = located.paths.values()
    is_binary = located.source.name == "binary archive"
    train, test = _from_batches(path) if is_binary else _from_images(path)
    pixels, others = (as_images(part[0], dtype) for part in (train, test))
    pixels, others, exact = scaled_images(pixels, others, scaling)
    return Dataset(
        "cifar10",
        {"x": pixels, "y": train[1]},
        {"x": others, "y": test[1]},
        num_classes=10,
        task="classification",
        class_names=CLASS_NAMES,
        origin=located.source.name,
        exact_statistics=exact,
    )


def load_cifar100(
    data_dir: pathlib.Path,
    *,
    labels: Literal["fine", "coarse"] = "fine",
    dtype: ImageDtype = "float32",
) -> Dataset:
    """Loads CIFAR-100.

    Args:
      labels: "fine" for 100 classes, or "coarse" for the 20 groups of five that they belong to.
      dtype: "float32" for numbers in [0, 1], or "uint8" for bytes.

    Returns:
      Images `[n, 32, 32, 3]` and labels 0 to 99 or 0 to 19, without natural clients.
    """
    located = locate("cifar100", data_dir)
    (path,) = located.paths.values()
    by_name = {pathlib.PurePosixPath(name).name: content for name, content in _members(path)}
    names = f"{labels}_label_names.txt"
    for needed in ("train.bin", "test.bin", names):
        checks.require(needed in by_name, str(path), f"hold {needed}", sorted(by_name))
    kind, num_classes = {"coarse": (0, 20), "fine": (1, 100)}[labels]
    lines = files.as_text(by_name[names], path / names).split()
    rule = f"name {num_classes} classes"
    checks.require(len(lines) == num_classes, f"{path}/{names}", rule, len(lines))
    train, test = (
        (as_images(x, dtype), np.ascontiguousarray(y[:, kind]))
        for x, y in (
            parse_binary(by_name[name], f"{path}/{name}", (20, 100))
            for name in ("train.bin", "test.bin")
        )
    )
    return Dataset(
        "cifar100",
        {"x": train[0], "y": train[1]},
        {"x": test[0], "y": test[1]},
        num_classes=num_classes,
        task="classification",
        class_names=tuple(lines),
        origin=located.source.name,
    )


def parse_binary(content: bytes, name: str, num_classes: tuple[int, ...] = (10,)) -> Part:
    """Reads rows of a byte for each kind of label, then three planes of 32x32 bytes.

    Labels are `[rows, kinds]`, each below its number of classes.
    """
    size = len(num_classes) + _BINARY_PIXELS
    fits = len(content) > 0 and len(content) % size == 0
    checks.require(fits, name, f"hold rows of {size} bytes", f"{len(content)} bytes")
    rows = np.frombuffer(content, np.uint8).reshape(-1, size)
    labels, pixels = np.split(rows, [len(num_classes)], axis=1)
    for kind, count in zip(labels.T, num_classes, strict=True):
        rule = f"hold a label from 0 to {count - 1} for each image"
        checks.require(bool(np.all(kind < count)), name, rule, "others")
    images = pixels.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    return np.ascontiguousarray(images), labels.astype(np.int32)


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
    x, y = (np.concatenate(each) for each in zip(*train, strict=True))
    return (x, y[:, 0]), (test[0][0], test[0][1][:, 0])


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


def load_tiny_imagenet(
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


@checked
def load_flair(
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
