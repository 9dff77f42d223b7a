"""Structured differences: rotated images, shifted labels, colours that reveal the label."""

from collections.abc import Sequence

import numpy as np
from scipy import ndimage

from fedjax_dp.core import checks
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.ranges import Count
from fedjax_dp.data.partition import Seed

# Ten colours, red, green and blue in [0, 1], far apart from one another.
PALETTE = np.array(
    [
        (1.0, 0.0, 0.0),
        (0.0, 0.8, 0.0),
        (0.2, 0.4, 1.0),
        (1.0, 1.0, 0.0),
        (1.0, 0.0, 1.0),
        (0.0, 1.0, 1.0),
        (1.0, 0.5, 0.0),
        (0.5, 0.0, 1.0),
        (0.6, 0.4, 0.2),
        (1.0, 1.0, 1.0),
    ],
    dtype=np.float32,
)

# Ten others, each apart from all of the first ten.
UNSEEN_PALETTE = np.array(
    [
        (0.8, 0.2, 0.4),
        (0.4, 1.0, 0.6),
        (0.4, 0.0, 0.6),
        (0.8, 0.8, 0.4),
        (0.6, 0.2, 0.8),
        (0.4, 0.8, 0.8),
        (0.8, 0.3, 0.1),
        (0.3, 0.3, 0.6),
        (0.4, 0.2, 0.1),
        (0.7, 0.7, 0.8),
    ],
    dtype=np.float32,
)

# FedCMNIST: digit d is seen in colours d and d + 1 in training, in colour d + 5 in testing.
TRAIN_COLORS = (0, 1)
TEST_COLORS = (5,)

# FedRotMNIST: degrees by which each digit is turned in training; testing is not turned.
ANGLES = (10.0, -10.0, 20.0, -20.0, 30.0, -30.0, 40.0, -40.0, 50.0, -50.0)


@checked
def rotate_quarter_turns(images: np.ndarray, turns: int) -> np.ndarray:
    """Rotates images counter-clockwise by multiples of 90 degrees.

    Args:
      images: `[examples, height, width, channels]`.
      turns: the number of turns; any integer.

    Returns:
      Turned images; height and width are exchanged if `turns` is odd.

    Raises:
      ValueError: if the images do not have four axes.
    """
    images = np.asarray(images)
    _check_images(images)
    return np.ascontiguousarray(np.rot90(images, turns, axes=(1, 2)))


@checked
def shift_labels(labels: np.ndarray, shift: int, num_classes: Count) -> np.ndarray:
    """Shifts labels cyclically: y becomes (y + shift) mod classes.

    Args:
      labels: `[examples]`, from 0 to `num_classes - 1`.
      shift: any integer.
      num_classes: the number of classes.

    Returns:
      Labels of the same type.

    Raises:
      ValueError: if a label is out of range.
    """
    labels = np.asarray(labels)
    checks.require(labels.dtype.kind in "iu", "labels", "be integers", labels.dtype)
    rule = f"be in [0, {num_classes})"
    checks.require(bool(np.all((labels >= 0) & (labels < num_classes))), "labels", rule, labels[:8])
    # Bytes would wrap around.
    return ((labels.astype(np.int64) + shift % num_classes) % num_classes).astype(labels.dtype)


@checked
def color_by_label(
    images: np.ndarray,
    labels: np.ndarray,
    rng: Seed,
    *,
    colors: Sequence[int] = TRAIN_COLORS,
    palette: np.ndarray = PALETTE,
) -> np.ndarray:
    """Paints grey images in colours that depend on the label.

    An image of class d gets colour (d + c) mod palette size, where c is drawn from `colors` with
    equal chances. Trained with `TRAIN_COLORS` and tested with `TEST_COLORS`, a model that learned
    colours instead of shapes fails: no test colour of a class is one of its training colours.

    Args:
      images: grey images, `[examples, height, width, 1]`.
      labels: the class of each, `[examples]`.
      rng: a NumPy generator, or a seed for one.
      colors: offsets into the palette.
      palette: `[colours, 3]`, in [0, 1].

    Returns:
      `[examples, height, width, 3]`, of the type of the images.

    Raises:
      ValueError: if shapes do not fit.

    Source: Mugunthan 2022 (FedCMNIST), appendix B.2, which leaves the palette open.
    """
    images = np.asarray(images)
    _check_images(images)
    labels = np.asarray(labels)
    checks.require(images.shape[-1] == 1, "images", "have one channel", images.shape)
    checks.require(len(labels) == len(images), "labels", f"be {len(images)}", len(labels))
    checks.require(len(colors) > 0, "colors", "hold at least one offset", colors)
    palette = np.asarray(palette, dtype=np.float32)
    fits = palette.ndim == 2 and len(palette) > 0 and palette.shape[1] == 3
    checks.require(fits, "palette", "be [colours, 3]", palette.shape)
    is_inside = bool(np.all((palette >= 0) & (palette <= 1)))
    checks.require(is_inside, "palette", "be in [0, 1]", palette)
    is_known = labels.size == 0 or (labels.min() >= 0 and labels.max() < len(palette))
    rule = f"be classes from 0 to {len(palette) - 1}"
    checks.require(bool(is_known), "labels", rule, labels.tolist()[:5])
    chosen = np.random.default_rng(rng).choice(np.asarray(colors), size=len(labels))
    paint = palette[(labels + chosen) % len(palette)][:, None, None, :]
    painted = images * paint
    if np.issubdtype(images.dtype, np.integer):
        painted = np.rint(painted)
    return painted.astype(images.dtype)


@checked
def rotate_by_label(
    images: np.ndarray, labels: np.ndarray, *, angles: Sequence[float] = ANGLES
) -> np.ndarray:
    """Rotates images around their centre by an angle that depends on the label.

    Pixels between others are interpolated linearly; corners turned in from outside are 0.

    Args:
      images: `[examples, height, width, channels]`.
      labels: the class of each, `[examples]`, from 0 to `len(angles) - 1`.
      angles: degrees for each class, counter-clockwise.

    Returns:
      Images of the same shape and type.

    Raises:
      ValueError: if shapes do not fit or a label has no angle.

    Source: Mugunthan 2022 (FedRotMNIST), appendix B.2.
    """
    images = np.asarray(images)
    _check_images(images)
    labels = np.asarray(labels)
    checks.require(len(labels) == len(images), "labels", f"be {len(images)}", len(labels))
    rule = f"be in [0, {len(angles)})"
    checks.require(bool(np.all((labels >= 0) & (labels < len(angles)))), "labels", rule, labels[:8])
    result = np.empty_like(images)
    for label in np.unique(labels):
        rows = labels == label
        turned = ndimage.rotate(
            images[rows].astype(np.float32),
            angles[label],
            axes=(1, 2),
            reshape=False,
            order=1,
            mode="grid-constant",
        )
        if np.issubdtype(images.dtype, np.integer):
            turned = np.rint(turned)
        result[rows] = turned
    return result


def _check_images(images: np.ndarray) -> None:
    checks.require(
        images.ndim == 4, "images", "have axes examples, height, width, channels", images.shape
    )
