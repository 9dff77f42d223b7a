"""Gradient masking: a step is weakened where clients do not agree on its direction."""

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

# A share such as 4 of 10 is a little more in binary; four are enough nevertheless.
_ROUNDING = 1e-6


class Masked(NamedTuple):
    """A mean of updates, and what is left of a step along it.

    Attributes:
      mean: the mean, unmasked: server optimisers read it as it is.
      mask: what the optimiser's step is multiplied by, the structure of the mean.
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

    The agreement of a coordinate is `A = |Σ_k sign(d_k)| / N` over the N clients with examples,
    whatever they weigh; a client that did not move it counts in N alone. Where A reaches the
    threshold the step is taken whole, elsewhere A times. The server's optimiser reads the mean as
    it is, and what it would do is masked. Sums of signs are streamed, as the mean is. Buffers, such
    as the statistics of batch norm, are averaged without a mask.

    Guarantee: none of its own. Under noise on records, signs are those of noised updates. Around a
    private mean the votes are part of what is clipped, noised and charged: a client sends one
    vector within the same bound, `vote_share` of it for its signs and what they leave for its
    update, and the mask is computed from the noised sum. A clip norm that adapts follows updates in
    that room, and `num_clipped` counts those that are longer. With N expected clients, p parameters
    and a noise multiplier z the noise on an agreement has a standard deviation of
    `z √p / (vote_share · N)`.

    Args:
      mean: what is masked; a plain mean where it is None.
      threshold: τ, in [0, 1]; at 0 every step is whole, at 1 the mask is the agreement itself.
      mask: what is left below the threshold: "soft" the agreement, "hard" nothing (AND-mask).
      form: "corrected", or "printed" for the listing as it stands, which steps the other way and,
        with the hard mask, takes the agreement without its absolute value.
      is_weighted: weigh clients by size in that plain mean; votes weigh the same in any case.
      vote_share: around a private mean, the part of the bound that the signs get, in (0, 1), less
        where some are 0; not read otherwise.

    Returns:
      The aggregator; its aggregate is `Masked`, which the server steps of FedAvg and its kin and of
      SCAFFOLD read. Its info holds `agreement`, the mean over coordinates, and `unmasked_share`,
      how many of them keep all of their step; both count buffers by their votes. Its numbers are
      swept by name, as `hyper.aggregator["threshold"]`, in SCAFFOLD, which aggregates two parts, as
      `hyper.aggregator["params"]["threshold"]`.

    Raises:
      ValueError: for a number out of its range, a mean that is stacked or masked already, or one
        that does other than to clip updates whole and add Gaussian noise.

    Source: Tenison and others 2022, "Gradient Masked Averaging for Federated Learning", algorithm 1
    and equation 3; the hard mask is that of Parascandolo and others 2021. Votes under noise are our
    resolution.
    """
    base = mean or (weighted_mean() if is_weighted else uniform_mean())
    checks.require(isinstance(base, Summed), "mean", "be summed, not stacked", type(base).__name__)
    assert isinstance(base, Summed)
    rule = "have no number called threshold, as a mean that is masked already has"
    checks.require("threshold" not in base.numbers, "mean", rule, dict(base.numbers))

    def mask_of(votes, count, threshold):
        """Masks from signed votes of `count` clients, exact where both are integers."""
        is_signed = mask == "hard" and form == "printed"
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
    own = {**base.ranges, "threshold": Fraction}
    if base.claim is not None:
        numbers, own = numbers | {"vote_share": vote_share}, own | {"vote_share": ProperFraction}
        ranges.check(numbers, own)
        return _around_noise(base, masked_by)._replace(numbers=numbers, ranges=own)
    ranges.check(numbers, own)

    def contribute(state, numbers, update, sender):
        votes_at_all = (sender.weight > 0).astype(jnp.int32)
        signs = jax.tree.map(lambda d: jnp.sign(d).astype(jnp.int32) * votes_at_all, update)
        return base.contribute(state, numbers, update, sender), signs, votes_at_all

    def combine(state, numbers, total, close):
        of_mean, votes, count = total
        state, aggregate, info = base.combine(state, numbers, of_mean, close)
        aggregate, of_mask = masked_by(aggregate, votes, count, numbers)
        return state, aggregate, {**info, **of_mask}

    return base._replace(
        contribute=contribute,
        combine=combine,
        numbers=numbers,
        ranges=own,
        message=update_and_weight,
    )


def _around_noise(mean: Summed, masked_by: Any) -> Summed:
    """Passes updates and votes through one private mean as one vector."""
    claim, rule = mean.claim, "claim what its Gaussian noise costs, which votes are to share"
    checks.require(isinstance(claim, ClientClaim), "mean", rule, type(claim).__name__)
    assert isinstance(claim, ClientClaim)
    event = claim.event(mean.numbers)
    is_gaussian = isinstance(event, dp_accounting.GaussianDpEvent) and mean.encode is None
    checks.require(is_gaussian, "mean", rule, type(event).__name__)
    rule = "clip updates whole, not by layer, so that no vote is shortened by itself"
    checks.require(claim.clips_whole, "mean", rule, "one that states nothing of the kind")

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
        # Votes grow as much as the update is too long: the mean, which shortens both, sees that it
        # is, and brings them back.
        excess = jnp.maximum(trees.l2_norm(widened) / remaining, 1.0)
        both = {"update": widened, "votes": trees.scale(votes, excess)}
        return mean.contribute(state, numbers, both, sender)

    def combine(state, numbers, total, close):
        kept, both, info = mean.combine(state, numbers, total, close)
        # The mean of votes is one over the clients that were expected.
        _, vote = bounds(state, numbers, both["votes"])
        votes = jax.tree.map(lambda v: jnp.clip(v / vote, -1.0, 1.0), both["votes"])
        aggregate, of_mask = masked_by(both["update"], votes, jnp.float32(1), numbers)
        return kept, aggregate._replace(votes=both["votes"]), {**info, **of_mask}

    def message(update, weight):
        # Update and votes are one vector within one bound, which the client makes in float32; where
        # the update is sparse, so are its votes.
        widened = jax.tree.map(trees.at_least_float32, update)
        return mean.message({"update": widened, "votes": widened}, weight)

    return mean._replace(init=init, contribute=contribute, combine=combine, message=message)
