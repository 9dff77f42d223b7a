"""What an engine hands to an aggregator, for tests that call one by itself."""

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_dp.server.base import Close, Fate, Roster, Sender

KEYS = jax.random.key(0), jax.random.key(1)


def sent_by(index=0, weight=1.0, key=KEYS[1], public_key=KEYS[0]) -> Sender:
    """A client that knows of no other."""
    index = jnp.asarray(index, jnp.int32)
    return Sender(
        index, jnp.asarray(weight, jnp.float32), key, public_key, Roster(index[None], jnp.ones(1))
    )


def closed(clients=(0,), contributes=None, keys=KEYS) -> Close:
    """The end of a round; all clients contribute, or the slots that are marked."""
    clients = jnp.asarray(clients, jnp.int32)
    is_real = np.ones(len(clients), bool) if contributes is None else contributes
    fates = jnp.where(is_real, Fate.CONTRIBUTED, Fate.EMPTY).astype(jnp.int8)
    return Close(Roster(clients, jnp.asarray(is_real)), fates, *keys)
