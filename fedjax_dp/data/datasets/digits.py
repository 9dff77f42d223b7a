"""The 1,797 handwritten digits that come with scikit-learn: no download."""

import pathlib

import numpy as np

from fedjax_dp.core.ranges import ProperFraction, Seed
from fedjax_dp.data.datasets.base import Dataset, ImageDtype, as_images, stratified_split

_LEVELS = 16


def load(
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
    from sklearn.datasets import load_digits

    digits = load_digits()
    levels = digits.images[..., np.newaxis].astype(np.float32)
    if dtype == "float32":
        images = levels / np.float32(_LEVELS)
    else:
        images = as_images(np.rint(levels * (255 / _LEVELS)).astype(np.uint8), dtype)
    labels = digits.target.astype(np.int32)
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
