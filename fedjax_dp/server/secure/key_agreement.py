"""Seeds of masks: what each pair of clients shares, and what each client has for itself."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from chex import PRNGKey

from fedjax_dp.core.keys import Purpose, fold


class MaskKeys(NamedTuple):
    """Where seeds of masks come from; a seed is two words, `[2]` uint32, the key of Threefry.

    Attributes:
      of_pair: `(public_key, client, other) -> seed` of a round that both derive.
      of_client: `(public_key, client) -> seed` of a round that the client has for itself.
      is_simulated: whether seeds follow from the run's public key, which protects nothing.
    """

    of_pair: Callable[[PRNGKey, jax.Array, jax.Array], jax.Array]
    of_client: Callable[[PRNGKey, jax.Array], jax.Array]
    is_simulated: bool


def simulated_keys() -> MaskKeys:
    """Builds a simulated key agreement, whose seeds are folded from the public key of the round.

    Guarantee: none: seeds have the distribution that an agreement gives them, and anyone who has
    the public key can derive them.

    Returns:
      The seeds, labelled simulated.
    """

    def seed(public_key, *path):
        key = fold(public_key, Purpose.MASK, *path)
        return jax.random.bits(key, (2,), jnp.uint32)

    def of_pair(public_key, client, other):
        return seed(public_key, 0, jnp.minimum(client, other), jnp.maximum(client, other))

    return MaskKeys(of_pair, lambda public_key, client: seed(public_key, 1, client), True)
