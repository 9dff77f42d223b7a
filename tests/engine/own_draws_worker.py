"""Runs wrappers that change cohorts on one and two CPU devices, resident and streamed."""

import itertools
import sys

import jax
import jax.numpy as jnp
import numpy as np
from small_problem import NUM_CLIENTS, ROUNDS, make_data, make_model, plain_trainer

from fedjax_dp import algorithms, data
from fedjax_dp.engine import (
    Change,
    ExecutionConfig,
    Fate,
    Layout,
    PrivacyAccounting,
    Wrapper,
    simulation,
)
from fedjax_dp.server import gaussian_mean

KEY, NOISE, DP_DELTA, COHORT = jax.random.key(7), 4.0, 1e-6, 2


def repeating(federation):
    """The cohort of round 0 in every round."""

    def draw(state, hyper, key, layout=Layout()):
        return federation.cohorts.draw(state._replace(round=jnp.int32(0)), hyper, key, layout)

    cohorts = federation.cohorts.given(draw)
    return federation.wrapped(Wrapper("repeating", frozenset({Change.COHORTS})), cohorts=cohorts)


def thinning(federation):
    """The first half of the clients never takes part."""
    cohorts = federation.cohorts.thinned(lambda round_index, clients: clients >= NUM_CLIENTS // 2)
    return federation.wrapped(Wrapper("thinning", frozenset({Change.COHORTS})), cohorts=cohorts)


def in_turn(federation):
    """The next two clients, by a state of its own that each round moves on."""

    def init(key, layout=Layout()):
        state = federation.init(key, layout)
        return state._replace(outer=(jnp.int32(0), *state.outer))

    def draw(state, hyper, key, layout=Layout()):
        inner = state._replace(outer=state.outer[1:])
        cohort = federation.cohorts.draw(inner, hyper, key, layout)
        is_next = (cohort.ids - state.outer[0]) % NUM_CLIENTS < COHORT
        fate = jnp.where(is_next, cohort.fate, Fate.EMPTY)
        return cohort._replace(fate=fate.astype(cohort.fate.dtype))

    def step(state, hyper, examples, cohort, key, layout=Layout()):
        first, *others = state.outer
        inner = state._replace(outer=tuple(others))
        after, record, info = federation.step(inner, hyper, examples, cohort, key, layout)
        first = (first + COHORT) % NUM_CLIENTS
        return after._replace(outer=(first, *after.outer)), record, info

    turns = Wrapper("in_turn", frozenset({Change.COHORTS}))
    cohorts = federation.cohorts.given(draw, reads_state=True)
    return federation.wrapped(turns, init=init, step=step, cohorts=cohorts)


# By wrapper, the sampling that it changes.
WRAPPERS = {
    repeating: data.participation(data.poisson(), NUM_CLIENTS, COHORT),
    thinning: data.participation(data.poisson(), NUM_CLIENTS, COHORT),
    in_turn: data.participation(data.full_participation(), NUM_CLIENTS),
}
LAYOUTS = list(itertools.product(("device", "host"), (1, 2)))


def main(output: str) -> None:
    """Saves who was drawn, ε by client, and the model of each wrapper in each layout."""
    model, arrays = make_model(), {}
    mean = gaussian_mean(1.0, NOISE, COHORT)
    algorithm = algorithms.dp_fedavg(model, plain_trainer(model), aggregator=mean)
    for (wrapper, joining), (placement, devices) in itertools.product(WRAPPERS.items(), LAYOUTS):
        layout = ExecutionConfig(clients_per_chunk=2, devices=devices, placement=placement)
        sim = simulation(algorithm, make_data(), joining, layout, wrapper=wrapper)
        state, record, _ = sim.run(sim.init(KEY), KEY, ROUNDS)
        accounting = PrivacyAccounting(sim)
        accounting.charge(record)
        after = sim.portable(state)
        job = f"{wrapper.__name__}:{placement}:{devices}"
        drawn = [np.isin(np.arange(NUM_CLIENTS), clients) for clients in record.clients]
        arrays[f"{job}/drawn"] = np.array(drawn)
        arrays[f"{job}/epsilon"] = accounting.epsilon({"client": DP_DELTA})["client"]
        arrays[f"{job}/devices"] = np.int32(len(jax.tree.leaves(state.server)[0].devices()))
        arrays[f"{job}/params"] = np.asarray(sim.federation.shared(after)["w"])
        arrays[f"{job}/outer"] = np.array(jax.tree.leaves(after.outer), np.int32)
    np.savez(output, **arrays)


if __name__ == "__main__":
    main(*sys.argv[1:])
