"""Masks: which entries of arrays are alive, stored as one bit each."""

import math
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from fedjax_dp.core.backend import backend
from fedjax_dp.core.trees import PyTree


@flax.struct.dataclass
class Sparse:
    """Arrays of which only the entries kept by a mask count, as in a sparse message.

    Attributes:
      values: arrays; 0 where the mask is False.
      mask: of their structure, bool, None for an array that is whole.
      is_known: whether the receiver has the mask, so that it need not be sent; static.
    """

    values: PyTree
    mask: PyTree
    is_known: bool = flax.struct.field(pytree_node=False, default=False)


def parted(tree: PyTree | Sparse) -> tuple[PyTree, PyTree | None]:
    """Splits a `Sparse` into arrays and mask; the mask of anything else is None."""
    return (tree.values, tree.mask) if isinstance(tree, Sparse) else (tree, None)


def full(shapes: PyTree) -> PyTree:
    """Makes the mask that keeps all entries, None if `shapes` holds None."""
    return jax.tree.map(lambda x: jnp.ones(x.shape, bool), shapes)


def applied(mask: PyTree, values: PyTree) -> PyTree:
    """Sets to zero what a mask does not keep; None keeps the whole array."""
    return jax.tree.map(
        lambda m, x: x if m is None else jnp.where(m, x, 0),
        mask,
        values,
        is_leaf=lambda m: m is None,
    )


def packed(mask: PyTree) -> PyTree:
    """Packs a mask into bytes, one bit per entry."""
    return jax.tree.map(lambda m: jnp.packbits(m.ravel()), mask)


def unpacked(bits: PyTree, shapes: PyTree) -> PyTree:
    """Unpacks the result of `packed` into a mask of these shapes."""

    def one(b: jax.Array, s: Any) -> jax.Array:
        return jnp.unpackbits(b, count=math.prod(s.shape)).reshape(s.shape).astype(bool)

    return jax.tree.map(one, bits, shapes)


def num_alive(mask: PyTree) -> jax.Array:
    """Counts the entries that a mask keeps."""
    return sum(map(count, jax.tree.leaves(mask)), jnp.int32(0))


def count(flags: jax.Array) -> jax.Array:
    """Counts the entries that are set; on a CPU by bytes of eight, a third of the time of a sum."""
    if backend() == "cpu":
        flags = jax.lax.population_count(jnp.packbits(flags.ravel()))
    return jnp.sum(flags, dtype=jnp.int32)
