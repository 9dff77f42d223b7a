"""Gradient masking: a step is damped where clients disagree on its direction."""

from typing import Any, Literal, NamedTuple

import dp_accounting
import jax
import jax.numpy as jnp

from fedjax_dp.core import checks, ranges, trees
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.ranges import Fraction, ProperFraction
from fedjax_dp.core.trees import PyTree
from fedjax_dp.privacy.claims import ClientClaim
from fedjax_dp.server.base import Aggregator, Summed, update_and_weight
from fedjax_dp.server.mean import uniform_mean, weighted_mean

# A threshold such as 0.4 is rounded up in binary; four clients of ten must still reach it.
_ROUNDING = 1e-6


class Masked(NamedTuple):
    """A mean of updates, and the mask of the step along it.

    Attributes:
      mean: the unmasked mean, which server optimisers read.
      mask: the factors of the optimiser's step, the structure of the mean.
      votes: under noise, the noised votes from which the mask is computed, in units of the mean,
        released as the mean is. None without noise.
    """

    mean: PyTree
    mask: PyTree
    votes: PyTree | None = None


def unmasked(aggregate: PyTree) -> tuple[PyTree, PyTree | None]:
    """Returns the mean and the mask of an aggregate, None without a mask."""
    is_masked = isinstance(aggregate, Masked)
    return (aggregate.mean, aggregate.mask) if is_masked else (aggregate, None)


def noised_parts(aggregate: PyTree) -> PyTree:
    """Returns the noised parts of an aggregate, mean and votes, for audits."""
    return (aggregate.mean, aggregate.votes) if isinstance(aggregate, Masked) else aggregate


def masked(step: PyTree, mask: PyTree | None, is_buffer: PyTree | None = None) -> PyTree:
    """Multiplies a server step by a mask, except on buffers."""
    if mask is None:
        return step
    if is_buffer is not None:
        mask = jax.tree.map(lambda m, plain: jnp.ones_like(m) if plain else m, mask, is_buffer)
    return jax.tree.map(lambda s, m: (s * m).astype(s.dtype), step, mask)


@checked
def gradient_mask(
    mean: Aggregator | None = None,
    *,
    threshold: Fraction = 0.4,
    mask: Literal["soft", "hard"] = "soft",
    form: Literal["corrected", "printed"] = "corrected",
    is_weighted: bool = True,
    vote_share: ProperFraction = 0.5,
) -> Summed:
    """Masks the server step in coordinates where clients disagree on the sign (GMA).

    The agreement of a coordinate is `A = |Σ_k sign(d_k)| / N` over the N clients of the round,
    whatever their weights; a client that did not move it, or has no examples, counts in N only, as
    it does in the divisor of `uniform_mean` and of private means. Where A reaches the
    threshold the step is taken in full, elsewhere A times. The server's optimiser reads the
    unmasked mean, and its step is masked. Sums of signs are streamed, as the mean is. Buffers, such
    as the statistics of batch norm, are averaged without a mask.

    Guarantee: none by itself. Under noise on records, signs are those of noised updates. Around a
    private mean the votes are part of what is clipped, noised and charged: a client sends one
    vector within the same bound, `vote_share` of it for its signs and the rest for its update, and
    the mask is computed from the noised sum. An adaptive clip norm tracks updates within that rest,
    and `num_clipped` counts longer ones. With N expected clients, p parameters and a noise
    multiplier z the noise on an agreement has a standard deviation of `z √p / (vote_share · N)`.

    Args:
      mean: the mean to mask; a plain mean if None.
      threshold: τ, in [0, 1]; at 0 nothing is masked, at 1 the mask is the agreement itself.
      mask: the mask below the threshold: "soft" the agreement, "hard" 0 (AND-mask).
      form: "corrected", or "printed" for the published listing, which steps in the opposite
        direction and, with the hard mask, uses the agreement without its absolute value.
      is_weighted: weight clients by size in the plain mean; votes always have equal weight.
      vote_share: around a private mean, the share of the bound for the signs, in (0, 1), less if
        some are 0; else ignored.

    Returns:
      The aggregator; its aggregate is `Masked`, which the server steps of FedAvg, its variants and
      SCAFFOLD read. Its info holds `agreement`, the mean over coordinates, and `unmasked_share`,
      the share of coordinates with a full step; both count buffers by their votes. Its numbers are
      swept by name, as `hyper.aggregator["threshold"]`, in SCAFFOLD, which aggregates two parts, as
      `hyper.aggregator["params"]["threshold"]`.

    Raises:
      ValueError: for a number out of its range, a mean that is stacked or already masked, or a
        private one that does not clip whole updates and add Gaussian noise.

    Source: Tenison and others 2022 (GMA), algorithm 1 and equation 3; the hard mask is that of
    Parascandolo and others 2021. Votes under noise are ours.
    """
    base = mean or (weighted_mean() if is_weighted else uniform_mean())
    checks.require(isinstance(base, Summed), "mean", "be summed, not stacked", type(base).__name__)
    assert isinstance(base, Summed)
    rule = "be unmasked, without a number called threshold"
    checks.require("threshold" not in base.numbers, "mean", rule, dict(base.numbers))

    def mask_of(votes, count, threshold):
        """Masks from signed votes of `count` clients, exact where both are integers."""
        is_signed = mask == "hard" and form == "printed"
        votes, count = votes.astype(jnp.float32), jnp.asarray(count, jnp.float32)
        votes = votes if is_signed else jnp.abs(votes)
        is_whole = votes >= threshold * count * (1 - _ROUNDING)
        agreement = jnp.abs(votes) * trees.reciprocal(count)
        kept = jnp.where(is_whole, 1.0, agreement if mask == "soft" else 0.0)
        return -kept if form == "printed" else kept

    def masked_by(aggregate: PyTree, votes: PyTree, count: Any, numbers: Any):
        masks = jax.tree.map(lambda v: mask_of(v, count, numbers["threshold"]), votes)
        size = trees.num_parameters(votes)

        def share(of_leaf, tree):
            return sum(jnp.sum(of_leaf(leaf)) for leaf in jax.tree.leaves(tree)) / size

        info = {
            "agreement": share(jnp.abs, votes) * trees.reciprocal(count),
            "unmasked_share": share(lambda m: jnp.abs(m) == 1, masks),
        }
        return Masked(aggregate, masks), info

    numbers = {**base.numbers, "threshold": threshold}
    limits = {**base.ranges, "threshold": Fraction}
    if base.claim is not None:
        numbers["vote_share"], limits["vote_share"] = vote_share, ProperFraction
        ranges.check(numbers, limits)
        return _around_noise(base, masked_by)._replace(numbers=numbers, ranges=limits)
    ranges.check(numbers, limits)

    def contribute(state, numbers, update, sender):
        votes = (sender.weight > 0).astype(jnp.int32)
        signs = jax.tree.map(lambda d: jnp.sign(d).astype(jnp.int32) * votes, update)
        return base.contribute(state, numbers, update, sender), signs, jnp.ones_like(votes)

    def combine(state, numbers, total, close):
        of_mean, votes, count = total
        state, aggregate, info = base.combine(state, numbers, of_mean, close)
        aggregate, of_mask = masked_by(aggregate, votes, count, numbers)
        return state, aggregate, {**info, **of_mask}

    return base._replace(
        contribute=contribute,
        combine=combine,
        numbers=numbers,
        ranges=limits,
        message=update_and_weight,
    )


def check_noise(argument: str, is_gaussian: bool, value: str) -> None:
    """Refuses a private mean whose claim would not cover votes."""
    rule = "give a claim for Gaussian noise, which covers the votes of gradient_mask too"
    checks.require(is_gaussian, argument, rule, value)


def check_clipping(argument: str, clips_whole: bool, value: Any) -> None:
    """Refuses a private mean that clips parts of an update."""
    rule = "leave updates whole: the votes of gradient_mask would be clipped alone"
    checks.require(clips_whole, argument, rule, value)


def _around_noise(mean: Summed, masked_by: Any) -> Summed:
    """Passes updates and votes through one private mean as one vector."""
    claim = mean.claim
    check_noise("mean", isinstance(claim, ClientClaim), type(claim).__name__)
    assert isinstance(claim, ClientClaim)
    event = claim.event(mean.numbers)
    is_gaussian = isinstance(event, dp_accounting.GaussianDpEvent) and mean.encode is None
    check_noise("mean", is_gaussian, type(event).__name__)
    check_clipping("mean", claim.clips_whole, "one that does not")

    def init(structure):
        return mean.init({"update": structure, "votes": structure})

    def bounds(state, numbers, structure):
        """The bound on the norm of an update with its votes, and the size of one vote."""
        whole = claim.sensitivity(state, numbers).contribution
        return whole, numbers["vote_share"] * whole / trees.num_parameters(structure) ** 0.5

    def contribute(state, numbers, update, sender):
        whole, vote = bounds(state, numbers, update)
        widened = jax.tree.map(trees.at_least_float32, update)
        votes = jax.tree.map(
            lambda d: jnp.where(sender.weight > 0, vote * jnp.sign(d), 0.0), widened
        )
        remaining = jnp.sqrt(whole**2 - trees.l2_norm(votes) ** 2)
        # Votes are scaled up by the factor by which the update is too long, so that the mean
        # notices that it is, and clipping restores them.
        excess = jnp.maximum(trees.l2_norm(widened) / remaining, 1.0)
        both = {"update": widened, "votes": trees.scale(votes, excess)}
        return mean.contribute(state, numbers, both, sender)

    def combine(state, numbers, total, close):
        kept, both, info = mean.combine(state, numbers, total, close)
        # Votes are averaged over the expected clients.
        _, vote = bounds(state, numbers, both["votes"])
        votes = jax.tree.map(lambda v: jnp.clip(v / vote, -1.0, 1.0), both["votes"])
        aggregate, of_mask = masked_by(both["update"], votes, jnp.float32(1), numbers)
        return kept, aggregate._replace(votes=both["votes"]), {**info, **of_mask}

    def message(update, weight):
        # Update and votes are one vector within one bound, in float32; if the update is sparse, so
        # are its votes.
        widened = jax.tree.map(trees.at_least_float32, update)
        return mean.message({"update": widened, "votes": widened}, weight)

    return mean._replace(init=init, contribute=contribute, combine=combine, message=message)
