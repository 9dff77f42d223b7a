"""The coordinate-wise trimmed mean: robust to a few arbitrary updates."""

from typing import Annotated

import jax
import jax.numpy as jnp
from annotated_types import Ge, Lt

from fedjax_dp.core import ranges, trees
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.server.base import Stacked, stateless, update_alone

# In [0, 0.5): something is left between the two ends.
TrimmedShare = Annotated[float, Ge(0), Lt(0.5)]
# A share such as 0.3 is rounded down in binary; three of ten must still be trimmed.
_ROUNDING = 1e-6


@checked
def trimmed_mean(trimmed_share: TrimmedShare = 0.1) -> Stacked:
    """Averages each coordinate without its smallest and its largest values.

    Of n values of a coordinate, `⌊trimmed_share · n⌋` are left out at either end. Weights are not
    read: a client that lies about its update could lie about its size too.

    Args:
      trimmed_share: β, the share to leave out at either end, in [0, 0.5); 0 is the plain mean.

    Returns:
      The aggregator, without a bound on an update. Its info holds `num_trimmed`, the clients left
      out at either end.

    Raises:
      ValueError: for a share out of its range.

    Source: Yin and others 2018, definition 2.
    """
    numbers, limits = {"trimmed_share": trimmed_share}, {"trimmed_share": TrimmedShare}
    ranges.check(numbers, limits)

    def contribute(state, numbers, update, sender):
        return jax.tree.map(trees.at_least_float32, update)

    def combine(state, numbers, stack, close):
        is_real = close.contributes
        count = jnp.sum(is_real)
        share = numbers["trimmed_share"] * count.astype(jnp.float32)
        trimmed = jnp.floor(share * (1 + _ROUNDING)).astype(jnp.int32)
        trimmed = jnp.clip(trimmed, 0, jnp.maximum(count - 1, 0) // 2)
        rank = jnp.arange(len(is_real))
        is_kept = (rank >= trimmed) & (rank < count - trimmed)

        def mean(values):
            shape = (-1, *[1] * (values.ndim - 1))
            # Empty slots sort last.
            ordered = jnp.sort(jnp.where(is_real.reshape(shape), values, jnp.inf), axis=0)
            kept = jnp.where(is_kept.reshape(shape), ordered, 0.0)
            return jnp.sum(kept, axis=0) / jnp.maximum(count - 2 * trimmed, 1).astype(kept.dtype)

        return state, jax.tree.map(mean, stack), {"num_trimmed": trimmed}

    return Stacked(
        stateless, contribute, combine, numbers=numbers, ranges=limits, message=update_alone
    )
