"""Noise in gamma shares inside the compiled round: what a party adds, drawn as one number."""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_dp.core import ranges, trees
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.messages import Coded, Exchange
from fedjax_dp.core.ranges import Count, Index, NonNegative, Positive
from fedjax_dp.core.trees import PyTree
from fedjax_dp.privacy.claims import ClientClaim
from fedjax_dp.privacy.events import concrete
from fedjax_dp.privacy.mechanisms import clipping, noise, random_bits
from fedjax_dp.privacy.mechanisms.gamma_shares import (
    Calibration,
    Form,
    GammaSharesDpEvent,
    draw_shares,
    gamma_shares,
)
from fedjax_dp.privacy.sensitivities import sensitivity_of_sum
from fedjax_dp.server.base import Diagnostic, Summed, stateless

# Bits of a word, as `protocol` has them, and bytes of a public key of X25519.
_WORD_BITS, _KEY_BYTES = 64, 32
# The numbers of the aggregator.
RANGES = {"clip_norm": Positive, "noise_multiplier": NonNegative}


@checked
def oblivious_mean(
    structure: PyTree,
    clip_norm: Positive,
    noise_multiplier: NonNegative,
    num_parties: Count,
    *,
    form: Form = "pairs",
    calibration: Calibration = "corrected",
    self_noise: bool = True,
) -> Summed:
    """Builds the mean of Π_PPFL for thousands of parties: no message of a pair is made.

    What a party adds is the sum of the shares that it chose, and has the law of one draw: g − g'
    for Gamma(m/n), with m shares; a Laplace number for m = n. Masks cancel in the sum and are
    neither made nor removed, and words are floats: the aggregate has the law of that of
    `protocol.run_iteration`, except for the rounding there.

    Guarantee: unit of privacy is one client with `clip_norm` as bound in L2 norm. For ε' =
    1/`noise_multiplier` under "corrected", one coordinate of a release is ε'-DP under add/remove,
    and a release of d coordinates is √d·ε'-DP, which is what the event says. Of other calibrations
    the event says what holds. All of `num_parties` must add their noise. Covered are those who see
    sums alone: no coalition of parties, and no server that fakes parties, which would take a secure
    shuffle.

    Args:
      structure: the updates, as arrays or shapes.
      clip_norm: bound on the L2 norm of one client's update, above 0.
      noise_multiplier: scale of one Laplace over `clip_norm` where it is corrected, at least 0.
      num_parties: n, the clients of every cohort, at least 2, and the public divisor.
      form: "pairs", or "one" for one share per client, as in PrivacyFL.
      calibration: "corrected", "variance" or "paper", see `privacy.gamma_shares`.
      self_noise: whether a client's shares include one from itself.

    Returns:
      The aggregator; its info holds the standard deviation of the noise and `num_clipped`, an exact
      count for the experimenter, which no claim covers and no message holds.

    Raises:
      ValueError: for one party, or a number out of its range.

    Source: Mugunthan 2022 (Π_PPFL), protocol 1 and appendix A.4; its scale is corrected, see
    `privacy.gamma_shares`.
    """
    start = {"clip_norm": clip_norm, "noise_multiplier": noise_multiplier}
    ranges.check(start, RANGES)
    unit = gamma_shares(
        num_parties,
        sensitivity_of_sum(1.0),
        1.0,
        form=form,
        calibration=calibration,
        self_noise=self_noise,
    )
    size = trees.num_parameters(structure)

    def contribute(state, numbers, update, sender):
        widened = jax.tree.map(trees.at_least_float32, update)
        bounded, norm = clipping.clip_by_global_norm(widened, numbers["clip_norm"])
        return bounded, (norm > numbers["clip_norm"]).astype(jnp.float32)

    def encode(state, numbers, contribution, sender):
        bounded, was_clipped = contribution
        leaves, treedef = jax.tree.flatten(bounded)
        scale = unit.scale * numbers["noise_multiplier"] * numbers["clip_norm"]
        draws = random_bits.like(
            sender.key, leaves, lambda key, shape: draw_shares(key, shape, unit.party_shape)
        )
        noised = [noise.release(x, scale, draw) for x, draw in zip(leaves, draws, strict=True)]
        return jax.tree.unflatten(treedef, noised), Diagnostic(was_clipped)

    def combine(state, numbers, total, close):
        summed, clipped = total
        scale = numbers["noise_multiplier"] * numbers["clip_norm"]
        info = {"noise_stddev": unit.average_stddev * scale}
        if clipped is not None:
            info["num_clipped"] = clipped.value
        return state, trees.scale(summed, 1.0 / num_parties), info

    def event(numbers):
        multiplier = concrete("noise_multiplier", numbers["noise_multiplier"])
        return GammaSharesDpEvent(unit.scale * multiplier / math.sqrt(size), num_parties)

    def message(update, weight):
        return Coded(jnp.zeros(size, jnp.uint32), _WORD_BITS)

    claim = ClientClaim(
        sensitivity=lambda state, numbers: sensitivity_of_sum(numbers["clip_norm"]),
        event=event,
        min_participants=num_parties,
        divisor=lambda numbers: num_parties,
        clips_whole=True,
    )
    return Summed(
        stateless,
        contribute,
        combine,
        encode=encode,
        numbers=start,
        ranges=RANGES,
        claim=claim,
        message=message,
    )


@checked
def noise_messages(
    num_parties: Count,
    num_weights: Count,
    *,
    form: Form = "pairs",
    key_rounds: Sequence[Index] = (0,),
) -> Exchange:
    """Counts the keys and noise terms of Π_PPFL, for the communication meter.

    All of them go through the server, n (n - 1) messages up and as many down. In rounds that begin
    with an agreement on keys, every party sends every other one a public key of 32 bytes of its
    own; masks of later rounds follow from the same keys. In every round it sends each a masked pair
    of terms for each weight, of which the server permutes the two.

    Args:
      num_parties: n, at least 1.
      num_weights: how many numbers an update has, at least 1.
      form: that of `oblivious_mean`; with "one" parties send each other keys alone.
      key_rounds: the rounds, from 0, that begin with an agreement on keys, as those of `clocked`.

    Returns:
      Bytes of types "keys" and "uint64", for `communication(..., exchange=...)`.

    Source: Mugunthan 2022 (Π_PPFL), protocol 1, appendices A.11 and A.14.
    """
    num_pairs = num_parties * (num_parties - 1)
    term_bytes = num_weights * (_WORD_BITS // 8) if form == "pairs" else 0

    def sent(
        rounds: np.ndarray, num_notified: np.ndarray, num_sent: np.ndarray
    ) -> dict[str, np.ndarray]:
        keys = np.isin(rounds, key_rounds) * num_pairs * _KEY_BYTES
        return {"keys": keys, f"uint{_WORD_BITS}": np.full_like(keys, num_pairs * 2 * term_bytes)}

    return Exchange(sent, sent)
