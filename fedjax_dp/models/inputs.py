"""What the models of the zoo do to their inputs before the first layer."""

import jax
import jax.numpy as jnp

from fedjax_dp.core import checks


def images(x: jax.Array) -> jax.Array:
    """Turns images into float32 with an axis of channels.

    Args:
      x: `[examples, height, width]` or `[examples, height, width, channels]`. Integers are pixel
        values from 0 to 255 and are divided by 255; floats are taken as they are.

    Returns:
      `[examples, height, width, channels]`, float32.
    """
    if x.ndim == 3:
        x = x[..., None]
    pixels = x.astype(jnp.float32)
    return pixels / 255 if jnp.issubdtype(x.dtype, jnp.integer) else pixels


def features(x: jax.Array) -> jax.Array:
    """Turns any example into one row of float32 features.

    Args:
      x: `[examples, ...]`. Bytes (uint8) are pixel values and are divided by 255; all other types
        are cast.

    Returns:
      `[examples, features]`, float32.
    """
    rows = x.reshape(x.shape[0], -1).astype(jnp.float32)
    return rows / 255 if x.dtype == jnp.uint8 else rows


def tokens(x: jax.Array, vocabulary_size: int) -> jax.Array:
    """Reads tokens outside the vocabulary as the nearest token inside it.

    Args:
      x: integers, `[examples, tokens]`.
      vocabulary_size: how many tokens there are.

    Returns:
      Integers in [0, vocabulary_size), `[examples, tokens]`.
    """
    return jnp.clip(x, 0, vocabulary_size - 1)


def check_image(example_x: jax.ShapeDtypeStruct, *, at_least: int) -> None:
    """Requires the structure of one image that is large enough.

    Args:
      example_x: shape and type of one image, `[height, width]` or `[height, width, channels]`.
      at_least: the smallest height and width in pixels.

    Raises:
      ValueError: if the shape is another.
    """
    shape = example_x.shape
    checks.require(
        len(shape) in (2, 3) and min(shape[:2]) >= at_least,
        "example_x",
        f"be an image [height, width] or [height, width, channels] of at least {at_least} pixels "
        "in height and width",
        shape,
    )


def check_tokens(example_x: jax.ShapeDtypeStruct) -> None:
    """Requires the structure of one sequence of tokens.

    Args:
      example_x: shape and type of one sequence, `[tokens]`, integers.

    Raises:
      ValueError: if the shape or the type is another.
    """
    checks.require(
        len(example_x.shape) == 1 and jnp.issubdtype(example_x.dtype, jnp.integer),
        "example_x",
        "be one row of integer tokens",
        (example_x.shape, str(example_x.dtype)),
    )


def check_dropout(argument: str, rate: float) -> None:
    """Requires a share of units to drop.

    Args:
      argument: the name to put into the error.
      rate: the share, in [0, 1).

    Raises:
      ValueError: if the share lies outside.
    """
    is_rate = checks.is_finite_number(rate) and 0 <= rate < 1
    checks.require(is_rate, argument, "lie in [0, 1)", rate)
