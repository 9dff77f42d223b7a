"""Calibrated noise meets its budget, and the published multipliers come out."""

import math

import dp_accounting as dpa
import numpy as np
import pytest
from dp_accounting import pld as dpa_pld
from dp_accounting import rdp as dpa_rdp
from marks import telling

from fedjax_dp.privacy import epsilon_of_poisson
from fedjax_dp.privacy.accounting import calibration as cal
from fedjax_dp.privacy.accounting.ledger import Ledger, UnsupportedEvent

CLASSIC = "rdp-classic-64"


def poisson(q, z):
    return dpa.PoissonSampledDpEvent(q, dpa.GaussianDpEvent(z))


# By the accountant of the authors of Robust-HDP: N = 2400, E = 200, δ = 1e-4, b = 16, 32, 64, 128.
Z_TABLE = {
    0.5: (10.08, 14.24, 20.13, 28.45),
    1.0: (5.15, 7.25, 10.22, 14.44),
    2.0: (2.71, 3.77, 5.28, 7.43),
    5.0: (1.31, 1.73, 2.35, 3.25),
}


@pytest.mark.parametrize("epsilon", Z_TABLE)
def test_authors_recipe_reproduces_the_table_of_multipliers(epsilon):
    batch = np.array([16, 32, 64, 128])
    got = cal.calibrate_poisson(epsilon, 1e-4, batch / 2400, 200 * 2400 / batch, accountant=CLASSIC)
    np.testing.assert_allclose(got, Z_TABLE[epsilon], atol=0.0051)


def test_multipliers_grow_with_rate_and_fall_with_budget():
    # Sub-linear in the rate, decreasing in ε and δ.
    rates = np.array([0.005, 0.01, 0.02, 0.04])
    z = cal.calibrate_poisson(1.0, 1e-4, rates, 1000)
    assert np.all(np.diff(z) > 0) and np.all(z[1:] / z[:-1] < 2)
    assert np.all(np.diff(cal.calibrate_poisson([0.5, 1, 2, 4], 1e-4, 0.01, 1000)) < 0)
    assert np.all(np.diff(cal.calibrate_poisson(1.0, [1e-7, 1e-5, 1e-3], 0.01, 1000)) < 0)


# By dp-accounting: N = 6600, b = 32, K = 1, E = 200, δ = 1e-4; first batch full, or all of 32.
FIRST_BATCH = {
    2: (3.206, 2.338),
    3: (2.218, 1.673),
    4: (1.731, 1.352),
    5: (1.444, 1.165),
    10: (0.901, 0.810),
    15: (0.738, 0.695),
}


def test_a_full_first_batch_costs_noise_in_every_later_round():
    epsilon = np.array(list(FIRST_BATCH), float)
    expected = np.array(list(FIRST_BATCH.values()))
    rate, steps = 32 / 6600, 6600 / 32
    rates, counts = np.tile([1.0, rate], (6, 1)), np.tile([1.0, 199 * steps], (6, 1))
    full = cal.calibrate_poisson(epsilon, 1e-4, rates, counts, accountant=CLASSIC)
    alike = cal.calibrate_poisson(epsilon, 1e-4, rate, 200 * steps, accountant=CLASSIC)
    np.testing.assert_allclose(full, expected[:, 0], atol=6e-4)
    np.testing.assert_allclose(alike, expected[:, 1], atol=6e-4)
    assert np.all(np.diff(full / alike) < 0)


# By dp-accounting: 20 selections at ε_sel = 0.03 ε: ε of the selections alone, multipliers
# when these get a budget of their own, and when both curves are added before one conversion.
SELECTIONS = {
    2: (0.585, 4.443, 3.360),
    3: (0.884, 3.043, 2.326),
    4: (1.188, 2.349, 1.816),
    5: (1.496, 1.937, 1.515),
    10: (3.104, 1.138, 0.942),
    15: (4.825, 0.892, 0.769),
}


@pytest.mark.parametrize("epsilon", SELECTIONS)
def test_selections_are_cheaper_in_one_joint_conversion(epsilon):
    alone, separate, joint = SELECTIONS[epsilon]
    rho = (0.03 * epsilon) ** 2 / 8
    ledger = Ledger("record", "replace_one")
    ledger.charge(dpa.ZCDpEvent(rho), count=20)
    spent = float(ledger.epsilon(1e-4, CLASSIC)[0])
    assert spent == pytest.approx(alone, abs=6e-4)
    phases = ([[1.0, 32 / 6600]], [[1.0, 199 * 6600 / 32]])
    got = cal.calibrate_poisson([epsilon - spent], 1e-4, *phases, accountant=CLASSIC)
    assert got == pytest.approx(separate, abs=6e-4)
    got = cal.calibrate_poisson([epsilon], 1e-4, *phases, rho=20 * rho, accountant=CLASSIC)
    assert got == pytest.approx(joint, abs=6e-4)


@telling
def test_user_level_multipliers_are_the_published_ones():
    # By dp-accounting 0.6.0.
    got = cal.calibrate_poisson([2, 4, 6, 8], 1 / 3400, 0.04, 1000)
    np.testing.assert_allclose(got, [2.382, 1.449, 1.136, 0.979], atol=6e-4)
    got = cal.calibrate_poisson([2, 4, 6, 8], 1 / 500, 0.06, 300)
    np.testing.assert_allclose(got, [1.780, 1.162, 0.946, 0.830], atol=6e-4)


@pytest.mark.parametrize("accountant,relation", [("rdp", "add_remove"), ("pld", "replace_one")])
def test_calibration_agrees_with_dp_accounting(accountant, relation):
    dpa_relation = dpa.NeighboringRelation[
        "ADD_OR_REMOVE_ONE" if relation == "add_remove" else "REPLACE_ONE"
    ]
    make = dpa_rdp.RdpAccountant if accountant == "rdp" else dpa_pld.PLDAccountant

    def event(z):
        return dpa.SelfComposedDpEvent(poisson(0.02, z), 100)

    expected = dpa.calibrate_dp_mechanism(
        lambda: make(neighboring_relation=dpa_relation), event, 0.4, 1e-5
    )
    general = cal.calibrate_noise_multiplier(
        event, 0.4, 1e-5, accountant=accountant, relation=relation
    )
    vectorised = cal.calibrate_poisson(
        0.4, 1e-5, 0.02, 100, accountant=accountant, relation=relation
    )
    # Two lattices of different widths agree to what either may add.
    tolerance = {"atol": 5e-6} if accountant == "rdp" else {"rtol": 1e-3}
    np.testing.assert_allclose([general, vectorised], expected, **tolerance)


@telling
def test_a_thousand_clients_meet_their_budgets_and_waste_nothing():
    rng = np.random.default_rng(0)
    n = 200
    rates, steps = 10 ** rng.uniform(-3, 0, n), rng.integers(10, 20_000, n)
    rates[:5] = 1.0
    budgets = rng.uniform(0.2, 9, n)
    z = cal.calibrate_poisson(budgets, 1e-5, rates, steps)
    assert z.shape == (n,)
    assert np.all(epsilon_of_poisson(z, rates, steps, 1e-5) <= budgets)
    assert np.all(epsilon_of_poisson(z * (1 - 1e-6), rates, steps, 1e-5) > budgets)
    for i in range(0, n, 40):
        event = dpa.GaussianDpEvent(z[i]) if rates[i] == 1 else poisson(rates[i], z[i])
        account = dpa_rdp.RdpAccountant().compose(event, int(steps[i]))
        assert account.get_epsilon(1e-5) == pytest.approx(budgets[i], rel=1e-5)


def test_clients_with_the_same_numbers_share_one_search():
    got = cal.calibrate_poisson(np.tile([1.0, 2.0], 500), 1e-5, 0.01, 100)
    np.testing.assert_array_equal(got[::2], got[0])
    np.testing.assert_array_equal(got[1::2], got[1])
    hits = cal._calibrated.cache_info().hits
    again = cal.calibrate_poisson([1.0, 2.0], 1e-5, 0.01, 100)
    np.testing.assert_array_equal(again, got[:2])
    assert cal._calibrated.cache_info().hits == hits + 1


def test_epsilon_of_poisson_is_the_ledgers():
    ledger = Ledger("record", num_units=2)
    ledger.charge(poisson(0.1, 1.3), units=[0], count=30)
    ledger.charge(dpa.GaussianDpEvent(1.3), units=[0], count=2)
    ledger.charge(poisson(0.2, 2.0), units=[1], count=10)
    ledger.charge(dpa.GaussianDpEvent(2.0), units=[1], count=4)
    ledger.charge(dpa.ZCDpEvent(0.01))
    got = epsilon_of_poisson(
        [1.3, 2.0], [[0.1, 1.0], [0.2, 1.0]], [[30, 2], [10, 4]], 1e-5, rho=0.01
    )
    np.testing.assert_allclose(got, ledger.epsilon(1e-5), rtol=1e-9)


def test_epochs_that_a_budget_allows():
    got = cal.max_poisson_steps([4.0, 2.0], 1 / 3400, 0.04, [1.4490, 2.3825])
    np.testing.assert_array_equal(got, [1000, 1000])
    assert epsilon_of_poisson(1.449, 0.04, 1000, 1 / 3400) <= 4.0
    assert epsilon_of_poisson(1.449, 0.04, 1001, 1 / 3400) > 4.0


def test_budgets_below_the_floor_of_the_old_recipe_are_refused_with_the_way_out():
    with pytest.raises(ValueError, match=r"ln\(1/dp_delta\)/63; choose accountant 'rdp'"):
        cal.calibrate_poisson(0.1, 1e-4, 0.01, 100, accountant=CLASSIC)
    assert cal.calibrate_poisson(0.1, 1e-4, 0.01, 100) > 0


def test_a_budget_that_selections_spent_is_refused():
    with pytest.raises(ValueError, match="already exceed it"):
        cal.calibrate_poisson(0.5, 1e-5, 0.01, 100, rho=1.0)
    with pytest.raises(ValueError, match="no epsilon holds"):
        cal.calibrate_noise_multiplier(lambda z: dpa.NonPrivateDpEvent(), 0.5, 1e-5)


def test_replace_one_is_refused_where_only_add_remove_is_known():
    with pytest.raises(UnsupportedEvent, match="accountant 'pld'"):
        cal.calibrate_poisson(1.0, 1e-5, 0.01, 100, relation="replace_one")


def test_a_budget_that_needs_no_noise_gets_the_smallest():
    assert cal.calibrate_poisson(1.0, 1e-5, 0.0, 100) == 2.0**-10
    assert cal.calibrate_noise_multiplier(lambda z: dpa.NoOpDpEvent(), 1.0, 1e-5) == 2.0**-10


def test_parts_of_steps_are_for_the_old_recipe_alone():
    with pytest.raises(ValueError, match="num_steps must hold integers"):
        cal.calibrate_poisson(1.0, 1e-5, 0.1, 1.5)


def test_one_gaussian_needs_less_noise_than_the_textbook_bound():
    # Dwork and Roth 2014, theorem A.1: σ ≥ √(2 ln(1.25/δ))/ε holds for one release and ε < 1 only.
    textbook = math.sqrt(2 * math.log(1.25 / 1e-5)) / 0.9
    got = cal.calibrate_noise_multiplier(dpa.GaussianDpEvent, 0.9, 1e-5, accountant="pld")
    exact = dpa.get_sigma_gaussian(0.9, 1e-5)
    assert exact <= got * (1 + 1e-4)
    assert got == pytest.approx(exact, rel=1e-3) and got < textbook
