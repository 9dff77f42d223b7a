"""The protocol Π_PPFL, message by message, on the host.

Every party makes two noise terms for every other one and hides both behind one mask. The server
permutes the two, and the receiver adds one of them, which it cannot read, to its message. Masks of
pairs cancel in the sum, and the masks of the noise are subtracted by those who made them.
"""

import hashlib
from collections.abc import Callable
from typing import Annotated, NamedTuple

import numpy as np
from annotated_types import Ge, Le

from fedjax_dp.core import checks
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.ranges import Seed
from fedjax_dp.privacy.mechanisms.gamma_shares import GammaShares
from fedjax_dp.server.fixed_point import FixedPoint, fixed_point

_SEED_BYTES = 32
Bits = Annotated[int, Ge(0), Le(62)]
# Seeds and terms of pairs are held for all of them.
_MOST_PARTIES = 4_096


class SetUp(NamedTuple):
    """What is agreed before the first iteration, and what is left of it for the next one.

    Attributes:
      noise: the numbers of the noise.
      fixed_point: of values, noise and masks.
      seeds: for parties i < j, in order, the seed from which both derive their next masks.
      iteration: iterations done.
    """

    noise: GammaShares
    fixed_point: FixedPoint
    seeds: tuple[bytes, ...]
    iteration: int = 0

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """The parties i < j of each seed."""
        n = self.noise.num_parties
        return [(i, j) for i in range(n) for j in range(i + 1, n)]

    @property
    def num_setup_messages(self) -> int:
        """Messages before the first iteration: one from every party to every other one."""
        return self.noise.num_parties * (self.noise.num_parties - 1)

    @property
    def num_messages(self) -> int:
        """Messages of parties up to now: those of the set-up, and one a party and iteration."""
        return self.num_setup_messages + self.noise.num_parties * self.iteration


class Terms(NamedTuple):
    """The noise terms of an iteration; index [i, j] is what party i made for party j.

    No party knows all of it: party i has its terms and masks, the server the permutations, party j
    the choices. `masks` of a pair without terms are 0.

    Attributes:
      terms: g⁰ and g¹, `[parties, parties, 2, weights]`, float64, as they were rounded.
      masks: s, the same for both terms, `[parties, parties, weights]`, uint64.
      is_swapped: whether the server exchanged the two, `[parties, parties, weights]`, bool.
      choices: which of the two that arrived the receiver added, `[parties, parties, weights]`,
        bool.
    """

    terms: np.ndarray
    masks: np.ndarray
    is_swapped: np.ndarray
    choices: np.ndarray

    def arrived(self, fixed_point: FixedPoint) -> np.ndarray:
        """Computes the masked pairs as receivers get them.

        Args:
          fixed_point: of the run.

        Returns:
          `[parties, parties, 2, weights]`, uint64.
        """
        pairs = self.masks[:, :, None] + fixed_point.encode(self.terms)
        return np.where(self.is_swapped[:, :, None], pairs[:, :, ::-1], pairs)


class Iteration(NamedTuple):
    """A recorded iteration of the protocol.

    Attributes:
      set_up: that it began with.
      values: what parties hold, `[parties, weights]`, float64.
      messages: y, what parties send to the server, `[parties, weights]`, uint64.
      pads: the masks of pairs that a party added, `[parties, weights]`, uint64.
      noise: what a party added, `[parties, weights]`, float64; where terms are made in pairs no
        party knows its own.
      terms: all terms, None where they were not recorded or parties drew their noise themselves.
    """

    set_up: SetUp
    values: np.ndarray
    messages: np.ndarray
    pads: np.ndarray
    noise: np.ndarray
    terms: Terms | None

    @property
    def total(self) -> np.ndarray:
        """The sum of values and noise, which the server decodes, `[weights]`, float64."""
        words = np.sum(self.messages, axis=0, dtype=np.uint64)
        return self.set_up.fixed_point.decode(np.asarray(words))

    @property
    def average(self) -> np.ndarray:
        """The broadcast of the server, `[weights]`, float64."""
        return self.total / len(self.values)


def _simulated_seed(root: bytes, i: int, j: int) -> bytes:
    pair = i.to_bytes(4, "big") + j.to_bytes(4, "big")
    return hashlib.shake_256(root + pair).digest(_SEED_BYTES)


@checked
def set_up_protocol(
    noise: GammaShares,
    seed: Seed,
    *,
    integer_bits: Bits = 15,
    fraction_bits: Bits = 32,
    agree: Callable[[int, int], bytes] | None = None,
) -> SetUp:
    """Agrees on a seed for every pair of parties, once for all iterations.

    Guarantee: with `agree=None` the key agreement is simulated: all seeds follow from one number,
    which is known to those who run the simulation, by SHAKE-256.

    Args:
      noise: from `privacy.gamma_shares`.
      seed: of the simulated agreement.
      integer_bits: k; values and noise terms are at most 2^k in absolute value.
      fraction_bits: f; the sum of n messages errs by at most n·(m + 1)·2^(−f−1), for the m noise
        terms that a party adds. It wraps if noise makes it exceed n·2^k.
      agree: `(i, j) -> 32 bytes` for parties i < j, the outcome of a real agreement, such as
        X25519 and HKDF.

    Returns:
      The state before the first iteration.

    Raises:
      ValueError: if words of 64 bits do not hold the sum, or an agreement is no 32 bytes.

    Source: Mugunthan 2022 (Π_PPFL), protocol 1, appendices A.11 and A.14.
    """
    rule = f"have at most {_MOST_PARTIES} parties, more in `oblivious_mean`"
    checks.require(noise.num_parties <= _MOST_PARTIES, "noise", rule, noise.num_parties)
    words = fixed_point(
        noise.num_parties,
        integer_bits=integer_bits,
        fraction_bits=fraction_bits,
        word_bits=64,
    )
    start = SetUp(noise, words, ())
    root = int(seed).to_bytes(8, "big")
    seeds = tuple(
        _simulated_seed(root, i, j) if agree is None else agree(i, j) for i, j in start.pairs
    )
    is_good = all(isinstance(s, bytes) and len(s) == _SEED_BYTES for s in seeds)
    checks.require(is_good, "agree", f"return {_SEED_BYTES} bytes", agree)
    return start._replace(seeds=seeds)


@checked
def run_iteration(
    set_up: SetUp,
    values: np.ndarray,
    rng: np.random.Generator,
    *,
    is_oblivious: bool = True,
    records: bool = True,
    left_out: np.ndarray | None = None,
    unsubtracted: np.ndarray | None = None,
    zero_sharing: bool = False,
) -> tuple[SetUp, Iteration]:
    """Runs one iteration of the protocol for a vector of weights, message by message.

    What parties draw for each other is drawn afresh in every iteration; in a deployment it can be
    sent ahead for all of them, with the set-up. Memory grows with n²·weights where terms are
    recorded, and with n·weights where not.

    A party that cheats leaves terms out. Of an honest sender it cannot, since the sender's mask
    then stays in the sum. Two that cheat together can, if the sender leaves the mask out of what
    it subtracts; with `zero_sharing` it cannot either, for it adds one share that was fixed when
    the masks were made. It still can make terms that are zero.

    Guarantee: `set_up.noise.event(weights, set_up.fixed_point.resolution)` for one party's values,
    which are rounded before noise is added, against those who see totals alone. Noise is rounded
    too, in steps of 2^-f, which no event covers.

    Args:
      set_up: from `set_up_protocol`, or from the iteration before.
      values: `[parties, weights]`, at most 2^k in absolute value.
      rng: draws noise, masks, permutations and choices, from a generator for each party and one
        for the server. Pass the same generator to every iteration: an equally seeded new one
        repeats all of it, and the difference of two sums is then free of noise.
      is_oblivious: whether parties choose from pairs; if not, each draws itself what it adds, as
        in PrivacyFL.
      records: whether all terms are recorded.
      left_out: `[parties, parties]`, bool; at [i, j], party j leaves the term of party i out.
      unsubtracted: `[parties, parties]`, bool; at [i, j], party i does not subtract the mask that
        it made for party j.
      zero_sharing: whether a party adds the last share of a sharing of 0, in the place of
        subtracting its masks.

    Returns:
      `(set_up, iteration)`, the state for the next iteration and the record of this one.

    Raises:
      ValueError: if shapes do not fit, or values are too large for the words.

    Source: Mugunthan 2022 (Π_PPFL), protocol 1, appendices A.7, A.8 and A.11.
    """
    noise, fixed_point = set_up.noise, set_up.fixed_point
    n = noise.num_parties
    values = np.asarray(values, np.float64)
    fits = values.ndim == 2 and len(values) == n
    checks.require(fits, "values", f"be [parties, weights] for {n} parties", values.shape)
    is_in_pairs = not is_oblivious or noise.shares_per_party >= n - 1
    checks.require(is_in_pairs, "set_up.noise", 'have the form "pairs" if is_oblivious', noise)
    for name, pairs in (("left_out", left_out), ("unsubtracted", unsubtracted)):
        flags = np.zeros((n, n), bool) if pairs is None else np.asarray(pairs)
        is_pairs = flags.shape == (n, n) and flags.dtype == bool
        rule = f"be [{n}, {n}] of bool"
        checks.require(is_pairs and (is_oblivious or pairs is None), name, rule, pairs)
    is_free = unsubtracted is None or not zero_sharing
    checks.require(is_free, "unsubtracted", "be None with zero_sharing", unsubtracted)
    set_up_after, pads = _pads(set_up, values.shape[1])
    messages = fixed_point.encode(values) + pads
    *parties, server, receivers = rng.spawn(n + 2)
    if not is_oblivious:
        drawn = [_shares(noise, party, noise.party_shape, values.shape[1:]) for party in parties]
        words = fixed_point.encode(np.stack(drawn))
        added = fixed_point.decode(words)
        return set_up_after, Iteration(set_up, values, messages + words, pads, added, None)
    added = np.zeros_like(messages)
    kept = []
    for i, party in enumerate(parties):
        dealt = _terms_of(noise, party, i, values.shape[1], fixed_point)
        dealt = dealt._replace(
            is_swapped=_coins(server, dealt.masks.shape),
            choices=_coins(receivers, dealt.masks.shape),
        )
        second = dealt.choices ^ dealt.is_swapped
        chosen = fixed_point.encode(np.where(second, dealt.terms[:, 1], dealt.terms[:, 0]))
        leaves = np.zeros(n, bool) if left_out is None else np.asarray(left_out[i], bool)
        keeps = np.zeros(n, bool) if unsubtracted is None else np.asarray(unsubtracted[i], bool)
        chosen[leaves] = 0
        messages += np.where(leaves[:, None], np.uint64(0), dealt.masks) + chosen
        # With zero-sharing this number is the last share of 0, dealt when the masks were made.
        messages[i] -= np.sum(dealt.masks[~keeps], axis=0, dtype=np.uint64)
        added += chosen
        if records:
            kept.append(dealt)
    terms = Terms(*map(np.stack, zip(*kept, strict=True))) if records else None
    return set_up_after, Iteration(set_up, values, messages, pads, fixed_point.decode(added), terms)


def _pads(set_up: SetUp, num_weights: int) -> tuple[SetUp, np.ndarray]:
    """Makes the masks of pairs, which one party adds and the other subtracts, and the next seeds.

    The generator doubles: an output is the mask, the rest the seed of the next iteration.
    """
    pads = np.zeros((set_up.noise.num_parties, num_weights), np.uint64)
    seeds = []
    for (i, j), seed in zip(set_up.pairs, set_up.seeds, strict=True):
        stream = hashlib.shake_256(seed).digest(_SEED_BYTES + 8 * num_weights)
        seeds.append(stream[:_SEED_BYTES])
        mask = np.frombuffer(stream, "<u8", offset=_SEED_BYTES)
        pads[i] += mask
        pads[j] -= mask
    return set_up._replace(seeds=tuple(seeds), iteration=set_up.iteration + 1), pads


def _shares(
    noise: GammaShares, rng: np.random.Generator, a: float, shape: tuple[int, ...]
) -> np.ndarray:
    first, second = rng.standard_gamma(a, (2, *shape))
    return noise.scale * (first - second)


def _terms_of(
    noise: GammaShares,
    rng: np.random.Generator,
    party: int,
    num_weights: int,
    fixed_point: FixedPoint,
) -> Terms:
    """Makes what one party sends to all others: two terms behind one mask for each of them."""
    n = noise.num_parties
    drawn = _shares(noise, rng, noise.share_shape, (n, 2, num_weights))
    masks = rng.integers(0, 2**64, (n, num_weights), np.uint64)
    if noise.shares_per_party < n:
        drawn[party], masks[party] = 0, 0
    nothing = np.zeros(masks.shape, bool)
    return Terms(fixed_point.decode(fixed_point.encode(drawn)), masks, nothing, nothing)


def _coins(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return rng.integers(0, 2, shape, np.uint8).astype(bool)
