"""LeNet-5."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from fedjax_dp.core import checks
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.models import inputs
from fedjax_dp.models.base import Model

_SIZE = 32


class _LeNet5(nn.Module):
    num_classes: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = _pad_to_size(inputs.images(x))
        for width in (6, 16):
            x = nn.relu(nn.Conv(width, (5, 5), padding="VALID")(x))
            x = nn.max_pool(x, (2, 2), strides=(2, 2))
        x = x.reshape(x.shape[0], -1)
        for size in (120, 84):
            x = nn.relu(nn.Dense(size)(x))
        return nn.Dense(self.num_classes)(x)


def _pad_to_size(x: jax.Array) -> jax.Array:
    missing = [max(_SIZE - size, 0) for size in x.shape[1:3]]
    return jnp.pad(x, [(0, 0), *((m // 2, m - m // 2) for m in missing), (0, 0)])


@checked
def lenet5(example_x: jax.ShapeDtypeStruct, num_classes: int) -> Model:
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
    checks.whole("num_classes", num_classes, at_least=2)
    module = _LeNet5(num_classes)
    return Model.from_flax(module, example_x, loss="softmax_cross_entropy", name="lenet5")
