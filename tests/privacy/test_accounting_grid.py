"""No stated ε lies below the true one, in 50 digits, or what a test on sums or maxima shows."""

import itertools
import time
import warnings

import dp_accounting as dpa
import mpmath as mp
import numpy as np
import pytest
from dp_accounting import pld as dpa_pld
from marks import later, telling

from fedjax_dp.privacy.accounting.calibration import calibrate_poisson
from fedjax_dp.privacy.accounting.ledger import Ledger

DELTAS = (1e-15, 1e-10, 1e-5, 0.01, 0.5)
NOISES = (0.01, 0.3, 0.8, 3.0, 100.0, 1e6)
RATES = (1e-9, 1e-4, 0.01, 0.5, 1 - 1e-9)
COUNTS = (1, 30, 10**4, 10**8, 10**12)


@pytest.fixture(autouse=True)
def fifty_digits():
    with mp.workdps(50):
        yield


def poisson(q, z):
    return dpa.PoissonSampledDpEvent(q, dpa.GaussianDpEvent(z))


def stated(event, count, dp_delta, accountant, relation="add_remove"):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ledger = Ledger(relation=relation)
        ledger.charge(event, count=count)
        return float(ledger.epsilon(dp_delta, accountant)[0])


def above(x):
    """The chance of a standard normal number above x, with all digits in the tail."""
    return mp.erfc(mp.mpf(x) / mp.sqrt(2)) / 2


def gaussian_delta(mu, epsilon):
    """Balle and Wang 2018, theorem 8."""
    return above(epsilon / mu - mu / 2) - mp.exp(epsilon) * above(epsilon / mu + mu / 2)


def removed(q, z, epsilon):
    """δ of one sampled step at any ε, positive or not, by the set where the ratio exceeds e^ε."""
    ratio = mp.exp(epsilon)
    if ratio <= 1 - q:
        return 1 - ratio
    x = z * z * mp.log((ratio - 1 + q) / q) + mp.mpf(1) / 2
    return q * above((x - 1) / z) - (ratio - 1 + q) * above(x / z)


def added(q, z, epsilon):
    """The same in the other direction."""
    ratio = mp.exp(epsilon)
    if 1 / ratio <= 1 - q:
        return mp.mpf(0)
    x = z * z * mp.log((1 / ratio - 1 + q) / q) + mp.mpf(1) / 2
    return (1 - ratio * (1 - q)) * above(-x / z) - ratio * q * above((1 - x) / z)


def sampled_delta(q, z, epsilon):
    """δ of one sampled step in both directions."""
    q, z = mp.mpf(q), mp.mpf(z)
    return max(removed(q, z, epsilon), added(q, z, epsilon), mp.mpf(0), 1 - mp.exp(epsilon))


def binomial(n, k, q):
    log_choices = mp.loggamma(n + 1) - mp.loggamma(k + 1) - mp.loggamma(n - k + 1)
    return mp.exp(log_choices + k * mp.log(q) + (n - k) * mp.log1p(-q))


def composed_delta(q, z, count, epsilon):
    """A lower bound on δ of many sampled steps: the best of a few tests between the neighbours."""
    q, z, ratio = mp.mpf(q), mp.mpf(z), mp.exp(epsilon)
    found = [sampled_delta(q, z, epsilon), mp.mpf(0)]
    # Whether the largest step exceeds a threshold.
    for loss in (epsilon / 2, epsilon, epsilon + 2):
        x = z * z * mp.log((mp.exp(loss) - 1 + q) / q) + mp.mpf(1) / 2
        without = above(x / z)
        having = q * above((x - 1) / z) + (1 - q) * without
        both = [-mp.expm1(count * mp.log1p(-chance)) for chance in (having, without)]
        found.append(both[0] - ratio * both[1])
    # Whether their sum does: it is normal, moved by as many as were drawn.
    shift, spread = q * count, mp.sqrt(count * q * (1 - q))
    if spread < 300:
        scale = z * mp.sqrt(count)
        drawn = range(max(0, int(shift - 7 * spread) - 1), min(count, int(shift + 7 * spread) + 9))
        chances = [binomial(count, k, q) for k in drawn]
        for factor in (0.8, 1.0, 1.2):
            at = shift / 2 + factor * epsilon * scale**2 / shift
            having = sum(p * above((at - k) / scale) for p, k in zip(chances, drawn, strict=True))
            found.append(having - ratio * above(at / scale))
    return max(found)


def true_epsilon(delta_of, dp_delta):
    """The smallest ε at which a falling curve is at most δ."""
    if delta_of(mp.mpf(0)) <= dp_delta:
        return mp.mpf(0)
    low, high = mp.mpf(0), mp.mpf(1)
    while delta_of(high) > dp_delta:
        low, high = high, 4 * high
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if delta_of(middle) > dp_delta else (low, middle)
    return high


QUICK = {
    "gaussian": list(itertools.product(NOISES[::2], COUNTS[::2], (1e-15, 1e-5, 0.5))),
    "one": list(itertools.product((1e-9, 0.01, 1 - 1e-9), (0.01, 0.8, 1e6), (1e-15, 1e-5, 0.01))),
    "many": list(itertools.product((1e-9, 0.01), (0.3, 3.0, 1e6), (30, 10**12), (1e-15, 1e-5))),
}
DENSE = {
    "gaussian": list(itertools.product(NOISES, COUNTS, DELTAS)),
    "one": list(itertools.product(RATES, NOISES, DELTAS)),
    "many": list(itertools.product(RATES, NOISES, COUNTS, DELTAS)),
}
WIDTHS = [pytest.param(QUICK, id="quick"), pytest.param(DENSE, id="dense", marks=pytest.mark.slow)]


@pytest.mark.parametrize("cells", WIDTHS)
@pytest.mark.parametrize("accountant", ["rdp", "pld", "rdp-classic-64"])
def test_gaussian_releases_never_cost_less_than_the_closed_form(accountant, cells):
    for z, count, dp_delta in cells["gaussian"]:
        exact = true_epsilon(lambda e, z=z, n=count: gaussian_delta(mp.sqrt(n) / z, e), dp_delta)
        got = stated(dpa.GaussianDpEvent(z), count, dp_delta, accountant)
        assert got >= exact, (z, count, dp_delta, got, exact)
        if accountant == "pld" and exact < 1e13:
            # Below a tenth of the deviation of the loss, and beyond losses of 1e13, the answer is
            # that of Rényi curves.
            floor = mp.sqrt(count) / z / 10
            assert got <= max(exact, floor) * (1 + mp.mpf(1) / 1000), (z, count, dp_delta)


@pytest.mark.parametrize("cells", WIDTHS)
@pytest.mark.parametrize("accountant", ["rdp", "pld"])
def test_one_sampled_step_never_costs_less_than_the_closed_form(accountant, cells):
    for q, z, dp_delta in cells["one"]:
        got = stated(poisson(q, z), 1, dp_delta, accountant)
        assert sampled_delta(q, z, mp.mpf(got)) <= dp_delta, (q, z, dp_delta, got)


@pytest.mark.parametrize("cells", WIDTHS)
@pytest.mark.parametrize("accountant", ["rdp", "pld"])
def test_many_sampled_steps_never_cost_less_than_what_a_test_can_show(accountant, cells):
    for q, z, count, dp_delta in cells["many"]:
        got = stated(poisson(q, z), count, dp_delta, accountant)
        if np.isfinite(got):
            assert composed_delta(q, z, count, mp.mpf(got)) <= dp_delta, (q, z, count, dp_delta)


@telling
def test_steps_that_cost_little_are_not_free():
    # Losses of 1e-17 a step were read as none. A test of the sum shows at least this much.
    for q, z, count, exact in [(0.01, 851_460.0, 10**6, 1e-5), (1e-9, 0.8, 10**12, 3e-3)]:
        assert composed_delta(q, z, count, mp.mpf(exact)) > 1e-6
        for accountant in ("rdp", "pld", "rdp-classic-64"):
            got = stated(poisson(q, z), count, 1e-6, accountant)
            assert got > exact and composed_delta(q, z, count, mp.mpf(got)) <= 1e-6


def two_steps(q, z, epsilon):
    """δ of two sampled steps: one is integrated over, the other known in closed form."""
    q, z = mp.mpf(q), mp.mpf(z)
    cuts = [-40 * z, -8 * z, -2 * z, 0, 1, 1 + 2 * z, 1 + 8 * z, 1 + 40 * z]

    def mixed(x):
        return 1 - q + q * mp.exp((2 * x - 1) / (2 * z * z))

    def density(x):
        return mp.npdf(x, 0, z)

    def with_unit(x):
        return density(x) * mixed(x) * removed(q, z, epsilon - mp.log(mixed(x)))

    def without(x):
        return density(x) * added(q, z, epsilon + mp.log(mixed(x)))

    return max(mp.quad(with_unit, cuts), mp.quad(without, cuts))


@pytest.mark.parametrize("dp_delta", later([1e-15, 1e-9, 1e-4], but=[1e-9]))
@pytest.mark.parametrize(
    "q,z",
    [
        pytest.param(0.01, 1.0, marks=telling),
        (0.3, 2.0),
        pytest.param(0.7, 0.6, marks=pytest.mark.slow),
    ],
)
def test_two_sampled_steps_cost_as_much_as_the_integral(q, z, dp_delta):
    with mp.workdps(25):
        got = stated(poisson(q, z), 2, dp_delta, "pld")
        assert two_steps(q, z, mp.mpf(got)) <= dp_delta * (1 + 1e-9)
        assert two_steps(q, z, mp.mpf(got) * (1 - mp.mpf(1) / 1000)) > dp_delta
        assert stated(poisson(q, z), 2, dp_delta, "rdp") >= got * (1 - 1e-3)


@telling
@pytest.mark.parametrize("relation", later(["add_remove", "replace_one"], but=["add_remove"]))
def test_composition_is_within_a_thousandth_of_a_ten_times_finer_lattice(relation):
    # The main job's client of 120 records, and one like it under the other relation.
    q, z, count, dp_delta = 32 / 120, 3.7, 150, 1e-5
    adjacency = {
        "add_remove": dpa.NeighboringRelation.ADD_OR_REMOVE_ONE,
        "replace_one": dpa.NeighboringRelation.REPLACE_ONE,
    }[relation]
    fine = (
        dpa_pld.PLDAccountant(adjacency, 1e-5).compose(poisson(q, z), count).get_epsilon(dp_delta)
    )
    got = stated(poisson(q, z), count, dp_delta, "pld", relation)
    # The finer lattice rounds up as well, by a hundredth of what this one may.
    assert fine * (1 - 1e-5) <= got <= fine * (1 + 1e-3)


def test_what_is_asked_both_ways_agrees():
    for q, z, count, dp_delta in [
        (0.01, 1.0, 1000, 1e-15),
        (0.2, 0.7, 40, 1e-6),
        (1.0, 5.0, 9, 0.2),
    ]:
        ledger = Ledger()
        ledger.charge(poisson(q, z) if q < 1 else dpa.GaussianDpEvent(z), count=count)
        for accountant in ("rdp", "pld"):
            epsilon = float(ledger.epsilon(dp_delta, accountant)[0])
            got = float(ledger.delta(epsilon, accountant)[0])
            assert got == pytest.approx(dp_delta, rel=0.02 if accountant == "pld" else 1e-6)


def test_the_accountant_that_gave_an_answer_is_reported():
    ledger = Ledger(num_units=2)
    ledger.charge(poisson(0.01, 1.0), units=[0], count=1000)
    # So small a rate has losses that differ by nine orders: no lattice holds them all.
    ledger.charge(poisson(1e-9, 0.3), units=[1], count=10**12)
    bound = ledger.bound(1e-15, "pld")
    by_curves = ledger.bound(1e-15, "rdp")
    assert bound.accountant[0] == "pld" and bound.value[0] < by_curves.value[0]
    assert bound.value[1] <= by_curves.value[1]
    assert set(by_curves.accountant) == {"rdp"}


def test_a_run_of_ten_clients_is_accounted_by_distributions_in_seconds():
    # The main job: clients of ten sizes, calibrated, and asked for ε after every round.
    sizes, rounds = np.arange(60, 260, 20), 30
    steps, rates = -(-sizes // 64), np.minimum(1.0, 64 / sizes)
    start = time.process_time()
    noise = calibrate_poisson(8.0, 1e-5, rates, rounds * steps, accountant="pld")
    ledger = Ledger("record", num_units=sizes.size)
    for done in range(rounds):
        for i, (q, z) in enumerate(zip(rates, noise, strict=True)):
            event = poisson(q, z) if q < 1 else dpa.GaussianDpEvent(z)
            ledger.charge(event, units=[i], count=int(steps[i]))
        spent = ledger.epsilon(1e-5, "pld")
        assert np.all(spent > 0) and (done < rounds - 1 or np.all(spent >= 8 * (1 - 1e-6)))
    assert time.process_time() - start < 5
    assert np.all(spent <= 8 * (1 + 1e-9))
