"""Random keys, folded by purpose, so that no draw depends on who else was drawn before it."""

import enum
import secrets

import jax
import jax.numpy as jnp
import numpy as np
from chex import PRNGKey


class Purpose(enum.IntEnum):
    """What a random draw is for; the first thing folded into the root key.

    Attributes:
      INIT: initial parameters.
      PARTICIPATION: which clients join a round.
      CLIENT: all that one client draws in one round.
      BATCH: which examples a local step reads.
      RECORD_NOISE: noise on a sum of clipped per-example gradients.
      CLIENT_NOISE: noise that a client adds to its own update.
      CENTRAL_NOISE: noise on the aggregate of a cohort.
      MODEL: draws of the model itself, such as dropout.
      SELECTION: a private or random choice among several models.
      SERVER: work on the host between rounds.
      ENCODING: what a client draws to turn its contribution into a message.
      PUBLIC: what all clients and the server draw alike, such as a rotation.
      SERVER_STEP: draws of the server's step.
      RUN: the root of one of several runs.
      PERSONAL: a client's second training, of what stays at home.
      COPIES: perturbed copies of a client's records.
      EVALUATION: a client's training for an evaluation alone.
    """

    INIT = 1
    PARTICIPATION = 2
    CLIENT = 3
    BATCH = 4
    RECORD_NOISE = 5
    CLIENT_NOISE = 6
    CENTRAL_NOISE = 7
    MODEL = 8
    SELECTION = 9
    SERVER = 10
    ENCODING = 11
    PUBLIC = 12
    SERVER_STEP = 13
    RUN = 14
    PERSONAL = 15
    COPIES = 16
    EVALUATION = 17


def secret_key() -> PRNGKey:
    """Draws a root key from the operating system, as many random bits as a key of JAX holds.

    For `Simulation.run`, in place of `jax.random.key(seed)`: cohorts, batches and noise are then no
    function of anything that is written down. Whoever calls this keeps the key as long as the run
    may have to go on to the same bits, and destroys it after.

    Guarantee: the bits come from `secrets`. JAX's own generator, threefry2x32, holds 64 of them
    (`jax.random.key_data`): who knows all but the noise of a release finds its key in 2^64 tries,
    some years of one accelerator. It is no cryptographic generator, and nothing shorter is proven
    impossible.

    Returns:
      The key, of the implementation that `jax.random.key` uses.
    """
    like = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0)))
    drawn = np.frombuffer(secrets.token_bytes(like.size * like.dtype.itemsize), like.dtype)
    return jax.random.wrap_key_data(jnp.asarray(drawn.reshape(like.shape)))


def fold(key: PRNGKey, *path: jax.typing.ArrayLike) -> PRNGKey:
    """Folds a path of integers, such as (purpose, round, client, step), into a key.

    Args:
      key: the key to start from.
      *path: integers, static or traced, each a scalar.

    Returns:
      A key that is a function of `key` and the path alone.
    """
    for part in path:
        key = jax.random.fold_in(key, part)
    return key
