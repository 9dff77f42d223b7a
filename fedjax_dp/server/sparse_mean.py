"""The mean of sparse updates: each coordinate over the clients whose mask includes it."""

import jax
import jax.numpy as jnp

from fedjax_dp.core import checks, masks, trees
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.masks import Sparse
from fedjax_dp.server.base import Summed, stateless


@checked
def sparse_mean(*, is_masked: bool = True) -> Summed:
    """Averages sparse updates, with equal weights for all clients of weight above 0.

    Sums and counts are streamed, so that a cohort is never stacked.

    Args:
      is_masked: divide each coordinate by the number of clients that keep it, as LotteryFL does;
        else by the number of all contributing clients, which shrinks weights that some have pruned:
        the plain mean of FedLTN's listing.

    Returns:
      The aggregator of `Sparse` updates, which refuses all others. Its aggregate is `Sparse`: the
      mask marks the coordinates that some client keeps; all others are 0. It bounds no update, so
      noise on the aggregate is refused.

    Source: Li and others 2021 (LotteryFL), equation 4.
    """

    def contribute(state, numbers, update: Sparse, sender):
        rule = "be Sparse for a sparse mean, as tickets are"
        checks.require(isinstance(update, Sparse), "updates", rule, type(update).__name__)
        joins = sender.weight > 0
        values = masks.applied(update.mask, jax.tree.map(trees.at_least_float32, update.values))
        kept = jax.tree.map(lambda m: (m & joins).astype(jnp.int32), update.mask)
        return trees.scale(values, joins), kept, joins.astype(jnp.int32)

    def combine(state, numbers, total, close):
        summed, kept, count = total

        def counted(n, x):
            return jax.tree.map(lambda y: jnp.broadcast_to(count, y.shape), x) if n is None else n

        kept = jax.tree.map(counted, kept, summed, is_leaf=lambda n: n is None)
        divisors = kept if is_masked else jax.tree.map(lambda n: jnp.where(n > 0, count, 0), kept)
        mean = jax.tree.map(lambda x, n: x * trees.reciprocal(n.astype(x.dtype)), summed, divisors)
        return state, Sparse(mean, jax.tree.map(lambda n: n > 0, kept)), {}

    return Summed(stateless, contribute, combine)
