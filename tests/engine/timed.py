"""Rounds of six clients in three cities under a clock, for tests of clocks."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
from small_problem import (
    NUM_CLIENTS,
    SETTINGS,
    SIZES,
    make_data,
    make_model,
    plain_trainer,
)

from fedjax_dp.algorithms import dp_fedavg, fedavg
from fedjax_dp.data import participants, sampling
from fedjax_dp.engine import (
    ExecutionConfig,
    compute_seconds,
    latencies,
    simulation,
)
from fedjax_dp.privacy.mechanisms.distributed import make_plan
from fedjax_dp.server import discrete_mean, gaussian_mean

KEY = jax.random.key(5)
ROUNDS = 3
CITIES = ("Boston", "Singapore", "NYC", "hub")
# To the hub as in table 5.3; between cities as in no table.
TABLE = np.array(
    [[0.0, 5.0, 0.2, 0.3], [4.0, 0.0, 7.0, 2.0], [0.25, 6.0, 0.0, 0.1], [0.3, 2.0, 0.1, 0.0]]
)
# The clients of each city, in turn.
PLACES = [CITIES[i % 3] for i in range(NUM_CLIENTS)]
STEPS = np.ceil(np.array(SIZES) / SETTINGS.batch_size) * SETTINGS.num_epochs
FREE = compute_seconds(NUM_CLIENTS)


def places(**options):
    return latencies(CITIES, TABLE, PLACES, "hub", **options)


TIMED = {"latencies": places(), "compute": FREE, "server_seconds": 0.0}
SLOW = {**TIMED, "deadline": 3.0}
WORK = compute_seconds(NUM_CLIENTS, per_step=[0.01, 0.02, 0.03, 0.5, 0.25, 0.125])
UNSURE = {**TIMED, "compute": WORK, "latencies": places(jitter=0.3)}
UNSURE |= {"dropout": 0.3, "deadline": 1.5}


@cache
def algorithm(name="plain"):
    model = make_model()
    if name == "private":
        return dp_fedavg(model, plain_trainer(model), aggregator=gaussian_mean(1.0, 1.0, 3))
    if name == "shares":
        plan = make_plan(4, 1.0, 1.0, num_clients=NUM_CLIENTS, num_shares=4)
        structure = jax.eval_shape(model.init, jax.random.key(0))
        return dp_fedavg(
            model, plain_trainer(model), aggregator=discrete_mean(structure, plan, NUM_CLIENTS)
        )
    return fedavg(model, plain_trainer(model))


def all_join():
    return participants.participation(sampling.full_participation(), NUM_CLIENTS)


def some(name):
    sampler = sampling.poisson() if name == "private" else sampling.fixed_size()
    return participants.participation(sampler, NUM_CLIENTS, 4)


def simulated(wrapper, name="plain", cohorts=None, placement="device", chunk=1):
    # One client at a time compiles fastest.
    execution = ExecutionConfig(clients_per_chunk=chunk, devices=None, placement=placement)
    cohorts = all_join() if cohorts is None else cohorts
    return simulation(algorithm(name), make_data(), cohorts, execution, wrapper=wrapper)


def run(sim, rounds=ROUNDS, deadline=None):
    """State, record and info after some rounds."""
    hyper = sim.federation.hyper
    if deadline is not None:
        numbers = {**hyper.algorithm, "clock_deadline": np.float32(deadline)}
        hyper = hyper._replace(algorithm=numbers)
    state, record, info = sim.run(sim.init(KEY), KEY, rounds, hyper)
    return sim.portable(state), record, info


def assert_equal(left, right):
    assert jax.tree.structure(left) == jax.tree.structure(right)
    jax.tree.map(np.testing.assert_array_equal, left, right)


OWN = ("round_seconds", "received_seconds", "simulated_seconds")
OWN += ("num_late", "num_dropouts", "num_unreachable", "is_abandoned")


def without_clients(federation, is_gone):
    """A federation in which given clients are never drawn."""
    cohorts = federation.cohorts.thinned(lambda _, clients: ~jnp.asarray(is_gone)[clients])
    return federation._replace(cohorts=cohorts)
