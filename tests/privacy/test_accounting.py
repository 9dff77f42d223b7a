"""The ledger composes what ran, and agrees with dp-accounting called on its own."""

import itertools
import json

import dp_accounting as dpa
import numpy as np
import pytest
from dp_accounting import dp_event
from dp_accounting import pld as dpa_pld
from dp_accounting import rdp as dpa_rdp
from marks import later, telling

from fedjax_dp.privacy import events as ev
from fedjax_dp.privacy.accounting import dp_accounting_adapter
from fedjax_dp.privacy.accounting.calibration import calibrate_poisson, epsilon_of_poisson
from fedjax_dp.privacy.accounting.ledger import Ledger, UnsupportedEvent
from fedjax_dp.privacy.events import Advice
from fedjax_dp.privacy.mechanisms.distributed import SkellamDpEvent
from fedjax_dp.privacy.mechanisms.noise import (
    BoundedLaplaceDpEvent,
    PureDpEvent,
    StaircaseDpEvent,
)
from fedjax_dp.privacy.mechanisms.selection import BoundedRangeDpEvent

# As dp-accounting names our relations.
ADD_REMOVE = dpa.NeighboringRelation.ADD_OR_REMOVE_ONE
REPLACE = dpa.NeighboringRelation.REPLACE_ONE
RELATIONS = {"add_remove": ADD_REMOVE, "replace_one": REPLACE}

gaussian, laplace, zcdp = dpa.GaussianDpEvent, dpa.LaplaceDpEvent, dpa.ZCDpEvent
sampled, truncated = dpa.PoissonSampledDpEvent, dpa.TruncatedSubsampledGaussianDpEvent


def poisson(q, z):
    return sampled(q, gaussian(z))


def fixed_size(base, num=10, size=5):
    return dpa.SampledWithoutReplacementDpEvent(num, size, base)


def spent(event, relation="add_remove", *, count=1, dp_delta=1e-5, accountant="rdp"):
    ledger = Ledger(relation=relation)
    ledger.charge(event, count=count)
    return float(ledger.epsilon(dp_delta, accountant)[0])


def independent(event, relation, *, count, dp_delta, accountant="rdp"):
    make = dpa_rdp.RdpAccountant if accountant == "rdp" else dpa_pld.PLDAccountant
    account = make(neighboring_relation=relation)
    return account.compose(event, count).get_epsilon(dp_delta)


def random_settings(seed, num=50):
    rng = np.random.default_rng(seed)
    for _ in range(num):
        yield (
            float(10 ** rng.uniform(-3.5, 0)),
            float(10 ** rng.uniform(-0.2, 1)),
            int(10 ** rng.uniform(0, 3.5)),
            float(10 ** rng.uniform(-8, -3)),
        )


# What we charge, what dp-accounting composes under the relation, and the relation.
CASES = {
    "poisson-gaussian": (poisson, poisson, "add_remove"),
    "gaussian": (lambda q, z: gaussian(z), lambda q, z: gaussian(z), "add_remove"),
    "gaussian-replace": (lambda q, z: gaussian(z), lambda q, z: gaussian(z / 2), "replace_one"),
    "laplace": (lambda q, z: laplace(z), lambda q, z: laplace(z), "add_remove"),
    "laplace-replace": (lambda q, z: laplace(z), lambda q, z: laplace(z / 2), "replace_one"),
    "selection": (lambda q, z: zcdp(1 / (8 * z)), lambda q, z: zcdp(1 / (8 * z)), "replace_one"),
    "two-releases-of-one-sample": (
        lambda q, z: sampled(q, dpa.ComposedDpEvent([gaussian(z), gaussian(2 * z)])),
        lambda q, z: poisson(q, (z**-2 + (2 * z) ** -2) ** -0.5),
        "add_remove",
    ),
}


@pytest.mark.parametrize("num", [5, pytest.param(50, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", CASES)
def test_random_settings_match_dp_accounting(name, num):
    charged, composed, relation = CASES[name]
    for q, z, count, dp_delta in random_settings(1, num):
        got = spent(charged(q, z), relation, count=count, dp_delta=dp_delta)
        expected = independent(composed(q, z), RELATIONS[relation], count=count, dp_delta=dp_delta)
        np.testing.assert_allclose(got, expected, rtol=1e-6, err_msg=f"{q} {z} {count} {dp_delta}")


@telling
@pytest.mark.parametrize("num", [5, pytest.param(50, marks=pytest.mark.slow)])
def test_random_fixed_size_settings_match_dp_accounting(num):
    rng = np.random.default_rng(2)
    for q, z, count, dp_delta in random_settings(2, num):
        n = int(rng.integers(50, 2000))
        m = max(1, int(q * n))
        asked = {"count": count, "dp_delta": dp_delta}
        got = spent(fixed_size(gaussian(z), n, m), "replace_one", **asked)
        expected = independent(fixed_size(gaussian(z / 2), n, m), REPLACE, **asked)
        np.testing.assert_allclose(got, expected, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("relation", ["add_remove", "replace_one"])
@pytest.mark.parametrize("sampler", ["poisson", "truncated"])
def test_fifty_random_settings_match_dp_accounting_by_pld(sampler, relation):
    rng = np.random.default_rng(3)
    for q, z, count, dp_delta in random_settings(3):
        # Little noise in many steps makes wide distributions, which take minutes.
        z, count = max(z, 1.5), min(count, 200)
        n = int(rng.integers(50, 2000))
        capacity = int(np.ceil(q * n + 2 * np.sqrt(q * n)))
        event = poisson(q, z) if sampler == "poisson" else truncated(n, q, capacity, z)
        asked = {"count": count, "dp_delta": dp_delta, "accountant": "pld"}
        got = spent(event, relation, **asked)
        expected = independent(event, RELATIONS[relation], **asked)
        # Two lattices of different widths agree to what either may add.
        np.testing.assert_allclose(got, expected, rtol=1e-3, atol=2e-4)


def test_one_gaussian_release_costs_as_much_as_the_closed_form():
    # dp-accounting 0.6.0: σ=1, δ=1e-5 gives 4.729 by RDP, and the exact value is below.
    got = spent(gaussian(1.0))
    assert got == pytest.approx(4.729, abs=1e-3)
    assert dpa.get_epsilon_gaussian(1.0, 1e-5) < got
    exact = spent(gaussian(1.0), accountant="pld")
    assert exact == pytest.approx(dpa.get_epsilon_gaussian(1.0, 1e-5), rel=1e-4)


def test_replacing_costs_as_much_as_half_the_noise():
    exact = dpa.get_epsilon_gaussian(1.0, 1e-5)
    for accountant, tolerance in [("pld", 1e-4), ("rdp", 0.15)]:
        got = spent(gaussian(2.0), "replace_one", accountant=accountant)
        assert exact * (1 - 1e-4) <= got <= exact * (1 + tolerance)


@pytest.mark.parametrize(
    "z,add_remove,replace_one,fixed_size", [(2.0, 3.256, 6.920, 22.3), (4.0, 1.387, 3.002, 8.23)]
)
def test_gap_between_relations_is_the_published_one(z, add_remove, replace_one, fixed_size):
    # N=2400, b=32, 15,000 steps, δ=1e-4. The PLD figures were computed by dp-accounting 0.6.0 on
    # a grid of 1e-3, which rounds up; the default grid of 1e-4 stays below by less than 1 %.
    event = poisson(32 / 2400, z)
    for relation, published in [("add_remove", add_remove), ("replace_one", replace_one)]:
        coarse = dpa_pld.PLDAccountant(RELATIONS[relation], 1e-3).compose(event, 15_000)
        assert coarse.get_epsilon(1e-4) == pytest.approx(published, abs=1e-3)
        got = spent(event, relation, count=15_000, dp_delta=1e-4, accountant="pld")
        assert 0.99 * published < got <= published
    fixed = dpa.SampledWithoutReplacementDpEvent(2400, 32, gaussian(z))
    got = spent(fixed, "replace_one", count=15_000, dp_delta=1e-4)
    assert got == pytest.approx(fixed_size, rel=3e-3)


def test_mnist_dp_sgd_of_abadi_and_others():
    # Abadi and others 2016, section 4 and 5.2 (TensorFlow Privacy's tutorial repeats the setting):
    # q = 0.01, σ = 4, T = 10,000, δ = 1e-5 gives ε ≈ 1.26 by the moments accountant.
    classic = spent(poisson(0.01, 4.0), count=10_000, accountant="rdp-classic-64")
    assert classic == pytest.approx(1.26, abs=0.005)
    assert spent(poisson(0.01, 4.0), count=10_000) < classic
    assert spent(poisson(0.01, 4.0), count=10_000, accountant="pld") < classic


@pytest.mark.parametrize("z,epochs,published", [(1.3, 15, 1.19), (1.1, 60, 3.01), (0.7, 45, 7.10)])
def test_mnist_tutorial_of_tensorflow_privacy(z, epochs, published):
    # Its table of MNIST results: 60,000 examples, batches of 256, δ = 1e-5.
    steps = int(epochs * 60_000 / 256)
    got = spent(poisson(256 / 60_000, z), count=steps, accountant="rdp-classic-64")
    assert got == pytest.approx(published, abs=0.005)


def test_dp_fedavg_of_mcmahan_and_others():
    # McMahan and others 2018: 763,430 users, 5000 a round, z = 1, 5000 rounds: (4.634, 1e-9)-DP by
    # moments up to 32. More orders, as here, can only lower it.
    event = poisson(5000 / 763_430, 1.0)
    classic = spent(event, count=5000, dp_delta=1e-9, accountant="rdp-classic-64")
    assert 0.99 * 4.634 < classic < 4.634
    assert spent(event, count=5000, dp_delta=1e-9) < classic
    orders = np.arange(2, 34)
    curve = 5000 * dpa_rdp.RdpAccountant(orders).compose(event).rdp
    assert min(curve + np.log(1e9) / (orders - 1)) == pytest.approx(4.634, abs=5e-4)


def test_each_unit_pays_for_what_it_ran():
    ledger = Ledger("record", num_units=4)
    ledger.charge(poisson(1.0, 2.0), count=3)
    ledger.charge(poisson(0.1, 2.0), units=[2, 0], count=[100, 7])
    ledger.charge(zcdp(0.01), units=np.array([0, 0, 3]))
    np.testing.assert_array_equal(ledger.num_compositions, [3 + 7 + 2, 3, 103, 4])
    for unit in range(4):
        account = dpa_rdp.RdpAccountant().compose(ledger.events(unit))
        for dp_delta in (1e-7, 1e-3):
            got = ledger.epsilon(dp_delta)[unit]
            np.testing.assert_allclose(got, account.get_epsilon(dp_delta), rtol=1e-6)
        got = ledger.delta(1.5)[unit]
        np.testing.assert_allclose(got, account.get_delta(1.5), rtol=1e-6)


def test_a_full_first_batch_composes_with_sampled_rounds():
    # As R-DPCFL is accounted: RDP adds K·ρ(q=1) of the first round to (E−1)·K·(N/b)·ρ(q=b/N).
    z, q, steps = 1.444, 32 / 6600, 41_044
    ledger = Ledger("record")
    ledger.charge(poisson(1.0, z))
    ledger.charge(poisson(q, z), count=steps)
    orders = np.asarray(dpa_rdp.RdpAccountant().orders)
    expected = orders / (2 * z * z) + steps * dpa_rdp.RdpAccountant().compose(poisson(q, z)).rdp
    compute = dpa_rdp.rdp_privacy_accountant.compute_epsilon
    np.testing.assert_allclose(ledger.epsilon(1e-4)[0], compute(orders, expected, 1e-4)[0])


def test_an_empty_ledger_spent_nothing():
    ledger = Ledger(num_units=3)
    for accountant in dp_accounting_adapter.ACCOUNTANTS:
        np.testing.assert_array_equal(ledger.epsilon(1e-5, accountant), np.zeros(3))
        np.testing.assert_array_equal(ledger.delta(1.0, accountant), np.zeros(3))
    np.testing.assert_array_equal(ledger.num_compositions, np.zeros(3))
    ledger.charge(dpa.NoOpDpEvent())
    np.testing.assert_array_equal(ledger.epsilon(1e-5), np.zeros(3))


@pytest.mark.parametrize("accountant", ["rdp", "pld", "rdp-classic-64"])
@pytest.mark.parametrize("event", [dpa.NonPrivateDpEvent(), gaussian(0.0), poisson(0.1, 0.0)])
def test_a_release_without_noise_is_not_private(event, accountant):
    ledger = Ledger(num_units=2)
    ledger.charge(poisson(0.01, 1.0))
    ledger.charge(event, units=[1])
    epsilon = ledger.epsilon(1e-5, accountant)
    assert np.isfinite(epsilon[0]) and np.isposinf(epsilon[1])


# What is refused, and the nearest choice: who counts, the relation, the sampler, the mechanism.
REFUSED = [
    (poisson(0.1, 1.0), "replace_one", "rdp", Advice(accountant="pld")),
    (fixed_size(gaussian(1.0)), "add_remove", "rdp", Advice(relation="replace_one")),
    (truncated(10, 0.1, 5, 1.0), "add_remove", "rdp", Advice(accountant="pld")),
    (zcdp(0.1), "add_remove", "pld", Advice(accountant="rdp")),
    (laplace(1.0), "replace_one", "pld", Advice(accountant="rdp")),
    # Of two relations with the same analysis the one that a run can claim.
    (sampled(0.1, laplace(1.0)), "replace_one", "rdp", Advice(relation="zero_out")),
    (dpa.RandomizedResponseDpEvent(0.1, 2), "replace_one", "pld", Advice(accountant="rdp")),
    (dpa.RandomizedResponseDpEvent(0.1, 2), "add_remove", "rdp", Advice(relation="replace_one")),
    (dpa.UnsupportedDpEvent(), "add_remove", "rdp", Advice(mechanism="gaussian")),
    # Each change alone leads to another refusal: who counts, or the relation.
    (sampled(0.1, zcdp(0.1)), "replace_one", "pld", Advice(mechanism="gaussian")),
    (
        *(fixed_size(laplace(1.0)), "replace_one", "pld"),
        Advice(relation="zero_out", sampler="poisson"),
    ),
    (
        *(dpa.SampledWithReplacementDpEvent(10, 5, gaussian(1.0)), "replace_one", "pld"),
        Advice(sampler="poisson"),
    ),
]


@pytest.mark.parametrize("event,relation,accountant,nearest", REFUSED)
def test_combinations_without_an_analysis_are_refused_with_the_nearest(
    event, relation, accountant, nearest
):
    with pytest.raises(UnsupportedEvent, match="nearest valid choice") as error:
        dp_accounting_adapter.translate(event, relation, accountant)
    assert error.value.advice == nearest
    assert str(error.value).endswith(str(nearest))
    assert type(event).__name__ in str(error.value)


BASES = [
    gaussian(1.0),
    laplace(1.0),
    zcdp(0.1),
    dpa.ComposedDpEvent([gaussian(1.0), laplace(2.0)]),
    dpa.RandomizedResponseDpEvent(0.1, 2),
    dp_event.DiscreteLaplaceDpEvent(0.5, 2),
    dp_event.MixtureOfGaussiansDpEvent(1.0, [0.0, 1.0], [0.5, 0.5]),
    dp_event.RepeatAndSelectDpEvent(gaussian(5.0), 2.0, np.inf),
    dp_event.RepeatAndSelectDpEvent(PureDpEvent(0.1), 2.0, np.inf),
    PureDpEvent(0.1),
    StaircaseDpEvent(2.0, 3),
    BoundedLaplaceDpEvent(2.0, 3, 1e-9),
    SkellamDpEvent(100.0, 2.0, 3.0),
    BoundedRangeDpEvent(0.1),
    dpa.UnsupportedDpEvent(),
]
SAMPLED = {
    "alone": lambda base: base,
    "poisson": lambda base: sampled(0.1, base),
    "fixed": lambda base: fixed_size(base),
    "replaced": lambda base: dpa.SampledWithReplacementDpEvent(10, 5, base),
    "truncated": lambda base: truncated(10, 0.1, 5, 1.0),
}


@pytest.mark.parametrize("relation", ["add_remove", "replace_one"])
@pytest.mark.parametrize("sampler", later(SAMPLED, soon=["poisson", "truncated"]))
def test_following_the_advice_of_a_refusal_is_accepted(sampler, relation):
    refused = 0
    for base, accountant in itertools.product(BASES, dp_accounting_adapter.ACCOUNTANTS):
        for event, _ in ev.flatten(SAMPLED[sampler](base)):
            try:
                dp_accounting_adapter.translate(event, relation, accountant)
            except UnsupportedEvent as error:
                refused += 1
                advice = error.advice
                assert advice is not None and any(advice), event
                followed = dp_accounting_adapter.follow(event, advice)
                for part, _ in ev.flatten(followed):
                    dp_accounting_adapter.translate(
                        part, advice.relation or relation, advice.accountant or accountant
                    )
                ledger = Ledger(relation=advice.relation or relation)
                ledger.charge(followed)
                ledger.epsilon(1e-5, advice.accountant or accountant)
    assert refused > 5


def test_advice_on_several_events_suits_them_all():
    # One of them alone would do with "rdp", the other with "pld".
    fixed = fixed_size(gaussian(1.0))
    advice = dp_accounting_adapter.nearest_choice([poisson(0.1, 1.0), fixed], "replace_one", "rdp")
    assert advice == Advice(accountant="pld", sampler="poisson")


def test_the_ledger_refuses_at_the_charge_what_no_accountant_can_analyse():
    ledger = Ledger()
    with pytest.raises(UnsupportedEvent):
        ledger.charge(fixed_size(gaussian(1.0)))
    ledger.charge(truncated(10, 0.1, 5, 1.0))
    with pytest.raises(UnsupportedEvent, match="accountant 'pld'"):
        ledger.epsilon(1e-5)
    assert ledger.epsilon(1e-5, "pld")[0] > 0


@pytest.mark.parametrize(
    "event,relation",
    [
        (laplace(0.0), "add_remove"),
        (laplace(0.0), "replace_one"),
        (gaussian(0.0), "replace_one"),
        (fixed_size(gaussian(0.0)), "replace_one"),
        (sampled(0.1, dpa.NonPrivateDpEvent()), "add_remove"),
        (sampled(0.1, laplace(0.0)), "add_remove"),
    ],
)
def test_no_noise_of_any_kind_is_not_private(event, relation):
    assert np.isposinf(spent(event, relation))


def test_sampling_of_nothing_costs_nothing():
    assert spent(sampled(0.1, dpa.NoOpDpEvent()), count=100) == 0
    assert spent(poisson(0.0, 0.0), count=100) == 0


def test_sampling_never_costs_more_than_taking_all_clients():
    base = gaussian(1.5)
    assert spent(poisson(0.2, 1.5)) < spent(base)
    assert spent(fixed_size(base, 50, 10), "replace_one") < spent(base, "replace_one")


def test_truncation_is_never_cheaper_than_exact_poisson():
    exact = spent(poisson(0.1, 1.0), count=50, accountant="pld")
    tight = spent(truncated(200, 0.1, 22, 1.0), count=50, accountant="pld")
    roomy = spent(truncated(200, 0.1, 60, 1.0), count=50, accountant="pld")
    assert tight > 1.05 * exact
    assert roomy == pytest.approx(exact, rel=1e-4)


ALL_EVENTS = [
    dpa.NonPrivateDpEvent(),
    laplace(2.0),
    poisson(0.25, 1.5),
    sampled(0.1, dpa.ComposedDpEvent([gaussian(1.0), gaussian(3.0)])),
    zcdp(0.1, 0.01),
    truncated(10, 0.1, 5, 1.0),
    dp_event.RepeatAndSelectDpEvent(gaussian(5.0), 2.0, np.inf),
    dp_event.MixtureOfGaussiansDpEvent(1.0, [0.0, 1.0], [0.5, 0.5]),
    dp_event.DiscreteLaplaceDpEvent(0.5, 2),
]


@pytest.mark.parametrize("event", ALL_EVENTS, ids=lambda e: type(e).__name__)
def test_events_survive_the_way_through_json(event):
    text = json.dumps(ev.to_dict(event), allow_nan=False)
    assert ev.from_dict(json.loads(text)) == event


def test_a_restored_ledger_continues_as_if_never_saved():
    ledger = Ledger("record", num_units=5)
    ledger.charge(poisson(0.1, 1.1), count=10)
    ledger.charge(poisson(np.float32(0.25), np.float64(1.5)), units=[1, 4], count=np.array([2, 3]))
    ledger.charge(zcdp(0.02), units=np.array([3]))
    restored = Ledger.from_json(ledger.to_json())
    for book in (ledger, restored):
        book.charge(poisson(0.1, 1.1), units=[0])
    assert restored.to_json() == ledger.to_json()
    np.testing.assert_array_equal(restored.epsilon(1e-5), ledger.epsilon(1e-5))
    np.testing.assert_array_equal(restored.num_compositions, ledger.num_compositions)
    with pytest.raises(ValueError, match="format must be 1"):
        Ledger.from_json('{"format": 0}')


@pytest.mark.parametrize("words", [{"count": 0}, {"units": []}, {"units": [1], "count": [0]}])
def test_no_compositions_leave_no_entry(words):
    ledger = Ledger("record", num_units=2)
    ledger.charge(poisson(0.1, 1.0), **words)
    again = Ledger.from_json(ledger.to_json())
    assert again.to_json() == ledger.to_json() and json.loads(ledger.to_json())["entries"] == []
    np.testing.assert_array_equal(again.epsilon(1e-5), [0.0, 0.0])
    with pytest.raises(UnsupportedEvent):
        ledger.charge(dpa.UnsupportedDpEvent(), **words)


def test_a_copy_is_a_snapshot():
    ledger = Ledger(num_units=2)
    ledger.charge(poisson(0.1, 1.0))
    before = ledger.copy()
    expected = ledger.epsilon(1e-5)
    ledger.charge(poisson(0.1, 1.0), units=[0])
    np.testing.assert_array_equal(before.epsilon(1e-5), expected)
    assert ledger.epsilon(1e-5)[0] > expected[0]


def test_what_is_charged_twice_is_paid_twice():
    once, twice = Ledger(), Ledger()
    once.charge(poisson(0.1, 1.0), count=2)
    twice.charge(poisson(0.1, 1.0))
    twice.charge(dpa.SelfComposedDpEvent(dpa.ComposedDpEvent([poisson(0.1, 1.0)]), 1))
    assert once.epsilon(1e-5) == twice.epsilon(1e-5)
    assert twice.num_compositions[0] == 2


def test_a_budget_stops_exactly_where_it_is_spent():
    event, budget, dp_delta = poisson(0.04, 1.449), 4.0, 1 / 3400
    ledger = Ledger()
    rounds = ledger.max_rounds(event, budget, dp_delta)
    # By dp-accounting this multiplier is calibrated to 1000 rounds, to three digits.
    assert rounds == pytest.approx(1000, abs=2)
    assert spent(event, count=rounds, dp_delta=dp_delta) <= budget
    assert spent(event, count=rounds + 1, dp_delta=dp_delta) > budget
    ledger.charge(event, count=rounds - 1)
    assert ledger.max_rounds(event, budget, dp_delta) == 1
    assert ledger.num_compositions[0] == rounds - 1
    assert ledger.max_rounds(zcdp(0.0), budget, dp_delta, limit=50) == 50


@pytest.mark.parametrize("accountant", ["rdp", "pld", "rdp-classic-64"])
def test_every_unit_is_asked_at_its_own_delta(accountant):
    event, deltas = poisson(0.1, 1.0), [1e-3, 1e-6, 1e-6, 1e-4]
    ledger = Ledger("record", num_units=4)
    ledger.charge(event, units=[0, 1, 2], count=[20, 20, 30])
    orders = [1 + x / 10 for x in range(1, 100)] + list(range(12, 65))
    expected = [0.0] * 4
    for unit, count in enumerate((20, 20, 30)):
        if accountant == "rdp-classic-64":
            curve = dpa_rdp.RdpAccountant(orders).compose(event, count).rdp
            expected[unit] = (curve + np.log(1 / deltas[unit]) / (np.array(orders) - 1)).min()
        else:
            asked = {"count": count, "dp_delta": deltas[unit], "accountant": accountant}
            expected[unit] = independent(event, ADD_REMOVE, **asked)
    found = ledger.epsilon(deltas, accountant)
    # Two lattices of different widths agree to what either may add.
    np.testing.assert_allclose(found, expected, rtol=1e-3 if accountant == "pld" else 1e-6)
    assert expected[3] == 0 < expected[0] < expected[1] < expected[2]
    with pytest.raises(ValueError, match="dp_delta must be one number or have one for each of"):
        ledger.epsilon(deltas[:3], accountant)
    with pytest.raises(ValueError, match="dp_delta must be in"):
        ledger.epsilon([1e-3, 1e-6, 1e-6, 1.0], accountant)


def test_budgets_are_asked_at_each_units_own_delta():
    ledger, event = Ledger("record", num_units=3), poisson(0.1, 1.0)
    deltas = np.array([1e-3, 1e-6, 1e-6])
    budget = spent(event, count=50, dp_delta=1e-6)
    assert ledger.max_rounds(event, budget, deltas, units=[1, 2]) == 50
    assert ledger.max_rounds(event, budget, deltas, units=[0]) > 60
    assert ledger.max_rounds(event, budget, deltas) == 50


def test_each_unit_may_repeat_its_history_within_its_own_budget():
    """Units of one event and another, of both together, and of nothing: by dp-accounting."""
    ledger = Ledger("record", num_units=5)
    events = poisson(0.1, 1.0), poisson(0.3, 2.0)
    ledger.charge(events[0], units=[0, 1, 3], count=[1, 1, 2])
    ledger.charge(events[1], units=[2, 3])
    deltas = np.array([1e-5, 1e-3, 1e-5, 1e-6, 1e-5])
    wanted = [40, 7, 300, 12]

    def by_hand(unit, repeats):
        accountant = dpa_rdp.RdpAccountant()
        for event, count in ev.flatten(ledger.events(unit)):
            accountant.compose(event, count * repeats)
        return accountant.get_epsilon(deltas[unit])

    # Its orders differ a little from those of dp-accounting.
    budgets = [by_hand(unit, repeats) * 1.001 for unit, repeats in enumerate(wanted)]
    found = ledger.max_repeats([*budgets, 1.0], deltas, limit=500)
    assert found.tolist() == [*wanted, 500]
    assert ledger.max_repeats(np.inf, 1e-5, limit=9).tolist() == [9] * 5
    assert ledger.max_repeats(1e-9, 1e-5, limit=9).tolist() == [0, 0, 0, 0, 9]
    # Past the ends of what was tried before.
    for repeats in (1, 2, 3, 499, 500):
        exactly = [Ledger("record", num_units=1) for _ in wanted]
        for unit, one in enumerate(exactly):
            one.charge(ledger.events(unit), count=repeats)
        spent = [one.epsilon(deltas[unit])[0] for unit, one in enumerate(exactly)]
        assert ledger.max_repeats([*spent, 1.0], deltas, limit=500).tolist()[:4] == [repeats] * 4


@pytest.mark.slow
def test_repeats_are_counted_by_the_accountant_that_is_asked():
    ledger, event = Ledger("record", num_units=2), poisson(0.1, 1.0)
    ledger.charge(event, units=[0])
    # Two lattices of different widths agree to 0.1 %; one more repeat costs more than that.
    budget = 1.002 * independent(event, ADD_REMOVE, count=40, dp_delta=1e-5, accountant="pld")
    assert ledger.max_repeats(budget, 1e-5, accountant="pld", limit=100).tolist() == [40, 100]
    assert ledger.max_repeats(budget, 1e-5, limit=100)[0] < 40


def test_a_question_about_few_units_reads_their_own_history():
    ledger = Ledger("record", num_units=4)
    ledger.charge(poisson(0.1, 1.0), units=[0, 2], count=[200, 50])
    ledger.charge(poisson(0.3, 2.0), units=[2, 3], count=[5, 7])
    event = poisson(0.1, 1.0)
    for unit in range(4):
        alone = ledger.copy()
        alone.charge(event, units=[unit], count=30)
        after = alone.epsilon(1e-5)[unit]
        for slack, expected in [(1.001, False), (0.999, True)]:
            most = ledger.max_rounds(event, slack * after, 1e-5, units=[unit], limit=30)
            assert (most < 30) is expected
        assert ledger.max_rounds(event, after, 1e-5, units=[unit]) == 30
    assert ledger.max_rounds(event, 1e-9, 1e-5, units=[], limit=9) == 9


@pytest.mark.parametrize(
    "call,message",
    [
        (lambda: Ledger().charge(poisson(0.1, 1.0), units=[1]), "units must hold indices"),
        (lambda: Ledger().charge(poisson(0.1, 1.0), units=[-1]), "units must hold indices"),
        (lambda: Ledger().charge(poisson(0.1, 1.0), count=1.5), "count must hold integers"),
        (lambda: Ledger().charge(poisson(0.1, 1.0), count=[1, 2]), "count must be a scalar or"),
        (lambda: Ledger().charge(poisson(0.1, -1.0)), "noise_multiplier must be 0, or from"),
        (lambda: Ledger().charge(poisson(0.1, np.nan)), "noise_multiplier must be 0, or from"),
        (lambda: Ledger().charge(poisson(1.1, 1.0)), "sampling_probability must be in"),
        (lambda: Ledger().events(1), "unit must be below 1"),
    ],
)
def test_bad_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("noise", [1e300, 1e-160, float("inf"), float("nan"), -1.0])
@pytest.mark.filterwarnings("error")
def test_noise_of_which_no_accountant_computes_ordinary_numbers_is_refused(noise):
    rule = "noise_multiplier must be 0, or from 1e-100 to 1e9"
    with pytest.raises(ValueError, match=rule):
        epsilon_of_poisson(noise, 0.1, 10, 1e-5)
    ledger = Ledger("client")
    with pytest.raises(ValueError, match=rule):
        ledger.charge(dpa.GaussianDpEvent(noise))
        ledger.epsilon(1e-5)


@pytest.mark.parametrize("accountant", ["rdp", "pld", "rdp-classic-64"])
@pytest.mark.parametrize("noise", [1e-100, 1e9])
@pytest.mark.filterwarnings("error")
def test_the_ends_of_the_range_of_noise_have_an_epsilon(noise, accountant):
    found = epsilon_of_poisson(noise, 0.1, 10, 1e-5, accountant=accountant)
    # Without noise all is known; the other end is close to no loss, but for what recipes add.
    assert found > 1e6 if noise < 1 else found < 0.3


@pytest.mark.filterwarnings("error")
def test_the_smallest_budget_is_met_and_uncountable_steps_are_refused():
    # The smallest of all budgets: δ alone allows for what so much noise leaves.
    noise = calibrate_poisson(5e-324, 1e-5, 0.1, 10)
    assert epsilon_of_poisson(noise, 0.1, 10, 1e-5) == 0.0
    for steps in (10**26, 10**400):
        with pytest.raises(ValueError, match=r"num_steps must be at most 2\^53"):
            epsilon_of_poisson(1.0, 0.1, steps, 1e-5)
