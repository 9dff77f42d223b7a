"""Seeds of masks: shared by each pair of clients, and of each client alone."""

import secrets
from collections.abc import Callable, Sequence
from typing import Annotated, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from annotated_types import Ge, Le
from chex import PRNGKey

from fedjax_dp.core import checks
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.keys import Purpose, fold, threefry_2x32
from fedjax_dp.core.packages import needed_for
from fedjax_dp.models import kinds

_SEED_BYTES = 8
_KEY_BYTES = 32
# A table of seeds for all pairs of so many takes 128 MiB.
_MOST_CLIENTS = 4_096


class MaskKeys(NamedTuple):
    """Where seeds of masks come from; a seed is two words, `[2]` uint32, the key of Threefry.

    Attributes:
      of_pair: `(public_key, client, other) -> seed` of a round that both derive.
      of_client: `(public_key, client) -> seed` of a round that the client alone has.
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


@checked
def agreed_keys(
    num_clients: Annotated[int, Ge(2), Le(_MOST_CLIENTS)],
    *,
    private_keys: Sequence[bytes] | None = None,
) -> MaskKeys:
    """Agrees on a seed for each pair of clients by X25519 and HKDF, on the host.

    All clients of the simulation are in one process, and so are their keys: the agreement is real,
    and what keeps keys apart in a deployment is not. Seeds of a round are Threefry blocks of the
    public key of the round under these seeds. They are an argument of a compiled simulation, and in
    no program that JAX may keep in its cache on disk; a round that is compiled otherwise, as by
    `jax.jit(federation.step)`, holds them as constants.

    Guarantee: keys serve one run. Two runs with the same keys and the same root key use the same
    masks, and the difference of two messages of a client is then exposed: agree for every run
    on new seeds, with new private keys. The seed of a pair cannot be computed without one of its
    two private keys, as far as X25519 is secure; a seed has 64 bits, as Threefry-2x32 takes, and
    can be found by anyone who can try 2^64 keys.

    Args:
      num_clients: the population, from 2 to 4,096; the cost grows with its square.
      private_keys: 32 bytes for each client; from the operating system where None.

    Returns:
      The seeds; those that clients have for themselves come from the operating system.

    Raises:
      MissingPackageError: if `cryptography` is not installed.
      ValueError: for keys that are not one of 32 bytes for each client.

    Source: Bonawitz and others 2017, figure 4, rounds 0 and 1; RFC 7748; RFC 5869.
    """
    if private_keys is None:
        private_keys = [secrets.token_bytes(_KEY_BYTES) for _ in range(num_clients)]
    lengths = {len(key) for key in private_keys}
    rule = f"hold {_KEY_BYTES} bytes for each of the {num_clients} clients"
    fits = len(private_keys) == num_clients and lengths == {_KEY_BYTES}
    checks.require(fits, "private_keys", rule, f"{len(private_keys)} of lengths {sorted(lengths)}")
    public = [public_key_of(key) for key in private_keys]
    table = np.zeros((num_clients, num_clients, 2), np.uint32)
    for i, key in enumerate(private_keys):
        for j in range(i + 1, num_clients):
            table[i, j] = table[j, i] = pair_seed(key, public[j], i, j)
    drawn = secrets.token_bytes(_SEED_BYTES * num_clients)
    of_clients = np.frombuffer(drawn, "<u4").reshape(num_clients, 2)
    # An argument of the compiled round, whose text may be kept on disk.
    held = kinds.Frozen(jax.tree.structure((0, 0)), (table, of_clients))

    def of_round(public_key, seed):
        return threefry_2x32(seed, jax.random.bits(public_key, (2,), jnp.uint32))

    return MaskKeys(
        lambda public_key, i, j: of_round(public_key, held.within(())[0][i, j]),
        lambda public_key, i: of_round(public_key, held.within(())[1][i]),
        False,
    )


@flax.struct.dataclass
class SeedTable:
    """Seeds of one round as arrays: arguments of a compiled function, and in no program."""

    clients: jax.Array  # Of each slot, `[slots]`, int32; -1 in slots whose client was not notified.
    rows: jax.Array  # By slot, the row that holds the pairs of its client, `[slots]`, int32.
    pair: jax.Array  # By row, and slot of the other client, `[rows, slots, 2]`, uint32.
    own: jax.Array  # By slot, `[slots, 2]`, uint32.

    def keys(self) -> MaskKeys:
        """Returns the seeds for `masked`; of pairs, those of clients that have a row."""

        def slot(client):
            return jnp.argmax(self.clients == client)

        return MaskKeys(
            lambda public_key, client, other: self.pair[self.rows[slot(client)], slot(other)],
            lambda public_key, client: self.own[slot(client)],
            False,
        )


def public_key_of(private_key: bytes) -> bytes:
    """Computes the X25519 public key of a private key, 32 bytes each."""
    with needed_for("Key agreement", "secure"):
        from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
    return X25519PrivateKey.from_private_bytes(private_key).public_key().public_bytes_raw()


def pair_seed(private_key: bytes, public_key: bytes, client: int, other: int) -> np.ndarray:
    """Derives the seed of a pair, `[2]` uint32, from one's private and the other's public key."""
    with needed_for("Key agreement", "secure"):
        from cryptography.hazmat.primitives.asymmetric.x25519 import (
            X25519PrivateKey,
            X25519PublicKey,
        )
        from cryptography.hazmat.primitives.hashes import SHA256
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF
    mine = X25519PrivateKey.from_private_bytes(private_key)
    common = mine.exchange(X25519PublicKey.from_public_bytes(public_key))
    info = f"fedjax_dp masks {min(client, other)} {max(client, other)}".encode()
    derived = HKDF(SHA256(), _SEED_BYTES, salt=None, info=info).derive(common)
    return np.frombuffer(derived, "<u4")
