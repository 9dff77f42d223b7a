"""Clients that are left out of rounds: whole runs against ledgers by hand, and what is refused."""

import functools

import dp_accounting
import jax
import numpy as np
import pytest
from dp_accounting import rdp
from small_problem import (
    ALONE,
    CLUSTERS,
    NUM_CLIENTS,
    SIZES,
    make_data,
    make_model,
    plain_trainer,
    private_trainer,
)

from fedjax_dp import algorithms
from fedjax_dp.data import participants, sampling
from fedjax_dp.engine import (
    ExecutionConfig,
    PrivacyAccounting,
    anderson,
    calibrate,
    federation,
    serverless,
    several_servers,
    simulation,
    within_budgets,
)

DELTAS = np.array([1e-5, 1e-4, 1e-6, 1e-5, 1e-3, 1e-5])


def cohorts_of(name, size=3):
    sampler = {
        "poisson": sampling.poisson(),
        "truncated": sampling.poisson(capacity=2),
        "fixed_size": sampling.fixed_size(),
        "cyclic": sampling.cyclic(),
        "min_separated": sampling.min_separated(2),
        "open": sampling.without_amplification(sampling.poisson()),
        "full": sampling.full_participation(),
    }[name]
    return participants.participation(sampler, NUM_CLIENTS, size)


def record_level(trainer=None):
    model = make_model()
    return algorithms.fedavg(model, trainer or private_trainer(model))


def spent_by_hand(fed, rounds, dp_delta):
    """ε of each client after so many rounds of its own, by dp-accounting."""
    claim, numbers = fed.claims.record, fed.hyper
    found = []
    for client, (size, count) in enumerate(zip(SIZES, rounds, strict=True)):
        local = jax.tree.map(lambda x, c=client: x if np.ndim(x) == 0 else x[c], numbers.local)
        accountant = rdp.RdpAccountant()
        if size and count:
            event = claim.at(0)(size, numbers._replace(local=local))
            accountant.compose(dp_accounting.SelfComposedDpEvent(event, int(count)))
        found.append(accountant.get_epsilon(float(np.broadcast_to(dp_delta, 6)[client])))
    return np.array(found)


def counts_of(record):
    clients = np.asarray(record.clients)
    return np.bincount(clients[clients >= 0].ravel(), minlength=NUM_CLIENTS)


@functools.cache
def ran(name, epsilon, rounds=14, seed=3):
    """A whole run with budgets of its own: the federation, its record, its last state and info."""
    rng = np.random.default_rng(seed)
    budgets = epsilon * rng.uniform(0.6, 1.8, NUM_CLIENTS)
    wrap = functools.partial(within_budgets, epsilon=budgets, dp_delta=DELTAS)
    sim = simulation(record_level(), make_data(), cohorts_of(name), ALONE, wrapper=wrap)
    key = jax.random.key(seed)
    state, record, info = sim.run(sim.init(key), key, rounds)
    return sim, record, sim.portable(state), info, budgets


@pytest.mark.parametrize("name", ["poisson", "fixed_size", "cyclic"])
def test_no_client_is_ever_past_its_budget_and_none_is_left_out_too_soon(name):
    sim, record, state, info, budgets = ran(name, 6.0)
    rounds = counts_of(record)
    spent = spent_by_hand(sim.federation, rounds, DELTAS)
    assert np.all(spent <= budgets * (1 + 1e-6))
    ledger = PrivacyAccounting(sim)
    ledger.charge(record)
    np.testing.assert_allclose(ledger.epsilon({"record": DELTAS})["record"], spent, rtol=2e-3)
    assert np.all(ledger.epsilon({"record": DELTAS})["record"] <= budgets * (1 + 1e-9))
    # Drawn by the same key without a limit: those missing had no round left.
    free = cohorts_of(name).draws(_key_of(3), np.arange(14))
    wanted = np.where(np.asarray(free.is_real), np.asarray(free.indices), -1)
    wanted = np.bincount(wanted[wanted >= 0], minlength=NUM_CLIENTS)
    is_out = rounds < wanted
    assert np.any(is_out) and np.all(rounds <= wanted)
    one_more = spent_by_hand(sim.federation, rounds + 1, DELTAS)
    assert np.all(one_more[is_out] > budgets[is_out] * (1 - 2e-3))
    left = np.asarray(state.outer[0].by_client)
    assert np.all(left[is_out] == 0)
    assert info.server["num_out_of_budget"][-1] == np.sum(left == 0)


def _key_of(seed):
    from fedjax_dp.core.keys import Purpose, fold

    return fold(jax.random.key(seed), Purpose.PARTICIPATION)
