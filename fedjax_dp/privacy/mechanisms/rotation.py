"""The randomised Walsh-Hadamard rotation, which spreads a vector evenly over its coordinates."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from chex import PRNGKey

from fedjax_dp.core import trees
from fedjax_dp.core.trees import PyTree


class Layout(NamedTuple):
    """The layout of a tree as one vector."""

    treedef: Any
    shapes: tuple[tuple[int, ...], ...]  # Of the leaves.
    dimension: int  # The number of scalars.
    padded: int  # The length of the vector, a power of two if it is to be rotated.


def layout_of(tree: PyTree, *, is_padded: bool = True) -> Layout:
    """Reads the layout of a tree of arrays or shapes, padded to a power of two or not."""
    leaves, treedef = jax.tree.flatten(tree)
    dimension = trees.num_parameters(leaves)
    padded = 1 << max(dimension - 1, 0).bit_length() if is_padded else dimension
    return Layout(treedef, tuple(tuple(x.shape) for x in leaves), dimension, padded)


def flatten(tree: PyTree, layout: Layout) -> jax.Array:
    """Writes a tree as one vector, `[padded]` in float32 or better, padded with zeros."""
    leaves = [trees.at_least_float32(jnp.asarray(x)).ravel() for x in jax.tree.leaves(tree)]
    flat = jnp.concatenate(leaves) if leaves else jnp.zeros(0)
    return jnp.pad(flat, (0, layout.padded - layout.dimension))


def unflatten(vector: jax.Array, layout: Layout) -> PyTree:
    """Reads a tree back from its vector and drops the padding."""
    sizes = [math.prod(shape) for shape in layout.shapes]
    parts = jnp.split(vector[: layout.dimension], np.cumsum(sizes)[:-1])
    leaves = [part.reshape(shape) for part, shape in zip(parts, layout.shapes, strict=True)]
    return jax.tree.unflatten(layout.treedef, leaves)


def rotate(key: PRNGKey, vector: jax.Array) -> jax.Array:
    """Applies random signs and the orthonormal Walsh-Hadamard transform, d being a power of two.

    All parties of one sum use the same key, so that the rotated vectors add up.

    Source: Kairouz, Liu, Steinke 2021, section 4.2.
    """
    return _hadamard(vector * _signs(key, vector))


def rotate_back(key: PRNGKey, vector: jax.Array) -> jax.Array:
    """Undoes `rotate` with the same key."""
    return _hadamard(vector) * _signs(key, vector)


def _signs(key: PRNGKey, vector: jax.Array) -> jax.Array:
    return jax.random.rademacher(key, vector.shape, vector.dtype)


def _hadamard(vector: jax.Array) -> jax.Array:
    """The orthonormal transform, its own inverse, in log2(d) passes."""
    (d,) = vector.shape
    half = 1
    while half < d:
        pairs = vector.reshape(-1, 2, half)
        vector = jnp.stack([pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]], axis=1)
        half *= 2
    return vector.reshape(d) / math.sqrt(d)
