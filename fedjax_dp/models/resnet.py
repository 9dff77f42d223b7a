"""Residual networks with group or batch normalisation."""

import functools
from collections.abc import Callable
from typing import Literal

import flax.linen as nn
import jax
import jax.numpy as jnp

from fedjax_dp.core import checks
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.ranges import Count
from fedjax_dp.models import inputs
from fedjax_dp.models.base import Model

_WIDTHS = (64, 128, 256, 512)
_NORMS = ("batch", "group")
_STEMS = ("cifar", "imagenet")

_conv = functools.partial(
    nn.Conv, use_bias=False, kernel_init=nn.initializers.variance_scaling(2.0, "fan_out", "normal")
)
_PAD_ONE = ((1, 1), (1, 1))


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
    num_classes: int,
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
    return _resnet("resnet18", (2, 2, 2, 2), example_x, num_classes, norm, num_groups, stem)


@checked
def resnet34(
    example_x: jax.ShapeDtypeStruct,
    num_classes: int,
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
    return _resnet("resnet34", (3, 4, 6, 3), example_x, num_classes, norm, num_groups, stem)


def _resnet(
    name: str,
    blocks: tuple[int, ...],
    example_x: jax.ShapeDtypeStruct,
    num_classes: int,
    norm: str,
    num_groups: int,
    stem: str,
) -> Model:
    inputs.check_image(example_x, at_least=1)
    checks.whole("num_classes", num_classes, at_least=2)
    checks.one_of("norm", norm, _NORMS)
    checks.one_of("stem", stem, _STEMS)
    checks.whole("num_groups", num_groups)
    checks.require(_WIDTHS[0] % num_groups == 0, "num_groups", "divide 64", num_groups)
    module = _ResNet(blocks, num_classes, norm, num_groups, stem)
    return Model.from_flax(module, example_x, loss="softmax_cross_entropy", name=name)
