"""Rényi curves of sampled mechanisms bound the divergences that they stand for."""

import dp_accounting as dpa
import numpy as np
import pytest
from scipy import integrate

from fedjax_dp.privacy.accounting import rdp, renyi
from fedjax_dp.privacy.accounting.ledger import Ledger

ORDERS = np.array([1.5, 2.0, 2.5, 3.0, 4.0, 7.3, 12.0])


def laplace_curve(scale, orders):
    account = dpa.rdp.RdpAccountant(list(orders)).compose(dpa.LaplaceDpEvent(scale))
    return account.rdp


def sampled_laplace(q, scale, alpha):
    """Both directions of the divergence of q-sampled Laplace noise, by quadrature."""

    def log_density(x, shift):
        return -abs(x - shift) / scale - np.log(2 * scale)

    def log_mixed(x):
        parts = np.log1p(-q) + log_density(x, 0), np.log(q) + log_density(x, 1)
        return np.logaddexp(*parts)

    def divergence(log_p, log_r):
        def integrand(x):
            return np.exp(alpha * log_p(x) + (1 - alpha) * log_r(x))

        value, _ = integrate.quad(integrand, -40, 41, points=[0, 1], limit=500)
        return np.log(value) / (alpha - 1)

    plain = lambda x: log_density(x, 0)  # noqa: E731
    return max(divergence(log_mixed, plain), divergence(plain, log_mixed))


@pytest.mark.parametrize("q", [0.01, 0.2, 0.9])
@pytest.mark.parametrize("scale", [0.7, 3.0])
def test_general_bound_covers_sampled_laplace(q, scale):
    base = laplace_curve(scale, np.arange(2.0, 13))
    bound = rdp.poisson_of_any(q, base, ORDERS)
    exact = np.array([sampled_laplace(q, scale, alpha) for alpha in ORDERS])
    assert np.all(bound >= exact * (1 - 1e-6))


@pytest.mark.parametrize("q", [1e-3, 0.05, 0.5])
@pytest.mark.parametrize("z", [0.8, 3.0])
def test_general_bound_covers_the_sampled_gaussian_and_is_exact_at_order_two(q, z):
    whole = np.arange(2.0, 13)
    bound = rdp.poisson_of_any(q, whole / (2 * z * z), ORDERS)
    is_whole = np.floor(ORDERS) == ORDERS
    exact = rdp.poisson_gaussian(q, z, ORDERS[is_whole])[0]
    assert np.all(bound[is_whole] >= exact * (1 - 1e-9))
    closed = np.log(1 - q * q + q * q * np.exp(1 / z**2))
    np.testing.assert_allclose(bound[1], closed, rtol=1e-9)
    # At order 3 the theorem's own sum, written out.
    expected = (1 - q) ** 2 * (2 * q + 1) + 3 * q * q * (1 - q) * np.exp(1 / z**2)
    expected += 3 * q**3 * np.exp(3 / z**2)
    np.testing.assert_allclose(bound[3], np.log(expected) / 2, rtol=1e-9)


def test_edges_of_the_general_bound():
    base = np.arange(2.0, 13) / 2
    np.testing.assert_array_equal(rdp.poisson_of_any(0.0, base, ORDERS), 0)
    full = rdp.poisson_of_any(1.0, base, ORDERS)
    assert np.all(np.isfinite(full)) and np.all(full >= ORDERS / 2 * (1 - 1e-9))


def test_sampled_zcdp_costs_less_than_unsampled_and_never_more():
    for q in (0.01, 0.3, 1.0):
        event = dpa.PoissonSampledDpEvent(q, dpa.ZCDpEvent(0.02))
        curve = renyi.rdp_curves([event])[0]
        assert np.all(curve <= 0.02 * np.asarray(rdp.DEFAULT_ORDERS) * (1 + 1e-12))
    sampled, full = Ledger(), Ledger()
    sampled.charge(dpa.PoissonSampledDpEvent(0.05, dpa.ZCDpEvent(0.02)), count=10)
    full.charge(dpa.ZCDpEvent(0.02), count=10)
    assert sampled.epsilon(1e-5)[0] < 0.5 * full.epsilon(1e-5)[0]


def test_sampled_composition_adds_before_it_amplifies():
    inside = dpa.ComposedDpEvent([dpa.ZCDpEvent(0.01), dpa.LaplaceDpEvent(4.0)])
    got = renyi.rdp_curves([dpa.PoissonSampledDpEvent(0.1, inside)])[0]
    orders = np.asarray(rdp.DEFAULT_ORDERS)
    whole = np.arange(2.0, 1025)
    base = 0.01 * whole + laplace_curve(4.0, whole)
    expected = np.minimum(
        rdp.poisson_of_any(0.1, base, orders), 0.01 * orders + laplace_curve(4.0, orders)
    )
    np.testing.assert_allclose(got, expected, rtol=1e-12)
