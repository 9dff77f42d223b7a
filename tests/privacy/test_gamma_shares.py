"""Gamma shares sum to Laplace noise, and what it costs is said for coordinates and for vectors."""

import functools

import dp_accounting as dpa
import jax
import numpy as np
import pytest
from marks import floats, later, slow, telling
from scipy import integrate, special, stats

from fedjax_dp import privacy
from fedjax_dp.privacy.accounting.ledger import Ledger
from fedjax_dp.privacy.mechanisms.gamma_shares import GammaSharesDpEvent, draw_shares
from fedjax_dp.privacy.reports import statement as st

pytestmark = floats

DRAW = jax.jit(draw_shares, static_argnums=1)
SIZE = 600_000


@functools.cache
def draws_of(seed, a, size=SIZE):
    return np.asarray(DRAW(jax.random.key(seed), (size,), a), np.float64)


@pytest.mark.parametrize(
    "n,num_sums",
    [
        (20, 30_000),
        pytest.param(2, 30_000, marks=telling),
        pytest.param(5000, 4_000, marks=slow),
    ],
)
def test_n_shares_sum_to_one_laplace(n, num_sums):
    size = SIZE if n < 5000 else num_sums * n
    sums = draws_of(n, 1 / n, size)[: num_sums * n].reshape(num_sums, n).sum(axis=1)
    assert stats.kstest(sums, stats.laplace.cdf).pvalue > 1e-3
    if n == 5000:
        return
    assert stats.kstest(sums / 1.1, stats.laplace.cdf).pvalue < 1e-6
    # Standard errors: √(5/N) of the variance, about √(2,500/N) of the kurtosis, for N sums.
    assert sums.var() == pytest.approx(2, rel=4 * np.sqrt(5 / num_sums))
    assert stats.kurtosis(sums, fisher=False) == pytest.approx(6, abs=1.2)


@telling
def test_shares_of_a_wrong_shape_do_not():
    sums = draws_of(0, 1 / 7).reshape(-1, 10).sum(axis=1)
    assert stats.kstest(sums, stats.laplace.cdf).pvalue < 1e-6


@pytest.mark.parametrize("level", [1e-30, 1e-6, 1.0])
def test_shares_of_tiny_shape_are_as_often_large_as_they_should_be(level):
    # g − g' beyond a level, for shape 1/5000: one of the two is, and the other is next to nothing.
    a = 1 / 5000
    found = np.sum(np.abs(draws_of(1, a)) > level)
    expected = 2 * stats.gamma.sf(level, a) * SIZE
    assert found == pytest.approx(expected, abs=4.5 * np.sqrt(expected))


@telling
def test_the_tail_of_a_share_is_that_of_its_law():
    a = 1 / 20
    draws = np.abs(draws_of(2, a))
    at = 6.0

    # Density of g − g': a Bessel function; 2 ∫ from 6.
    def density(x):
        scale = special.gamma(a) * np.sqrt(np.pi) * 2 ** (a - 0.5)
        return x ** (a - 0.5) * special.kv(0.5 - a, x) / scale

    expected = 2 * integrate.quad(density, at, np.inf)[0] * draws.size
    assert np.sum(draws > at) == pytest.approx(expected, abs=4.5 * np.sqrt(expected))


@pytest.mark.parametrize(
    "form,self_noise,calibration,scale,epsilon",
    [
        # n = 16, S = 8, ε = 1/2. The scales of section 3, with S = n·Δ.
        ("one", True, "paper", 1.0, 8.0),
        ("one", True, "corrected", 16.0, 0.5),
        ("one", True, "variance", 16.0, 0.5),
        ("pairs", True, "paper", 1.0, 8.0),
        ("pairs", True, "corrected", 16.0, 0.5),
        ("pairs", True, "variance", 4.0, 2.0),
        ("pairs", False, "corrected", 16.0, 0.5),
    ],
)
def test_calibrations(form, self_noise, calibration, scale, epsilon):
    sensitivity = privacy.Sensitivity(8.0, "replace_one")
    noise = privacy.gamma_shares(
        16, sensitivity, 0.5, form=form, calibration=calibration, self_noise=self_noise
    )
    assert noise.scale == pytest.approx(scale)
    assert noise.coordinate_epsilon == pytest.approx(epsilon)
    num_laplaces = {"one": 1, "pairs": 16 if self_noise else 15}[form]
    assert noise.sum_variance == pytest.approx(2 * scale**2 * num_laplaces)
    assert noise.average_stddev == pytest.approx(np.sqrt(2 * num_laplaces) * scale / 16)
    assert noise.share_variance == pytest.approx(2 * scale**2 / 16)
    # A vector moves by √d times as much in L1 norm; rounds add up.
    assert noise.epsilon(100) == pytest.approx(10 * epsilon)
    assert noise.epsilon(100, 20) == pytest.approx(200 * epsilon)


def test_a_vector_costs_what_its_l1_norm_says():
    """The log ratio of densities is reached by a move along the diagonal, and by no other."""
    d, epsilon = 9, 0.5
    noise = privacy.gamma_shares(4, privacy.sensitivity_of_sum(1.0), epsilon, form="one")
    moves = np.random.default_rng(0).normal(size=(1000, d))
    moves /= np.linalg.norm(moves, axis=1, keepdims=True)
    moves[0] = 1 / np.sqrt(d)
    ratios = np.abs(moves).sum(axis=1) / noise.scale
    assert ratios[0] == pytest.approx(noise.epsilon(d)) and ratios[1:].max() < noise.epsilon(d)
    assert ratios.max() > 2 * noise.coordinate_epsilon


@pytest.mark.parametrize(
    "relation,factor", [("add_remove", 1), ("zero_out", 1), ("replace_one", 2)]
)
def test_the_event_is_that_of_laplace_noise(relation, factor):
    event, orders = GammaSharesDpEvent(3.0, 10), np.array([1.01, 2.0, 8.0, 64.0])
    exact = dpa.rdp.RdpAccountant(list(orders)).compose(dpa.LaplaceDpEvent(3.0 / factor)).rdp
    np.testing.assert_allclose(event.rdp(orders, relation), exact, rtol=1e-9)
    ours, theirs = Ledger("record", relation), Ledger("record", relation)
    ours.charge(event, count=7)
    theirs.charge(dpa.LaplaceDpEvent(3.0), count=7)
    assert ours.epsilon(1e-6)[0] == pytest.approx(theirs.epsilon(1e-6)[0], rel=1e-6)
    assert np.all(np.isinf(GammaSharesDpEvent(0.0, 10).rdp(orders, relation)))


def test_more_laplaces_in_the_sum_cost_no_more_than_the_event_says():
    # Three Laplaces: density e^{−|x|}(3 + 3|x| + x²)/16, at a distance of ε.
    epsilon, order = 0.7, 4.0

    def density(x):
        return np.exp(-np.abs(x)) * (3 + 3 * np.abs(x) + x * x) / 16

    def integrand(x):
        return density(x) ** order * density(x - epsilon) ** (1 - order)

    integral = integrate.quad(integrand, -60, 60, points=[0, epsilon], limit=200)[0]
    exact = np.log(integral) / (order - 1)
    stated = GammaSharesDpEvent(1 / epsilon, 3).rdp(np.array([order]), "add_remove")[0]
    assert 0.1 * stated < exact <= stated


def test_events_of_coordinate_and_vector_differ_by_the_l1_norm():
    noise = privacy.gamma_shares(16, privacy.Sensitivity(8.0, "replace_one"), 0.5)
    assert noise.event(1) == GammaSharesDpEvent(16 / 4, 16)
    assert noise.event(100).noise_multiplier == pytest.approx(16 / 40)
    # The divergence of order ∞ is ε: for a coordinate, the one asked for.
    assert noise.event(1).rdp(np.array([1e9]), "replace_one")[0] == pytest.approx(0.5)


def minimizer(rows, labels, alpha, steps, rate, start):
    w = start.copy()
    for _ in range(steps):
        margins = labels * (rows @ w)
        gradient = -(labels * special.expit(-margins)) @ rows / len(rows) + alpha * w
        w -= rate * gradient
    return w


@pytest.mark.parametrize("steps", later([1, 5, 50, 400], but=[5, 50], mark=telling))
def test_gradient_steps_keep_to_the_bound_of_minimisers(steps):
    rng, alpha, k = np.random.default_rng(steps), 0.05, 12
    bound = privacy.minimizer_sensitivity(k, alpha)
    assert (bound.l2, bound.relation) == (pytest.approx(2 / (k * alpha)), "replace_one")
    for _ in range(20):
        rows = rng.normal(size=(k, 3))
        rows /= np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1)
        labels, other = rng.choice([-1.0, 1.0], k), rows.copy()
        other[0] = -rows[0]
        start, rate = rng.normal(size=3), 2 / (0.25 + 2 * alpha)
        found = [minimizer(x, labels, alpha, steps, rate, start) for x in (rows, other)]
        assert np.linalg.norm(found[0] - found[1]) <= bound.l2


def test_the_bound_of_minimisers_is_reached_by_a_linear_loss():
    # Loss ⟨g, w⟩ with ‖g‖ = L has the minimiser −ḡ/α: replacing g by −g moves it by 2L/(kα).
    gradients, alpha = np.array([[3.0, 0.0]] + [[0.0, 1.0]] * 4), 0.2
    moved = gradients.copy()
    moved[0] *= -1
    distance = np.linalg.norm((gradients - moved).mean(axis=0) / alpha)
    assert privacy.minimizer_sensitivity(5, alpha, lipschitz=3.0).l2 == pytest.approx(distance)


@pytest.mark.parametrize(
    "bad,words",
    [
        ({"num_parties": 1}, "num_parties must be an integer of at least 2, got 1"),
        ({"num_parties": 0}, "num_parties must be"),
        ({"epsilon": 0.0}, "epsilon must be above 0, got 0.0"),
        ({"sensitivity": privacy.Sensitivity(0.0, "add_remove")}, "sensitivity.l2 must be above 0"),
        ({"calibration": "papers"}, "calibration must be one of"),
        ({"form": "one", "self_noise": False}, "self_noise must be True"),
    ],
)
def test_bad_input_is_refused(bad, words):
    good = {"num_parties": 4, "sensitivity": privacy.sensitivity_of_sum(1.0), "epsilon": 1.0}
    with pytest.raises(ValueError, match=words):
        privacy.gamma_shares(**{**good, **bad})


@pytest.mark.parametrize("relation", ["add_remove", "replace_one"])
def test_rounded_vectors_stay_within_the_bound_of_the_event(relation):
    """Rounding makes L1 norms longer than √d times the L2 bound, and no longer than is charged."""
    d, width = 64, 0.2499
    noise = privacy.gamma_shares(4, privacy.sensitivity_of_sum(1.0, relation), 1.0)
    assert noise.event(d).noise_multiplier == pytest.approx(noise.scale / np.sqrt(d))
    is_replaced = relation == "replace_one"
    allowed = (1 + is_replaced) * noise.scale / noise.event(d, width).noise_multiplier
    vectors = np.random.default_rng(0).normal(size=(50, d))
    # All entries of the first are a little more than half a step.
    vectors = np.vstack([np.ones(d), vectors])
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    others = -vectors if is_replaced else np.zeros_like(vectors)
    moved = np.rint(vectors / width) - np.rint(others / width)
    largest = width * np.abs(moved).sum(axis=1).max()
    assert (1 + is_replaced) * np.sqrt(d) < largest <= allowed


def test_the_statement_names_who_is_not_covered():
    ledger = Ledger("client", "add_remove")
    ledger.charge(privacy.gamma_shares(4, privacy.sensitivity_of_sum(1.0), 1.0).event(4))
    data = st.statement(ledger, 1e-6)
    assert data["mechanisms"] == ["Laplace noise in gamma shares"]
    assert data["trusted"] == "gamma_shares" and data["laplace_scale"] == [0.5, 0.5]
    words = st.in_words(data)
    for part in ("coalition of parties", "Sybil", "secure shuffle", "masked messages"):
        assert part in words
