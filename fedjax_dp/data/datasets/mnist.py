"""MNIST and Fashion-MNIST, and MNIST with its writers or with shifted test data."""

import dataclasses
import pathlib
from typing import Literal

import numpy as np

from fedjax_dp.core import checks
from fedjax_dp.core.ranges import Index
from fedjax_dp.data import shifts
from fedjax_dp.data.datasets.base import Dataset, ImageDtype, as_images
from fedjax_dp.data.datasets.catalog import Located, locate
from fedjax_dp.data.datasets.formats import read_idx, require_classes, require_labelled_images

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


def load_mnist(data_dir: pathlib.Path, *, dtype: ImageDtype = "float32") -> Dataset:
    """Loads MNIST.

    Args:
      data_dir: the data directory.
      dtype: "float32" for numbers in [0, 1], or "uint8" for bytes.

    Returns:
      Images `[n, 28, 28, 1]`, bright on dark, and labels 0 to 9, without natural clients.
    """
    located = locate("mnist", data_dir)
    return _dataset("mnist", located, dtype, tuple("0123456789"))


def load_fashion_mnist(data_dir: pathlib.Path, *, dtype: ImageDtype = "float32") -> Dataset:
    """Loads Fashion-MNIST.

    Args:
      data_dir: the data directory.
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
      data_dir: the data directory.
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
      data_dir: the data directory.
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
      data_dir: the data directory.
      dtype: "float32" for numbers in [0, 1], or "uint8" for bytes.

    Returns:
      Images `[n, 28, 28, 1]` and labels 0 to 9, without natural clients.

    Source: Mugunthan 2022, appendix B.2.
    """
    upright = load_mnist(data_dir, dtype=dtype)
    x = shifts.rotate_by_label(upright.train["x"], upright.train["y"])
    train = {"x": x, "y": upright.train["y"]}
    return dataclasses.replace(upright, name="fedrotmnist", train=train)
