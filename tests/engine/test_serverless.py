"""Rounds without a server, and masks under a clock: sums, messages, seconds, what is refused."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_client_state as counting
import timed
from marks import telling
from small_problem import (
    NUM_CLIENTS,
    SIZES,
    assert_same_state,
    make_data,
    make_model,
    plain_trainer,
)

from fedjax_dp.algorithms import fedavg
from fedjax_dp.engine import (
    ExecutionConfig,
    Fate,
    clocked,
    communication,
    daily,
    federation,
    in_rounds,
    latencies,
    round_times,
    serverless,
    serverless_times,
    simulation,
)
from fedjax_dp.server import secure, uniform_mean
from fedjax_dp.server.secure import words

BETWEEN = latencies(timed.CITIES, timed.TABLE, timed.PLACES)
ALONE = {"latencies": BETWEEN, "compute": timed.WORK, "server_seconds": 0.5}


def alone(inner, **options):
    return clocked(serverless(inner), **{**ALONE, **options})


def test_rounds_without_a_server_are_those_by_hand():
    """Also a client whose update is not finite sends a message to each of the others."""
    one = ExecutionConfig(clients_per_chunk=1)
    sim = simulation(counting.algorithm(), make_data(), timed.all_join(), one, wrapper=alone)
    state, record, info = timed.run(sim, 2)
    params, kept = counting.by_hand(record.clients, finishes=False, all_clients=False)
    np.testing.assert_allclose(state.server["params"], params, rtol=1e-5)
    np.testing.assert_allclose(state.clients, kept, rtol=1e-5)
    assert info.server["num_messages"].tolist() == [30, 30]
    last = np.max(serverless_times(BETWEEN, timed.WORK, num_steps=np.array(SIZES))) + 0.5
    np.testing.assert_allclose(info.server["round_seconds"], last, rtol=1e-6)


@telling
def test_all_clients_make_the_model_that_a_server_would():
    """The round ends when the last client has heard of all others; n (n − 1) messages."""
    sim = timed.simulated(partial(alone, key_seconds=3.0, key_rounds=(1,)))
    state, record, info = timed.run(sim)
    plain = timed.simulated(None)
    expected, other, plain_info = timed.run(plain)
    assert_same_state(state, expected, atol=0)
    timed.assert_equal(record, other)
    last = np.max(serverless_times(BETWEEN, timed.WORK, num_steps=timed.STEPS)) + 0.5
    np.testing.assert_allclose(info.server["round_seconds"], last + np.array([0, 3, 0]), rtol=1e-6)
    np.testing.assert_array_equal(info.server["received_seconds"], info.server["round_seconds"])
    assert info.server["num_messages"].tolist() == [30] * 3
    found, one = communication(sim, record, info), communication(plain, other, plain_info)
    np.testing.assert_array_equal(found.by_round("up"), 5 * one.by_round("up"))
    assert found.total("down") == 0 < one.total("down")


@telling
def test_clients_that_leave_neither_send_nor_receive():
    """Four clients of six have 12 messages, and wait for each other alone."""
    away = in_rounds(end=[99, 1, 99] * 2)
    sim = timed.simulated(partial(alone, availability=away))
    _, record, info = timed.run(sim, 2)
    assert info.server["num_messages"].tolist() == [30, 12]
    active = np.array([True, False, True] * 2)
    seconds = (
        np.nanmax(serverless_times(BETWEEN, timed.WORK, num_steps=timed.STEPS, active=active)) + 0.5
    )
    assert info.server["round_seconds"][1] == pytest.approx(seconds)
    up = communication(sim, record, info).by_round("up")
    assert up[0] * 12 == up[1] * 30


@telling
def test_jitter_is_drawn_by_pair_and_only_adds():
    near = latencies(timed.CITIES, timed.TABLE, timed.PLACES, jitter=0.5)
    _, _, info = timed.run(timed.simulated(partial(alone, latencies=near)))
    seconds = info.server["round_seconds"]
    least = np.max(serverless_times(BETWEEN, timed.WORK, num_steps=timed.STEPS)) + 0.5
    assert np.all(seconds > least) and len(set(seconds.tolist())) == 3


def under_masks(form="masked", dropouts=2, of=None):
    """FedAvg of six clients under masks, or of none."""
    model, mean = make_model(), uniform_mean()
    if form is not None:
        graph = secure.all_pairs(NUM_CLIENTS, colluders=1, dropouts=dropouts)
        mean = secure.masked(mean, secure.fixed_point(NUM_CLIENTS), graph, form=form)
    built = fedavg(model, plain_trainer(model), aggregator=mean)
    execution = ExecutionConfig(clients_per_chunk=1)
    return simulation(built, make_data(), timed.all_join(), execution, wrapper=of)


@telling
def test_masks_cancel_without_a_server():
    """Each client adds its own masked message too: masked is cancelled is with a server."""
    found = [
        timed.run(under_masks(form, of=of)) for form, of in (("masked", alone), ("cancelled", None))
    ]
    assert_same_state(found[0][0], found[1][0], atol=0)
    plain = timed.run(under_masks(None))
    assert_same_state(found[0][0], plain[0], atol=1e-5)


@telling
@pytest.mark.parametrize("dropouts, is_lost", [(2, False), (1, True)])
def test_masks_of_late_clients_are_removed_or_the_round_is_lost(dropouts, is_lost):
    """Singapore's two clients are late: their neighbours' masks are left in the sum."""
    late = partial(clocked, **timed.SLOW)
    states = []
    for form in ("masked", "cancelled"):
        state, record, info = timed.run(under_masks(form, dropouts, late))
        assert record.count(Fate.LATE).tolist() == [2] * 3
        assert info.aggregator["num_lost"].tolist() == [is_lost] * 3
        assert info.aggregator["num_recovered"].tolist() == [2 * (not is_lost)] * 3
        states.append(state)
    assert_same_state(*states, atol=0)
    plain, _, _ = timed.run(under_masks(None, of=late))
    start = under_masks(None)
    before = start.portable(start.init(timed.KEY))
    wanted = before.server if is_lost else plain.server
    for x, y in zip(jax.tree.leaves(states[0].server), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=0 if is_lost else 1e-5)


@telling
def test_first_updates_under_masks():
    """Over-selected clients have sent their masks: they count as drop-outs of the graph."""
    state, record, info = timed.run(
        under_masks("masked", 3, partial(clocked, **timed.TIMED, keep=3))
    )
    assert record.count(Fate.LATE).tolist() == [3] * 3
    assert info.aggregator["num_recovered"].tolist() == [3] * 3
    plain, _, _ = timed.run(under_masks(None, of=partial(clocked, **timed.TIMED, keep=3)))
    assert_same_state(state._replace(outer=()), plain._replace(outer=()), atol=1e-5)


def test_a_hierarchy_of_sums_is_the_flat_sum():
    """Words modulo 2^32 of 60 clients under five edge servers, added edge by edge by NumPy."""
    values = np.random.default_rng(0).normal(size=(60, 7)).astype(np.float32)
    encoding = secure.fixed_point(60)
    coded, _ = jax.vmap(lambda v: words.encode(encoding, v, "nearest"))(values)
    sent = np.asarray(jax.tree.leaves(coded)[0])
    edges = np.arange(60) % 5
    sums = [sent[edges == e].sum(axis=0, dtype=np.uint32) for e in range(5)]
    root = np.sum(sums, axis=0, dtype=np.uint32)
    np.testing.assert_array_equal(root, np.asarray(jnp.sum(sent, axis=0, dtype=jnp.uint32)))


@pytest.mark.parametrize(
    ("name", "cohorts", "message"),
    [
        ("private", timed.all_join, "aggregator must add no noise for clients without a server"),
        ("shares", timed.all_join, "aggregator must add no noise for clients without a server"),
        (
            "plain",
            partial(timed.some, "plain"),
            "participation must be full_participation.*: without",
        ),
    ],
)
def test_what_needs_a_server_is_refused(name, cohorts, message):
    fed = federation(timed.algorithm(name), make_data(), cohorts())
    with pytest.raises(ValueError, match=message):
        serverless(fed)


def test_masks_hold_against_clients_that_receive_all_messages():
    """One client alone has what a server has, and its own seeds."""
    model = make_model()

    def averaging(**against):
        graph = secure.all_pairs(NUM_CLIENTS, **against)
        mean = secure.masked(uniform_mean(), secure.fixed_point(NUM_CLIENTS), graph)
        built = fedavg(model, plain_trainer(model), aggregator=mean)
        return federation(built, make_data(), timed.all_join())

    serverless(averaging(colluders=1))
    with pytest.raises(ValueError, match="graph of masks for 1 colluder or more: each client"):
        serverless(averaging())


@pytest.mark.parametrize(
    ("inner", "changed", "message"),
    [
        (serverless, timed.TIMED, "latencies.server must name no server"),
        (lambda fed: fed, ALONE, "latencies.server must name the place of a server"),
        (serverless, {**ALONE, "deadline": 9.0}, "deadline must be left out without a server"),
        (serverless, {**ALONE, "keep": 2}, "keep must be left out without a server"),
        (
            serverless,
            {**ALONE, "availability": daily([8, 9])},
            "availability must depend on rounds alone without a server",
        ),
        (
            lambda fed: fed,
            {
                **timed.TIMED,
                "latencies": latencies(
                    timed.CITIES, timed.TABLE, timed.PLACES, "hub", edges=["NYC"] * 6
                ),
                "keep": 2,
            },
            "keep must be left out with edge servers",
        ),
    ],
)
def test_clocks_fit_their_federation(inner, changed, message):
    fed = inner(federation(timed.algorithm(), make_data(), timed.all_join()))
    with pytest.raises(ValueError, match=message):
        clocked(fed, **{"compute": timed.FREE, **changed})


def test_times_with_a_server_need_one():
    with pytest.raises(ValueError, match="latencies must have a server"):
        round_times(BETWEEN, timed.FREE)
    with pytest.raises(ValueError, match="edges must be left out without a server"):
        latencies(timed.CITIES, timed.TABLE, timed.PLACES, edges=timed.PLACES)
