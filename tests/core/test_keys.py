"""Root keys: of the operating system, with all the bits that a key holds."""

import jax
import numpy as np

import fedjax_dp as fdp
from fedjax_dp.core import keys


def test_a_secret_key_is_made_of_the_bytes_of_the_operating_system_and_of_all_of_them(monkeypatch):
    asked = []

    def drawn(size):
        asked.append(size)
        return bytes(range(1, size + 1))

    monkeypatch.setattr(keys.secrets, "token_bytes", drawn)
    key = fdp.secret_key()
    words = np.asarray(jax.random.key_data(key))
    assert words.tobytes() == bytes(range(1, 9)) and asked == [8]
    assert key.dtype == jax.random.key(0).dtype
    # What a seed gives holds 32 bits at most.
    assert np.asarray(jax.random.key_data(jax.random.key(2**32 - 1)))[0] == 0 != words[0]


def test_no_two_secret_keys_are_alike():
    drawn = {np.asarray(jax.random.key_data(fdp.secret_key())).tobytes() for _ in range(50)}
    assert len(drawn) == 50
