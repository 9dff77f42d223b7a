"""Clients that are left out of rounds: whole runs against ledgers by hand, and what is refused."""

import functools
import os
import pathlib
import subprocess
import sys

import chex
import dp_accounting
import jax
import numpy as np
import pytest
from cases import CASES
from dp_accounting import rdp
from hypothesis import given, settings
from hypothesis import strategies as st
from marks import slow, telling
from side_by_side import several_devices
from small_problem import (
    ALONE,
    NUM_CLIENTS,
    SIZES,
    make_data,
    make_model,
    plain_trainer,
    private_trainer,
)

from fedjax_dp import algorithms
from fedjax_dp.core.keys import Purpose, fold
from fedjax_dp.data import participants, sampling
from fedjax_dp.engine import (
    PrivacyAccounting,
    anderson,
    federation,
    scheduled,
    serverless,
    several_servers,
    simulation,
    within_budgets,
)
from fedjax_dp.engine.wrappers.budgets import is_spent
from fedjax_dp.server.private import gaussian_mean

HERE = pathlib.Path(__file__).parent
DELTAS = np.array([1e-5, 1e-4, 1e-6, 1e-5, 1e-3, 1e-5])
ROUNDS, KEY = 14, 3
SAMPLERS = {
    "poisson": sampling.poisson(),
    "truncated": sampling.poisson(capacity=2),
    "fixed_size": sampling.fixed_size(),
    "cyclic": sampling.cyclic(),
    "min_separated": sampling.min_separated(2),
    "open": sampling.without_amplification(sampling.poisson()),
    "full": sampling.full_participation(),
}


def cohorts_of(name):
    return participants.participation(SAMPLERS[name], NUM_CLIENTS, 3)


def record_level():
    model = make_model()
    return algorithms.dp_sgd(model, private_trainer(model))


def both_levels():
    model = make_model()
    mean = gaussian_mean(1.0, 2.0, 3.0)
    return algorithms.dp_fedavg(model, private_trainer(model), aggregator=mean)


def at_both_levels(name):
    return federation(both_levels(), make_data(), cohorts_of(name))


def not_private():
    model = make_model()
    algorithm = algorithms.fedavg(model, plain_trainer(model))
    return federation(algorithm, make_data(), cohorts_of("poisson"))


def in_stages():
    case = CASES["f_cdpfl"]
    return federation(case.make(make_model()), case.data(), case.participation())


@functools.cache
def bound(name="poisson"):
    return federation(record_level(), make_data(), cohorts_of(name))


def limited(budgets, name="poisson"):
    return within_budgets(bound(name), epsilon=budgets, dp_delta=DELTAS)


def spent_by_hand(rounds):
    """ε of each client after so many rounds of its own, by dp-accounting."""
    claim, numbers = bound().claims.record, bound().hyper
    found = []
    for client, (size, count) in enumerate(zip(SIZES, rounds, strict=True)):
        local = jax.tree.map(lambda x, c=client: x if np.ndim(x) == 0 else x[c], numbers.local)
        accountant = rdp.RdpAccountant()
        if size and count:
            event = claim.at(0)(size, numbers._replace(local=local))
            accountant.compose(dp_accounting.SelfComposedDpEvent(event, int(count)))
        found.append(accountant.get_epsilon(float(DELTAS[client])))
    return np.array(found)


def counts_of(clients):
    held = np.asarray(clients).ravel()
    return np.bincount(held[held >= 0], minlength=NUM_CLIENTS)


def drawn_without_limits(name, seed, rounds):
    draws = cohorts_of(name).draws(
        fold(jax.random.key(seed), Purpose.PARTICIPATION), np.arange(rounds)
    )
    return np.where(np.asarray(draws.is_real), np.asarray(draws.indices), -1)


# Budgets of so many rounds, and a little more; by hand.
PLANNED = np.array([3, 0, 2, 5, 4, 200])


@functools.cache
def budgets_of_plan():
    return np.maximum(1.02 * spent_by_hand(PLANNED), 1e-3)


def test_each_client_has_the_rounds_that_dp_accounting_allows_it():
    state = limited(budgets_of_plan()).init(jax.random.key(0))
    left = np.asarray(state.outer[0].by_client)
    # A client without records pays nothing.
    assert left[1] > 10**6
    np.testing.assert_array_equal(left[[0, 2, 3, 4]], PLANNED[[0, 2, 3, 4]])
    # Of many rounds, one more costs less than 2 %.
    allowed = budgets_of_plan()[5]
    assert spent_by_hand(left)[5] <= allowed * (1 + 1e-6)
    assert spent_by_hand(left + 1)[5] > allowed * (1 - 2e-3)


@slow
@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    name=st.sampled_from(["poisson", "truncated", "fixed_size", "cyclic", "min_separated"]),
    seed=st.integers(0, 2**20),
    scale=st.floats(0.5, 12.0),
    dp_delta=st.sampled_from([1e-3, 1e-5]),
)
def test_no_client_is_past_its_budget_and_none_is_left_out_too_soon(name, seed, scale, dp_delta):
    rng = np.random.default_rng(seed)
    budgets = scale * rng.uniform(0.7, 1.6, NUM_CLIENTS)
    try:
        fed = within_budgets(bound(name), epsilon=budgets, dp_delta=dp_delta)
    except ValueError as error:
        assert "epsilon must allow a client one round or more" in str(error)
        return
    key = jax.random.key(seed)
    coming = fed.cohorts.coming(fed.init(key), fed.hyper, key, 30)
    left = np.asarray(fed.init(key).outer[0].by_client)
    wanted = drawn_without_limits(name, seed, 30)
    took = np.zeros(NUM_CLIENTS, int)
    for ran, free in zip(coming.clients, wanted, strict=True):
        allowed = [c for c in free[free >= 0] if took[c] < left[c]]
        assert sorted(ran[ran >= 0]) == sorted(allowed)
        took[allowed] += 1
    accounts = PrivacyAccounting(fed)
    spent = _charged(accounts, took).epsilon(dp_delta)
    assert np.all(spent <= budgets * (1 + 1e-9))
    is_out = (took == left) & (np.array(SIZES) > 0)
    assert np.all(_charged(accounts, took + 1).epsilon(dp_delta)[is_out] > budgets[is_out])


def _charged(accounts, rounds):
    """A ledger of so many rounds of each client."""
    ledger = accounts.ledgers["record"].copy()
    claim, numbers = bound().claims.record, bound().hyper
    for client, (size, count) in enumerate(zip(SIZES, rounds, strict=True)):
        local = jax.tree.map(lambda x, c=client: x if np.ndim(x) == 0 else x[c], numbers.local)
        if size and count:
            event = claim.at(0)(size, numbers._replace(local=local))
            ledger.charge(event, units=[client], count=int(count))
    return ledger


@functools.cache
def ran(name="poisson", placement="device", is_bounded=True):
    """A whole run: the simulation, its last state, record and info."""
    budgets = budgets_of_plan() if is_bounded else np.inf
    wrap = functools.partial(within_budgets, epsilon=budgets, dp_delta=DELTAS)
    execution = ALONE._replace(placement=placement)
    sim = simulation(record_level(), make_data(), cohorts_of(name), execution, wrapper=wrap)
    key = jax.random.key(KEY)
    state, record, info = sim.run(sim.init(key), key, ROUNDS)
    return sim, sim.portable(state), record, info


@telling
def test_a_whole_run_charges_what_its_budgets_allow():
    sim, state, record, info = ran()
    rounds, wanted = counts_of(record.clients), drawn_without_limits("poisson", KEY, ROUNDS)
    is_out = rounds < counts_of(wanted)
    assert np.any(is_out) and not np.all(is_out[np.array(SIZES) > 0])
    accounts = PrivacyAccounting(sim)
    accounts.charge(record)
    spent = accounts.epsilon({"record": DELTAS})["record"]
    np.testing.assert_allclose(spent, spent_by_hand(rounds), rtol=2e-3)
    assert np.all(spent <= budgets_of_plan() * (1 + 1e-9))
    left = np.asarray(state.outer[0].by_client)
    assert np.all(left[is_out] == 0)
    assert info.server["num_out_of_budget"][-1] == np.sum(left == 0) >= np.sum(is_out)
    assert not is_spent(sim.federation, state)
    used_up = state._replace(outer=(state.outer[0]._replace(by_client=left * (left > 1000)),))
    assert is_spent(sim.federation, used_up) and not is_spent(bound(), used_up._replace(outer=()))


@telling
def test_a_run_in_parts_is_the_run_as_a_whole():
    sim, state, record, _ = ran()
    key = jax.random.key(KEY)
    first, early, _ = sim.run(sim.init(key), key, 5)
    coming = sim.federation.cohorts.coming(sim.portable(first), sim.hyper, key, ROUNDS - 5)
    second, late, _ = sim.run(first, key, ROUNDS - 5)
    chex.assert_trees_all_equal(sim.portable(second), state)
    for ahead, held in zip(coming.clients, late.clients, strict=True):
        assert sorted(ahead[ahead >= 0]) == sorted(held[held >= 0])
    np.testing.assert_array_equal(
        counts_of(early.clients) + counts_of(late.clients), counts_of(record.clients)
    )
    allowed = PrivacyAccounting(sim).affordable_rounds(
        sim.init(key), key, ROUNDS, {"record": budgets_of_plan()}, {"record": DELTAS}, "rdp"
    )
    assert allowed == ROUNDS


@slow
def test_streamed_rounds_leave_out_the_same_clients():
    _, state, record, _ = ran()
    _, streamed, other, _ = ran(placement="host")
    for held, there in zip(record.clients, other.clients, strict=True):
        assert sorted(held[held >= 0]) == sorted(there[there >= 0])
    chex.assert_trees_all_close(streamed.server, state.server, rtol=1e-5, atol=1e-6)


@slow
def test_budgets_that_leave_no_client_out_change_no_draw():
    """Another program, whose sums may round differently."""
    _, state, record, _ = ran(is_bounded=False)
    key = jax.random.key(KEY)
    sim = simulation(record_level(), make_data(), cohorts_of("poisson"), ALONE)
    plain, usual, _ = sim.run(sim.init(key), key, ROUNDS)
    np.testing.assert_array_equal(usual.clients, record.clients)
    chex.assert_trees_all_close(sim.portable(plain).server, state.server, rtol=1e-5, atol=1e-6)


@slow
def test_several_devices_leave_out_the_same_clients(tmp_path):
    environment = os.environ | {
        "XLA_FLAGS": several_devices(2),
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")]),
    }
    script = (
        "import numpy as np, sys; sys.path.insert(0, sys.argv[1])\n"
        "import test_within_budgets as t\n"
        "t.ALONE = t.ALONE._replace(devices=2)\n"
        "sim, state, record, _ = t.ran()\n"
        "assert sim.layout.num_devices == 2\n"
        "np.savez(sys.argv[2], clients=np.sort(record.clients), **state.server.params)\n"
    )
    file = tmp_path / "two.npz"
    command = [sys.executable, "-c", script, str(HERE), str(file)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    _, state, record, _ = ran()
    two = dict(np.load(file))
    np.testing.assert_array_equal(two.pop("clients"), np.sort(record.clients))
    for name, value in two.items():
        np.testing.assert_allclose(value, state.server.params[name], rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore:acceleration is a heuristic:UserWarning")
def test_its_state_is_found_inside_and_around_other_wrappers():
    inside = limited(budgets_of_plan(), "full")
    servers = several_servers(bound("full"), servers=np.arange(6) % 2, exchange_every=1)
    around = within_budgets(servers, epsilon=budgets_of_plan(), dp_delta=DELTAS)
    for fed in (anderson(inside, memory=1), around):
        key = jax.random.key(0)
        state = fed.init(key)
        coming = fed.cohorts.coming(state, fed.hyper, key, 30).clients
        left = np.asarray(inside.init(key).outer[0].by_client)
        assert np.array_equal(counts_of(coming), np.minimum(left, 30))
        assert len(fed.wrappers) == 2


def test_clients_that_all_may_be_drawn_pay_alone_under_both_claims():
    """A cyclic cohort is no secret: those that are left out pay neither for records nor clients."""
    fed = within_budgets(at_both_levels("cyclic"), epsilon=budgets_of_plan(), dp_delta=DELTAS)
    key = jax.random.key(0)
    ledgers = PrivacyAccounting(fed).planned(fed.init(key), key, 30)
    coming = counts_of(fed.cohorts.coming(fed.init(key), fed.hyper, key, 30).clients)
    np.testing.assert_array_equal(ledgers["client"].num_compositions, coming)
    # Every second round has client 5, which may be in all of them.
    assert coming[0] == 3 and coming[5] == 15


@pytest.mark.parametrize(
    ("make", "rule"),
    [
        (lambda: at_both_levels("poisson"), "participation must charge those alone that are drawn"),
        (lambda: at_both_levels("fixed_size"), "participation must charge those alone"),
        (lambda: at_both_levels("full"), "participation must charge those alone"),
        (
            lambda: limited(budgets_of_plan()),
            "federation must draw its cohorts by its sampling alone",
        ),
        (lambda: not_private(), "federation must claim privacy for records"),
        (lambda: in_stages(), "federation must have rounds that all cost a client the same"),
    ],
)
def test_what_has_no_guarantee_is_refused(make, rule):
    with pytest.raises(ValueError, match=rule):
        within_budgets(make(), epsilon=budgets_of_plan(), dp_delta=DELTAS)


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({"epsilon": [1.0, 2.0]}, "epsilon must be one number or have one for each of the 6"),
        ({"dp_delta": DELTAS[:2]}, "dp_delta must be one number or have one for each of the 6"),
        ({"epsilon": 0.0}, "epsilon must be above 0"),
        ({"epsilon": 1e-3}, "epsilon must allow a client one round or more with this noise"),
        ({"relation": "add_remove"}, "relation must be 'zero_out' or 'replace_one'"),
    ],
)
def test_bad_budgets_are_refused(options, rule):
    with pytest.raises(ValueError, match=rule):
        within_budgets(bound(), **{"epsilon": 100.0, "dp_delta": DELTAS, **options})


def test_prices_that_change_over_rounds_are_refused():
    fed = limited(budgets_of_plan())
    rates = scheduled(fed, {"local.learning_rate": [1.0, 0.5]}, 2)
    assert PrivacyAccounting(rates).rounds_by_client(9.0, 1e-5).shape == (NUM_CLIENTS,)
    with pytest.raises(ValueError, match="hyper must have no factors of numbers that set what a r"):
        PrivacyAccounting(scheduled(fed, {"local.noise_multiplier": [1.0, 2.0]}, 2))


def test_wrappers_that_do_not_go_around_it_refuse_it():
    with pytest.raises(ValueError, match="be accelerated around it"):
        within_budgets(anderson(bound("full"), memory=1), epsilon=9.0, dp_delta=DELTAS)
    with pytest.raises(ValueError, match="draw cohorts that depend on no server's state"):
        several_servers(
            limited(budgets_of_plan()), servers=np.arange(NUM_CLIENTS) % 2, exchange_every=1
        )
    with pytest.raises(ValueError, match=r"participation must be full_participation\(\)"):
        serverless(limited(budgets_of_plan(), "full"))
