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
    """Loads the digits: images `[n, 8, 8, 1]` of 17 grey levels, labels 0 to 9, no natural clients.

    The source has no test part: one is drawn, with the same share of every class. "float32" is the
    level divided by 16, "uint8" the nearest of 0 to 255.
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
