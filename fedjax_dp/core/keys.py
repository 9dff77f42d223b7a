"""Random keys, folded by purpose, so that no draw depends on the draws before it."""

import enum
import secrets
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from chex import PRNGKey
from jax.extend.random import threefry_2x32 as threefry_2x32

from fedjax_dp.core import checks


class Purpose(enum.IntEnum):
    """The purpose of a random draw; the first thing folded into the root key."""

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
    MASK = 18
    CLOCK = 19
    SERVERS = 20
    AUGMENTATION = 21
    NOISED_EVALUATION = 22


# The generator of keys that noise may be drawn from. Its words are those of a published cipher, on
# every backend (Salmon and others 2011, Threefry-2x32, which passes the tests stated there).
STATED = "threefry2x32"


def settings() -> dict[str, Any]:
    """Lists the settings of JAX that random numbers follow from; another version may lack some."""
    names = ("default_prng_impl", "threefry_partitionable", "random_seed_offset")
    return {f"jax_{name}": getattr(jax.config, f"jax_{name}", None) for name in names}


def require_settings(then: Mapping[str, Any]) -> None:
    """Refuses to resume with settings that would change cohorts, batches and noise.

    Rounds after the newest checkpoint run again: with other numbers they would be two releases, of
    which one is charged.
    """
    now = settings()
    changed = [name for name in now if name in then and then[name] != now[name]]
    changes = "; ".join(f"{name} was {then[name]} and is {now[name]}" for name in changed)
    rule = (
        "be as when the run started, or cohorts, batches and noise would differ; set them in "
        "the environment by the same names in capitals"
    )
    checks.require(not changed, "the random numbers of JAX", rule, changes)


def require_stated(key: PRNGKey) -> None:
    """Refuses keys whose generator has no stated quality, for noise and secret cohorts.

    The words of "rbg" and "unsafe_rbg" depend on the backend, and keys that are folded from one
    need not be independent.
    """
    generator = str(jax.random.key_impl(key))
    rule = (
        f"be of {STATED} where noise protects records or clients, whose quality is stated: leave "
        f"JAX_DEFAULT_PRNG_IMPL as it is, and make keys by jax.random.key(seed, impl={STATED!r})"
    )
    checks.require(generator == STATED, "key", rule, generator)


def secret_key() -> PRNGKey:
    """Draws a root key from the operating system, as many random bits as a key of JAX holds.

    For `Simulation.run`, in place of `jax.random.key(seed)`: cohorts, batches and noise then depend
    on nothing that is written down. Keep the key for as long as the run may have to be resumed to
    the same bits, and destroy it afterwards.

    Guarantee: the bits come from `secrets`. JAX's own generator, threefry2x32, holds 64 of them
    (`jax.random.key_data`): an attacker who knows all but the noise of a release finds its key in
    2^64 tries, some years of one accelerator. It is not a cryptographic generator, and faster
    attacks are not ruled out.

    Returns:
      The key, of the implementation that `jax.random.key` uses.
    """
    like = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0)))
    drawn = np.frombuffer(secrets.token_bytes(like.size * like.dtype.itemsize), like.dtype)
    return jax.random.wrap_key_data(jnp.asarray(drawn.reshape(like.shape)))


def fold(key: PRNGKey, *path: jax.typing.ArrayLike) -> PRNGKey:
    """Folds a path of integers, such as (purpose, round, client, step), into a key."""
    for part in path:
        key = jax.random.fold_in(key, part)
    return key
