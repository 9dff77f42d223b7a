"""What a client does to its update before it leaves: functions that are applied in order."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from chex import PRNGKey

from fedjax_dp.clients.base import ClientData, LocalConfig
from fedjax_dp.core import checks, trees
from fedjax_dp.core.trees import PyTree
from fedjax_dp.privacy import clipping, noise


class UpdateContext(NamedTuple):
    """What an update transform may look at besides the delta.

    Attributes:
      params: the local parameters at the end of training.
      gradient: the gradient of the last step as it was released, noised where training is private;
        zeros where no step was taken.
      client: the client's data.
      config: the client's numbers.
      key: a key of the round, the client and the transform's place in the chain.
    """

    params: PyTree
    gradient: PyTree
    client: ClientData
    config: LocalConfig
    key: PRNGKey


UpdateTransform = Callable[[PyTree, UpdateContext], PyTree]


def clip_update(clip_norm: float) -> UpdateTransform:
    """Scales an update down to a bound on its L2 norm.

    Args:
      clip_norm: the bound, above 0.

    Returns:
      The transform; an update that is not finite becomes zero.
    """
    checks.positive("clip_norm", clip_norm)
    return lambda delta, context: clipping.clip_by_global_norm(delta, clip_norm)[0]


def add_client_noise(stddev: float) -> UpdateTransform:
    """Adds Gaussian noise at the client.

    Args:
      stddev: standard deviation in parameter units, at least 0.

    Returns:
      The transform. It claims nothing by itself: a claim needs a bound before it.
    """
    checks.non_negative("stddev", stddev)
    return lambda delta, context: noise.add_gaussian(context.key, delta, stddev)


def keep_largest(share: float) -> UpdateTransform:
    """Keeps the entries of largest magnitude in every layer and zeroes the others.

    Args:
      share: the share of entries to keep in each layer, in (0, 1]; at least one is kept, and ties
        are broken by position, so that exactly that many remain.

    Returns:
      The transform.
    """
    checks.probability("share", share)

    def sparsify(x: jax.Array) -> jax.Array:
        return jnp.where(mask_of_largest(jnp.abs(x), share), x, 0)

    return lambda delta, context: jax.tree.map(sparsify, delta)


def mask_of_largest(scores: jax.Array, share: float) -> jax.Array:
    """Marks the entries of largest score.

    Args:
      scores: any shape; NaN counts as the least.
      share: the share of entries to mark, in (0, 1]; at least one is.

    Returns:
      Bools of the same shape, exactly `max(1, round(share * size))` of them true; of equal scores
      the first in order.
    """
    flat = jnp.where(jnp.isnan(scores), -jnp.inf, scores).reshape(-1)
    count = max(1, round(share * flat.size))
    least = jax.lax.top_k(flat, count)[0][-1]
    above, tied = flat > least, flat == least
    room = count - jnp.sum(above)
    return (above | (tied & (jnp.cumsum(tied) <= room))).reshape(scores.shape)


def cast(dtype: jax.typing.DTypeLike) -> UpdateTransform:
    """Rounds an update to a narrower type, as a client with little bandwidth would send it.

    Args:
      dtype: the type that is sent, such as `jnp.bfloat16`; the result keeps its own type.

    Returns:
      The transform.
    """
    return lambda delta, context: jax.tree.map(lambda x: x.astype(dtype).astype(x.dtype), delta)


def scale_update(factor: float) -> UpdateTransform:
    """Multiplies an update by one number.

    Args:
      factor: the number.

    Returns:
      The transform.
    """
    return lambda delta, context: trees.scale(delta, factor)
