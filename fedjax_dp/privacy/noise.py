"""Continuous noise on trees of parameters: Gaussian and Laplace."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from chex import PRNGKey

from fedjax_dp.core import checks, keys, trees

PyTree = Any
Scalar = jax.typing.ArrayLike
Sampler = Callable[..., jax.Array]


def _check_scale(argument: str, value: Scalar) -> None:
    if isinstance(value, int | float | np.number | np.ndarray):
        checks.non_negative(argument, value)


def _add(key: PRNGKey, tree: PyTree, scale: Scalar, sampler: Sampler) -> PyTree:
    scale = jnp.asarray(scale)
    # Zero is a release that any scale may make, so it is the answer to a scale that is none.
    is_valid = jnp.isfinite(scale) & (scale >= 0)
    leaves, treedef = jax.tree.flatten(tree)
    noised = []
    for index, leaf in enumerate(leaves):
        wide = trees.at_least_float32(jnp.asarray(leaf))
        checks.require(
            jnp.issubdtype(wide.dtype, jnp.floating), "tree", "hold floats only", wide.dtype.name
        )
        draw = sampler(keys.fold(key, index), wide.shape, wide.dtype)
        noised.append(jnp.where(is_valid, wide + scale.astype(wide.dtype) * draw, 0))
    return jax.tree.unflatten(treedef, noised)


def add_gaussian(key: PRNGKey, tree: PyTree, stddev: Scalar) -> PyTree:
    """Adds independent Gaussian noise to every entry of a tree.

    Each leaf draws from its own key, folded from its place in the tree, in float32 or better.

    Guarantee: none by itself; what it buys is in the sensitivity from which `stddev` was made
    (`clipping.noise_stddev`). Float32 draws reach 5.4 standard deviations and leave gaps
    between the values that they can take; see `discrete` for noise without either.

    Args:
      key: used for this addition and nothing else.
      tree: a tree of float arrays.
      stddev: standard deviation per entry, in units of the parameters, at least 0; may be
        traced. A traced value that is negative or not finite releases zeros.

    Returns:
      The noised tree, its leaves float32 or better.

    Raises:
      ValueError: if a static `stddev` is negative or not finite, or a leaf holds no floats.
    """
    _check_scale("stddev", stddev)
    return _add(key, tree, stddev, jax.random.normal)


def add_laplace(key: PRNGKey, tree: PyTree, scale: Scalar) -> PyTree:
    """Adds independent Laplace noise to every entry of a tree.

    The density is `exp(−|x|/scale) / (2·scale)`, with standard deviation `√2·scale`; the scale
    is a multiple of the L1 sensitivity, not of the L2 one.

    Args:
      key: used for this addition and nothing else.
      tree: a tree of float arrays.
      scale: in units of the parameters, at least 0; may be traced. A traced value that is
        negative or not finite releases zeros.

    Returns:
      The noised tree, its leaves float32 or better.

    Raises:
      ValueError: if a static `scale` is negative or not finite, or a leaf holds no floats.
    """
    _check_scale("scale", scale)
    return _add(key, tree, scale, jax.random.laplace)
