"""How well a model fits a client's data, for clients that choose among models."""

import jax
import jax.numpy as jnp

from fedjax_dp.clients.base import ClientData
from fedjax_dp.core.trees import PyTree
from fedjax_dp.models.base import Model


def mean_loss(
    model: Model, params: PyTree, client: ClientData, *, block_size: int = 128
) -> jax.Array:
    """Computes the exact mean loss of a model over a client's examples.

    Args:
      model: the model.
      params: its parameters.
      client: the client's data.
      block_size: examples that are computed at once; bounds memory, changes nothing else.

    Returns:
      A float32 scalar; 0 for a client without examples. Not private.
    """
    block = min(block_size, client.limit)

    def body(i, total):
        rows = i * block + jnp.arange(block)
        losses, _ = model.losses(params, client.gather(rows))
        return total + jnp.sum(jnp.where(rows < client.size, losses, 0.0))

    total = jax.lax.fori_loop(0, -(-client.size // block), body, jnp.float32(0))
    return total / jnp.maximum(client.size, 1)
