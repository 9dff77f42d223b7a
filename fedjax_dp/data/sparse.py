"""Draws from large populations at a cost that grows with the sample, not the population.

A draw from few members visits each of them. From more than `DENSE` members these functions draw the
gaps between members, or members until they are distinct, or positions of a permutation one by one.
"""

import math

import jax
import jax.numpy as jnp
from chex import PRNGKey

from fedjax_dp.core.keys import fold
from fedjax_dp.core.trees import promoted

# Up to this many members, or this many times the expected number, all are visited.
DENSE = 1024
_DENSE_BATCHES = 32
# No draw of a run is larger than its slots, except with probability 2^-100 each.
_OVERFLOW = 100 * math.log(2)
# Digits of a gap have odds exact to 2^-17; the rate is lowered by more than that.
_RATE_MARGIN = 1.0 - 2.0**-14
# Gaps are drawn in pieces, each of which continues with probability from e^-8 to e^-4.
_LONGEST_PIECE = 4.0
_NUM_DIGITS = 31
_ROUNDS = 8


def num_dense(limit: int, batch_size: float) -> int:
    """Counts the slots that draws need which visit every member."""
    return min(limit, max(DENSE, math.ceil(_DENSE_BATCHES * batch_size)))


def is_sparse(size: jax.Array, batch_size: jax.typing.ArrayLike) -> jax.Array:
    """Whether a draw skips members: large populations, by population and batch alone."""
    many = jnp.maximum(DENSE, jnp.ceil(_DENSE_BATCHES * jnp.asarray(batch_size)))
    size, many = promoted(size, many)
    return jnp.asarray(size > many)


def tail(mean: float) -> int:
    """Bounds a count of independent events of mean above 0, except with probability 2^-100.

    Source: Chernoff's bound, P(X ≥ c) ≤ exp(c − μ − c·ln(c / μ)).
    """
    low, high = mean, mean + 200 + 20 * math.sqrt(mean) + mean
    while high - low > 0.5:
        middle = (low + high) / 2
        is_enough = middle * math.log(middle / mean) - middle + mean >= _OVERFLOW
        low, high = (low, middle) if is_enough else (middle, high)
    return math.ceil(high)


def mean_of(slots: int) -> float:
    """Finds the largest mean, to within 1/2, whose `tail` fits some slots."""
    low, high = 0.0, float(slots)
    while high - low > 0.5:
        middle = (low + high) / 2
        low, high = (middle, high) if tail(middle) <= slots else (low, middle)
    return high


def coins(
    key: PRNGKey, size: jax.Array, rate: jax.Array, limit: int, capacity: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Draws each member independently: members `[capacity]`, their count, any overflow.

    The gaps between drawn members are geometric, and the binary digits of such a gap independent:
    digit k is 1 with odds (1 − rate)^(2^k). `capacity` is at least `tail` of the expected count.

    Guarantee: given all others, a member is drawn with probability at most `rate`, below 1 / 32.
    """
    odds, is_used, continues, piece = digits(rate)
    num_tokens = capacity + 1 + tail(max(1.0, 1.1 * math.exp(-_LONGEST_PIECE) * capacity))
    # The bits of each gap do not depend on limit and slots, so these change no draw.
    bits = jax.random.bits(key, (num_tokens, len(odds) + 1), jnp.uint32)
    is_one = (bits[:, :-1] < odds) & is_used
    values = jnp.uint32(1) << jnp.arange(len(odds), dtype=jnp.uint32)
    gaps = jnp.minimum(jnp.sum(jnp.where(is_one, values, 0), axis=1, dtype=jnp.uint32), limit)
    is_longer = bits[:, -1] < continues
    steps = jnp.where(is_longer, jnp.minimum(piece, limit), jnp.minimum(gaps + 1, limit))
    # Past the last member, sums stay there.
    ends = jax.lax.associative_scan(lambda a, b: jnp.minimum(a + b, jnp.uint32(limit)), steps)
    starts = jnp.concatenate([jnp.zeros(1, jnp.uint32), ends[:-1]])
    places = starts + gaps
    is_in = ~is_longer & (starts < limit) & (places < size.astype(jnp.uint32))
    (tokens,) = jnp.nonzero(is_in, size=capacity, fill_value=0)
    count = jnp.sum(is_in)
    return places[tokens].astype(jnp.int32), jnp.minimum(count, capacity), count > capacity


def digits(rate: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Returns the law of a gap: uint32 thresholds for binary digits, which of them are used, the
    threshold for a gap that is longer than they can express, and the length of that piece.
    """
    decay = -jnp.log1p(-rate * jnp.float32(_RATE_MARGIN))
    lengths = 2.0 ** jnp.arange(_NUM_DIGITS, dtype=jnp.float32)
    is_used = lengths * decay <= _LONGEST_PIECE
    odds = jnp.exp(-lengths * decay)
    chances = odds / (1 + odds)
    num_used = jnp.sum(is_used)
    piece = jnp.uint32(1) << num_used.astype(jnp.uint32)
    continues = jnp.exp(-(2.0 ** num_used.astype(jnp.float32)) * decay)
    as_bits = [(p * 2.0**32).astype(jnp.uint32) for p in (chances, jnp.minimum(continues, 0.9999))]
    return as_bits[0], is_used, as_bits[1], piece


def distinct(key: PRNGKey, size: jax.Array, count: jax.Array, capacity: int) -> jax.Array:
    """Draws `count` of more than twice as many members uniformly without replacement."""
    slots = jnp.arange(capacity)
    is_asked = slots < count

    def again(carry):
        attempt, rows, is_wrong = carry
        fresh = _uniform(fold(key, attempt), size, capacity)
        rows = jnp.where(is_wrong, fresh, rows)
        # Unused slots hold numbers that no member has.
        named = jnp.where(is_asked, rows, size + slots)
        order = jnp.argsort(named, stable=True)
        is_same = jnp.concatenate([jnp.zeros(1, bool), named[order][1:] == named[order][:-1]])
        return attempt + 1, rows, jnp.zeros(capacity, bool).at[order].set(is_same)

    start = jnp.int32(0), jnp.zeros(capacity, jnp.int32), jnp.ones(capacity, bool)
    return jax.lax.while_loop(lambda carry: jnp.any(carry[2]), again, start)[1]


def _uniform(key: PRNGKey, size: jax.Array, count: int) -> jax.Array:
    """Draws members uniformly up to 2^-33, with replacement: a 64-bit fraction of the size."""
    high, low = jax.random.bits(key, (count, 2), jnp.uint32).T
    size = size.astype(jnp.uint32)
    carry = _upper(low, size)
    lower = high * size
    overflows = lower + carry < lower
    return (_upper(high, size) + overflows.astype(jnp.uint32)).astype(jnp.int32)


def _upper(a: jax.Array, b: jax.Array) -> jax.Array:
    """Returns the upper 32 of the 64 bits of a product."""
    low, ah, al, bh, bl = jnp.uint32(0xFFFF), a >> 16, a & 0xFFFF, b >> 16, b & 0xFFFF
    middle = ah * bl + ((al * bl) >> 16)
    other = al * bh + (middle & low)
    return ah * bh + (middle >> 16) + (other >> 16)


def permuted(key: PRNGKey, places: jax.Array, size: jax.Array) -> jax.Array:
    """Returns the members at some positions of a random order; member 0 outside it.

    A Feistel network permutes the numbers of as many bits as the population of at least 2 needs; a
    number that is not a member is permuted again. No privacy claim depends on this order.

    Source: Luby and Rackoff 1988; Black and Rogaway 2002 for numbers that are not members.
    """
    keys = jax.random.bits(key, (_ROUNDS,), jnp.uint32)
    size = size.astype(jnp.uint32)
    width = 32 - jax.lax.clz(size - 1)
    right = width - width // 2
    masks = (jnp.uint32(1) << (width - right)) - 1, (jnp.uint32(1) << right) - 1

    def once(values):
        halves = [values >> right, values & masks[1]]
        for i in range(_ROUNDS):
            own, other = halves[i % 2], halves[1 - i % 2]
            halves[i % 2] = own ^ (_mixed(other ^ keys[i]) & masks[i % 2])
        return (halves[0] << right) | halves[1]

    is_inside = (places >= 0) & (places.astype(jnp.uint32) < size)
    start = once(jnp.where(is_inside, places, 0).astype(jnp.uint32))
    members = jax.lax.while_loop(
        lambda values: jnp.any(values >= size),
        lambda values: jnp.where(values >= size, once(values), values),
        start,
    )
    return jnp.where(is_inside, members, 0).astype(jnp.int32)


def _mixed(x: jax.Array) -> jax.Array:
    """Mixes 32 bits, so that each depends on all (the finaliser of MurmurHash3)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
