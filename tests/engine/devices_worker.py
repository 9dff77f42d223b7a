"""Runs cases on several CPU devices; a process of its own, since a process has one set of them."""

import sys
import tempfile

import jax
import numpy as np
from cases import CASES
from small_problem import KEY, ROUNDS

from fedjax_dp.engine.client_store import ClientStore
from fedjax_dp.engine.layout import ExecutionConfig
from fedjax_dp.engine.record import Fate, joined
from fedjax_dp.engine.round import SimulationState


def held(state) -> list[int]:
    """The rows of client state that each device holds, over all arrays on devices."""
    leaves = [x for x in jax.tree.leaves(state.clients) if isinstance(x, jax.Array)]
    return [shard.data.shape[0] for leaf in leaves for shard in leaf.addressable_shards]


def slots(sim, key, rounds: int) -> tuple[np.ndarray, np.ndarray]:
    """The clients of the slots of each device, `[rounds, devices, slots]`; -1 in empty ones.

    Also how many of them all devices train together, `[rounds]`.
    """

    @jax.jit
    def draw(i):
        state = SimulationState((), (), None, i)
        return sim.federation.cohorts.draw(state, sim.hyper, key, sim.layout)

    cohorts = [jax.device_get(draw(np.int32(i))) for i in range(rounds)]
    ids = np.array([np.where(c.fate == Fate.EMPTY, -1, c.ids) for c in cohorts])
    split = np.array([c.num_split for c in cohorts])
    return ids.reshape(rounds, sim.layout.num_devices, -1), split


def main(output: str, *jobs: str) -> None:
    """Runs jobs such as "fedavg:2:device" and saves the leaves of each final state."""
    arrays = {}
    for job in jobs:
        name, devices, placement = job.split(":")
        placement, _, splits = placement.partition("+")
        execution = ExecutionConfig(
            clients_per_chunk=2,
            devices=int(devices),
            placement=placement,
            rounds_per_call=2,
            folder=tempfile.mkdtemp() if placement == "disk" else None,
            split_clients=splits == "split",
        )
        sim = CASES[name].simulation(execution)
        key = jax.random.key(KEY)
        state, record, _ = sim.run(sim.init(key), key, ROUNDS)
        kept = sim.portable(state).clients
        if isinstance(kept, ClientStore):
            kept = kept.many(range(len(sim.sizes)))
        # From host arrays, as after a checkpoint, the same program must take the state back.
        _, more, _ = sim.run(sim.portable(state), key, 1)
        arrays[f"{job}/traces"] = np.int32(sim.num_traces())
        arrays[f"{job}/devices"] = np.int32(len(jax.tree.leaves(state.server)[0].devices()))
        arrays[f"{job}/participants"] = joined([record, more]).clients
        arrays[f"{job}/slots"], arrays[f"{job}/split"] = slots(sim, key, ROUNDS + 1)
        arrays[f"{job}/held"] = np.array(held(state), np.int32)
        for part, tree in (("server", sim.portable(state).server), ("clients", kept)):
            for i, leaf in enumerate(jax.tree.leaves(tree)):
                arrays[f"{job}/{part}/{i}"] = leaf
    np.savez(output, **arrays)


if __name__ == "__main__":
    main(*sys.argv[1:])
