"""Streams of masks, made neighbour by neighbour so that a client holds one at a time."""

import jax
import jax.numpy as jnp
from chex import PRNGKey
from jax.extend.random import threefry_2x32

from fedjax_dp.core.trees import PyTree
from fedjax_dp.server.secure.graphs import Circle
from fedjax_dp.server.secure.key_agreement import MaskKeys

_MULTIPLE = 128


def flat(words: PyTree) -> jax.Array:
    """Lines up the words of a tree, fewer than 2^32, and zeros up to a multiple of 128.

    XLA's CPU compiler takes seven times as long for streams of other lengths.
    """
    parts = [leaf.reshape(-1) for leaf in jax.tree.leaves(words)]
    parts.append(jnp.zeros(-sum(part.size for part in parts) % _MULTIPLE, jnp.uint32))
    return jnp.concatenate(parts)


def shaped(vector: jax.Array, like: PyTree) -> PyTree:
    """Undoes `flat`."""
    leaves, structure = jax.tree.flatten(like)
    parts, start = [], 0
    for leaf in leaves:
        parts.append(vector[start : start + leaf.size].reshape(leaf.shape))
        start += leaf.size
    return jax.tree.unflatten(structure, parts)


def stream(seed: jax.Array, size: int) -> jax.Array:
    """Draws uniform words, `[size]` uint32, by Threefry-2x32 in counter mode; the size is even."""
    return threefry_2x32(seed, jnp.arange(size, dtype=jnp.uint32))


def with_pair_masks(
    vector: jax.Array,
    circle: Circle,
    place: jax.Array,
    keys: MaskKeys,
    public_key: PRNGKey,
    counts: jax.Array,
) -> jax.Array:
    """Adds the masks of the client at a place with those neighbours, by place, that count.

    Of two clients the one of the smaller index adds the mask, and the other subtracts it.
    """
    client = circle.clients[place]

    def one(step, vector):
        neighbor, is_there = circle.neighbor(place, step)
        other = circle.clients[neighbor]

        def with_mask(vector):
            mask = stream(keys.of_pair(public_key, client, other), len(vector))
            return jnp.where(client < other, vector + mask, vector - mask)

        is_wanted = is_there & counts[neighbor]
        return jax.lax.cond(is_wanted, with_mask, lambda vector: vector, vector)

    return jax.lax.fori_loop(0, 2 * circle.reach, one, vector)
