"""Runs asynchronous rounds on two CPU devices; a process of its own, see `devices_worker`."""

import sys
from functools import partial

import jax
import numpy as np
from small_problem import make_data, theta_of
from test_asynchronous import KEY, ROUNDS, UNSURE, algorithm, joined

from fedjax_dp.engine import ExecutionConfig, asynchronous, simulation


def main(output: str) -> None:
    """Saves the model at the end, and who arrived."""
    execution = ExecutionConfig(clients_per_chunk=2, devices=2, placement="device")
    wrapper = partial(asynchronous, **{**UNSURE, "max_staleness": 1})
    sim = simulation(algorithm("fedavg"), make_data(), joined(), execution, wrapper=wrapper)
    state, record, _ = sim.run(sim.init(KEY), KEY, ROUNDS)
    np.savez(
        output,
        devices=len(jax.tree.leaves(state.server)[0].devices()),
        theta=theta_of(sim.portable(state).server.params),
        clients=record.clients,
        fate=record.fate,
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
