"""Convolutional networks of the federated literature: small ones, LeNet-5, residual networks."""

import functools
from collections.abc import Callable, Sequence
from typing import Literal

import flax.linen as nn
import jax
import jax.numpy as jnp

from fedjax_dp.core import checks
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.ranges import Count, Decay
from fedjax_dp.models import inputs
from fedjax_dp.models.base import Model
from fedjax_dp.models.inputs import NumClasses

_SIZE = 32
_WIDTHS = (64, 128, 256, 512)

_conv = functools.partial(
    nn.Conv, use_bias=False, kernel_init=nn.initializers.variance_scaling(2.0, "fan_out", "normal")
)
_PAD_ONE = ((1, 1), (1, 1))


def _pool(x: jax.Array) -> jax.Array:
    return nn.max_pool(x, (2, 2), strides=(2, 2))


def _flat(x: jax.Array) -> jax.Array:
    return x.reshape(x.shape[0], -1)


def _pad_to_size(x: jax.Array, size: int) -> jax.Array:
    missing = [max(size - n, 0) for n in x.shape[1:3]]
    return jnp.pad(x, [(0, 0), *((m // 2, m - m // 2) for m in missing), (0, 0)])


class _PooledCnn(nn.Module):
    """Convolutions 5×5, each pooled, then dense layers."""

    channels: tuple[int, ...]
    hidden_sizes: tuple[int, ...]
    num_classes: int
    padding: str = "SAME"
    least_size: int | None = None  # Smaller images are padded to it.

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = inputs.images(x)
        x = x if self.least_size is None else _pad_to_size(x, self.least_size)
        for width in self.channels:
            x = _pool(nn.relu(nn.Conv(width, (5, 5), padding=self.padding)(x)))
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
def thesis_cnn(example_x: jax.ShapeDtypeStruct, num_classes: NumClasses) -> Model:
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
    module = _PooledCnn((16, 32), (), num_classes)
    return Model.from_flax(module, example_x, loss="softmax_cross_entropy", name="thesis_cnn")


@checked
def fedavg_cnn(example_x: jax.ShapeDtypeStruct, num_classes: NumClasses) -> Model:
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
    module = _PooledCnn((32, 64), (512,), num_classes)
    return Model.from_flax(module, example_x, loss="softmax_cross_entropy", name="fedavg_cnn")


@checked
def emnist_cnn(
    example_x: jax.ShapeDtypeStruct,
    num_classes: NumClasses,
    *,
    dropout: Sequence[Decay] = (0.0, 0.0),
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
    checks.require(len(dropout) == 2, "dropout", "hold two shares", dropout)
    first, second = map(inputs.dropout_rate, dropout)
    module = _EmnistCnn(num_classes, (first, second))
    return Model.from_flax(module, example_x, loss="softmax_cross_entropy", name="emnist_cnn")


@checked
def lenet5(example_x: jax.ShapeDtypeStruct, num_classes: NumClasses) -> Model:
    """Builds LeNet-5 with ReLU and max-pooling in place of its sigmoids and averages.

    Two 5×5 convolutions (6 and 16 channels, no padding), each pooled, and dense layers of 120, 84
    and the classes. Images below 32×32 are zero-padded to that size, as in the source. 61,706
    parameters for grey images of up to 32×32 pixels and 10 classes, 62,006 for colour images.

    Args:
      example_x: shape and type of one image; integers are divided by 255.
      num_classes: the number of classes, at least 2.

    Returns:
      The model; outputs are logits `[examples, classes]`.

    Raises:
      ValueError: if `example_x` is no image or there are too few classes.

    Source: LeCun and others 1998, section II.B.
    """
    inputs.check_image(example_x, at_least=1)
    module = _PooledCnn((6, 16), (120, 84), num_classes, "VALID", _SIZE)
    return Model.from_flax(module, example_x, loss="softmax_cross_entropy", name="lenet5")


class _Block(nn.Module):
    width: int
    stride: int
    norm: Callable[[str], nn.Module]

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        strides = (self.stride, self.stride)
        y = _conv(self.width, (3, 3), strides, padding=_PAD_ONE, name="conv1")(x)
        y = nn.relu(self.norm("norm1")(y))
        y = _conv(self.width, (3, 3), padding=_PAD_ONE, name="conv2")(y)
        y = self.norm("norm2")(y)
        if self.stride != 1 or x.shape[-1] != self.width:
            x = _conv(self.width, (1, 1), strides, padding="VALID", name="shortcut")(x)
            x = self.norm("shortcut_norm")(x)
        return nn.relu(x + y)


class _ResNet(nn.Module):
    blocks: tuple[int, ...]
    num_classes: int
    norm: str
    num_groups: int
    stem: str
    widths: tuple[int, ...] = _WIDTHS

    @nn.compact
    def __call__(self, x: jax.Array, *, is_training: bool = False) -> jax.Array:
        norm: Callable[[str], nn.Module]
        if self.norm == "group":
            norm = functools.partial(_group_norm, self.num_groups)
        else:
            norm = functools.partial(_batch_norm, not is_training)
        x = inputs.images(x)
        if self.stem == "imagenet":
            x = _conv(self.widths[0], (7, 7), (2, 2), padding=((3, 3), (3, 3)), name="stem")(x)
            x = nn.relu(norm("stem_norm")(x))
            x = nn.max_pool(x, (3, 3), strides=(2, 2), padding=_PAD_ONE)
        else:
            x = _conv(self.widths[0], (3, 3), padding=_PAD_ONE, name="stem")(x)
            x = nn.relu(norm("stem_norm")(x))
        for stage, (width, num_blocks) in enumerate(zip(self.widths, self.blocks, strict=True)):
            for i in range(num_blocks):
                stride = 2 if stage > 0 and i == 0 else 1
                x = _Block(width, stride, norm, name=f"stage{stage + 1}_block{i + 1}")(x)
        return nn.Dense(self.num_classes, name="head")(jnp.mean(x, axis=(1, 2)))


def _group_norm(num_groups: int, name: str) -> nn.Module:
    return nn.GroupNorm(num_groups, epsilon=1e-5, name=name)


def _batch_norm(use_running_average: bool, name: str) -> nn.Module:
    return nn.BatchNorm(use_running_average, momentum=0.9, epsilon=1e-5, name=name)


@checked
def resnet18(
    example_x: jax.ShapeDtypeStruct,
    num_classes: NumClasses,
    *,
    norm: Literal["group", "batch"] = "group",
    num_groups: Count = 2,
    stem: Literal["imagenet", "cifar"] = "imagenet",
) -> Model:
    """Builds ResNet-18.

    11,181,642 parameters on colour images of 10 classes with the ImageNet stem, 11,173,962 with the
    CIFAR stem; 9,600 of them belong to normalisation. Batch norm adds 9,600 running statistics,
    which travel with the parameters.

    Args:
      example_x: shape and type of one image; integers are divided by 255.
      num_classes: the number of classes, at least 2.
      norm: "group", or "batch", whose outputs in training depend on the whole batch: such a model
        is refused under per-example clipping.
      num_groups: groups of channels that share statistics under group norm; divides 64.
      stem: "imagenet", a 7×7 convolution of stride 2 and max-pooling of stride 2, as in the
        published count and the authors' code; or "cifar", a 3×3 convolution of stride 1, which
        keeps 16 times as many pixels and costs about as many times more.

    Returns:
      The model; outputs are logits `[examples, classes]`.

    Raises:
      ValueError: if an argument is out of its range.

    Source: He and others 2016; the code of Malekmohammadi and others 2024 (Robust-HDP) for group
    norm with 2 groups.
    """
    return _resnet(
        "resnet18", example_x, _ResNet((2, 2, 2, 2), num_classes, norm, num_groups, stem)
    )


@checked
def resnet34(
    example_x: jax.ShapeDtypeStruct,
    num_classes: NumClasses,
    *,
    norm: Literal["group", "batch"] = "group",
    num_groups: Count = 2,
    stem: Literal["imagenet", "cifar"] = "imagenet",
) -> Model:
    """Builds ResNet-34.

    21,335,972 parameters on colour images of 100 classes with the ImageNet stem; 17,024 of them
    belong to normalisation.

    Args:
      example_x: shape and type of one image; integers are divided by 255.
      num_classes: the number of classes, at least 2.
      norm: "group" or "batch", as in `resnet18`.
      num_groups: groups of channels that share statistics under group norm; divides 64.
      stem: "imagenet" or "cifar", as in `resnet18`.

    Returns:
      The model; outputs are logits `[examples, classes]`.

    Raises:
      ValueError: if an argument is out of its range.

    Source: He and others 2016; the code of Malekmohammadi and others 2024 (Robust-HDP) for group
    norm with 2 groups.
    """
    return _resnet(
        "resnet34", example_x, _ResNet((3, 4, 6, 3), num_classes, norm, num_groups, stem)
    )


def _resnet(name: str, example_x: jax.ShapeDtypeStruct, module: _ResNet) -> Model:
    inputs.check_image(example_x, at_least=1)
    rule = "divide 64"
    checks.require(_WIDTHS[0] % module.num_groups == 0, "num_groups", rule, module.num_groups)
    return Model.from_flax(module, example_x, loss="softmax_cross_entropy", name=name)
