"""The vectorised Rényi curves agree with quadrature and with dp-accounting."""

import dp_accounting as dpa
import numpy as np
import pytest
from dp_accounting import rdp as dpa_rdp
from marks import telling
from scipy import integrate, stats

from fedjax_dp.privacy.accounting import rdp

SETTINGS = [(0.01, 1.1), (0.3, 0.6), (0.0005, 4.0), (0.9, 2.0), (0.04, 0.4)]


def quadrature(q, z, alpha):
    """E_{N(0,z²)}[((1−q) + q·dN(1,z²)/dN(0,z²))^α], by definition."""
    low, high = -12 * z - 1, alpha + 12 * z + 1

    def integrand(x):
        ratio = (1 - q) + q * np.exp((2 * x - 1) / (2 * z * z))
        return np.exp(alpha * np.log(ratio) + stats.norm.logpdf(x, scale=z))

    value, _ = integrate.quad(integrand, low, high, limit=2000, epsrel=1e-12, points=[0.0, alpha])
    return np.log(value) / (alpha - 1)


@pytest.mark.parametrize("q,z", SETTINGS)
def test_curves_match_the_defining_integral(q, z):
    orders = [2.0, 3.0, 5.0, 9.0]
    expected = [quadrature(q, z, alpha) for alpha in orders]
    np.testing.assert_allclose(rdp.poisson_gaussian(q, z, orders)[0], expected, rtol=1e-6)


@pytest.mark.parametrize("q,z", SETTINGS)
def test_curves_at_broken_orders_bound_the_integral_closely(q, z):
    # As dp-accounting 0.6 does, the series adds its terms without their signs: an upper bound.
    orders = [2.5, 3.3, 4.7, 9.1]
    expected = np.array([quadrature(q, z, alpha) for alpha in orders])
    excess = rdp.poisson_gaussian(q, z, orders)[0] / expected - 1
    assert np.all(excess > -1e-7) and np.all(excess < 5e-4)


# McMahan, Ramage, Talwar, Zhang, "Learning Differentially Private Recurrent Language Models",
# ICLR 2018: ε of DP-FedAvg for z = 1 and δ = 1/K^1.1 after 1, 10, ..., 10^6 rounds, from the
# moments accountant (moments up to 32, so orders up to 33).
DP_FEDAVG = {
    (10**5, 10**2): (0.97, 0.98, 1.00, 1.07, 1.18, 2.21, 7.50),
    (10**6, 10**1): (0.68, 0.69, 0.69, 0.69, 0.69, 0.72, 0.73),
    (10**6, 10**3): (1.17, 1.17, 1.20, 1.28, 1.39, 2.44, 8.13),
    (10**6, 10**4): (1.73, 1.92, 2.08, 3.06, 8.49, 32.38, 187.01),
}


@pytest.mark.parametrize("num_users,clients_per_round", DP_FEDAVG)
def test_published_table_of_dp_fedavg(num_users, clients_per_round):
    orders = range(2, 34)
    rounds = 10.0 ** np.arange(7)
    curve = rdp.poisson_gaussian(clients_per_round / num_users, 1.0, orders)
    got = rdp.to_epsilon(rounds[:, None] * curve, orders, num_users**-1.1, is_classic=True)
    np.testing.assert_allclose(got, DP_FEDAVG[num_users, clients_per_round], atol=0.0051)


@telling
def test_curves_match_dp_accounting_on_random_settings():
    rng = np.random.default_rng(0)
    q, z = 10 ** rng.uniform(-4, 0, 50), 10 ** rng.uniform(-0.5, 1.2, 50)
    got = rdp.poisson_gaussian(q, z)
    for row, one_q, one_z in zip(got, q, z, strict=True):
        event = dpa.PoissonSampledDpEvent(one_q, dpa.GaussianDpEvent(one_z))
        expected = dpa_rdp.RdpAccountant().compose(event).rdp
        is_whole = np.floor(rdp.DEFAULT_ORDERS) == rdp.DEFAULT_ORDERS
        np.testing.assert_allclose(row[is_whole], expected[is_whole], rtol=1e-6)
        # Between them the chord beats the series of dp-accounting where terms of both signs meet;
        # where it does not, moments that are summed from 1 on hold no more than 13 digits.
        with np.errstate(over="ignore"):
            lifted = np.expm1(expected * (np.asarray(rdp.DEFAULT_ORDERS) - 1)) + 2e-13
        moments = np.log1p(lifted) * (1 + 1e-6)
        finite = np.isfinite(lifted)
        assert np.all((row * (np.asarray(rdp.DEFAULT_ORDERS) - 1) <= moments)[finite])


def test_default_orders_are_those_of_dp_accounting():
    np.testing.assert_array_equal(rdp.DEFAULT_ORDERS, dpa_rdp.RdpAccountant().orders)


def test_edges_of_the_sampled_gaussian():
    orders = [2.0, 3.5, 16.0]
    got = rdp.poisson_gaussian([0, 1, 0.5, 1], [1, 2, 0, 0], orders)
    np.testing.assert_array_equal(got[0], 0)
    np.testing.assert_allclose(got[1], np.asarray(orders) / 8)
    assert np.all(np.isposinf(got[2:]))


@pytest.mark.parametrize("dp_delta", [1e-10, 1e-5, 1e-2, 0.4])
@pytest.mark.parametrize("steps", [1, 300, 50_000])
def test_conversions_match_dp_accounting(dp_delta, steps):
    curves = steps * rdp.poisson_gaussian(*np.transpose(SETTINGS))
    compute = dpa_rdp.rdp_privacy_accountant
    orders = rdp.DEFAULT_ORDERS
    expected = [compute.compute_epsilon(orders, c, dp_delta)[0] for c in curves]
    np.testing.assert_allclose(rdp.to_epsilon(curves, orders, dp_delta), expected, rtol=1e-9)
    for epsilon in (0.0, 0.3, 5.0):
        expected = [compute.compute_delta(orders, c, epsilon)[0] for c in curves]
        np.testing.assert_allclose(rdp.to_delta(curves, orders, epsilon), expected, rtol=1e-6)


def test_classic_conversion_is_mironovs_proposition_3():
    orders = np.asarray(rdp.CLASSIC_ORDERS)
    curve = orders / (2 * 3.0**2)
    expected = min(c + np.log(1e4) / (a - 1) for a, c in zip(orders, curve, strict=True))
    assert rdp.to_epsilon(curve, orders, 1e-4, is_classic=True) == pytest.approx(expected)
    back = rdp.to_delta(curve, orders, float(expected), is_classic=True)
    assert back == pytest.approx(1e-4, rel=1e-9)


def test_classic_recipe_has_its_known_floor():
    # The conversion alone: ε can never go below ln(1/δ)/63 = 0.146 at δ = 1e-4.
    curve = rdp.poisson_gaussian(0.01, 1e6, rdp.CLASSIC_ORDERS)[0]
    floor = rdp.to_epsilon(curve, rdp.CLASSIC_ORDERS, 1e-4, is_classic=True)
    assert floor == pytest.approx(0.146, abs=5e-4)


def test_nothing_run_costs_nothing_and_no_delta_costs_everything():
    zeros = np.zeros(len(rdp.DEFAULT_ORDERS))
    assert rdp.to_epsilon(zeros, rdp.DEFAULT_ORDERS, 1e-5) == 0
    assert rdp.to_epsilon(zeros, rdp.DEFAULT_ORDERS, 0.0) == 0
    assert rdp.to_delta(zeros, rdp.DEFAULT_ORDERS, 0.5) == 0
    assert np.isposinf(rdp.to_epsilon(zeros + 0.1, rdp.DEFAULT_ORDERS, 0.0))
    assert rdp.to_delta(zeros + np.inf, rdp.DEFAULT_ORDERS, 1.0) == 1
