"""FedCMNIST and FedRotMNIST: MNIST whose test data are shifted away from the training data."""

import dataclasses
import pathlib
from typing import Literal

import numpy as np

from fedjax_dp.core import checks
from fedjax_dp.core.ranges import Index
from fedjax_dp.data import shifts
from fedjax_dp.data.datasets.base import Dataset, ImageDtype
from fedjax_dp.data.datasets.mnist import load_mnist

_PALETTE = shifts.PALETTE


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
