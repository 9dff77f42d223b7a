"""Small convolutional networks of the federated literature."""

from collections.abc import Sequence

import flax.linen as nn
import jax

from fedjax_dp.core import checks
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.ranges import Decay
from fedjax_dp.models import inputs
from fedjax_dp.models.base import Model


def _pool(x: jax.Array) -> jax.Array:
    return nn.max_pool(x, (2, 2), strides=(2, 2))


def _flat(x: jax.Array) -> jax.Array:
    return x.reshape(x.shape[0], -1)


class _PooledCnn(nn.Module):
    """Convolutions 5×5, each pooled, then dense layers."""

    channels: tuple[int, ...]
    hidden_sizes: tuple[int, ...]
    num_classes: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = inputs.images(x)
        for width in self.channels:
            x = _pool(nn.relu(nn.Conv(width, (5, 5), padding="SAME")(x)))
        x = _flat(x)
        for size in self.hidden_sizes:
            x = nn.relu(nn.Dense(size)(x))
        return nn.Dense(self.num_classes)(x)


class _EmnistCnn(nn.Module):
    num_classes: int
    dropout: tuple[float, float]

    @nn.compact
    def __call__(self, x: jax.Array, *, is_training: bool = False) -> jax.Array:
        x = inputs.images(x)
        x = nn.relu(nn.Conv(32, (3, 3), padding="VALID")(x))
        x = nn.relu(nn.Conv(64, (3, 3), padding="VALID")(x))
        x = nn.Dropout(self.dropout[0], deterministic=not is_training)(_pool(x))
        x = nn.relu(nn.Dense(128)(_flat(x)))
        x = nn.Dropout(self.dropout[1], deterministic=not is_training)(x)
        return nn.Dense(self.num_classes)(x)


@checked
def thesis_cnn(example_x: jax.ShapeDtypeStruct, num_classes: int) -> Model:
    """Builds the network of record-level DP experiments: two pooled convolutions and a dense layer.

    Convolutions are 5×5 with 16 and 32 channels, zero-padded to keep the size, each with ReLU and
    2×2 max-pooling. 28,938 parameters on 28×28×1 images of 10 classes: 416 + 12,832 + 15,690.

    Args:
      example_x: shape and type of one image of at least 4×4 pixels; integers are divided by 255.
      num_classes: the number of classes, at least 2.

    Returns:
      The model; outputs are logits `[examples, classes]`.

    Raises:
      ValueError: if the image is too small or there are too few classes.

    Source: the code of Malekmohammadi and others 2024 (Robust-HDP). Padding follows from the
    count: 28,938 − 416 − 12,832 − 10 is 10 · 32 · 7 · 7, and only size-keeping convolutions leave
    7×7 after two poolings.
    """
    inputs.check_image(example_x, at_least=4)
    checks.whole("num_classes", num_classes, at_least=2)
    module = _PooledCnn((16, 32), (), num_classes)
    return Model.from_flax(module, example_x, loss="softmax_cross_entropy", name="thesis_cnn")


@checked
def fedavg_cnn(example_x: jax.ShapeDtypeStruct, num_classes: int) -> Model:
    """Builds the network that federated averaging was introduced with.

    Convolutions are 5×5 with 32 and 64 channels, zero-padded to keep the size, each with ReLU and
    2×2 max-pooling, then a dense layer of 512 units. 1,663,370 parameters on 28×28×1 images of 10
    classes.

    Args:
      example_x: shape and type of one image of at least 4×4 pixels; integers are divided by 255.
      num_classes: the number of classes, at least 2.

    Returns:
      The model; outputs are logits `[examples, classes]`.

    Raises:
      ValueError: if the image is too small or there are too few classes.

    Source: McMahan and others 2017, section 3.
    """
    inputs.check_image(example_x, at_least=4)
    checks.whole("num_classes", num_classes, at_least=2)
    module = _PooledCnn((32, 64), (512,), num_classes)
    return Model.from_flax(module, example_x, loss="softmax_cross_entropy", name="fedavg_cnn")


@checked
def emnist_cnn(
    example_x: jax.ShapeDtypeStruct, num_classes: int, *, dropout: Sequence[Decay] = (0.0, 0.0)
) -> Model:
    """Builds the two-convolution network of the federated EMNIST literature.

    Convolutions are 3×3 with 32 and 64 channels and no padding, with ReLU, then 2×2 max-pooling and
    a dense layer of 128 units. 1,206,590 parameters on 28×28×1 images of 62 classes, 1,199,882 for
    10 classes.

    Args:
      example_x: shape and type of one image of at least 6×6 pixels; integers are divided by 255.
      num_classes: the number of classes, at least 2.
      dropout: shares dropped in training after the pooling and after the dense layer, each in
        [0, 1); the source has (0.25, 0.5).

    Returns:
      The model; outputs are logits `[examples, classes]`.

    Raises:
      ValueError: if an argument is out of its range.

    Source: Reddi and others 2021, appendix C.2.
    """
    inputs.check_image(example_x, at_least=6)
    checks.whole("num_classes", num_classes, at_least=2)
    checks.require(len(dropout) == 2, "dropout", "hold two shares", dropout)
    for rate in dropout:
        inputs.check_dropout("dropout", rate)
    module = _EmnistCnn(num_classes, (dropout[0], dropout[1]))
    return Model.from_flax(module, example_x, loss="softmax_cross_entropy", name="emnist_cnn")
