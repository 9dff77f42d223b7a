"""A small residual network for CIFAR-10 on CPUs, in place of the thesis' ResNet-18."""

from typing import Literal

import flax.linen as nn
import jax
import jax.numpy as jnp

from fedjax_dp.models import Model


class _SmallResNet(nn.Module):
    """A stem of stride 2, and a residual block at each width, the later ones of stride 2."""

    widths: tuple[int, ...]
    num_classes: int
    norm: str

    @nn.compact
    def __call__(self, x: jax.Array, *, is_training: bool = False) -> jax.Array:
        def normed(x: jax.Array) -> jax.Array:
            if self.norm == "group":
                return nn.GroupNorm(2, epsilon=1e-5)(x)
            return nn.BatchNorm(not is_training, momentum=0.9, epsilon=1e-5)(x)

        def conv(x: jax.Array, width: int, stride: int = 1, size: int = 3) -> jax.Array:
            return nn.Conv(width, (size, size), (stride, stride), use_bias=False)(x)

        x = x.astype(jnp.float32) / 255 if jnp.issubdtype(x.dtype, jnp.integer) else x
        x = nn.relu(normed(conv(x, self.widths[0], 2)))
        for stage, width in enumerate(self.widths):
            stride = 1 if stage == 0 else 2
            y = nn.relu(normed(conv(x, width, stride)))
            y = normed(conv(y, width))
            shortcut = x if stage == 0 else normed(conv(x, width, stride, 1))
            x = nn.relu(y + shortcut)
        return nn.Dense(self.num_classes)(jnp.mean(x, axis=(1, 2)))


def small_resnet(
    example_x: jax.ShapeDtypeStruct,
    num_classes: int,
    *,
    norm: Literal["group", "batch"] = "group",
) -> Model:
    """Builds a residual network of three blocks, of 8, 16 and 32 channels.

    It has the parts of ResNet-18 (a stem of stride 2, blocks with shortcuts, group norm with two
    groups or batch norm, a mean over pixels) and less than a five-hundredth of its parameters.

    Args:
      example_x: shape and type of one image; integers are divided by 255.
      num_classes: the number of classes.
      norm: "group" or "batch", whose outputs in training depend on the whole batch.

    Returns:
      The model; outputs are logits `[examples, classes]`.
    """
    module = _SmallResNet((8, 16, 32), num_classes, norm)
    return Model.from_flax(module, example_x, loss="softmax_cross_entropy", name="small_resnet")
