"""What colluders recover of a party, by the closed forms of the attacks."""

import functools

import numpy as np
import pytest

from fedjax_dp import audit, privacy
from fedjax_dp.audit.collusion import squared_correlation
from fedjax_dp.server.oblivious import run_iteration, set_up_protocol

PARTIES, TRIALS = 20, 4000
# Variances by hand for n = 20 and scale 1, where a share has the variance v = 1/10.
TABLE = {"naive": 40.0, "random": 40.0, "mean": 21.0, "diff": 116.0, "non_oblivious": 2.0}
VALUE_VARIANCE = 16.0


def noise_of(n=PARTIES, **options):
    return privacy.gamma_shares(n, privacy.sensitivity_of_sum(1.0), 1.0, **options)


@functools.cache
def recorded(is_oblivious=True):
    rng = np.random.default_rng(0)
    values = rng.normal(scale=np.sqrt(VALUE_VARIANCE), size=(PARTIES, TRIALS))
    return run_iteration(set_up_protocol(noise_of(), 0), values, rng, is_oblivious=is_oblivious)[1]


def attacked(attack):
    iteration = recorded(attack != "non_oblivious")
    return audit.collusion(iteration, attack, np.random.default_rng(1), honest=3)


@pytest.mark.parametrize("attack,variance", [*TABLE.items(), ("pooled", 2.0)])
def test_residual_variances_are_those_of_the_table(attack, variance):
    found = attacked(attack)
    assert audit.expected_residual(attack, noise_of()) == pytest.approx(variance)
    assert found.expected_variance == pytest.approx(variance)
    # Of the variance the standard error is 2.3 %, for one Laplace number 3.5 %.
    assert found.residual_variance == pytest.approx(variance, rel=0.05)
    r2 = VALUE_VARIANCE / (VALUE_VARIANCE + variance)
    assert audit.expected_r2(attack, noise_of(), VALUE_VARIANCE) == pytest.approx(r2)
    assert found.r2 == pytest.approx(r2, abs=4 * 2 * np.sqrt(r2 / TRIALS) * (1 - r2) + 1e-3)


def test_attacks_come_in_the_printed_order():
    r2 = {attack: attacked(attack).r2 for attack in TABLE}
    assert r2["non_oblivious"] > r2["mean"] > max(r2["naive"], r2["random"]) > r2["diff"]
    # At the scale at which 0.894 is printed for parties that draw their own noise.
    laplace = 0.1186
    noise = noise_of(100)._replace(scale=np.sqrt(laplace / 2))
    expected = {a: audit.expected_r2(a, noise, 1.0) for a in TABLE}
    assert expected["non_oblivious"] == pytest.approx(0.894, abs=1e-3)
    assert max(v for a, v in expected.items() if a != "non_oblivious") == expected["mean"] < 0.164
    assert expected["mean"] == pytest.approx(0.143, abs=1e-3)
    assert expected["naive"] == expected["random"] == pytest.approx(0.078, abs=1e-3)
    assert expected["diff"] == pytest.approx(0.027, abs=1e-3)


def test_residuals_by_brute_force_for_three_parties():
    """The terms that each attack leaves, as coefficients of g⁰ and g¹ of every pair, squared."""
    n, honest, v = 3, 0, noise_of(3).share_variance
    leaves = {"naive": (0, 0), "mean": (0.5, 0.5), "diff": (1, -1)}
    for attack, subtracted in leaves.items():
        total = 0.0
        for i in range(n):
            for _ in range(n):
                for bit in (0, 1):
                    left = np.array([1.0 - bit, bit])
                    if i != honest:
                        left = left - subtracted
                    total += 0.5 * v * np.sum(left**2)
        assert audit.expected_residual(attack, noise_of(3)) == pytest.approx(total)


@pytest.mark.parametrize("self_noise", [True, False])
def test_colluders_that_pool_leave_as_much_as_without_pairs(self_noise):
    n = 5
    noise, rng = noise_of(n, self_noise=self_noise), np.random.default_rng(2)
    values = rng.normal(size=(n, 20_000))
    iteration = run_iteration(set_up_protocol(noise, 1), values, rng)[1]
    found = audit.collusion(iteration, "pooled", rng, honest=2)
    assert found.residual_variance == pytest.approx(found.expected_variance, rel=0.08)
    own = audit.expected_residual("non_oblivious", noise)
    assert found.expected_variance == pytest.approx(own)


def test_a_server_reads_nothing_off_a_message():
    iteration = recorded()
    for party in range(PARTIES):
        found = squared_correlation(audit.snoop(iteration, honest=party), iteration.values[party])
        assert found < 16 / TRIALS
    without = iteration._replace(messages=iteration.messages - iteration.pads)
    # Masks of the noise still hide it; without any the message is the value.
    assert squared_correlation(audit.snoop(without), iteration.values[0]) < 16 / TRIALS
    bare = recorded(False)
    bare = bare._replace(messages=bare.messages - bare.pads)
    assert squared_correlation(audit.snoop(bare), bare.values[0]) > 0.5


@pytest.mark.parametrize(
    "of_whom,zero_sharing,is_good",
    [("coalition", False, True), ("coalition", True, False), ("all", True, False)],
)
def test_leaving_noise_out_spoils_a_sum_of_shares_of_zero(of_whom, zero_sharing, is_good):
    n, rng = 6, np.random.default_rng(3)
    coalition = np.arange(n) < 3
    found = audit.omit_noise(
        set_up_protocol(noise_of(n), 2),
        rng.normal(size=(n, 5_000)),
        rng,
        coalition,
        of_whom=of_whom,
        zero_sharing=zero_sharing,
    )
    assert found.error < 20 if is_good else found.error > 1e6
    # Of 36 terms of equal variance 9 or 18 are gone.
    kept = {"coalition": 27, "all": 18}[of_whom] / 36
    assert found.noise_share == pytest.approx(kept, rel=0.1)


@pytest.mark.parametrize(
    "call,words",
    [
        (lambda p, r: audit.collude(p, "means", r), "attack must be one of"),
        (lambda p, r: audit.collude(p, "mean", r, honest=20), "honest must be below the number"),
        (lambda p, r: audit.collude(p._replace(terms=None), "mean", r), "hold the terms of pairs"),
        (lambda p, r: audit.collude(p, "non_oblivious", r), "be of parties that drew their own"),
        (
            lambda p, r: audit.omit_noise(p.set_up, p.values, r, np.ones(20, bool)),
            "coalition must mark some of 20 parties, not all",
        ),
    ],
)
def test_bad_input_is_refused(call, words):
    with pytest.raises(ValueError, match=words):
        call(recorded(), np.random.default_rng(0))
