"""MNIST and its relatives: Fashion-MNIST, digits by writer or shifted, EMNIST, FEMNIST."""

import dataclasses
import hashlib
import importlib.util
import pathlib
import zipfile
import zlib
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np

from fedjax_dp.core import checks, files
from fedjax_dp.core.ranges import Index, ProperFraction, Seed
from fedjax_dp.data import shifts
from fedjax_dp.data.datasets.base import Dataset, ImageDtype, as_images, stratified_split
from fedjax_dp.data.datasets.catalog import CATALOG, Located, locate
from fedjax_dp.data.datasets.formats import (
    hdf5_clients,
    maybe_gunzip,
    parse_idx,
    read_idx,
    require_classes,
    require_labelled_images,
)

_FASHION_CLASSES = (
    "T-shirt/top",
    "trouser",
    "pullover",
    "dress",
    "coat",
    "sandal",
    "shirt",
    "sneaker",
    "bag",
    "ankle boot",
)

_WRITER_COLUMN = 2
_PALETTE = shifts.PALETTE
Split = Literal["byclass", "bymerge", "balanced", "letters", "digits", "mnist"]
EMNIST_CLASSES = {
    "byclass": 62,
    "bymerge": 47,
    "balanced": 47,
    "letters": 26,
    "digits": 10,
    "mnist": 10,
}
# images [n, 28, 28] as bytes, dark on bright; labels [n]; the writer
_Writer = tuple[np.ndarray, np.ndarray, str]
_LEVELS = 16
_DIGITS = "6ebb3d2fee246a4e99363262ddf8a00a3c41bee6014c373ed9d9216ba7f651b8"


def load_mnist(data_dir: pathlib.Path, *, dtype: ImageDtype = "float32") -> Dataset:
    """Loads MNIST.

    Args:
      dtype: "float32" for numbers in [0, 1], or "uint8" for bytes.

    Returns:
      Images `[n, 28, 28, 1]`, bright on dark, and labels 0 to 9, without natural clients.
    """
    located = locate("mnist", data_dir)
    return _dataset("mnist", located, dtype, tuple("0123456789"))


def load_fashion_mnist(data_dir: pathlib.Path, *, dtype: ImageDtype = "float32") -> Dataset:
    """Loads Fashion-MNIST.

    Args:
      dtype: "float32" for numbers in [0, 1], or "uint8" for bytes.

    Returns:
      Images `[n, 28, 28, 1]`, bright on dark, and labels 0 to 9, without natural clients.
    """
    located = locate("fashion_mnist", data_dir)
    return _dataset("fashion_mnist", located, dtype, _FASHION_CLASSES)


def load_mnist_by_writer(data_dir: pathlib.Path, *, dtype: ImageDtype = "float32") -> Dataset:
    """Loads MNIST with the writers of its digits as natural clients.

    QMNIST (Yadav and Bottou 2019) recovered the writer of each digit. Its label files list MNIST's
    images in MNIST's order; that is checked against MNIST's own labels. No writer of training
    digits wrote test digits.

    Args:
      dtype: "float32" for numbers in [0, 1], or "uint8" for bytes.

    Returns:
      Images and labels as `load_mnist`, with the writers' numbers as client ids, int32.
    """
    located = locate("mnist_by_writer", data_dir)
    plain = _dataset("mnist_by_writer", located, dtype, tuple("0123456789"))
    writers = []
    for name, labels in (("train", plain.train["y"]), ("test", plain.test["y"])):
        path = located.paths[f"qmnist-{name}-labels-idx2-int.gz"]
        table = read_idx(path)
        fits = table.dtype == np.int32 and table.shape[1:] == (8,)
        rule = "have 8 columns of 32-bit integers"
        checks.require(fits, str(path), rule, f"{table.dtype}{list(table.shape)}")
        table = table[: len(labels)]
        rule = "list the same classes as the label file of MNIST"
        checks.require(np.array_equal(table[:, 0], labels), str(path), rule, "a different row")
        writers.append(np.ascontiguousarray(table[:, _WRITER_COLUMN], dtype=np.int32))
    return Dataset(
        plain.name,
        plain.train,
        plain.test,
        num_classes=10,
        task="classification",
        train_clients=writers[0],
        test_clients=writers[1],
        class_names=plain.class_names,
        origin=plain.origin,
    )


def _dataset(name: str, located: Located, dtype: str, class_names: tuple[str, ...]) -> Dataset:
    parts = []
    for prefix in ("train", "t10k"):
        images_path = located.paths[f"{prefix}-images-idx3-ubyte.gz"]
        labels_path = located.paths[f"{prefix}-labels-idx1-ubyte.gz"]
        images, labels = read_idx(images_path), read_idx(labels_path)
        require_labelled_images(images, labels, str(images_path), str(labels_path))
        require_classes(labels, 10, str(labels_path))
        parts.append({"x": as_images(images[..., np.newaxis], dtype), "y": labels.astype(np.int32)})
    return Dataset(
        name,
        parts[0],
        parts[1],
        num_classes=10,
        task="classification",
        class_names=class_names,
        origin=located.source.name,
    )


def load_fedcmnist(
    data_dir: pathlib.Path,
    *,
    dtype: ImageDtype = "float32",
    test_colors: Literal["of_others", "unseen"] = "of_others",
    color_seed: Index = 0,
) -> Dataset:
    """Loads MNIST in colours that reveal the digit in training and mislead in testing.

    Digit d is seen in the colours d and d + 1 of ten in training, each with probability one half.
    No test colour of a digit is one of its training colours. If test colours are those of other
    digits, d gets d + 5, and a model that relies on colour is almost always wrong; if they are
    unseen, each image gets one of ten others at random, and such a model guesses.

    Args:
      dtype: "float32" for numbers in [0, 1], or "uint8" for bytes.
      test_colors: "of_others" or "unseen", see above.
      color_seed: the seed of the colours, at least 0.

    Returns:
      Images `[n, 28, 28, 3]` and labels 0 to 9, without natural clients.

    Source: Mugunthan 2022, appendix B.2; it names no palette, and both of `data.shifts` are ours.
    """
    checks.one_of("test_colors", test_colors, ("of_others", "unseen"))
    grey = load_mnist(data_dir, dtype=dtype)

    def painted(part, purpose, colors, palette):
        rng = np.random.default_rng([color_seed, purpose])
        x = shifts.color_by_label(part["x"], part["y"], rng, colors=colors, palette=palette)
        return {"x": x, "y": part["y"]}

    is_unseen = test_colors == "unseen"
    of_test = (range(10), shifts.UNSEEN_PALETTE) if is_unseen else (shifts.TEST_COLORS, _PALETTE)

    return dataclasses.replace(
        grey,
        name="fedcmnist",
        train=painted(grey.train, 0, shifts.TRAIN_COLORS, _PALETTE),
        test=painted(grey.test, 1, *of_test),
    )


def load_fedrotmnist(data_dir: pathlib.Path, *, dtype: ImageDtype = "float32") -> Dataset:
    """Loads MNIST whose training digits are rotated by an angle that depends on the class.

    Training digits 0 to 9 are turned by 10, -10, 20, -20, 30, -30, 40, -40, 50 and -50 degrees
    counter-clockwise; test digits are upright.

    Args:
      dtype: "float32" for numbers in [0, 1], or "uint8" for bytes.

    Returns:
      Images `[n, 28, 28, 1]` and labels 0 to 9, without natural clients.

    Source: Mugunthan 2022, appendix B.2.
    """
    upright = load_mnist(data_dir, dtype=dtype)
    x = shifts.rotate_by_label(upright.train["x"], upright.train["y"])
    train = {"x": x, "y": upright.train["y"]}
    return dataclasses.replace(upright, name="fedrotmnist", train=train)


def load_emnist(
    data_dir: pathlib.Path, *, split: Split = "byclass", dtype: ImageDtype = "float32"
) -> Dataset:
    """Loads EMNIST (Cohen et al. 2017).

    The published files hold each image with rows and columns exchanged; they are put upright here.
    In "byclass", classes are digits (0 to 9), capitals (10 to 35) and small letters (36 to 61).
    The labels of "letters", which the files count from 1, start at 0 here.

    Args:
      split: "byclass", "bymerge", "balanced", "letters", "digits" or "mnist".
      dtype: "float32" for numbers in [0, 1], or "uint8" for bytes.

    Returns:
      Images `[n, 28, 28, 1]`, bright on dark, and labels, without natural clients.
    """
    checks.one_of("split", split, EMNIST_CLASSES)
    idx, archive = CATALOG["emnist"].sources
    names = tuple(name.replace("byclass", split) for name in idx.files)
    sources = (dataclasses.replace(idx, files=names), archive)
    located = locate(dataclasses.replace(CATALOG["emnist"], sources=sources), data_dir)
    arrays = {name: _read_emnist(located, name) for name in names}
    parts = []
    for images_name, labels_name in (names[:2], names[2:]):
        (images, images_place), (labels, labels_place) = arrays[images_name], arrays[labels_name]
        require_labelled_images(images, labels, images_place, labels_place)
        first = int(split == "letters")
        require_classes(labels, EMNIST_CLASSES[split], labels_place, first)
        upright = np.ascontiguousarray(images.swapaxes(1, 2))[..., np.newaxis]
        parts.append({"x": as_images(upright, dtype), "y": labels.astype(np.int32) - first})
    return Dataset(
        "emnist",
        parts[0],
        parts[1],
        num_classes=EMNIST_CLASSES[split],
        task="classification",
        origin=f"{located.source.name}, {split}",
    )


def _read_emnist(located: Located, name: str) -> tuple[np.ndarray, str]:
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


def load_femnist(
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


def load_sklearn_digits(
    data_dir: pathlib.Path,
    *,
    test_fraction: ProperFraction = 0.2,
    seed: Seed = 0,
    dtype: ImageDtype = "float32",
) -> Dataset:
    """Loads the digits, 8x8 grey images with 17 levels.

    The source has no test part: one is drawn, with the same share of every class.

    Args:
      data_dir: not used; every loader takes it.
      test_fraction: the share of the images set aside for testing, in (0, 1).
      seed: chooses these images.
      dtype: "float32" for the level divided by 16, or "uint8" for the nearest of 0 to 255.

    Returns:
      Images `[n, 8, 8, 1]` and labels 0 to 9, without natural clients.
    """
    table = _digits_table()
    levels = table[:, :-1].reshape(-1, 8, 8, 1).astype(np.float32)
    if dtype == "float32":
        images = levels / np.float32(_LEVELS)
    else:
        images = as_images(np.rint(levels * (255 / _LEVELS)).astype(np.uint8), dtype)
    labels = table[:, -1].astype(np.int32)
    train, test = stratified_split(labels, test_fraction, seed)
    return Dataset(
        "digits",
        {"x": images[train], "y": labels[train]},
        {"x": images[test], "y": labels[test]},
        num_classes=10,
        task="classification",
        class_names=tuple("0123456789"),
        origin="scikit-learn",
    )


def _digits_table() -> np.ndarray:
    """Reads levels and label of each digit from scikit-learn's folder: importing it is slow."""
    found = importlib.util.find_spec("sklearn")
    assert found is not None and found.origin is not None
    path = pathlib.Path(found.origin).parent / "datasets" / "data" / "digits.csv.gz"
    text = maybe_gunzip(path.read_bytes(), str(path))
    digest = hashlib.sha256(text).hexdigest()
    checks.require(digest == _DIGITS, str(path), f"have the unpacked SHA-256 {_DIGITS}", digest)
    numbers = np.fromstring(text.decode().strip().replace("\n", ","), np.int32, sep=",")
    return numbers.reshape(-1, 65)
