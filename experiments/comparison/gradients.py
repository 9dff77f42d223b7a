"""CIFAR-10 as orientations and colours, on which small models learn under privacy.

Networks trained from pixels learn nothing here at these budgets; on fixed features they do.

Source: the features are a plain form of Dalal and Triggs 2005 (histograms of oriented gradients);
that private models need such features is found by Tramèr and Boneh 2021.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_dp.data.datasets import Dataset, load

CELLS = 4  # In each direction; 8 pixels wide.
BINS = 8  # Of orientations between 0 and 180 degrees.
AT_ONCE = 1000


@jax.jit
def features(images: jax.Array) -> jax.Array:
    """Describes images `[n, side, side, 3]` in [0, 1] by CELLS² · (BINS + 3) numbers in [-1, 1].

    Of each cell: the square root of the share that each orientation has in the image's gradient,
    and the mean colour. An image's features depend on no other image.
    """
    count, side = images.shape[:2]
    width = side // CELLS
    grey = jnp.pad(images.mean(axis=-1), ((0, 0), (1, 1), (1, 1)), mode="edge")
    down, right = grey[:, 2:, 1:-1] - grey[:, :-2, 1:-1], grey[:, 1:-1, 2:] - grey[:, 1:-1, :-2]
    angle = jnp.arctan2(down, right) % jnp.pi * (BINS / jnp.pi)
    # A gradient is divided over the two orientations next to its own.
    apart = jnp.abs(angle[..., None] - jnp.arange(BINS))
    near = jnp.maximum(1 - jnp.minimum(apart, BINS - apart), 0)
    parts = jnp.concatenate([jnp.hypot(down, right)[..., None] * near, images], axis=-1)
    cells = parts.reshape(count, CELLS, width, CELLS, width, BINS + 3).sum(axis=(2, 4))
    oriented, colours = cells[..., :BINS], cells[..., BINS:] / width**2
    shares = oriented / (oriented.sum(axis=(1, 2, 3), keepdims=True) + 1e-3)
    return jnp.concatenate([jnp.sqrt(shares), 2 * colours - 1], axis=-1).reshape(count, -1)


@functools.cache
def cifar10(data_dir: pathlib.Path) -> Dataset:
    """Loads CIFAR-10 by its features, once in a process."""
    images = load("cifar10", data_dir, dtype="uint8")

    def of(part: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        x, starts = part["x"], range(0, len(part["x"]), AT_ONCE)
        some = [np.asarray(features(x[i : i + AT_ONCE] / np.float32(255))) for i in starts]
        return {"x": np.concatenate(some), "y": part["y"]}

    return dataclasses.replace(images, train=of(images.train), test=of(images.test))
