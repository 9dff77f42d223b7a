"""Seeds of masks: the stream, the agreement of pairs, and shares that are given back."""

import hashlib
import hmac
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_dp.server.secure import HeldShares, agreed_keys, masks, recover_secret, share_secret
from fedjax_dp.server.secure.key_agreement import pair_seed, public_key_of, simulated_keys

KEY = jax.random.key(5)


def threefry(seed, x0, x1):
    """Threefry-2x32 with 20 rounds, after figure 2 of Salmon and others 2011."""
    keys = [*seed, seed[0] ^ seed[1] ^ np.uint32(0x1BD11BDA)]
    x0, x1 = x0 + keys[0], x1 + keys[1]
    for i in range(20):
        turn = np.uint32([13, 15, 26, 6, 17, 29, 16, 24][i % 8])
        x0 = x0 + x1
        x1 = ((x1 << turn) | (x1 >> (32 - turn))) ^ x0
        if i % 4 == 3:
            step = i // 4 + 1
            x0, x1 = x0 + keys[step % 3], x1 + keys[(step + 1) % 3] + np.uint32(step)
    return x0, x1


def test_the_stream_is_threefry_in_counter_mode():
    seed = np.array([3, 2**31 + 5], np.uint32)
    halves = np.split(np.arange(8, dtype=np.uint32), 2)
    with np.errstate(over="ignore"):
        expected = np.concatenate(threefry(seed, *halves))
    np.testing.assert_array_equal(masks.stream(jnp.asarray(seed), 8), expected)
    # Words are lined up with zeros, which are left out again.
    words = {"a": jnp.arange(4, dtype=jnp.uint32).reshape(2, 2), "b": jnp.uint32(9)}
    lined_up = masks.flat(words)
    np.testing.assert_array_equal(lined_up.narrow, [0, 1, 2, 3, 9, *[0] * 123])
    assert lined_up.low.size == lined_up.high.size == 0
    back = masks.shaped(lined_up, words)
    assert jax.tree.all(jax.tree.map(lambda x, y: jnp.array_equal(x, y), back, words))


def multiplied(scalar, u):
    """A point of Curve25519 times a scalar, by the ladder of RFC 7748, section 5."""
    p, a24 = 2**255 - 19, 121665
    k = bytearray(scalar)
    k[0], k[31] = k[0] & 248, (k[31] & 127) | 64
    k = int.from_bytes(k, "little")
    x1 = int.from_bytes(u, "little") & (2**255 - 1)
    x2, z2, x3, z3 = 1, 0, x1, 1
    for t in reversed(range(255)):
        bit = k >> t & 1
        if bit:
            x2, z2, x3, z3 = x3, z3, x2, z2
        a, b, c, d = x2 + z2, x2 - z2, x3 + z3, x3 - z3
        aa, bb, da, cb = a * a % p, b * b % p, d * a % p, c * b % p
        x3, z3 = (da + cb) ** 2 % p, x1 * (da - cb) ** 2 % p
        x2, z2 = aa * bb % p, (aa - bb) * (aa + a24 * (aa - bb)) % p
        if bit:
            x2, z2, x3, z3 = x3, z3, x2, z2
    return (x2 * pow(z2, -1, p) % p).to_bytes(32, "little")


def test_pairs_agree_by_x25519_and_hkdf():
    pytest.importorskip("cryptography")
    private = [bytes([i + 1] * 32) for i in range(3)]
    base = (9).to_bytes(32, "little")
    public = [multiplied(key, base) for key in private]
    assert public == [public_key_of(key) for key in private]
    keys = agreed_keys(3, private_keys=private)
    assert not keys.is_simulated and simulated_keys().is_simulated
    round_words = np.asarray(jax.random.bits(KEY, (2,), jnp.uint32))
    for i, j in itertools.permutations(range(3), 2):
        common = multiplied(private[i], public[j])
        extracted = hmac.digest(bytes(32), common, hashlib.sha256)
        info = f"fedjax_dp masks {min(i, j)} {max(i, j)}".encode()
        derived = hmac.digest(extracted, info + b"\x01", hashlib.sha256)[:8]
        seed = np.frombuffer(derived, "<u4")
        np.testing.assert_array_equal(pair_seed(private[i], public[j], i, j), seed)
        with np.errstate(over="ignore"):
            expected = threefry(seed, round_words[0], round_words[1])
        np.testing.assert_array_equal(keys.of_pair(KEY, i, j), expected)
    # Seeds of a client's own are its own, and those of simulated pairs are symmetric.
    assert np.any(keys.of_client(KEY, 0) != keys.of_client(KEY, 1))
    found = [np.asarray(simulated_keys().of_pair(KEY, *pair)) for pair in ((1, 2), (2, 1), (1, 0))]
    np.testing.assert_array_equal(found[0], found[1])
    assert np.any(found[0] != found[2])


def test_too_few_shares_say_nothing_of_a_secret():
    """Over the field of 7 elements, all polynomials of degree 2 are tried."""
    tables = []
    for secret in (0, 5):
        seen = np.zeros((7, 7), int)
        for draws in itertools.product(range(7), repeat=2):
            numbers = iter(draws)
            shares = share_secret(
                secret, [1, 3, 4], 3, prime=7, draw=lambda n, numbers=numbers: next(numbers)
            )
            assert recover_secret(shares, 3, prime=7) == secret
            seen[shares[1], shares[4]] += 1
        tables.append(seen)
    np.testing.assert_array_equal(tables, np.ones((2, 7, 7)))
    secret = 2**512 + 12345
    shares = share_secret(secret, range(9), 5)
    for some in itertools.combinations(shares, 5):
        assert recover_secret({i: shares[i] for i in some}, 5) == secret
    with pytest.raises(ValueError, match="shares must be at least the threshold of 5, got 4"):
        recover_secret({i: shares[i] for i in range(4)}, 5)


def test_a_drop_out_is_recovered_and_nothing_more():
    """Five clients, the last of which drops out: its private key comes back from shares."""
    pytest.importorskip("cryptography")
    private = [bytes([i + 7] * 32) for i in range(5)]
    own = [2**60 + i for i in range(5)]
    of_pair, of_own = {}, {}
    for i in range(5):
        others = [j for j in range(5) if j != i]
        of_pair[i] = share_secret(int.from_bytes(private[i], "little"), others, 3)
        of_own[i] = share_secret(own[i], others, 3)
    held = [
        HeldShares(
            {i: of_pair[i][j] for i in of_pair if i != j},
            {i: of_own[i][j] for i in of_own if i != j},
            3,
        )
        for j in range(4)
    ]
    given = [client.give([4], [i for i in range(4) if i != j]) for j, client in enumerate(held)]
    back = recover_secret({j: pair[4] for j, (_, pair, _) in enumerate(given)}, 3)
    assert back.to_bytes(32, "little") == private[4]
    for i in range(4):
        shares = {j: o[i] for j, (_, _, o) in enumerate(given) if j != i}
        assert recover_secret(shares, 3) == own[i]
    # With that key the server has the seeds of the drop-out's pairs.
    table = agreed_keys(5, private_keys=private)
    seed = pair_seed(private[4], public_key_of(private[1]), 4, 1)
    words = jax.random.bits(KEY, (2,), jnp.uint32)
    with np.errstate(over="ignore"):
        expected = threefry(seed, *np.asarray(words))
    np.testing.assert_array_equal(table.of_pair(KEY, 1, 4), expected)
    # No share of both seeds of a client, in one request or in two.
    client, after = held[0], given[0][0]
    with pytest.raises(ValueError, match="only one of a client's two seeds may be recovered, got "):
        client.give([2], [1, 2, 3])
    with pytest.raises(ValueError, match="the own seed of a client whose pair seed was given"):
        after.give([], [1, 2, 3, 4])
    with pytest.raises(ValueError, match="the pair seed of a client whose own seed was given"):
        after.give([3], [1, 2, 5])
    with pytest.raises(ValueError, match="sent must name at least 3 neighbours"):
        client.give([3, 4], [1, 2])
    assert after.give([4], [1, 2, 3])[1] == given[0][1]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: agreed_keys(3, private_keys=[bytes(32)] * 2), "32 bytes for each of the 3"),
        (lambda: agreed_keys(2, private_keys=[bytes(32), b""]), "private_keys must hold"),
        (lambda: share_secret(7, [0, 1], 3), "threshold must be at most the 2 holders"),
        (lambda: share_secret(7, [0, 0], 1), "holders must differ"),
        (lambda: share_secret(7, [0, 5], 1, prime=5), "secret must be at least 0 and below"),
        (lambda: share_secret(3, [0, 4], 1, prime=5), "holders must be at least 0 and below"),
        (lambda: share_secret(7, [0, 1], 0), "threshold must be an integer of at least 1"),
    ],
)
def test_bad_input_is_refused(call, words):
    with pytest.raises(ValueError, match=words):
        call()
