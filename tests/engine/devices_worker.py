"""Runs cases on several CPU devices; a process of its own, since a process has one set of them."""

import sys

import jax
import numpy as np
from cases import CASES, KEY, ROUNDS, snapshot
from fedjax_dp.engine.execution import ExecutionConfig


def main(output: str, *jobs: str) -> None:
    """Runs jobs such as "fedavg:2:device" and saves the leaves of each final state."""
    arrays = {}
    for job in jobs:
        name, devices, placement = job.split(":")
        execution = ExecutionConfig(
            clients_per_chunk=2, devices=int(devices), placement=placement, rounds_per_call=2
        )
        sim = CASES[name].simulation(execution)
        key = jax.random.key(KEY)
        state, info = sim.run(sim.init(key), key, ROUNDS)
        # From host arrays, as after a checkpoint, the same program must take the state back.
        _, more = sim.run(snapshot(state), key, 1)
        arrays[f"{job}/traces"] = np.int32(sim.num_traces())
        arrays[f"{job}/devices"] = np.int32(len(jax.tree.leaves(state.server)[0].devices()))
        participants = [info["participants"], more["participants"]]
        arrays[f"{job}/participants"] = np.concatenate(participants)
        for part in ("server", "rows"):
            for i, leaf in enumerate(jax.tree.leaves(getattr(snapshot(state), part))):
                arrays[f"{job}/{part}/{i}"] = leaf
    np.savez(output, **arrays)


if __name__ == "__main__":
    main(*sys.argv[1:])
