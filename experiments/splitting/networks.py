"""The networks of the chapter's runs: on MNIST, and on CIFAR-10 (figure 2.3)."""

import flax.linen as nn
import jax
import jax.numpy as jnp

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


class _CifarCnn(nn.Module):
    """Two pooled convolutions of 64 filters, normalised over channels, and three dense layers."""

    num_classes: int

    @nn.compact
    def __call__(self, x: jax.Array, *, is_training: bool = False) -> jax.Array:
        def pooled(x):
            return nn.max_pool(x, (2, 2), strides=(2, 2))

        x = response_normalised(pooled(nn.relu(nn.Conv(64, (5, 5), padding="VALID")(x))))
        x = pooled(response_normalised(nn.relu(nn.Conv(64, (5, 5), padding="VALID")(x))))
        x = nn.relu(nn.Dense(384)(x.reshape(len(x), -1)))
        return nn.Dense(self.num_classes)(nn.relu(nn.Dense(192)(x)))


def response_normalised(x: jax.Array) -> jax.Array:
    """Divides by `(1 + 1e-4 m)^¾`, m the mean square of a channel and the one before it.

    Before the first channel there are zeros.
    """
    squares = jnp.square(x)
    before = jnp.pad(squares[..., :-1], [(0, 0)] * (x.ndim - 1) + [(1, 0)])
    return x / (1 + 1e-4 * (squares + before) / 2) ** 0.75


def cifar_cnn(example_x: jax.ShapeDtypeStruct, num_classes: int) -> Model:
    """Builds the network of the authors' program: 797,962 parameters on 32×32×3 images, 10 classes.

    Args:
      example_x: shape and type of an image.
      num_classes: how many classes there are.

    Returns:
      The model; outputs are logits `[examples, classes]`.
    """
    module = _CifarCnn(num_classes)
    return Model.from_flax(module, example_x, loss="softmax_cross_entropy", name="cifar_cnn")
