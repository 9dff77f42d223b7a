"""The protocol Π_PPFL adds exactly what it says, hides the rest, and has its aggregator's law."""

import hashlib
from fractions import Fraction

import dp_accounting
import jax
import numpy as np
import pytest
from aggregating import closed, sent_by
from marks import floats, later, telling
from scipy import stats
from small_problem import ALONE, NUM_CLIENTS, make_data, make_model, plain_trainer

from fedjax_dp import algorithms, data, engine, privacy
from fedjax_dp.core.messages import tariff_of
from fedjax_dp.server.base import Diagnostic
from fedjax_dp.server.fixed_point import fixed_point
from fedjax_dp.server.oblivious import (
    noise_messages,
    oblivious_mean,
    run_iteration,
    set_up_protocol,
)

pytestmark = floats

MODULUS = 2**64


def noise_of(n, **options):
    return privacy.gamma_shares(n, privacy.sensitivity_of_sum(1.0), 1.0, **options)


def run_once(n, num_weights, seed=0, **options):
    values = np.random.default_rng(seed).uniform(-4, 4, (n, num_weights))
    set_up = set_up_protocol(noise_of(n), seed)
    return run_iteration(set_up, values, np.random.default_rng(seed), **options)


def rounded(values, bits):
    """Multiples of 2^-bits, as Python integers, by rational numbers."""
    return [round(Fraction(float(x)) * 2**bits) for x in np.ravel(values)]


@pytest.mark.parametrize("bits", [0, 7, 32])
def test_words_hold_numbers_to_half_a_unit(bits):
    form = fixed_point(2, integer_bits=15, fraction_bits=bits, word_bits=64)
    rng = np.random.default_rng(bits)
    values = rng.uniform(-(2.0**15), 2.0**15, 1000)
    words = form.encode(values)
    assert words.dtype == np.uint64
    assert [int(w) for w in words] == [x % MODULUS for x in rounded(values, bits)]
    assert np.abs(form.decode(words) - values).max() <= 2.0 ** (-bits - 1)
    assert np.all(
        np.sign(form.decode(words[np.abs(values) > 1])) == np.sign(values[np.abs(values) > 1])
    )


@pytest.mark.parametrize("bad", [2.0**15 + 1, -(2.0**15) - 1, np.nan, np.inf])
def test_what_words_do_not_hold_is_refused(bad):
    form = fixed_point(2, integer_bits=15, fraction_bits=32, word_bits=64)
    with pytest.raises(ValueError, match=r"values must be at most 2\^15"):
        form.encode(np.array([0.0, bad]))


@pytest.mark.parametrize(
    "n,num_bits,holds", [(4, 60, True), (4, 61, False), (5, 60, True), (5, 61, False)]
)
def test_the_modulus_exceeds_twice_the_largest_sum(n, num_bits, holds):
    assert holds == (2 * n * 2**num_bits < 2**64)
    if holds:
        set_up_protocol(noise_of(n), 0, integer_bits=20, fraction_bits=num_bits - 20)
    else:
        with pytest.raises(ValueError, match="fraction_bits must be from -20 to 40"):
            set_up_protocol(noise_of(n), 0, integer_bits=20, fraction_bits=num_bits - 20)


@pytest.mark.parametrize("n", [2, 3, 8])
@pytest.mark.parametrize("self_noise", [True, False])
def test_the_sum_is_that_of_values_and_chosen_terms_exactly(n, self_noise):
    noise = noise_of(n, self_noise=self_noise)
    set_up, rng = set_up_protocol(noise, 5), np.random.default_rng(1)
    for iteration in range(3):
        values = rng.normal(size=(n, 4))
        set_up, played = run_iteration(set_up, values, rng)
        terms = played.terms
        expected = np.array(rounded(values, 32), object).reshape(n, 4).sum(axis=0)
        for i in range(n):
            for j in range(n):
                for w in range(4):
                    picked = terms.choices[i, j, w] ^ terms.is_swapped[i, j, w]
                    expected[w] += int(terms.terms[i, j, int(picked), w] * 2**32)
        words = [sum(int(y) for y in column) % MODULUS for column in played.messages.T]
        assert words == [x % MODULUS for x in expected]
        np.testing.assert_allclose(played.total, values.sum(0) + played.noise.sum(0), atol=1e-7)
        np.testing.assert_array_equal(played.average, played.total / n)
        if not self_noise:
            assert not np.any(terms.terms[np.arange(n), np.arange(n)])
        assert set_up.iteration == iteration + 1
        assert set_up.num_messages == n * (n - 1) + n * (iteration + 1)


def test_masks_of_pairs_cancel_and_follow_the_stream_of_both_ends():
    set_up, played = run_once(4, 6, seed=3)
    assert not np.any(np.sum(played.pads, axis=0, dtype=np.uint64))
    own = [0] * 6
    for (i, j), seed in zip(played.set_up.pairs, played.set_up.seeds, strict=True):
        stream = hashlib.shake_256(seed).digest(32 + 48)
        mask = [int.from_bytes(stream[32 + 8 * w :][:8], "little") for w in range(6)]
        sign = (i == 1) - (j == 1)
        own = [(a + sign * m) % MODULUS for a, m in zip(own, mask, strict=True)]
    assert [int(w) for w in played.pads[1]] == own
    # The next iteration has other masks and other noise.
    _, following = run_iteration(set_up, played.values, np.random.default_rng(4))
    assert not np.any(following.pads == played.pads)
    assert not np.any(following.terms.terms == played.terms.terms)


def is_uniform(words):
    """A χ² test of the lowest and of the highest byte."""
    counts = [
        np.bincount(np.ravel(b).astype(np.int64), minlength=256) for b in (words & 255, words >> 56)
    ]
    return min(stats.chisquare(c).pvalue for c in np.asarray(counts)) > 1e-4


def test_messages_of_all_but_one_look_uniform():
    # With no noise but masks to hide behind, and equal values.
    n, size = 4, 30_000
    noise = noise_of(n)._replace(scale=1e-12)
    values = np.broadcast_to(np.arange(4.0)[:, None], (n, size))
    _, played = run_iteration(set_up_protocol(noise, 0), values, np.random.default_rng(0))
    y = played.messages
    seen = [y[0], y[1], y[2], y[0] + y[1], y[0] - y[1], y[0] + y[1] + y[2], y[1] ^ y[2]]
    assert all(map(is_uniform, seen))
    assert not is_uniform(y.sum(axis=0, dtype=np.uint64))
    # Without the masks of pairs a message is still hidden by those of the noise, if it has any.
    assert is_uniform(played.messages[0] - played.pads[0])
    bare = run_iteration(played.set_up, values, np.random.default_rng(0), is_oblivious=False)[1]
    assert is_uniform(bare.messages[0]) and not is_uniform(bare.messages[0] - bare.pads[0])
    # What arrives at a receiver is masked, and the server's permutation hides which is which.
    arrived = played.terms.arrived(played.set_up.fixed_point)
    assert is_uniform(arrived[0, 1, 0]) and is_uniform(arrived[2, 3, 1])


def test_a_choice_says_nothing_of_the_term():
    _, played = run_once(3, 20_000)
    terms = played.terms
    second = terms.choices ^ terms.is_swapped
    for x in (terms.choices, second, terms.choices ^ second):
        assert abs(x.mean() - 0.5) < 4.5 * 0.5 / np.sqrt(x.size)


@pytest.mark.parametrize(
    "options",
    later(
        [{}, {"self_noise": False}, {"form": "one"}, {"calibration": "paper"}],
        but=[{}, {"form": "one"}],
        mark=telling,
    ),
    ids=["pairs", "without own", "one", "paper"],
)
def test_protocol_and_aggregator_have_one_law(options):
    n, size = 3, 30_000
    values, rng = np.zeros((n, size)), np.random.default_rng(0)
    noise = noise_of(n, **options)
    is_oblivious = noise.shares_per_party > 1
    _, played = run_iteration(
        set_up_protocol(noise, 0), values, rng, is_oblivious=is_oblivious, records=False
    )
    structure = jax.ShapeDtypeStruct((size,), np.float32)
    mean = oblivious_mean(structure, 1.0, 1.0, n, **options)
    sent = jax.jit(
        lambda key: mean.encode(
            (), mean.numbers, (np.zeros(size, np.float32), 0.0), sent_by(key=key)
        )
    )
    messages = np.array([sent(jax.random.key(i))[0] for i in range(n)], np.float64)
    total = messages.sum(axis=0)
    assert stats.ks_2samp(total, played.total).pvalue > 1e-3
    assert stats.ks_2samp(messages[0], played.noise[0]).pvalue > 1e-3
    # The test sees a scale that is off by 10 %, and one share more or less.
    assert stats.ks_2samp(1.1 * total, played.total).pvalue < 1e-3
    for shares in {1, 2, 3} - {noise.shares_per_party}:
        parts = np.random.default_rng(1).standard_gamma(shares, (2, size)) * noise.scale
        assert stats.ks_2samp(parts[0] - parts[1], played.total).pvalue < 1e-6
    assert played.total.var() == pytest.approx(noise.sum_variance, rel=0.06)
    info = mean.combine((), mean.numbers, (messages.sum(axis=0), None), closed())[2]
    assert float(info["noise_stddev"]) == pytest.approx(played.average.std(), rel=0.03)


def test_whether_an_update_was_clipped_is_no_part_of_a_message():
    """It is exact: a server that receives it learns of a norm what no noise hides."""
    mean = oblivious_mean(jax.ShapeDtypeStruct((3,), np.float32), 1.0, 1.0, 6)
    contribution = mean.contribute((), mean.numbers, np.full(3, 9, np.float32), sent_by())
    message = mean.encode((), mean.numbers, contribution, sent_by())
    is_figure = [isinstance(x, Diagnostic) for x in message]
    assert is_figure == [False, True] and float(message[1].value) == 1
    # Three words: the number of bytes that are counted is of all that is sent.
    assert tariff_of(mean.message(message[0], 1.0)).fixed["dense"] == {"uint64": 24}
    info = mean.combine((), mean.numbers, message, closed())[2]
    assert info["num_clipped"] == 1
    assert "num_clipped" not in mean.combine((), mean.numbers, (message[0], None), closed())[2]


def averaging(**options):
    mean = oblivious_mean({"b": np.zeros(()), "w": np.zeros(3)}, 0.5, 2.0, NUM_CLIENTS, **options)
    model = make_model()
    return algorithms.fedavg(model, plain_trainer(model), aggregator=mean)


def test_a_round_clips_noises_and_is_charged():
    joining = data.participation(data.full_participation(), NUM_CLIENTS)
    sim = engine.simulation(averaging(), make_data(), joining, ALONE)
    key = jax.random.key(0)
    _, record, info = sim.run(sim.init(key), key, 3)
    # Six Laplace numbers of scale 1, over 6.
    np.testing.assert_allclose(info.aggregator["noise_stddev"], np.sqrt(12) / 6, rtol=1e-6)
    # Six messages of four words of 8 bytes, in each of three rounds.
    up = engine.communication(sim, record, info).by_round("up")
    np.testing.assert_array_equal(np.asarray(up), [6 * 4 * 8] * 3)
    book = engine.PrivacyAccounting(sim.federation)
    book.charge(record)
    # A release has ε = √4 · 0.5 / 1; three of them are (ε, δ)-private for ε below 3.
    expected = privacy.Ledger("client", "add_remove")
    expected.charge(dp_accounting.LaplaceDpEvent(1.0), count=3)
    found = book.epsilon({"client": 1e-5})["client"]
    assert np.max(found) == pytest.approx(expected.epsilon(1e-5)[0], rel=1e-6)


def test_keys_agreed_again_and_terms_are_in_the_meter():
    """Rounds of six parties with four weights, message by message; keys before rounds 0 and 3."""
    joining = data.participation(data.full_participation(), NUM_CLIENTS)
    sim = engine.simulation(averaging(), make_data(), joining, ALONE)
    key, parts, n, d = jax.random.key(0), [], NUM_CLIENTS, 4
    exchange = noise_messages(n, d, key_rounds=(0, 3))
    state = sim.init(key)
    for first, rounds in ((0, 2), (2, 3)):
        state, record, info = sim.run(state, key, rounds)
        parts.append(engine.communication(sim, record, info, exchange=exchange, first_round=first))
    for direction in ("up", "down"):
        keys, words = [], []
        for r in range(5):
            pairs = [(i, j) for i in range(n) for j in range(n) if i != j]
            keys.append(sum(32 for _ in pairs if r in (0, 3)))
            words.append(sum(2 * d * 8 for _ in pairs) + (n * d * 8 if direction == "up" else 0))
        for name, expected in (("keys", keys), ("uint64", words)):
            found = [part.sent[direction]["dense"][name] for part in parts]
            np.testing.assert_array_equal(np.concatenate(found), expected)
    # The set-up's messages are those of the protocol, and shares of one sum need no pairs.
    one = noise_messages(n, d, form="one").up(np.arange(2), *[np.full(2, n)] * 2)
    assert one["keys"].tolist() == [32 * set_up_protocol(noise_of(n), 0).num_setup_messages, 0]
    assert one["uint64"].tolist() == [0, 0]


def test_cohorts_with_fewer_parties_than_shares_are_refused():
    joining = data.participation(data.poisson(), NUM_CLIENTS, 3)
    with pytest.raises(ValueError, match="must give the updates of at least 6 clients"):
        engine.federation(averaging(), make_data(), joining)


@pytest.mark.parametrize(
    "call,words",
    [
        (
            lambda s, v, r: run_iteration(s, v[:2], r),
            r"values must be \[parties, weights\] for 3 parties",
        ),
        (lambda s, v, r: run_iteration(s, v * 1e9, r), r"values must be at most 2\^15"),
        (
            lambda s, v, r: run_iteration(s, v, r, left_out=np.ones(3, bool)),
            r"left_out must be \[3, 3\]",
        ),
        (
            lambda s, v, r: run_iteration(
                s, v, r, unsubtracted=np.eye(3, dtype=bool), zero_sharing=True
            ),
            "unsubtracted must be None with zero_sharing",
        ),
        (
            lambda s, v, r: run_iteration(s, v, r, is_oblivious=False, left_out=np.eye(3) > 0),
            "left_out",
        ),
        (lambda s, v, r: set_up_protocol(noise_of(5000), 0), "at most 4096 parties"),
        (lambda s, v, r: set_up_protocol(s.noise, 0, agree=lambda i, j: b"x"), "agree must return"),
        (lambda s, v, r: oblivious_mean(np.zeros(3), 1.0, 1.0, 1), "num_parties must be"),
        (
            lambda s, v, r: run_iteration(s._replace(noise=noise_of(3, form="one")), v, r),
            'form "pairs"',
        ),
    ],
)
def test_bad_input_is_refused(call, words):
    with pytest.raises(ValueError, match=words):
        call(set_up_protocol(noise_of(3), 0), np.ones((3, 2)), np.random.default_rng(0))
