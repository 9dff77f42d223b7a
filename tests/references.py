"""A finished run of every case in the plainest layout, which the tests of a process share."""

import functools
from typing import Any, NamedTuple

import jax
import numpy as np
from cases import CASES, Case
from small_problem import KEY, ROUNDS, snapshot

from fedjax_dp.engine import ExecutionConfig, RoundInfo, RoundRecord, Simulation

# The plainest layout: one client at a time, one device, all data resident.
PLAIN = ExecutionConfig(clients_per_chunk=1, placement="device", rounds_per_call=2)


class Reference(NamedTuple):
    """A finished run of a case in the plainest layout; states are host copies."""

    case: Case
    sim: Simulation
    key: Any
    initial: Any
    final: Any
    record: RoundRecord
    info: RoundInfo


@functools.cache
def reference(name: str) -> Reference:
    """Runs a case once for all tests of a process."""
    case = CASES[name]
    key = jax.random.key(KEY)
    sim = case.simulation(PLAIN)
    initial = snapshot(sim.init(key))
    final, record, info = sim.run(initial, key, ROUNDS)
    return Reference(case, sim, key, initial, snapshot(final), record, info)


def num_slab_sizes(sim: Simulation, participants) -> int:
    """How many sizes of slab a streamed run needs: twice the expected rows, or powers of two.

    Participants are `[rounds, slots]` on one device, or `[rounds, devices, slots]`; -1 is nobody.
    """
    sizes = np.append(np.asarray(sim.sizes), 0)
    ids = np.asarray(participants)
    by_device = ids[:, None] if ids.ndim == 2 else ids
    rows = np.max(np.sum(sizes[by_device], axis=2), axis=1).tolist()
    expected = sim.participation.cohort_size * sim.sizes.mean() / by_device.shape[1]
    rows_at_least = int(np.ceil(2 * expected))
    return len({1 << (max(n, rows_at_least) - 1).bit_length() for n in rows})
