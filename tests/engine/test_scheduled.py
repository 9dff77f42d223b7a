"""Numbers that change over rounds: the rounds that run, and what they cost."""

from functools import cache, partial
from typing import Annotated
from unittest.mock import Mock

import dp_accounting
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from annotated_types import Gt, Interval, Le
from dp_accounting import rdp
from marks import slow, telling
from small_problem import NUM_CLIENTS, make_data, make_model

from fedjax_dp.algorithms import dp_sgd, fedavg, fedprox, schedules
from fedjax_dp.clients import LocalConfig, dp_sgd_trainer, local_trainer
from fedjax_dp.clients.optimizers import ranges_of
from fedjax_dp.data import participants, sampling
from fedjax_dp.engine.accounts.calibration import calibrate
from fedjax_dp.engine.accounts.privacy_accounting import PrivacyAccounting
from fedjax_dp.engine.cohort import typed
from fedjax_dp.engine.execution.compile import simulation
from fedjax_dp.engine.facts import population_of
from fedjax_dp.engine.federation import federation
from fedjax_dp.engine.layout import ExecutionConfig
from fedjax_dp.engine.record import RoundRecord, digest_of
from fedjax_dp.engine.round import SimulationState, run_round
from fedjax_dp.engine.schedules import scheduled
from fedjax_dp.privacy.mechanisms import random_bits
from fedjax_dp.privacy.mechanisms.noise import BandedNoise
from fedjax_dp.server import gaussian_mean

ROUNDS, DELTA, MULTIPLIER = 10, 1e-5, np.float32(1.2)
KEY = jax.random.key(3)
NOISE = "aggregator.noise_multiplier"
FACTORS = np.linspace(1.5, 0.75, ROUNDS).astype(np.float32)


def _trainer(**numbers):
    return local_trainer(make_model(), LocalConfig(learning_rate=0.3, batch_size=4, **numbers))


@cache
def _plain():
    """A federation with Gaussian noise on clients' updates, in which all take part."""
    aggregator = gaussian_mean(0.5, MULTIPLIER, NUM_CLIENTS)
    algorithm = fedavg(make_model(), _trainer(), aggregator=aggregator)
    cohorts = participants.participation(sampling.full_participation(), NUM_CLIENTS)
    return federation(algorithm, population_of(make_data()), cohorts)


def _private(factors):
    return scheduled(_plain(), {NOISE: factors}, ROUNDS)


def _record(bound, rounds):
    """The record of rounds that ran with the numbers of a federation, made by hand."""
    hyper = jax.tree.map(np.asarray, typed(bound.hyper))
    count = len(rounds)
    return RoundRecord(
        clients=np.tile(np.arange(NUM_CLIENTS, dtype=np.int32), (count, 1)),
        fate=np.ones((count, NUM_CLIENTS), np.int8),
        overflow=np.zeros(count, np.int32),
        stage=np.zeros(count, np.int32),
        is_released=np.ones(count, bool),
        digest=np.stack([digest_of(hyper.at(t)) for t in rounds]),
    )


def _epsilon_by_hand(multipliers):
    account = rdp.RdpAccountant()
    for z in multipliers:
        account.compose(dp_accounting.GaussianDpEvent(float(z)))
    return account.get_epsilon(DELTA)


def test_each_round_is_charged_by_the_noise_that_it_ran_with():
    bound = _private(FACTORS)
    accounting = PrivacyAccounting(bound)
    # What ran counts, not in which order it is charged.
    accounting.charge(_record(bound, [7, 9, 3]))
    accounting.charge(_record(bound, [8]))
    ran = MULTIPLIER * FACTORS[[7, 9, 3, 8]]
    assert accounting.epsilon(DELTA) == pytest.approx(_epsilon_by_hand(ran), rel=1e-6)
    others = _epsilon_by_hand(np.full(4, MULTIPLIER))
    assert accounting.epsilon(DELTA) != pytest.approx(others, rel=1e-2)


def test_rounds_after_the_last_factor_have_it():
    bound = _private(FACTORS)
    assert bound.hyper.at(10**6).number(NOISE) == MULTIPLIER * FACTORS[-1]
    accounting = PrivacyAccounting(bound)
    accounting.charge(_record(bound, [50]))
    wanted = _epsilon_by_hand([MULTIPLIER * FACTORS[-1]])
    assert accounting.epsilon(DELTA) == pytest.approx(wanted, rel=1e-6)


def test_rounds_of_unknown_numbers_are_not_charged():
    bound = _private(FACTORS)
    accounting = PrivacyAccounting(bound)
    with pytest.raises(ValueError, match="record must have digests of its numbers, which change"):
        accounting.charge(_record(bound, [0])._replace(digest=None))
    with pytest.raises(ValueError, match="hyper must be the numbers that the rounds ran with"):
        accounting.charge(_record(_private(FACTORS * 3), [0]))
    assert accounting.epsilon(DELTA) == 0


def test_a_budget_ends_before_the_round_that_would_exceed_it():
    bound = _private(FACTORS)
    accounting = PrivacyAccounting(bound)
    noise = MULTIPLIER * FACTORS
    spent = [_epsilon_by_hand(noise[:n]) for n in range(1, ROUNDS + 1)]
    state = SimulationState((), (), None, jnp.int32(0))
    for count in (1, 4, 9):
        budget = {"client": (spent[count - 1] + spent[count]) / 2}
        told = accounting.affordable_rounds(state, KEY, ROUNDS, budget, {"client": DELTA}, "rdp")
        assert told == count
    # From round 4 on, the rounds that are left cost more each.
    accounting.charge(_record(bound, range(4)))
    later = state._replace(round=jnp.int32(4))
    budget = {"client": (spent[6] + spent[7]) / 2}
    assert accounting.affordable_rounds(later, KEY, 6, budget, {"client": DELTA}, "rdp") == 3
    whole = accounting.planned(later, KEY, 6)["client"].epsilon(DELTA)[0]
    assert whole == pytest.approx(spent[-1], rel=1e-6)


def test_noise_of_records_is_calibrated_as_a_whole():
    # With 7 records a batch has all of them, and with none nothing is paid.
    sizes, budgets = np.array([40, 7, 0]), np.array([1.0, 2.0, 3.0])
    noise = np.repeat(np.array([1.5, 1.0, 0.75], np.float32), [2, 3, 5])
    config = LocalConfig(0.1, 8.0, 2, clip_norm=1.0, noise_multiplier=1.0)
    algorithm = dp_sgd(make_model(), dp_sgd_trainer(make_model(), config))
    factors = {
        "local.noise_multiplier": noise,
        "local.num_epochs": np.array([1, 1, 0.5], np.float32),
        "local.learning_rate": FACTORS,
    }
    hyper = calibrate(algorithm, sizes, budgets, DELTA, ROUNDS, factors=factors)
    assert not hyper.factors and hyper.local.noise_multiplier.dtype == np.float32
    for size, z, budget in zip(sizes, hyper.local.noise_multiplier, budgets, strict=True):
        account, rate = rdp.RdpAccountant(), min(1.0, 8 / size) if size else 0
        for factor, rounds, epochs in ((1.5, 2, 2), (1.0, 3, 1), (0.75, 5, 1)) if size else ():
            event = dp_accounting.GaussianDpEvent(float(z * np.float32(factor)))
            steps = int(np.ceil(size / 8)) * epochs * rounds
            account.compose(dp_accounting.PoissonSampledDpEvent(rate, event), steps)
        assert not size or budget * (1 - 1e-4) < account.get_epsilon(DELTA) <= budget


@telling
def test_correlated_noise_is_scaled_round_by_round():
    """Row t of the noise is z_t times that of unit scale, so that C undoes it after a division."""
    coefficients = np.array([0.8, 0.5, 0.3], np.float32) / np.float32(np.sqrt(0.98))
    banded, total = BandedNoise(coefficients, 1.0, ROUNDS), {"w": jnp.zeros(5)}
    rows = {}
    for name, stddevs in (("unit", np.ones(ROUNDS, np.float32)), ("own", FACTORS)):
        state, rows[name] = banded.init(total), []
        for t in range(ROUNDS):
            key = jax.random.fold_in(KEY, t)
            state, noised = banded.add_noise(key, state, total, stddevs[t])
            rows[name].append(np.asarray(noised["w"], np.float64))
    np.testing.assert_allclose(rows["own"], FACTORS[:, None] * np.array(rows["unit"]), rtol=1e-6)
    # C makes independent draws of the noise of unit scale: C is what a participation costs by.
    whole = sum(c * np.eye(ROUNDS, k=-i) for i, c in enumerate(np.float64(coefficients)))
    keys = [jax.random.fold_in(KEY, t) for t in range(ROUNDS)]
    draws = [random_bits.like(key, [total["w"]], random_bits.normal)[0] for key in keys]
    undone = whole @ (np.array(rows["own"]) / FACTORS[:, None])
    np.testing.assert_allclose(undone, np.array(draws), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ({"local.learning_rat": [1.0]}, "did you mean 'local.learning_rate'"),
        ({"local": [1.0]}, "schedules must name numbers of hyper"),
        (
            {"aggregator.clip_norm": [1.0, 0.0]},
            "in round 1, hyper.aggregator.clip_norm must be above",
        ),
        ({"aggregator.noise_multiplier": [-1.0]}, "in round 0 the factor must be at least 0"),
        ({"local.batch_size": [1.0, 2.0]}, "in round 1, batch_size must be at most 4"),
        ({"local.num_epochs": [[1.0]]}, "must have one factor for each round"),
    ],
)
def test_what_is_no_number_of_a_federation_or_leaves_its_range_is_refused(tables, words):
    with pytest.raises(ValueError, match=words):
        scheduled(_plain(), tables, ROUNDS)


def bounded(learning_rate, *, reach: Annotated[float, Gt(0), Le(2)] = 1.0):
    return optax.sgd(reach * learning_rate)


class Bounded:
    def __call__(self, learning_rate, *, reach: Annotated[float, Interval(gt=0, le=2)] = 1.0):
        return optax.sgd(reach * learning_rate)


def documented(
    learning_rate,
    *,
    reach: Annotated[float, "a text", Gt(0), Le(2)] = 1.0,
    other: "Unknown" = 1.0,  # noqa: F821
):
    return optax.sgd(reach * other * learning_rate)


def _of_optimizer(optimizer, **numbers):
    config = LocalConfig(learning_rate=0.3, batch_size=4, optimizer=numbers)
    algorithm = fedavg(make_model(), local_trainer(make_model(), config, optimizer=optimizer))
    cohorts = participants.participation(sampling.full_participation(), NUM_CLIENTS)
    return federation(algorithm, population_of(make_data()), cohorts)


@pytest.mark.parametrize(
    ("optimizer", "name", "value", "most", "rule"),
    [
        (optax.sgd, "momentum", 0.9, 1.0, r"in \[0, 1\)"),
        (partial(optax.adamw, nesterov=True), "b2", 0.9, 1.0, r"in \[0, 1\)"),
        (optax.rmsprop, "eps", 1e-3, 0.0, "above 0"),
        (optax.inject_hyperparams(optax.yogi), "b1", 0.9, 1.0, r"in \[0, 1\)"),
        (optax.inject_hyperparams(partial(optax.lion)), "b1", 0.9, 1.0, r"in \[0, 1\)"),
        (bounded, "reach", 1.0, 3.0, r"in \(0, 2\]"),
        (Bounded(), "reach", 1.0, 3.0, r"in \(0, 2\]"),
        (documented, "reach", 1.0, 3.0, r"in \(0, 2\]"),
    ],
)
def test_numbers_of_an_optimiser_stay_in_the_range_of_a_constant(
    optimizer, name, value, most, rule
):
    made = _of_optimizer(optimizer, **{name: value})
    own = f"local.optimizer.{name}"
    with pytest.raises(ValueError, match=rf"in round 1, optimizer\.{name} must be {rule}"):
        scheduled(made, {own: [1.0, most / value]}, ROUNDS)
    with pytest.raises(ValueError, match=rf"^optimizer\.{name} must be {rule}"):
        _of_optimizer(optimizer, **{name: most})
    assert scheduled(made, {own: [1.0, 0.5]}, ROUNDS).hyper.factors


def _described(rate, *, bold: Annotated[float, "how bold"] = 0.0):
    return optax.sgd(rate * (1 + bold))


@pytest.mark.parametrize(
    "optimizer",
    [
        optax.adam(0.1),
        lambda rate, bold=0: optax.sgd(rate),
        _described,
        # It answers every attribute.
        Mock(side_effect=optax.sgd),
    ],
)
def test_an_optimiser_without_annotations_has_no_ranges(optimizer):
    assert not ranges_of(optimizer)["optimizer"]


def test_a_step_by_itself_asks_for_the_numbers_of_one_round():
    bound = _private(FACTORS)
    state = SimulationState((), (), None, jnp.int32(0))
    with pytest.raises(ValueError, match=r"hyper must be those of one round, as hyper\.at"):
        run_round(bound.algorithm, None, state, bound.hyper, None, None, KEY)


@telling
def test_a_run_with_schedules_is_the_loop_that_changes_numbers_by_hand():
    curves = {
        "local.learning_rate": schedules.warm_up(schedules.cosine(6), 2),
        "local.num_epochs": [1.0, 2.0],
        "algorithm.mu": schedules.linear(ROUNDS, final=0.5),
        "algorithm.server_learning_rate": schedules.inverse(),
    }
    algorithm = fedprox(make_model(), _trainer(num_epochs=1), mu=0.2)
    data = make_data()
    options = {"data": data, "cohort_size": 3.0}
    sim = simulation(
        algorithm, wrapper=partial(scheduled, schedules=curves, num_rounds=ROUNDS), **options
    )
    found, record, _ = sim.run(sim.init(KEY), KEY, ROUNDS + 2)
    assert sim.num_traces() == 1
    plain = simulation(algorithm, **options)
    state = plain.init(KEY)
    for t in range(ROUNDS + 2):
        rate = np.float32(0.3) * np.float32(curves["local.learning_rate"](min(t, ROUNDS - 1)))
        numbers = plain.hyper.local._replace(learning_rate=rate, num_epochs=2.0 if t else 1.0)
        own = {
            "mu": np.float32(0.2) * np.float32(1 - 0.5 * min(t, ROUNDS - 1) / ROUNDS),
            "server_learning_rate": np.float32(1 / (1 + min(t, ROUNDS - 1))),
        }
        by_hand = plain.hyper._replace(local=numbers, algorithm=own)
        state, one, _ = plain.run(state, KEY, 1, by_hand)
        np.testing.assert_array_equal(one.digest[0], record.digest[t])
    assert plain.num_traces() == 1
    for mine, other in zip(jax.tree.leaves(found), jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(mine, other)


@telling
def test_other_tables_of_a_compiled_run_compile_nothing():
    sim = simulation(
        fedavg(make_model(), _trainer()),
        make_data(),
        cohort_size=3.0,
        wrapper=partial(
            scheduled, schedules={"local.learning_rate": schedules.cosine(100)}, num_rounds=100
        ),
    )
    sim.run(sim.init(KEY), KEY, 100)
    other = {"local.learning_rate": np.full(100, 0.5, np.float32)}
    sim.run(sim.init(KEY), KEY, 100, sim.hyper._replace(factors=other))
    assert sim.num_traces() == 1
    with pytest.raises(ValueError, match="hyper must hold the numbers"):
        sim.run(sim.init(KEY), KEY, 1, sim.hyper._replace(factors={}))


@slow
def test_streamed_rounds_take_the_numbers_of_their_rounds_too():
    """Also those that set steps, by which the draw of a cohort orders its slots."""
    curves = {"local.learning_rate": schedules.cosine(5), "local.num_epochs": [1.0, 2.0, 0.5]}
    states = {}
    for placement in ("device", "host"):
        sim = simulation(
            fedavg(make_model(), _trainer(num_epochs=1)),
            make_data(),
            cohort_size=3.0,
            execution=ExecutionConfig(placement=placement, clients_per_chunk=1),
            wrapper=partial(scheduled, schedules=curves, num_rounds=5),
        )
        states[placement], _, _ = sim.run(sim.init(KEY), KEY, 5)
    leaves = (jax.tree.leaves(states[placement].server) for placement in states)
    for mine, other in zip(*leaves, strict=True):
        np.testing.assert_array_equal(mine, other)
