"""Client state that is finished with the round, and a second split of data."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import later, telling
from small_problem import NUM_CLIENTS, SIZES, make_data

from fedjax_dp.algorithms.base import (
    ClientOutput,
    ClientState,
    FederatedAlgorithm,
    Finish,
    FinishForAll,
    Numbers,
    Training,
)
from fedjax_dp.clients import LocalConfig
from fedjax_dp.data import participants, sampling
from fedjax_dp.engine import ExecutionConfig, Fate, simulation
from fedjax_dp.server import uniform_mean

ROUNDS = 4
KEY = jax.random.key(5)
RATES = np.linspace(0.1, 0.6, NUM_CLIENTS).astype(np.float32)
# Sends what is not finite: it is drawn and adds nothing.
SPOILED = 2
PARTICIPATION = participants.participation(sampling.poisson(), NUM_CLIENTS, 3.5)


def algorithm(finish=None) -> FederatedAlgorithm:
    """Adds a client's size to half of what it keeps; one client's sum is not finite."""

    def client(message, own, client, hyper, key):
        sent = 0.5 * own + client.size
        sent = jnp.where(client.index == SPOILED, jnp.nan, sent)
        return ClientOutput({"p": sent}, jnp.float32(1), own + 1)

    def server_step(server, aggregate, hyper, round, key):
        rate = hyper.algorithm["rate"]
        return {"params": server["params"] + rate * aggregate["p"]}, {}

    return FederatedAlgorithm(
        name="counting",
        init=lambda key: {"params": jnp.float32(1)},
        broadcast=lambda server, client: (),
        client=client,
        aggregator=uniform_mean(),
        server_step=server_step,
        training=Training(LocalConfig(learning_rate=RATES), lambda size, config: size),
        numbers=Numbers({"rate": 0.25}),
        client_state=ClientState(lambda server: 2 * server["params"], finish),
    )


def finished(message, own, hyper):
    """Reads all of its arguments: the server's new state, the aggregate, the client's numbers."""
    params, total = message
    return 0.5 * own + 0.1 * params - hyper.local.learning_rate * total


def closing(server, aggregate):
    return server["params"], aggregate["p"]


def by_hand(cohorts, *, finishes, all_clients):
    """The same in NumPy; returns the model and the client state."""
    params, kept = 1.0, np.full(NUM_CLIENTS, 2.0)
    for cohort in cohorts:
        who = [i for i in cohort if i not in (-1, SPOILED)]
        aggregate = np.mean([0.5 * kept[i] + SIZES[i] for i in who]) if who else 0.0
        params += 0.25 * aggregate
        kept[who] += 1
        for i in range(NUM_CLIENTS) if all_clients else who:
            if finishes:
                kept[i] = 0.5 * kept[i] + 0.1 * params - RATES[i] * aggregate
    return params, kept


@functools.cache
def run(is_finished, all_clients, placement):
    finish = (FinishForAll if all_clients else Finish)(closing, finished)
    chosen = algorithm(finish if is_finished else None)
    execution = ExecutionConfig(clients_per_chunk=2, devices=None, placement=placement)
    sim = simulation(chosen, make_data(), PARTICIPATION, execution)
    state, record, _ = sim.run(sim.init(KEY), KEY, ROUNDS)
    return sim.portable(state), record


@telling
@pytest.mark.parametrize(
    "is_finished, all_clients, placement",
    later(
        [
            (False, False, "device"),
            (True, False, "device"),
            (True, True, "device"),
            (False, False, "host"),
            (True, False, "host"),
        ],
        but=[(True, False, "device"), (True, True, "device"), (True, False, "host")],
        mark=telling,
    ),
)
def test_client_state_is_finished_with_the_round(is_finished, all_clients, placement):
    state, record = run(is_finished, all_clients, placement)
    params, kept = by_hand(record.clients, finishes=is_finished, all_clients=all_clients)
    np.testing.assert_allclose(state.server["params"], params, rtol=1e-5)
    np.testing.assert_allclose(state.clients, kept, rtol=1e-5)
    # Clients that sat out, took part or were spoiled differ.
    was_drawn = np.isin(np.arange(NUM_CLIENTS), record.clients)
    assert was_drawn[SPOILED] and record.count(Fate.NOT_FINITE).sum() > 0
    assert all(record.num_drawn < NUM_CLIENTS)
    assert (state.clients[SPOILED] != 2) == all_clients


def test_finishing_all_clients_is_refused_where_states_are_streamed():
    with pytest.raises(ValueError, match="placement must be 'device' for counting, which changes"):
        run(True, True, "host")


SECOND_SIZES = (2, 4, 0, 3, 1, 6)


def _sum_of_second(client):
    """Adds up the features of a client's second split, and counts both splits."""
    second = client.validation
    x = second.gather(jnp.arange(second.limit))["x"]
    is_own = (jnp.arange(second.limit) < second.size)[:, None]
    return {"x": jnp.where(is_own, x, 0).sum(0), "sizes": jnp.stack([client.size, second.size])}


def _reads_validation() -> FederatedAlgorithm:
    def client(message, own, client, hyper, key):
        return ClientOutput(jax.tree.map(jnp.float32, _sum_of_second(client)), jnp.float32(1), None)

    return FederatedAlgorithm(
        name="reads_validation",
        init=lambda key: {"x": jnp.zeros(3), "sizes": jnp.zeros(2)},
        broadcast=lambda server, client: (),
        client=client,
        aggregator=uniform_mean(),
        server_step=lambda server, aggregate, hyper, round, key: (aggregate, {}),
        training=Training(LocalConfig(), lambda size, config: size),
    )


@pytest.mark.parametrize("placement", later(["device", "host"], but=["host"], mark=telling))
def test_a_second_split_is_read_in_the_round(placement):
    first, second = make_data(), make_data(SECOND_SIZES, seed=1)
    execution = ExecutionConfig(clients_per_chunk=2, devices=None, placement=placement)
    sim = simulation(_reads_validation(), first, PARTICIPATION, execution, validation=second)
    state = sim.init(KEY)
    for _ in range(ROUNDS):
        state, record, _ = sim.run(state, KEY)
        who = record.clients[record.clients >= 0]
        assert len(who) > 1
        expected = np.mean([second.client(i)["x"].sum(0) for i in who], axis=0)
        np.testing.assert_allclose(state.server["x"], expected, rtol=1e-5, atol=1e-6)
        sizes = np.mean([(first.sizes[i], second.sizes[i]) for i in who], axis=0)
        np.testing.assert_allclose(state.server["sizes"], sizes, rtol=1e-6)


def test_a_second_split_is_one_of_the_same_clients():
    with pytest.raises(ValueError, match="validation must hold a second split of the 6 clients"):
        simulation(_reads_validation(), make_data(), PARTICIPATION, validation=make_data(SIZES[:5]))
