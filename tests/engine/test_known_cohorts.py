"""Masked sums of random cohorts that are no secret: lost rounds, charges and refusals."""

import functools

import dp_accounting
import jax
import numpy as np
import pytest
from marks import later, telling
from small_problem import ALONE, NUM_CLIENTS, make_data, make_model, plain_trainer

from fedjax_dp.algorithms import dp_fedavg
from fedjax_dp.core.keys import Purpose, fold
from fedjax_dp.data import (
    fixed_size,
    full_participation,
    participation,
    poisson,
    without_amplification,
)
from fedjax_dp.engine import Fate, PrivacyAccounting, RoundRecord, federation, simulation
from fedjax_dp.privacy import make_plan
from fedjax_dp.privacy.reports import statement
from fedjax_dp.server import discrete_mean, gaussian_mean, secure

KEY, ROUNDS, RATE = jax.random.key(5), 40, 4.5
# Rounds of fewer than four clients are lost, and of six: the words have room for five.
FEWEST, MOST = 4, 5
GRAPH = secure.all_pairs(FEWEST, colluders=1)
KNOWN = without_amplification(poisson())


def declared(noise="shares", form="cancelled", graph=GRAPH):
    """Noise in shares of 3 clients, of which the sum holds those of a colluder too; or not."""
    model = make_model()
    structure = jax.eval_shape(model.init, KEY)
    plan = make_plan(4, 0.5, 1.0, num_clients=NUM_CLIENTS, num_shares=FEWEST, colluders=1, bits=20)
    mean = discrete_mean(structure, plan, 4) if noise == "shares" else gaussian_mean(0.5, 1.0, 4.5)
    if form is not None:
        mean = secure.masked(mean, secure.fixed_point(MOST), graph, form=form)
    return dp_fedavg(model, plain_trainer(model), aggregator=mean), plan


def joined(sampler, size=RATE):
    return participation(sampler, NUM_CLIENTS, size)


@functools.cache
def ran(noise):
    algorithm, _ = declared(noise)
    sim = simulation(algorithm, make_data(), joined(KNOWN), ALONE)
    _, record, info = sim.run(sim.init(KEY), KEY, ROUNDS)
    return sim, jax.device_get(record), jax.device_get(info)


def drawn():
    """Who is in each round, from the Poisson sampler itself, `[rounds, clients]`."""
    key, cohorts = fold(KEY, Purpose.PARTICIPATION), np.zeros((ROUNDS, NUM_CLIENTS), int)
    for i in range(ROUNDS):
        found = joined(poisson()).draw(key, i)
        cohorts[i, np.asarray(found.indices)[np.asarray(found.is_real)]] = 1
    return cohorts


@pytest.mark.parametrize("noise", later(["shares", "server"], mark=telling))
def test_each_drawn_client_is_charged_without_amplification_for_lost_rounds_too(noise):
    sim, record, info = ran(noise)
    cohorts = drawn()
    counts = cohorts.sum(axis=1)
    is_lost = (counts < FEWEST) | (counts > MOST)
    assert 0 < is_lost.sum() < ROUNDS and counts.max() == 6
    np.testing.assert_array_equal(info.aggregator["num_lost"], is_lost)
    accounting = PrivacyAccounting(sim)
    accounting.charge(record)
    ledger, times = accounting.ledgers["client"], cohorts.sum(axis=0)
    np.testing.assert_array_equal(ledger.num_compositions, times)
    assert len(set(times)) > 1
    if noise == "server":
        for count, epsilon in zip(times, ledger.epsilon(1e-5), strict=True):
            accountant = dp_accounting.rdp.RdpAccountant()
            accountant.compose(dp_accounting.GaussianDpEvent(1.0), int(count))
            assert epsilon == pytest.approx(accountant.get_epsilon(1e-5), rel=1e-6)
    # A budget is spent by the client that is drawn most often.
    budget = {"client": float(ledger.epsilon(1e-5).max())}
    fresh = PrivacyAccounting(sim)
    found = fresh.affordable_rounds(sim.init(KEY), KEY, 2 * ROUNDS, budget, {"client": 1e-5}, "rdp")
    assert ROUNDS <= found < 2 * ROUNDS


def test_a_server_that_knows_the_cohort_may_be_named_in_the_statement():
    algorithm, plan = declared()
    accounting = PrivacyAccounting(federation(algorithm, make_data(), joined(KNOWN)))
    clients = np.array([[0, 2, 3, 5], [1, 2, -1, -1]])
    fate = np.where(clients < 0, Fate.EMPTY, Fate.CONTRIBUTED).astype(np.int8)
    accounting.charge(RoundRecord(clients, fate, *np.zeros((2, 2), int), np.ones(2, bool)))
    facts = secure.masking_facts(GRAPH, plan, form="cancelled")
    ledger = accounting.ledgers["client"]
    data = statement.statement(ledger, 1e-5, trust="honest_but_curious", secure_aggregation=facts)
    assert data["must_stay_hidden"] == [] and facts["colluders"] == 1
    assert "that collude with the server is at most 1." in statement.in_words(data)


@telling
def test_masks_are_made_and_removed_as_they_are_left_out():
    model = [
        simulation(declared(form=form)[0], make_data(), joined(KNOWN))
        for form in ("masked", "cancelled")
    ]
    masked, cancelled = (sim.run(sim.init(KEY), KEY, 3)[0].server for sim in model)
    jax.tree.map(np.testing.assert_array_equal, masked, cancelled)


@pytest.mark.parametrize(
    ("form", "sampler", "message"),
    [
        (None, KNOWN, "participation must give the updates of at least 4 clients in every"),
        ("masked", poisson(), "which would show how many were drawn"),
        ("masked", poisson(capacity=5), "which would show how many were drawn|Gaussian noise only"),
        (
            None,
            poisson(),
            "participation must give the updates of at least 4 clients in every",
        ),
    ],
)
def test_secret_cohorts_and_sums_without_masks_are_refused(form, sampler, message):
    with pytest.raises(ValueError, match=message):
        federation(declared(form=form)[0], make_data(), joined(sampler))


def test_a_graph_that_recovers_sums_of_fewer_than_the_shares_is_refused():
    with pytest.raises(ValueError, match="no round be summed of fewer than the 4 clients"):
        declared(graph=secure.all_pairs(FEWEST, dropouts=1))


def test_cohorts_of_fixed_size_may_be_known_too():
    """Where the event of fixed cohorts is refused: it is for replace-one alone."""
    algorithm, _ = declared("server")
    secret = federation(algorithm, make_data(), joined(fixed_size(), 4))
    with pytest.raises(ValueError, match="replace_one"):
        PrivacyAccounting(secret, "zero_out")
    known = federation(algorithm, make_data(), joined(without_amplification(fixed_size()), 4))
    assert PrivacyAccounting(known, "zero_out").ledgers["client"].num_units == NUM_CLIENTS


def test_a_sampler_that_amplifies_nothing_is_refused():
    with pytest.raises(ValueError, match=r"sampler must be poisson\(\) or fixed_size\(\)"):
        without_amplification(full_participation())
