"""MNIST, Fashion-MNIST, and MNIST by writer."""

import pathlib

import numpy as np

from fedjax_dp.core import checks
from fedjax_dp.data.datasets.base import Dataset, ImageDtype, as_images
from fedjax_dp.data.datasets.catalog import CATALOG
from fedjax_dp.data.datasets.files import Located, locate
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


def load_mnist(data_dir: pathlib.Path, *, dtype: ImageDtype = "float32") -> Dataset:
    """Loads MNIST.

    Args:
      data_dir: the data directory.
      dtype: "float32" for numbers in [0, 1], or "uint8" for bytes.

    Returns:
      Images `[n, 28, 28, 1]`, bright on dark, and labels 0 to 9, without natural clients.
    """
    located = locate(CATALOG["mnist"], data_dir)
    return _dataset("mnist", located, dtype, tuple("0123456789"))


def load_fashion_mnist(data_dir: pathlib.Path, *, dtype: ImageDtype = "float32") -> Dataset:
    """Loads Fashion-MNIST.

    Args:
      data_dir: the data directory.
      dtype: "float32" for numbers in [0, 1], or "uint8" for bytes.

    Returns:
      Images `[n, 28, 28, 1]`, bright on dark, and labels 0 to 9, without natural clients.
    """
    located = locate(CATALOG["fashion_mnist"], data_dir)
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
    located = locate(CATALOG["mnist_by_writer"], data_dir)
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
