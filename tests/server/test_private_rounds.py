"""Private aggregators inside compiled rounds: what they release, refuse and cost."""

import math
import pathlib

import dp_accounting
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from aggregating import closed, sent_by
from marks import floats, later, slow, telling
from scipy import special, stats
from small_problem import ALONE

from fedjax_dp.algorithms.fedavg import fedavg
from fedjax_dp.clients.base import LocalConfig
from fedjax_dp.clients.sgd import local_trainer
from fedjax_dp.data import participants, sampling
from fedjax_dp.data.federated import FederatedData
from fedjax_dp.engine import Fate, PrivacyAccounting, simulation
from fedjax_dp.engine.cohort import Cohort
from fedjax_dp.engine.facts import examples_of
from fedjax_dp.engine.round import run_round
from fedjax_dp.models.base import Model
from fedjax_dp.privacy.accounting.ledger import Ledger
from fedjax_dp.privacy.mechanisms.clipping import make_adaptive_clipping
from fedjax_dp.privacy.mechanisms.distributed import choose_bits, make_central_plan, make_plan
from fedjax_dp.privacy.mechanisms.noise import banded_noise
from fedjax_dp.server import (
    adaptive_gaussian_mean,
    central_discrete_mean,
    correlated_gaussian_mean,
    discrete_mean,
    gaussian_mean,
    laplace_mean,
)
from fedjax_dp.server.base import Diagnostic
from fedjax_dp.server.private import num_shares

pytestmark = floats

DIMENSION = 6
STRUCTURE = {"w": jax.ShapeDtypeStruct((DIMENSION,), jnp.float32)}
KEY = jax.random.key(0)
PAGE = pathlib.Path(__file__).parents[2] / "docs" / "privacy" / "user-level.md"
SHARP_EDGES = PAGE.with_name("sharp-edges.md")


def _population(targets):
    """One example a client; a step of size 1 on half the squared distance moves to the target."""
    targets = np.asarray(targets, np.float32)
    return FederatedData({"x": targets, "y": targets}, np.arange(len(targets) + 1))


def _model():
    def squared(outputs, batch):
        return 0.5 * jnp.sum((outputs - batch["y"]) ** 2, axis=-1)

    return Model.from_functions(
        lambda key: {"w": jnp.zeros(DIMENSION)},
        lambda params, x: jnp.broadcast_to(params["w"], x.shape),
        loss=squared,
    )


def _simulation(targets, aggregator, sampler=None, cohort=None, **execution):
    model = _model()
    config = LocalConfig(learning_rate=1.0, batch_size=1, num_steps=1)
    trainer = local_trainer(model, config, sampler=sampling.full_participation())
    data = _population(targets)
    participation = participants.participation(
        sampler or sampling.full_participation(), data.num_clients, cohort
    )
    algorithm = fedavg(model, trainer, aggregator=aggregator)
    return simulation(algorithm, data, participation, ALONE._replace(**execution))


def _charged(run, num_rounds, dp_delta):
    """Each client's ε after so many rounds of a run, and their record."""
    account = PrivacyAccounting(run)
    _, record, _ = run.run(run.init(KEY), KEY, num_rounds)
    account.charge(record)
    return account.epsilon({"client": dp_delta})["client"], record


def _by_hand(event, count=1):
    """What dp-accounting composes of an event."""
    return dp_accounting.rdp.RdpAccountant().compose(event, count)


def _assert_amplified(spent, multiplier):
    """Four releases are below those without sampling, above continuous noise with it."""
    gaussian = dp_accounting.GaussianDpEvent(multiplier)
    sampled = _by_hand(dp_accounting.PoissonSampledDpEvent(0.25, gaussian), 4)
    assert sampled.get_epsilon(1e-3) <= spent <= _by_hand(gaussian, 4).get_epsilon(1e-3)


def _clipped_mean(targets, clip_norm, divisor):
    targets = np.asarray(targets, np.float64)
    norms = np.linalg.norm(targets, axis=1, keepdims=True)
    return (targets * np.minimum(1, clip_norm / norms)).sum(0) / divisor


def _assert_mean_of_who_joined(run, targets, divisor, atol):
    """After one round at clip norm 1.5; gives what the aggregator says of it."""
    state, record, info = run.run(run.init(KEY), KEY, 1)
    joined = targets[record.clients[0][record.clients[0] >= 0]]
    expected = _clipped_mean(joined, 1.5, divisor)
    np.testing.assert_allclose(state.server.params["w"], expected, atol=atol)
    clipped = np.linalg.norm(joined, axis=1) > 1.5
    assert info.aggregator["num_clipped"][0] == np.sum(clipped)
    return info.aggregator


@pytest.fixture
def targets():
    return np.random.default_rng(0).normal(size=(12, DIMENSION))


@telling
def test_discrete_mean_recovers_the_clipped_mean_as_noise_and_granularity_vanish(targets):
    plan = make_plan(DIMENSION, 1.5, 0.0, num_clients=12, bits=28)
    run = _simulation(targets, discrete_mean(STRUCTURE, plan, 12), clients_per_chunk=5)
    state, _record, info = run.run(run.init(KEY), KEY, 1)
    expected = _clipped_mean(targets, 1.5, 12)
    np.testing.assert_allclose(state.server.params["w"], expected, atol=5 * plan.granularity)
    assert plan.granularity < 1e-5
    assert info.aggregator["bits_per_parameter"][0] == pytest.approx(28 * 8 / DIMENSION)


def _sum_of_zeros(aggregator, public_key, keys):
    """The sum of what clients send for updates of zeros."""
    zeros = {"w": jnp.zeros(DIMENSION)}
    messages = jax.vmap(
        lambda key: aggregator.encode((), {}, zeros, sent_by(key=key, public_key=public_key))
    )(keys)
    return jax.tree.map(lambda m: jnp.sum(m, axis=0), messages)


@pytest.mark.parametrize(
    "num_shares", [pytest.param(1, marks=slow), pytest.param(12, marks=telling)]
)
def test_discrete_mean_has_the_planned_noise(targets, num_shares):
    plan = make_plan(DIMENSION, 1.0, 2.0, num_clients=12, num_shares=num_shares, bits=20)
    run = _simulation(targets, discrete_mean(STRUCTURE, plan, 12))
    aggregator = run.algorithm.aggregator

    @jax.jit
    @jax.vmap
    def one(key):
        public, private, own = jax.random.split(key, 3)
        total = _sum_of_zeros(aggregator, public, jax.random.split(own, 12))
        return aggregator.combine((), {}, total, closed(keys=(public, private)))[1]["w"]

    draws = np.asarray(one(jax.random.split(KEY, 2000))).ravel()
    # Rounding of zeros adds nothing; 12,000 draws know the deviation to 2 % at three sigma.
    assert draws.std() == pytest.approx(2.0 / 12, rel=0.02)


def _filled_mean(clip_norm, multiplier, cohort, *, shares, bits=20):
    plan = make_plan(DIMENSION, clip_norm, multiplier, num_clients=12, num_shares=shares, bits=bits)
    return discrete_mean(STRUCTURE, plan, cohort, varies=True), plan


@telling
@pytest.mark.parametrize("count", later([0, 1, 3, 7, 20, 21, 30], but=[0, 21]))
def test_filled_noise_has_one_law_whatever_the_cohort(count):
    """One share each, the server the missing ones: also of no clients, or more than shares."""
    aggregator, plan = _filled_mean(1.0, 2.0, 5.0, shares=20)

    @jax.jit
    @jax.vmap
    def one(key):
        public, private, own = jax.random.split(key, 3)
        total = (jnp.zeros(8, jnp.uint32), Diagnostic(jnp.float32(0)), jnp.int32(0))
        if count:
            total = _sum_of_zeros(aggregator, public, jax.random.split(own, count))
        _, aggregate, info = aggregator.combine((), {}, total, closed(keys=(public, private)))
        return aggregate["w"], info["num_lost"]

    draws, lost = one(jax.random.split(KEY, 2000))
    assert (np.asarray(draws) * 5.0).std() == pytest.approx(2.0, rel=0.02)
    assert plan.share_stddev * plan.granularity == pytest.approx(2.0 / math.sqrt(20))
    assert np.all(np.asarray(lost) == (count > 20))


@telling
def test_a_round_of_more_clients_than_shares_releases_nothing_of_them(targets):
    aggregator, _ = _filled_mean(1.5, 0.0, 3.0, shares=3, bits=28)
    run = _simulation(targets, aggregator, sampling.poisson(), 8)
    state, record, info = run.run(run.init(KEY), KEY, 1)
    assert record.num_drawn[0] > 3 and info.aggregator["num_lost"][0] == 1
    assert not np.any(state.server.params["w"])


@telling
def test_filled_noise_inside_the_compiled_round(targets):
    """Poisson cohorts of any size: the mean comes back."""
    aggregator, plan = _filled_mean(1.5, 0.0, 6.0, shares=12, bits=28)
    run = _simulation(targets, aggregator, sampling.poisson(), 6, clients_per_chunk=5)
    info = _assert_mean_of_who_joined(run, targets, 6, 5 * plan.granularity)
    assert info["num_lost"][0] == 0


def _messages(targets, count):
    """What each client sends, by its index, in a round in which the first `count` take part."""
    # The lattice of a run: a share from each of so many clients, cohorts that vary.
    shares = num_shares(len(targets), 4)
    bits = choose_bits(DIMENSION, 1.0, 1.0, num_clients=shares)
    plan = make_plan(DIMENSION, 1.0, 1.0, num_clients=shares, bits=bits)
    aggregator = discrete_mean(STRUCTURE, plan, 4, varies=True)
    encode = aggregator.encode
    sent = {}

    def watched(state, numbers, contribution, sender):
        message = encode(state, numbers, contribution, sender)
        jax.debug.callback(
            lambda key, message: sent.update({key.tobytes(): message.tobytes()}),
            jax.random.key_data(sender.key),
            message[0],
        )
        return message

    watching = aggregator._replace(encode=watched)
    run = _simulation(targets, watching, sampling.poisson(), 4)
    ids = jnp.arange(len(targets), dtype=jnp.int32)
    fate = jnp.where(ids < count, Fate.CONTRIBUTED, Fate.EMPTY).astype(jnp.int8)
    cohort = Cohort(ids, fate, jnp.int32(0))
    layout = run.layout._replace(chunk=1)
    examples = jax.device_put(examples_of(_population(targets)))
    run_round(run.algorithm, layout, run.init(KEY), run.hyper, examples, cohort, KEY)
    jax.effects_barrier()
    return sent


@telling
def test_what_a_client_sends_does_not_tell_it_how_many_take_part(targets):
    """Given that n take part, its chance to be among them is n/N, not the sampling rate."""
    few, many = _messages(targets, 2), _messages(targets, 9)
    assert len(few) == 2 and len(many) == 9
    assert few.items() <= many.items()


def _divergence(rate, stddev, epsilon):
    """Hockey-stick divergence of a sampled Gaussian release; the ratio grows with y."""
    if rate == 0:
        return 0.0

    def crossing(ratio):
        return stddev**2 * math.log((ratio - 1 + rate) / rate) + 0.5

    def tails(y):
        there = (1 - rate) * special.ndtr(-y / stddev) + rate * special.ndtr((1 - y) / stddev)
        return there, special.ndtr(-y / stddev)

    there, away = tails(crossing(math.exp(epsilon)))
    added, removed = there - math.exp(epsilon) * away, 0.0
    if math.exp(-epsilon) > 1 - rate:
        there, away = tails(crossing(math.exp(-epsilon)))
        removed = (1 - away) - math.exp(epsilon) * (1 - there)
    return max(added, removed)


def test_the_leak_of_a_known_cohort_size_is_as_documented():
    """N = 20, q = 0.1, z = 0.7, ε = 2: once with the count, once without, as the ledger has it."""
    num_clients, rate, stddev, epsilon = 20, 0.1, 0.7, 2.0
    known = sum(
        stats.binom.pmf(n, num_clients, rate) * _divergence(n / num_clients, stddev, epsilon)
        for n in range(num_clients + 1)
    )
    hidden = _divergence(rate, stddev, epsilon)
    assert (known, hidden) == pytest.approx((9.9e-4, 4.7e-4), rel=0.01)
    ledger = Ledger("client", "zero_out")
    ledger.charge(dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(stddev)))
    stated = ledger.delta(epsilon, "pld")[0]
    assert hidden <= stated < known and stated == pytest.approx(hidden, rel=1e-2)
    text = SHARP_EDGES.read_text("utf-8")
    assert f"{known:.1e}".replace("e-04", "e-4") in text
    assert f"{hidden:.1e}".replace("e-04", "e-4") in text


@pytest.mark.parametrize("num_clients, cohort", [(20, 2), (1000, 20), (1000, 50), (10_000, 1000)])
def test_with_this_many_shares_one_round_in_ten_thousand_is_lost(num_clients, cohort):
    shares = num_shares(num_clients, cohort)
    rate = cohort / num_clients
    # Summed term by term in exact logarithms, not by the function under test.
    n = np.arange(num_clients + 1)
    log = special.gammaln(num_clients + 1) - special.gammaln(n + 1)
    log = log - special.gammaln(num_clients - n + 1) + n * np.log(rate)
    chance = np.exp(log + (num_clients - n) * np.log1p(-rate))
    assert chance[n > shares].sum() <= 1e-4 < chance[n > shares - 1].sum()
    assert num_shares(1, 1) == num_shares(2, 0.1) == 2
    # What as many shares as are expected would cost, as the documentation has it.
    extra = np.sum(chance * np.maximum(n, cohort) / cohort) - 1
    stated = {20: 8.8, 50: 5.5, 1000: 1.2}.get(cohort)
    if stated is not None:
        assert round(100 * extra, 1) == stated
        assert f"{stated} %" in PAGE.read_text("utf-8")


@telling
def test_filled_noise_is_charged_with_the_amplification_of_its_sampler(targets):
    aggregator, plan = _filled_mean(1.0, 1.5, 3.0, shares=12)
    spent, _ = _charged(_simulation(targets, aggregator, sampling.poisson(), 3), 4, 1e-3)
    _assert_amplified(spent[0], 1.5 / (plan.l2_norm * plan.granularity))


@telling
@pytest.mark.parametrize(
    ("sampler", "cohort"), [pytest.param(None, None, marks=telling), (sampling.poisson(), 6.5)]
)
def test_central_discrete_noise_needs_no_fixed_cohort(targets, sampler, cohort):
    aggregator = central_discrete_mean(STRUCTURE, 1.5, 0.0, cohort or 12.0, tolerance=1e-6)
    run = _simulation(targets, aggregator, sampler, cohort, clients_per_chunk=5)
    _assert_mean_of_who_joined(run, targets, cohort or 12, 1e-5)


@telling
def test_a_central_release_is_on_its_lattice_and_a_client_moves_it_by_integer_steps(targets):
    plan = make_central_plan(DIMENSION, 1.5, 2.0)
    aggregator = central_discrete_mean(STRUCTURE, 1.5, 2.0, 1.0)
    released = []
    for clients in (targets, np.where(np.arange(12)[:, None] == 4, np.nan, targets)):
        run = _simulation(clients, aggregator)
        state, *_ = run.run(run.init(KEY), KEY, 1)
        steps = np.asarray(state.server.params["w"], np.float64) / plan.granularity
        np.testing.assert_allclose(steps, np.round(steps), atol=1e-3)
        released.append(np.round(steps))
    moved = released[0] - released[1]
    assert 0 < np.sum(moved**2) <= plan.l2_norm_squared
    bound = float(aggregator.claim.sensitivity((), aggregator.numbers).l2)
    assert bound == pytest.approx(plan.l2_norm * plan.granularity) and bound <= 1.5 * 1.0101


@telling
def test_central_discrete_noise_is_charged_with_the_amplification_of_its_sampler(targets):
    aggregator = central_discrete_mean(STRUCTURE, 1.0, 1.5, 3.0)
    spent, _ = _charged(_simulation(targets, aggregator, sampling.poisson(), 3), 4, 1e-3)
    _assert_amplified(
        spent[0], 1.5 / float(aggregator.claim.sensitivity((), aggregator.numbers).l2)
    )


def test_one_share_each_needs_a_fixed_cohort(targets):
    plan = make_plan(DIMENSION, 1.0, 1.0, num_clients=6, bits=20)
    with pytest.raises(ValueError, match="the updates of at least 6 clients"):
        _simulation(targets, discrete_mean(STRUCTURE, plan, 6), sampling.poisson(), 6)


@telling
def test_a_client_that_is_not_finite_sends_zeros_with_its_share_of_noise(targets):
    spoiled = np.array(targets)
    spoiled[3] = np.nan
    plan = make_plan(DIMENSION, 1.5, 0.0, num_clients=12, bits=28)
    run = _simulation(spoiled, discrete_mean(STRUCTURE, plan, 12))
    state, record, _info = run.run(run.init(KEY), KEY, 1)
    expected = _clipped_mean(np.delete(targets, 3, axis=0), 1.5, 12)
    np.testing.assert_allclose(state.server.params["w"], expected, atol=5 * plan.granularity)
    assert record.count(Fate.NOT_FINITE)[0] == 1


@telling
def test_correlated_noise_is_refused_behind_cohorts_that_repeat_too_soon(targets):
    banded = banded_noise(8, 3, min_separation=3)
    aggregator = correlated_gaussian_mean(banded, 1.0, 1.0, 4)
    with pytest.raises(ValueError, match=r"keep 3 rounds.*min_separated\(3\)"):
        _simulation(targets, aggregator, sampling.poisson(), 4)
    with pytest.raises(ValueError, match="keep 3 rounds"):
        _simulation(targets, aggregator, sampling.cyclic(), 6)
    _simulation(targets, aggregator, sampling.cyclic(), 4)
    _simulation(targets, aggregator, sampling.min_separated(3), 4)


@telling
def test_correlated_noise_of_a_run_costs_one_release_for_each_participation(targets):
    banded = banded_noise(9, 3, min_separation=3)
    aggregator = correlated_gaussian_mean(banded, 1.0, 1.3, 4)
    run = _simulation(targets, aggregator, sampling.min_separated(3), 4)
    spent, record = _charged(run, 9, 1e-5)
    times = np.bincount(record.clients.ravel(), minlength=12)
    assert times.max() <= 3
    # The whole run is one Gaussian release whose sensitivity is √(participations) · clip norm.
    reference = _by_hand(dp_accounting.GaussianDpEvent(1.3 / math.sqrt(times.max())))
    assert spent.max() == pytest.approx(reference.get_epsilon(1e-5), rel=1e-6)


@telling
def test_correlated_noise_follows_its_strategy():
    """C · (noise of the rounds) is white: the released noises solve the banded recursion."""
    banded = banded_noise(6, 3, min_separation=3)
    aggregator = correlated_gaussian_mean(banded, 1.0, 1.0, 1)
    zeros = {"w": jnp.zeros(DIMENSION)}

    def run(key):
        def one(state, t):
            keys = closed(keys=(key, jax.random.fold_in(key, t)))
            state, noised, _ = aggregator.combine(state, aggregator.numbers, (zeros, 0.0), keys)
            return state, noised["w"]

        return jax.lax.scan(one, aggregator.init(zeros), jnp.arange(6))[1]

    noises = np.asarray(jax.jit(jax.vmap(run))(jax.random.split(KEY, 4000)), np.float64)
    strategy = sum(np.eye(6, k=-i) * c for i, c in enumerate(banded.coefficients))
    white = np.einsum("st,rtd->rsd", strategy, noises)
    covariance = np.einsum("rsd,rtd->st", white, white) / (4000 * DIMENSION)
    np.testing.assert_allclose(covariance, np.eye(6), atol=0.04)


def test_adaptive_clipping_moves_towards_the_quantile_of_norms():
    rng = np.random.default_rng(1)
    directions = rng.normal(size=(40, DIMENSION))
    directions /= np.linalg.norm(directions, axis=1, keepdims=True)
    norms = np.linspace(0.5, 4.5, 40)
    rule = make_adaptive_clipping(40, initial_clip_norm=0.05, learning_rate=0.3, count_stddev=1.0)
    aggregator = adaptive_gaussian_mean(rule, 0.6)
    contribute = jax.vmap(
        lambda state, w: aggregator.contribute(state, aggregator.numbers, {"w": w}, sent_by()),
        in_axes=(None, 0),
    )
    updates = jnp.asarray(directions * norms[:, None], jnp.float32)

    def one(state, t):
        total = jax.tree.map(lambda x: jnp.sum(x, axis=0), contribute(state, updates))
        keys = closed(keys=(KEY, jax.random.fold_in(KEY, t)))
        state, _, info = aggregator.combine(state, aggregator.numbers, total, keys)
        return state, info["clip_norm"]

    _, history = jax.jit(lambda state: jax.lax.scan(one, state, jnp.arange(80)))(
        aggregator.init(None)
    )
    assert history[0] == pytest.approx(0.05)
    # The median norm is 2.5; the noised count keeps the norm near it, and not at the other end.
    assert 1.8 < float(jnp.mean(history[-30:])) < 3.2


@telling
def test_adaptive_clipping_is_charged_for_updates_and_count_together(targets):
    rule = make_adaptive_clipping(6, count_stddev=1.0)
    run = _simulation(targets, adaptive_gaussian_mean(rule, 0.9), sampling.poisson(), 6)
    spent, _ = _charged(run, 5, 1e-5)
    event = dp_accounting.PoissonSampledDpEvent(0.5, dp_accounting.GaussianDpEvent(0.9))
    reference = _by_hand(event, 5)
    assert spent[0] == pytest.approx(reference.get_epsilon(1e-5), rel=1e-6)
    # Two Gaussian releases of one sample add their inverse variances.
    update_share = float(run.hyper.aggregator["noise_multiplier"]) ** -2
    assert update_share + (2 * rule.count_stddev) ** -2 == pytest.approx(0.9**-2, rel=1e-5)


@telling
def test_laplace_mean_clips_in_l1_norm(targets):
    run = _simulation(targets, laplace_mean(1.0, 0.0, 12))
    state, *_ = run.run(run.init(KEY), KEY, 1)
    norms = np.abs(targets).sum(1, keepdims=True)
    expected = (targets * np.minimum(1, 1.0 / norms)).sum(0) / 12
    np.testing.assert_allclose(state.server.params["w"], expected, atol=1e-6)


@pytest.mark.parametrize("make", [gaussian_mean, laplace_mean])
def test_private_means_state_their_sensitivity(make):
    aggregator = make(0.7, 1.0, 5.0)
    assert float(
        aggregator.claim.sensitivity(aggregator.init(None), aggregator.numbers).l2
    ) == pytest.approx(0.7)
