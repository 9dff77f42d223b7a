"""Conversions and checks of the inputs of the zoo's models."""

from typing import Annotated, Any

import jax
import jax.numpy as jnp
from annotated_types import Ge, Lt

from fedjax_dp.core import checks

# At least 2.
NumClasses = Annotated[int, Ge(2), Lt(checks.COUNT_LIMIT)]


def images(x: jax.Array) -> jax.Array:
    """Converts images to float32 `[examples, height, width, channels]`; divides integers by 255."""
    if x.ndim == 3:
        x = x[..., None]
    pixels = x.astype(jnp.float32)
    return pixels / 255 if jnp.issubdtype(x.dtype, jnp.integer) else pixels


def features(x: jax.Array) -> jax.Array:
    """Flattens each example into float32 features; only bytes are divided by 255."""
    rows = x.reshape(x.shape[0], -1).astype(jnp.float32)
    return rows / 255 if x.dtype == jnp.uint8 else rows


def tokens(x: jax.Array, vocabulary_size: int) -> jax.Array:
    """Clips tokens to the vocabulary."""
    return jnp.clip(x, 0, vocabulary_size - 1)


def dropout_rate(dropout: Any) -> float:
    """Returns a rate as a number of Python: it decides what a model computes, and is static."""
    rule = "be a number that is known when the model is built"
    checks.require(not checks.is_traced(dropout), "dropout", rule, dropout)
    return float(dropout)


def check_image(example_x: jax.ShapeDtypeStruct, *, at_least: int) -> None:
    """Requires the structure of one image of at least the given height and width."""
    shape = example_x.shape
    rule = "be an image [height, width] or [height, width, channels] of at least "
    rule += f"{at_least} pixels in height and width"
    checks.require(len(shape) in (2, 3) and min(shape[:2]) >= at_least, "example_x", rule, shape)


def check_tokens(example_x: jax.ShapeDtypeStruct) -> None:
    """Requires the structure of one sequence of integer tokens."""
    fits = len(example_x.shape) == 1 and jnp.issubdtype(example_x.dtype, jnp.integer)
    rule = "be one row of integer tokens"
    checks.require(fits, "example_x", rule, (example_x.shape, str(example_x.dtype)))


def require_positions(x: jax.Array, num_positions: int) -> None:
    """Requires sequences that a model has positions for."""
    rule = f"have at most {num_positions} tokens, the positions of the model"
    checks.require(x.shape[1] <= num_positions, "x", rule, x.shape[1])


def require_heads(name: str, size: int, num_heads: int) -> None:
    """Requires vectors that can be divided among the heads of attention."""
    checks.require(size % num_heads == 0, name, f"be a multiple of {num_heads} heads", size)
