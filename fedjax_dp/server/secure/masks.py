"""Streams of masks, made neighbour by neighbour so that a client holds one at a time."""

import math

import flax.struct
import jax
import jax.numpy as jnp
from chex import PRNGKey

from fedjax_dp.core import trees
from fedjax_dp.core.keys import threefry_2x32
from fedjax_dp.core.trees import PyTree
from fedjax_dp.server.secure.graphs import Circle
from fedjax_dp.server.secure.key_agreement import MaskKeys
from fedjax_dp.server.secure.words import Words, is_words, joined_limbs, split_limbs

_MULTIPLE = 128


@flax.struct.dataclass
class Line:
    """The words of a message in a line."""

    narrow: jax.Array  # Words of 32 bits, uint32.
    low: jax.Array  # The lower halves of words of 64 bits, uint32.
    high: jax.Array  # Their higher halves.

    def __add__(self, other: "Line") -> "Line":
        """Adds words modulo 2^32 and modulo 2^64."""
        low = self.low + other.low
        carry = (low < self.low).astype(jnp.uint32)
        return Line(self.narrow + other.narrow, low, self.high + other.high + carry)

    def __sub__(self, other: "Line") -> "Line":
        """Subtracts words modulo 2^32 and modulo 2^64."""
        borrow = (self.low < other.low).astype(jnp.uint32)
        high = self.high - other.high - borrow
        return Line(self.narrow - other.narrow, self.low - other.low, high)


def flat(words: PyTree) -> Line:
    """Lines up the words of a tree, of fewer than 2^32 times 32 bits; zeros fill multiples of 128.

    XLA's CPU compiler takes seven times as long for streams of other lengths.
    """
    leaves = jax.tree.leaves(words, is_leaf=is_words)
    wide = [joined_limbs(leaf.values) for leaf in leaves if _is_wide(leaf)]
    narrow = [jax.tree.leaves(leaf)[0] for leaf in leaves if not _is_wide(leaf)]
    lower, higher = ([halves[i] for halves in wide] for i in range(2))
    return Line(_lined_up(narrow), _lined_up(lower), _lined_up(higher))


def shaped(line: Line, like: PyTree) -> PyTree:
    """Undoes `flat`."""
    leaves, structure = jax.tree.flatten(like, is_leaf=is_words)
    start = {True: 0, False: 0}

    def one(leaf):
        is_wide = _is_wide(leaf)
        shape = leaf.values.shape[1:] if is_wide else jax.tree.leaves(leaf)[0].shape
        part = slice(start[is_wide], start[is_wide] + math.prod(shape))
        start[is_wide] = part.stop
        if is_wide:
            halves = (half[part].reshape(shape) for half in (line.low, line.high))
            return leaf.replace(values=split_limbs(*halves))
        return jax.tree.map(lambda _: line.narrow[part].reshape(shape), leaf)

    return jax.tree.unflatten(structure, map(one, leaves))


def stream(seed: jax.Array, size: int, start: int = 0) -> jax.Array:
    """Draws uniform words, `[size]` uint32, by Threefry-2x32 in counter mode; the size is even."""
    return threefry_2x32(seed, start + jnp.arange(size, dtype=jnp.uint32))


def mask(seed: jax.Array, like: Line) -> Line:
    """Draws uniform words, as many as a line has, from one stream."""
    count = len(like.low)
    # Each block of the stream gives both halves of a word, so that nothing is moved.
    wide = stream(seed, 2 * count)
    return Line(stream(seed, len(like.narrow), 2 * count), wide[:count], wide[count:])


def with_pair_masks(
    line: Line,
    circle: Circle,
    position: jax.Array,
    keys: MaskKeys,
    public_key: PRNGKey,
    counts: jax.Array,
) -> Line:
    """Adds the masks of the client at a position with those neighbours, by position, that count.

    Of two clients the one of the smaller index adds the mask, and the other subtracts it.
    """
    client = circle.clients[position]

    def one(step, line):
        neighbor, exists = circle.neighbor(position, step)
        other = circle.clients[neighbor]

        def with_mask(line):
            drawn = mask(keys.of_pair(public_key, client, other), line)
            return trees.where(client < other, line + drawn, line - drawn)

        is_wanted = exists & counts[neighbor]
        return jax.lax.cond(is_wanted, with_mask, lambda line: line, line)

    return jax.lax.fori_loop(0, 2 * circle.reach, one, line)


def _is_wide(leaf: Words | jax.Array) -> bool:
    return isinstance(leaf, Words) and leaf.bits == 64


def _lined_up(parts: list[jax.Array]) -> jax.Array:
    """Joins arrays, and zeros up to a multiple of 128."""
    missing = -sum(part.size for part in parts) % _MULTIPLE
    return jnp.concatenate([*(part.reshape(-1) for part in parts), jnp.zeros(missing, jnp.uint32)])
