"""Collusion against noise in shares: all parties but one subtract what they know of the noise."""

from collections.abc import Callable
from typing import Literal, NamedTuple, get_args

import numpy as np

from fedjax_dp.core import checks
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.ranges import Index, Positive
from fedjax_dp.privacy.mechanisms.gamma_shares import GammaShares
from fedjax_dp.server.oblivious.protocol import Iteration, SetUp, run_iteration

Attack = Literal["non_oblivious", "naive", "random", "mean", "diff", "pooled"]
ATTACKS: tuple[Attack, ...] = get_args(Attack)


class CollusionResult(NamedTuple):
    """How well an attack recovers the values of one party.

    Attributes:
      attack: its name.
      r2: squared correlation of estimates and values, over weights.
      residual_variance: of estimates minus values.
      expected_variance: what the shares that are left unknown add up to.
    """

    attack: str
    r2: float
    residual_variance: float
    expected_variance: float


@checked
def expected_residual(attack: Attack, noise: GammaShares) -> float:
    """Computes the variance of the noise that an attack of all parties but one leaves.

    For m shares of variance v in what a party adds: n·m·v for "naive" and "random",
    (n − 1)·m·v/2 + m·v for "mean", 3(n − 1)·m·v + m·v for "diff", and m·v for "non_oblivious" and
    "pooled".

    Args:
      attack: see `collude`.
      noise: from `privacy.gamma_shares`.

    Returns:
      The variance of one weight, in units of the sum squared.

    Source: derived from Mugunthan 2022 (Π_PPFL), protocol 1, whose counts in appendix A.7 do not
    agree with each other; "pooled" at `collude`.
    """
    n, own = noise.num_parties, noise.shares_per_party * noise.share_variance
    factors = {
        "non_oblivious": 1.0,
        "naive": n,
        "random": n,
        "mean": (n - 1) / 2 + 1,
        "diff": 3 * (n - 1) + 1,
        "pooled": 1.0,
    }
    return factors[attack] * own


@checked
def expected_r2(attack: Attack, noise: GammaShares, value_variance: Positive) -> float:
    """Computes r² between estimates and values, V/(V + residual).

    Args:
      attack: see `collude`.
      noise: from `privacy.gamma_shares`.
      value_variance: V, variance of a party's values, above 0.

    Returns:
      A number in (0, 1).

    Source: Mugunthan 2022, section 2.5.4, which reports r².
    """
    return value_variance / (value_variance + expected_residual(attack, noise))


@checked
def collude(
    iteration: Iteration, attack: Attack, rng: np.random.Generator, *, honest: Index = 0
) -> np.ndarray:
    """Estimates one party's values from the released sum and what all others know.

    All attacks subtract the others' values. Of the noise they subtract further:

    - "non_oblivious": what the others added, where every party drew its own noise.
    - "naive": nothing.
    - "random": one of the two terms that each of them made for a receiver, by a coin.
    - "mean": half of both terms.
    - "diff": the first term minus the second.
    - "pooled": all that they know together. The sum less their own messages is the message of the
      honest party; of that they subtract the masks that they share with it and half of both terms
      that they made for it. Its own masks cancel with a masked term of each pair that it sent
      them, and of such a pair they know the difference, since both terms have one mask, and
      subtract half of that. What stays is half the variance of 2(n − 1) terms, and one term of its
      own: as much as where every party drew its own noise.

    The first five are those of the source, whose parties do not pool what they received.

    Args:
      iteration: from `run_iteration`; with terms, except for "non_oblivious".
      attack: one of these.
      rng: for coins.
      honest: the party that is attacked, below the number of parties.

    Returns:
      The estimates, `[weights]`, float64.

    Raises:
      ValueError: if the record is of another kind than the attack reads.

    Source: Mugunthan 2022, section 2.5.4 and appendix A.13.2; "pooled" is ours.
    """
    n = len(iteration.values)
    checks.require(honest < n, "honest", f"be below the number of parties, {n}", honest)
    has_terms = iteration.terms is not None
    needs_terms = attack not in ("non_oblivious", "naive")
    checks.require(has_terms or not needs_terms, "iteration", "hold the terms of pairs", "none")
    is_own = not has_terms and attack == "non_oblivious"
    rule = "be of parties that drew their own"
    checks.require(is_own or attack != "non_oblivious", "iteration", rule, attack)
    others = np.arange(n) != honest
    if attack == "pooled":
        return _pooled(iteration, honest)
    rest = iteration.total - iteration.values[others].sum(axis=0)
    if attack == "naive":
        return rest
    if attack == "non_oblivious":
        return rest - iteration.noise[others].sum(axis=0)
    assert iteration.terms is not None
    first, second = np.moveaxis(iteration.terms.terms[others], 2, 0)
    known: dict[str, Callable[[], np.ndarray]] = {
        "random": lambda: np.where(rng.integers(0, 2, first.shape, np.uint8), first, second),
        "mean": lambda: (first + second) / 2,
        "diff": lambda: first - second,
    }
    return rest - known[attack]().sum(axis=(0, 1))


def _pooled(iteration: Iteration, honest: int) -> np.ndarray:
    """Strips the honest party's message of every mask, and of what is known of its noise."""
    terms, fixed_point = iteration.terms, iteration.set_up.fixed_point
    assert terms is not None
    others = np.arange(len(iteration.values)) != honest
    # What the others hold: masks and terms that they made for it, and pairs that came from it.
    masks, its_terms = terms.masks[others, honest], terms.terms[others, honest]
    came = terms.arrived(fixed_point)[honest, others]
    # The released sum, less what they sent. All of its masks of pairs are shared with one of them.
    sent = np.sum(iteration.messages[others], axis=0, dtype=np.uint64)
    message = np.sum(iteration.messages, axis=0, dtype=np.uint64) - sent
    message = message + np.sum(iteration.pads[others], axis=0, dtype=np.uint64)
    message = message - np.sum(masks, axis=0, dtype=np.uint64)
    # Its own masks go when one of each pair that it sent, with the same mask, is added.
    message = message + np.sum(came[:, 0], axis=0, dtype=np.uint64)
    halves = fixed_point.decode(came[:, 0] - came[:, 1]) / 2
    return fixed_point.decode(message) - its_terms.mean(axis=1).sum(axis=0) - halves.sum(axis=0)


@checked
def snoop(iteration: Iteration, *, honest: Index = 0) -> np.ndarray:
    """Reads the message of one party as the server could, as if no mask were in it.

    Args:
      iteration: from `run_iteration`.
      honest: the party, below the number of parties.

    Returns:
      What its words decode to, `[weights]`, float64.

    Source: Mugunthan 2022, appendix A.13.1.
    """
    n = len(iteration.values)
    checks.require(honest < n, "honest", f"be below the number of parties, {n}", honest)
    return iteration.set_up.fixed_point.decode(iteration.messages[honest])


@checked
def collusion(
    iteration: Iteration, attack: Attack, rng: np.random.Generator, *, honest: Index = 0
) -> CollusionResult:
    """Attacks a recorded iteration and compares estimates with values, weight by weight.

    Args:
      iteration: from `run_iteration`, its weights being independent trials, at least 2.
      attack: see `collude`.
      rng: for coins.
      honest: the party that is attacked.

    Returns:
      r², residual variance, and the variance that is expected.
    """
    values = iteration.values[honest]
    checks.require(values.size > 1, "iteration", "hold at least 2 weights", values.size)
    estimates = collude(iteration, attack, rng, honest=honest)
    return CollusionResult(
        attack,
        squared_correlation(estimates, values),
        float(np.var(estimates - values, ddof=1)),
        expected_residual(attack, iteration.set_up.noise),
    )


def squared_correlation(estimates: np.ndarray, values: np.ndarray) -> float:
    """Computes r²; 0 where either does not vary."""
    a, b = estimates - estimates.mean(), values - values.mean()
    scale = float(np.sum(a * a) * np.sum(b * b))
    return float(np.sum(a * b)) ** 2 / scale if scale > 0 else 0.0


class OmissionResult(NamedTuple):
    """The effect of noise terms that parties left out of a sum.

    Attributes:
      error: the largest difference between released sum and sum of values, in standard deviations
        of the noise that was planned: a few where the sum is good, and some 2^40 where masks are
        left in it.
      noise_share: the variance of the noise that was added over that planned.
    """

    error: float
    noise_share: float


@checked
def omit_noise(
    set_up: SetUp,
    values: np.ndarray,
    rng: np.random.Generator,
    coalition: np.ndarray,
    *,
    of_whom: Literal["all", "coalition"] = "coalition",
    zero_sharing: bool = True,
) -> OmissionResult:
    """Runs an iteration in which a coalition leaves noise terms out of its messages.

    Terms of honest senders leave their masks behind, and the sum is garbage. Terms of each other
    can be left out with their masks, unless masks are shares of 0, the last of which is fixed when
    they are made. Against terms that are made too small there is no remedy in the protocol.

    Args:
      set_up: from `set_up_protocol`, for noise in pairs.
      values: `[parties, weights]`.
      rng: draws all of the iteration.
      coalition: which parties cheat, `[parties]`, bool; one at least is honest, and one is not.
      of_whom: whose terms are left out, those of "all" senders, or of the "coalition".
      zero_sharing: whether masks are shares of 0.

    Returns:
      The error of the sum, and how much noise it has.

    Raises:
      ValueError: if the coalition has no party, or all of them.

    Source: Mugunthan 2022, appendix A.8.
    """
    n = set_up.noise.num_parties
    coalition = np.asarray(coalition)
    is_part = coalition.shape == (n,) and coalition.dtype == bool
    is_part = is_part and bool(coalition.any() and not coalition.all())
    checks.require(is_part, "coalition", f"mark some of {n} parties, not all", coalition)
    among = np.outer(coalition, coalition)
    left_out = among if of_whom == "coalition" else np.broadcast_to(coalition, (n, n))
    _, iteration = run_iteration(
        set_up,
        values,
        rng,
        records=False,
        left_out=left_out,
        unsubtracted=None if zero_sharing else among,
        zero_sharing=zero_sharing,
    )
    planned = set_up.noise.sum_variance
    error = np.max(np.abs(iteration.total - iteration.values.sum(axis=0))) / np.sqrt(planned)
    added = np.var(iteration.noise.sum(axis=0))
    return OmissionResult(float(error), float(added / planned))
