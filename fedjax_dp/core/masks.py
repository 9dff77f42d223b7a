"""Masks: which entries of arrays are alive, one bit each where they are kept."""

import math
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from fedjax_dp.core.trees import PyTree


@flax.struct.dataclass
class Sparse:
    """Arrays of which only those entries are meant that a mask keeps.

    It is what a sparse message is made of: whoever counts bytes counts the entries that are kept.

    Attributes:
      values: arrays; 0 where the mask is.
      mask: of their structure, bool, with None in the place of an array that is whole.
      is_known: whether who receives it has the mask, which then need not be sent; static.
    """

    values: PyTree
    mask: PyTree
    is_known: bool = flax.struct.field(pytree_node=False, default=False)


def parted(tree: PyTree | Sparse) -> tuple[PyTree, PyTree | None]:
    """Takes arrays and the mask of those that have one apart.

    Args:
      tree: arrays, or a `Sparse` of them.

    Returns:
      Arrays and mask; None where all entries are meant.
    """
    return (tree.values, tree.mask) if isinstance(tree, Sparse) else (tree, None)


def full(shapes: PyTree) -> PyTree:
    """Makes the mask that keeps everything.

    Args:
      shapes: arrays, or shapes, or None for what has no mask.

    Returns:
      Arrays of bools, all true.
    """
    return jax.tree.map(lambda x: jnp.ones(x.shape, bool), shapes)


def applied(mask: PyTree, values: PyTree) -> PyTree:
    """Sets to zero what a mask does not keep.

    Args:
      mask: bool, with None in the place of an array that is whole.
      values: arrays.

    Returns:
      The arrays.
    """
    return jax.tree.map(
        lambda m, x: x if m is None else jnp.where(m, x, 0), mask, values, is_leaf=_is_none
    )


def packed(mask: PyTree) -> PyTree:
    """Packs a mask, for whoever keeps it.

    Args:
      mask: bool.

    Returns:
      One bit an entry: arrays of bytes, `[ceil(entries / 8)]`, uint8.
    """
    return jax.tree.map(lambda m: jnp.packbits(m.ravel()), mask)


def unpacked(bits: PyTree, shapes: PyTree) -> PyTree:
    """Unpacks a mask.

    Args:
      bits: as `packed` gives them.
      shapes: arrays of the mask's shapes, or shapes.

    Returns:
      The mask.
    """

    def one(b: jax.Array, s: Any) -> jax.Array:
        return jnp.unpackbits(b, count=math.prod(s.shape)).reshape(s.shape).astype(bool)

    return jax.tree.map(one, bits, shapes)


def num_alive(mask: PyTree) -> jax.Array:
    """Counts the entries that a mask keeps.

    Args:
      mask: bool.

    Returns:
      Their number, int32.
    """
    counts = [jnp.sum(m, dtype=jnp.int32) for m in jax.tree.leaves(mask)]
    return sum(counts, jnp.int32(0))


def _is_none(x: Any) -> bool:
    return x is None
