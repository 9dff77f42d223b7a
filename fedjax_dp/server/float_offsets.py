"""The legacy form of masks, offsets on floats as PrivacyFL printed them: for comparison only."""

import hashlib
from typing import NamedTuple

import numpy as np

from fedjax_dp.core import checks
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.ranges import Count, Seed

# Binary digits of an offset, the first ones of a key.
_OFFSET_BITS = 18


class FloatOffsets(NamedTuple):
    """Offsets of one round, and the keys of the next.

    Attributes:
      keys: 256 bits for each pair, symmetric, a mapping of `(i, j)` with i below j.
      num_clients: the population.
    """

    keys: dict[tuple[int, int], bytes]
    num_clients: int

    def offsets(self, is_active: np.ndarray | None = None) -> np.ndarray:
        """Computes the sum of each client's offsets, which cancel over all active clients.

        Args:
          is_active: the clients that have not left, `[num_clients]`, bool; all if None.

        Returns:
          `[num_clients]`, float64 whole numbers, 0 for clients that have left.

        Raises:
          ValueError: for another number of clients.
        """
        active = np.ones(self.num_clients, bool) if is_active is None else np.asarray(is_active)
        rule = f"have one entry for each of the {self.num_clients} clients"
        checks.require(active.shape == (self.num_clients,), "is_active", rule, active.shape)
        total = np.zeros(self.num_clients)
        for (i, j), key in self.keys.items():
            if active[i] and active[j]:
                total[i] += _offset(key)
                total[j] -= _offset(key)
        return total

    def following(self) -> "FloatOffsets":
        """Derives the keys of the next round from the digits of each that are no offset."""
        keys = {
            pair: _stream(_digits(key)[_OFFSET_BITS:].encode()) for pair, key in self.keys.items()
        }
        return self._replace(keys=keys)


@checked
def float_offsets(num_clients: Count, seed: Seed = 0) -> FloatOffsets:
    """Makes simulated keys for the legacy offsets of PrivacyFL, which are added to floats.

    Each pair shares one whole number of 18 bits a round, the same for all weights, which one adds
    and the other subtracts.

    Guarantee: none. A message is a float, not a number modulo m: its size shows the
    offset, it is the same for every weight, so that differences of weights are exposed, and its
    leading bit is always 1. In float64 a sum errs by some 1e-10; float32 would lose the weights.
    Use `secure.masked` for masks that hide.

    Args:
      num_clients: the population, at least 2.
      seed: the root of the simulated keys.

    Returns:
      The offsets of the first round.

    Raises:
      ValueError: for fewer than two clients.

    Source: Mugunthan 2022, section 5.3.2; the code of Mugunthan and others 2020 (PrivacyFL) for the
    18 bits.
    """
    checks.whole("num_clients", num_clients, at_least=2)
    pairs = [(i, j) for i in range(num_clients) for j in range(i + 1, num_clients)]
    keys = {pair: _stream(f"{seed} {pair[0]} {pair[1]}".encode()) for pair in pairs}
    return FloatOffsets(keys, num_clients)


def _stream(seed: bytes) -> bytes:
    return hashlib.sha256(seed).digest()


def _digits(key: bytes) -> str:
    """Writes a key in binary without leading zeros, so that the first digit is 1."""
    return f"{int.from_bytes(key, 'big'):b}"


def _offset(key: bytes) -> float:
    """Takes the first 18 digits of a key."""
    return float(int(_digits(key)[:_OFFSET_BITS], 2))
