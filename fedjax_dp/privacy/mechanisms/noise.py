"""Continuous noise on trees of parameters: Gaussian and Laplace."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from chex import PRNGKey

from fedjax_dp.core import checks, trees
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.trees import PyTree
from fedjax_dp.privacy.mechanisms import random_bits
from fedjax_dp.privacy.sensitivities import Scalar


def _check_scale(argument: str, value: Scalar) -> None:
    if isinstance(value, int | float | np.number | np.ndarray):
        checks.non_negative(argument, value)


def release(value: jax.Array, scale: Scalar, draw: jax.Array) -> jax.Array:
    """Adds scaled noise; zeros, never NaN, if a traced scale is negative or not finite."""
    scale = jnp.asarray(scale, value.dtype)
    is_valid = jnp.isfinite(scale) & (scale >= 0)
    return jnp.where(is_valid, value + scale * draw, 0)


def _add(key: PRNGKey, tree: PyTree, scale: Scalar, sampler: Callable[..., jax.Array]) -> PyTree:
    leaves, treedef = jax.tree.flatten(tree)
    wide = [trees.at_least_float32(jnp.asarray(leaf)) for leaf in leaves]
    for leaf in wide:
        is_float = jnp.issubdtype(leaf.dtype, jnp.floating)
        checks.require(is_float, "tree", "hold floats only", leaf.dtype.name)
    pairs = zip(wide, random_bits.like(key, wide, sampler), strict=True)
    noised = [release(leaf, scale, draw.astype(leaf.dtype)) for leaf, draw in pairs]
    return jax.tree.unflatten(treedef, noised)


@checked
def add_gaussian(key: PRNGKey, tree: PyTree, stddev: Scalar) -> PyTree:
    """Adds independent Gaussian noise to every entry of a tree.

    Small leaves share a draw and large ones have one each (`random_bits.like`), in float32 or
    better.

    Guarantee: none by itself; it follows from the sensitivity from which `stddev` was computed
    (`sensitivities.noise_stddev`). Draws reach 20.6 standard deviations but leave gaps between
    their possible values; see `discrete` for noise without gaps.

    Args:
      key: used for this addition and nothing else.
      tree: a tree of float arrays.
      stddev: standard deviation per entry, in units of the parameters, at least 0; may be
        traced. A traced value that is negative or not finite releases zeros.

    Returns:
      The noised tree, its leaves float32 or better.
    """
    _check_scale("stddev", stddev)
    return _add(key, tree, stddev, random_bits.normal)


@checked
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
    """
    _check_scale("scale", scale)
    return _add(key, tree, scale, random_bits.laplace)
