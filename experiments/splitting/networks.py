"""The network of the chapter's runs on MNIST."""

import flax.linen as nn
import jax

from fedjax_dp.models.base import Model


class _MnistCnn(nn.Module):
    """Two pooled convolutions, dropout of whole channels in the second, and two dense layers."""

    num_classes: int

    @nn.compact
    def __call__(self, x: jax.Array, *, is_training: bool = False) -> jax.Array:
        def pooled(x):
            return nn.relu(nn.max_pool(x, (2, 2), strides=(2, 2)))

        x = pooled(nn.Conv(10, (5, 5), padding="VALID")(x))
        x = nn.Conv(20, (5, 5), padding="VALID")(x)
        x = pooled(nn.Dropout(0.5, broadcast_dims=(1, 2), deterministic=not is_training)(x))
        x = nn.relu(nn.Dense(20)(x.reshape(len(x), -1)))
        return nn.Dense(self.num_classes)(x)


def mnist_cnn(example_x: jax.ShapeDtypeStruct, num_classes: int) -> Model:
    """Builds the network: 11,910 parameters on 28×28×1 images of 10 classes.

    Args:
      example_x: shape and type of an image.
      num_classes: how many classes there are.

    Returns:
      The model; outputs are logits `[examples, classes]`.
    """
    module = _MnistCnn(num_classes)
    return Model.from_flax(module, example_x, loss="softmax_cross_entropy", name="mnist_cnn")
