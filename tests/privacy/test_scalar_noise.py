"""Staircase and bounded Laplace noise have their laws, and the laws are private."""

import json

import dp_accounting
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import floats, later, telling
from scipy import stats

from fedjax_dp.core import ranges, sums
from fedjax_dp.data import participants, sampling
from fedjax_dp.experiment.components.mechanism import Setting, client_aggregator
from fedjax_dp.experiment.schema.config import StaircaseLevel
from fedjax_dp.privacy import events as ev
from fedjax_dp.privacy import mechanisms
from fedjax_dp.privacy.accounting.ledger import Ledger
from fedjax_dp.privacy.mechanisms import noise as sn
from fedjax_dp.privacy.mechanisms.clipping import (
    clip_entries,
    clip_entries_to_lattice,
    within_exact_sums,
)
from fedjax_dp.server.private import bounded_laplace_mean, staircase_mean

pytestmark = floats

ZEROS, FEWER_ZEROS = jnp.zeros(1_000_000), jnp.zeros(100_000)


def staircase_cdf(x, epsilon, sensitivity, gamma):
    """Geng and others 2015, the density of step k: a(γ)·e^(−kε), e^−ε of it past γΔ."""
    a = (1 - np.exp(-epsilon)) / (2 * sensitivity * (gamma + np.exp(-epsilon) * (1 - gamma)))
    k, rest = np.divmod(np.abs(x) / sensitivity, 1.0)
    step = a * sensitivity * (gamma + (1 - gamma) * np.exp(-epsilon))
    whole = step * (1 - np.exp(-epsilon * k)) / (1 - np.exp(-epsilon))
    part = np.minimum(rest, gamma) + np.exp(-epsilon) * np.maximum(rest - gamma, 0)
    half = whole + a * sensitivity * np.exp(-epsilon * k) * part
    return 0.5 + np.sign(x) * half


def bounded_laplace_cdf(x, scale, largest):
    inside = 1 - np.exp(-largest / scale)
    half = (1 - np.exp(-np.minimum(np.abs(x), largest) / scale)) / inside
    return 0.5 + np.sign(x) * half / 2


@telling
@pytest.mark.parametrize(
    "epsilon,flatness",
    later([(1.0, None), (5.0, None), (0.5, 0.3)], but=[(0.5, 0.3)], mark=telling),
)
def test_staircase_law_accepts_the_right_scale_and_rejects_three_percent_off(epsilon, flatness):
    noised = sn.add_staircase(jax.random.key(0), FEWER_ZEROS, epsilon, 2.0, flatness=flatness)
    draws = np.asarray(noised, np.float64)
    gamma = 1 / (1 + np.exp(epsilon / 2)) if flatness is None else flatness
    assert stats.kstest(draws, staircase_cdf, args=(epsilon, 2.0, gamma)).pvalue > 1e-3
    for wrong in (0.97, 1.03):
        off = stats.kstest(draws, staircase_cdf, args=(epsilon, 2.0 * wrong, gamma))
        assert off.pvalue < 1e-6


@pytest.mark.parametrize(
    "epsilon,expected", later([(1.0, 0.9595), (5.0, 0.0826)], but=[(1.0, 0.9595)])
)
def test_staircase_beats_laplace_by_the_published_error(epsilon, expected):
    # Geng and others 2015: E|X| = Δ e^(ε/2)/(e^ε − 1) at the best γ; Laplace has Δ/ε.
    draws = np.asarray(sn.add_staircase(jax.random.key(1), FEWER_ZEROS, epsilon, 1.0), np.float64)
    exact = np.exp(epsilon / 2) / np.expm1(epsilon)
    assert exact == pytest.approx(expected, abs=6e-5)
    assert np.abs(draws).mean() == pytest.approx(exact, rel=0.01)
    assert np.abs(draws).mean() < 1 / epsilon


def test_bounded_laplace_is_epsilon_delta_private():
    # Numerically, over all shifts up to the sensitivity: δ(ε) of the truncated densities.
    epsilon, dp_delta, sensitivity = 1.0, 1e-2, 1.0
    scale = sensitivity / epsilon
    largest = sn.bounded_laplace_range(epsilon, dp_delta, sensitivity)
    x, width = np.linspace(-largest - 1, largest + 1, 400_001, retstep=True)

    def density(shift):
        inside = np.abs(x - shift) <= largest
        height = 1 / (2 * scale * (1 - np.exp(-largest / scale)))
        return np.where(inside, height * np.exp(-np.abs(x - shift) / scale), 0)

    spent = [
        np.sum(np.maximum(density(0) - np.exp(epsilon) * density(s), 0)) * width
        for s in (0.1, 0.5, 1.0)
    ]
    assert max(spent) <= dp_delta * (1 + 1e-3) and max(spent) > 0.95 * dp_delta


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 6.0])
def test_pure_dp_costs_what_randomised_response_costs(epsilon):
    p = np.exp(epsilon) / (1 + np.exp(epsilon))
    orders = np.array([1.5, 2.0, 10.0])
    expected = np.log(p**orders * (1 - p) ** (1 - orders) + (1 - p) ** orders * p ** (1 - orders))
    event = sn.PureDpEvent(epsilon)
    np.testing.assert_allclose(event.rdp(orders, "add_remove"), expected / (orders - 1), rtol=1e-9)
    assert ev.from_dict(json.loads(json.dumps(ev.to_dict(event)))) == event
    ledger = Ledger()
    ledger.charge(event)
    assert ledger.epsilon(1e-300)[0] <= epsilon + np.log(1e300) / 1023
    ledger.charge(event, count=99)
    # At a large ε the conversion itself costs a little more than adding up.
    assert ledger.epsilon(1e-5)[0] < 100 * epsilon * 1.001


def test_the_mechanism_bounds_entries_and_pays_for_all_of_them():
    mechanism = mechanisms.staircase(0.5, 2.0, num_entries=3)
    tree = {"a": jnp.array([0.25, -7.0]), "b": jnp.array([1.0])}
    clipped, largest = mechanism.clip(tree)
    np.testing.assert_allclose(clipped["a"], [0.25, -0.5])
    np.testing.assert_allclose(clipped["b"], [0.5])
    assert largest == 7.0
    assert mechanism.sensitivity.l2 == pytest.approx(0.5 * np.sqrt(3))
    for relation, factor in (("add_remove", 1), ("replace_one", 2)):
        ledger = Ledger(unit="client", relation=relation)
        ledger.charge(mechanism.event())
        # Pure DP: what RDP of any order can say is at most its ε, and nearly that at a tiny δ.
        spent = float(ledger.epsilon(1e-12)[0])
        # The conversion from the largest order, 1024, adds ln(1/δ)/1023.
        assert 0.9 * factor * 3 / 2 <= spent <= factor * 3 / 2 + np.log(1e12) / 1000


def test_the_mechanism_adds_the_noise_of_one_entrys_bound():
    mechanism = mechanisms.staircase(0.5, 0.25, num_entries=FEWER_ZEROS.size)
    noise = np.abs(np.asarray(mechanism.add_noise(jax.random.key(6), FEWER_ZEROS), np.float64))
    # E|X| = Δ e^{ε/2}/(e^ε − 1) with Δ = 1/2 and ε = 4.
    expected = 0.5 * np.exp(2) / np.expm1(4)
    assert np.mean(noise) == pytest.approx(expected, abs=5 * np.std(noise) / FEWER_ZEROS.size**0.5)
    assert float(mechanism.noise_stddev) == pytest.approx(np.sqrt(np.mean(noise**2)), rel=0.01)


@jax.jit
def staircase_release(multiplier):
    """What is released of 100 ones, and the deviation that is stated; compiled once."""
    mechanism = mechanisms.staircase(1.0, multiplier, num_entries=100)
    noised = mechanism.add_noise(jax.random.key(0), {"a": jnp.ones(100)})["a"]
    return noised, mechanism.noise_stddev


def test_no_noise_and_bad_numbers_of_the_mechanism():
    np.testing.assert_array_equal(staircase_release(0.0)[0], np.ones(100))
    for bad in (np.nan, -1.0):
        np.testing.assert_array_equal(staircase_release(bad)[0], np.zeros(100))
    ledger = Ledger(unit="client")
    ledger.charge(mechanisms.staircase(1.0, 0.0, num_entries=3).event())
    assert np.isinf(ledger.epsilon(1e-5)[0])


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_entries_of_what_is_not_finite_become_zero(bad):
    clipped, largest = clip_entries({"a": jnp.array([1.0, bad]), "b": jnp.ones(2)}, 0.5)
    np.testing.assert_array_equal(np.concatenate(jax.tree.leaves(clipped)), np.zeros(4))
    assert np.isinf(largest)


def test_bounded_laplace_range_of_a_large_epsilon_is_finite():
    # ln(1 + (e^ε − 1)/(2δ)) → ε − ln(2δ).
    for epsilon in (25.0, 35.0, 500.0):
        expected = (epsilon - np.log(2e-6)) / epsilon
        assert sn.bounded_laplace_range(epsilon, 1e-6, 1.0) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("epsilon", [0.5, 3.0, 40.0])
def test_the_stated_deviation_of_bounded_laplace_is_that_of_its_density(epsilon):
    dp_delta = 0.05
    largest = np.log1p(np.expm1(epsilon) / (2 * dp_delta)) / epsilon
    x = np.linspace(0, largest, 1_000_001)
    density = np.exp(-epsilon * x)
    expected = np.sqrt(np.trapezoid(x**2 * density, x) / np.trapezoid(density, x))
    assert float(sn.bounded_laplace_stddev(epsilon, dp_delta)) == pytest.approx(expected, rel=1e-4)


def bounded(multiplier=0.5, num_entries=3, entry_delta=1e-4, **options):
    return mechanisms.bounded_laplace(
        0.5, multiplier, num_entries=num_entries, entry_delta=entry_delta, **options
    )


@telling
def test_bounded_laplace_hides_an_entry_at_the_bound_and_never_leaves_its_range():
    mechanism = bounded(num_entries=ZEROS.size, entry_delta=1e-3)
    noise = np.asarray(mechanism.add_noise(jax.random.key(7), ZEROS), np.float64)
    epsilon, scale = 2.0, 0.25
    largest = scale * np.log1p(np.expm1(epsilon) / 2e-3)
    assert np.abs(noise).max() <= largest * (1 + 1e-6)
    assert stats.kstest(noise, bounded_laplace_cdf, args=(scale, largest)).pvalue > 1e-3
    for wrong in (0.97, 1.03):
        off = stats.kstest(noise, bounded_laplace_cdf, args=(wrong * scale, largest))
        assert off.pvalue < 1e-6
    assert float(mechanism.noise_stddev) == pytest.approx(noise.std(), rel=0.01)


def true_delta(epsilon, multiplier, entry_delta, num_releases):
    """δ(ε) of releases of one entry that a unit moves by its bound, by convolving losses."""
    largest = np.log1p(np.expm1(1 / multiplier) / (2 * entry_delta)) * multiplier
    width = 1e-3
    x = np.arange(-largest, largest, width) + width / 2
    mass = np.exp(-np.abs(x) / multiplier)
    mass /= mass.sum()
    outside = x + 1 > largest
    # The loss at x is ln(p(x)/p(x + 1)), infinite where the neighbour never goes.
    loss = (np.abs(x + 1) - np.abs(x)) / multiplier
    lost, grid = mass[outside].sum(), 1e-3
    index = np.rint(loss[~outside] / grid).astype(int)
    low = index.min()
    single = np.bincount(index - low, weights=mass[~outside])
    total = np.ones(1)
    for _ in range(num_releases):
        total = np.convolve(total, single)
    losses = grid * (low * num_releases + np.arange(total.size))
    finite = np.sum(total * np.maximum(-np.expm1(epsilon - losses), 0))
    return finite + 1 - (1 - lost) ** num_releases


@pytest.mark.parametrize("num_releases", [1, 4])
def test_the_ledger_never_claims_more_than_bounded_laplace_provides(num_releases):
    multiplier, entry_delta = 1.5, 1e-3
    ledger = Ledger(unit="client")
    ledger.charge(bounded(multiplier, 1, entry_delta).event(), count=num_releases)
    for epsilon in (0.5, 1.0, 2.0, 3.0):
        truth = true_delta(epsilon, multiplier, entry_delta, num_releases)
        claimed = ledger.delta(epsilon)[0]
        assert truth <= claimed * (1 + 1e-3)
    # With a large ε only what is cut off is left: half of δ on this side for each release.
    assert ledger.delta(100.0)[0] == pytest.approx(num_releases * entry_delta, rel=1e-6)
    assert truth > 0


def test_the_delta_that_is_cut_off_is_taken_off_what_is_asked():
    event = bounded(2.0, 3, 1e-6).event()
    ledger, pure = Ledger(unit="client"), Ledger(unit="client")
    ledger.charge(event, count=10)
    pure.charge(mechanisms.staircase(0.5, 2.0, num_entries=3).event(), count=10)
    # 10 releases of 3 entries spend 3e-5 of δ.
    assert ledger.epsilon(1e-4)[0] == pytest.approx(pure.epsilon(7e-5)[0], rel=1e-9)
    assert np.isinf(ledger.epsilon(2.9e-5)[0])
    assert ledger.delta(20.0)[0] == pytest.approx(pure.delta(20.0)[0] + 3e-5, rel=1e-9)
    assert ev.from_dict(json.loads(json.dumps(ev.to_dict(event)))) == event
    again = Ledger.from_json(ledger.to_json())
    assert again.epsilon(1e-4)[0] == ledger.epsilon(1e-4)[0]


def test_sampling_thins_the_delta_and_exchanging_a_unit_costs_two():
    event = bounded(2.0, 3, 1e-6).event()
    sampled = dp_accounting.PoissonSampledDpEvent(0.1, event)
    assert ev.slack_of(sampled, "add_remove") == pytest.approx(3e-7)
    several = dp_accounting.SelfComposedDpEvent(dp_accounting.ComposedDpEvent([sampled, event]), 5)
    assert ev.slack_of(several, "add_remove") == pytest.approx(5 * 3.3e-6)
    assert ev.slack_of(event, "replace_one") == pytest.approx(3e-6 * (1 + np.exp(0.5)))
    assert ev.slack_of(dp_accounting.GaussianDpEvent(1.0), "add_remove") == 0


def test_an_account_is_unaffected_by_the_lost_delta_of_another():
    ledger, alone = Ledger(num_units=2), Ledger()
    gaussian = dp_accounting.GaussianDpEvent(2.0)
    ledger.charge(gaussian)
    ledger.charge(bounded(2.0, 3, 1e-6).event(), units=[1])
    alone.charge(gaussian)
    first, second = ledger.epsilon(1e-5)
    assert first == pytest.approx(alone.epsilon(1e-5)[0], rel=1e-14)
    assert first < second < np.inf


def test_no_noise_and_bad_numbers_of_bounded_laplace():
    tree = {"a": jnp.ones(3)}

    def release(multiplier):
        return bounded(multiplier).add_noise(jax.random.key(0), tree)["a"]

    np.testing.assert_array_equal(jax.jit(release)(0.0), np.ones(3))
    np.testing.assert_array_equal(jax.jit(release)(jnp.nan), np.zeros(3))
    ledger = Ledger(unit="client")
    ledger.charge(bounded(0.0).event())
    assert np.isinf(ledger.epsilon(1e-5)[0])
    with pytest.raises(ValueError, match="number of entries in the sum must be 4"):
        bounded(num_entries=4).add_noise(jax.random.key(0), tree)


@pytest.mark.parametrize("clip_norm", later([0.1, 3e-7], but=[0.1]))
@pytest.mark.parametrize("name", ["staircase", "bounded_laplace"])
def test_a_unit_moves_a_sum_by_its_bound_and_not_by_a_rounding_more(name, clip_norm):
    """A density that drops in steps, or ends, charges nothing for what is beyond one step."""
    options = {"entry_delta": 1e-4} if name == "bounded_laplace" else {}
    mechanism = getattr(mechanisms, name)(clip_norm, 1.0, num_entries=40, **options)
    updates = 2 * clip_norm * np.random.default_rng(0).normal(size=(500, 40)).astype(np.float32)
    updates[:, ::4] = np.abs(updates[:, ::4])

    @jax.jit
    def sums_without(places):
        kept = jax.vmap(lambda x: mechanism.clip(x)[0])(jnp.asarray(updates))
        without = jax.lax.map(lambda at: _both_sums(kept.at[at].set(0)), places)
        return kept, _both_sums(kept), without

    places = np.arange(0, 500, 25)
    kept, total, without = (np.asarray(x, np.float64) for x in sums_without(places))
    moved = total - without
    assert np.max(np.abs(moved)) <= np.float64(np.float32(clip_norm))
    np.testing.assert_array_equal(moved, np.stack([kept[places]] * 2, axis=1))
    assert np.max(np.abs(kept - np.clip(updates, -clip_norm, clip_norm))) <= clip_norm / 4096


def _both_sums(contributions):
    """Added plainly, and as rounds add them."""
    kept = sums.value(sums.over_first_axis(contributions))
    return jnp.stack([jnp.sum(contributions, axis=0), kept])


def test_sums_of_rounds_are_exact_whatever_partial_sums_were():
    """A plain running sum passes 2^24 units on its way, and loses the only entry that is left."""
    unit = 2.0**-12
    entries = np.float32([*[1.0] * 5000, unit, *[-1.0] * 5000])
    total = jax.jit(lambda x: sums.value(sums.over_first_axis(x)))(entries)
    assert float(within_exact_sums(total, 1.0)) == unit
    assert np.add.accumulate(entries)[-1] == 0


@pytest.mark.parametrize("bound", [1e-3, 0.7, 5.0])
def test_sums_that_would_be_rounded_are_cut_off(bound):
    limit = float(np.max(clip_entries_to_lattice(jnp.float32([1e9]), bound)[0]))
    assert bound * (1 - 2**-12) <= limit <= np.float32(bound)
    far = jnp.float32([1e6 * bound, -1e6 * bound, 2000 * limit])
    cut = np.asarray(within_exact_sums(far, bound), np.float64)
    assert 2048 * bound <= cut[0] <= 4096 * bound and cut[1] == -cut[0] and cut[2] == far[2]
    np.testing.assert_array_equal(within_exact_sums(far, np.inf), far)
    for none in (0.0, -1.0, np.nan, 1e-35):
        nothing, _ = jax.jit(clip_entries_to_lattice)(jnp.ones(3), jnp.float32(none))
        np.testing.assert_array_equal(nothing, np.zeros(3))


def test_edges_of_steps_are_floats_and_no_nearer_than_the_sensitivity():
    for sensitivity in (0.1, 1.0, 2 / 3, 1e-12, 12345.678, 0.9999999):
        width = np.float64(sn._few_bits(sensitivity))
        exact = np.float64(np.float32(sensitivity))
        assert exact * (1 + 2.0**-21) <= width <= exact * (1 + 2.0**-11 + 2.0**-19)
        for digits in (1, 3, 4095, 4095 << 12):
            assert np.float64(np.float32(digits) * np.float32(width)) == digits * width


def test_odds_of_a_digit_are_exact_to_their_last_places():
    small, large = np.float32([2.0**-16, 2.0**-9, 0.1, 0.999]), np.float32([1.001, 5.0, 20.0, 60.0])
    _, lost = sn._shares(small)
    np.testing.assert_allclose(lost, np.tanh(np.float64(small) / 2), rtol=3e-7)
    kept, _ = sn._shares(large)
    np.testing.assert_allclose(kept, 2 / (1 + np.exp(np.float64(large))), rtol=4e-7)


@pytest.mark.parametrize("epsilon", [2.0**-9, 0.3])
def test_numbers_of_steps_are_geometric(epsilon):
    steps = np.asarray(sn._geometric(jax.random.key(3), (200_000,), jnp.float32(epsilon)))
    assert steps.min() == 0
    chance = -np.expm1(-epsilon)
    edges = np.unique(stats.geom.ppf(np.linspace(0, 1, 41)[1:-1], chance)) - 1
    expected = np.diff(np.concatenate([[0], stats.geom.cdf(edges + 1, chance), [1]]))
    counts = np.histogram(steps, np.concatenate([[-0.5], edges + 0.5, [np.inf]]))[0]
    assert stats.chisquare(counts, expected * steps.size).pvalue > 1e-3
    wrong = -np.expm1(-epsilon * 1.03)
    off = np.diff(np.concatenate([[0], stats.geom.cdf(edges + 1, wrong), [1]]))
    assert stats.chisquare(counts, off * steps.size).pvalue < 1e-6


def test_noise_of_more_steps_than_can_be_drawn_is_refused():
    rule = r"noise_multiplier must be 0 or at least 0\.0625 and at most 65536"
    with pytest.raises(ValueError, match=rule):
        mechanisms.staircase(1.0, 1e5, num_entries=3)
    with pytest.raises(ValueError, match="epsilon must be from 2\\^-16 to 16"):
        sn.add_staircase(jax.random.key(0), ZEROS, 1e-5, 1.0)
    np.testing.assert_array_equal(staircase_release(1e5)[0], np.zeros(100))
    assert np.all(np.abs(np.asarray(staircase_release(6e4)[0])) > 1)


@pytest.mark.parametrize("multiplier", [0.0624, 0.02, 0.005])
def test_staircase_noise_that_is_hardly_ever_drawn_is_refused(multiplier):
    """At ε = 50 an entry all of 1,000 numbers came out as they were."""
    rule = r"noise_multiplier must be 0 or at least 0\.0625 and at most 65536"
    with pytest.raises(ValueError, match=rule):
        mechanisms.staircase(1.0, multiplier, num_entries=3)
    with pytest.raises(ValueError, match=rule):
        staircase_mean(jnp.zeros(3), 1.0, multiplier, 2.0)
    released, stddev = staircase_release(multiplier)
    np.testing.assert_array_equal(released, np.zeros(100))
    assert np.isfinite(stddev)
    # The smallest that is drawn moves all of them.
    assert np.all(np.asarray(staircase_release(1 / 16)[0]) != 1)


def test_staircase_noise_of_a_traced_epsilon_that_cannot_be_drawn_is_zeros():
    """Below 2^-18 the odds of digits would be those of a negative ε."""
    noised = jax.jit(
        lambda epsilon: sn.add_staircase(jax.random.key(0), jnp.ones(50), epsilon, 1.0)
    )
    for epsilon in (2.0**-19, 2.0**-17, 16.1, jnp.nan, -1.0):
        np.testing.assert_array_equal(noised(epsilon), np.zeros(50))
    assert np.all(np.asarray(noised(2.0**-16)) != 0)


@pytest.mark.parametrize("epsilon", [2.0**-16, 0.01, 1.0, 16.0, 200.0])
def test_the_stated_deviation_of_the_staircase_is_that_of_its_steps(epsilon):
    """The mean square over steps k on either level, in float64, by the sampler of the source."""
    gamma = 1 / (1 + np.exp(epsilon / 2))
    k = np.arange(min(40 / epsilon, 3e6) + 2)
    chance = -np.expm1(-epsilon) * np.exp(-epsilon * k)
    high = gamma / (gamma + (1 - gamma) * np.exp(-epsilon))

    def mean_square(low, high):
        return (low**2 + low * high + high**2) / 3

    each = high * mean_square(k, k + gamma) + (1 - high) * mean_square(k + gamma, k + 1)
    expected = np.sqrt(np.sum(chance * each))
    assert float(sn.staircase_stddev(epsilon)) == pytest.approx(expected, rel=1e-5, abs=1e-30)


@pytest.mark.parametrize(("epsilon", "smallest"), [(12.0, 1 / 13), (100.0, 1 / 16)])
def test_a_search_for_staircase_noise_stays_within_what_can_be_drawn(epsilon, smallest):
    """The search probes far below the multiplier that it ends with."""
    setting = Setting(
        participants.participation(sampling.full_participation(), 4),
        jax.ShapeDtypeStruct((), jnp.float32),
        1,
        {"accountant": "rdp", "relation": "zero_out"},
    )
    mean = client_aggregator(StaircaseLevel(epsilon=epsilon, dp_delta=1e-5), setting)
    found = mean.numbers["noise_multiplier"]
    assert smallest <= found <= smallest * 1.4
    ledger = Ledger(unit="client", relation="zero_out")
    ledger.charge(mean.claim.event(mean.numbers))
    assert ledger.epsilon(1e-5)[0] <= epsilon


@pytest.mark.parametrize("clip_norm", [1e-35, 2.0**-100])
def test_a_bound_whose_lattice_float32_does_not_hold_is_refused(clip_norm):
    """Every contribution would be zeros."""
    rule = "must be above 7.88861e-31"
    with pytest.raises(ValueError, match=f"clip_norm {rule}"):
        mechanisms.staircase(clip_norm, 1.0, num_entries=3)
    with pytest.raises(ValueError, match=f"clip_norm {rule}"):
        mechanisms.bounded_laplace(clip_norm, 1.0, num_entries=3, entry_delta=1e-4)
    with pytest.raises(ValueError, match=f"clip_norm {rule}"):
        staircase_mean(jnp.zeros(3), clip_norm, 1.0, 2.0)
    with pytest.raises(ValueError, match=f"bound {rule}"):
        clip_entries_to_lattice(jnp.ones(3), clip_norm)
    for swept in (
        staircase_mean(jnp.zeros(3), 2.0**-99, 1.0, 2.0),
        bounded_laplace_mean(jnp.zeros(3), 2.0**-99, 1.0, 2.0, 1e-4),
    ):
        with pytest.raises(ValueError, match=f"clip_norm {rule}"):
            ranges.check({"clip_norm": clip_norm}, swept.ranges)
