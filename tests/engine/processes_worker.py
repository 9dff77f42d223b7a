"""Runs cases in one of several processes, or in one process with as many devices."""

import sys

import jax
import numpy as np

OUTPUT, PROCESS, NUM_PROCESSES, ADDRESS = sys.argv[1:]
if int(NUM_PROCESSES) > 1:
    jax.distributed.initialize(
        ADDRESS,
        int(NUM_PROCESSES),
        int(PROCESS),
        coordinator_bind_address=ADDRESS,
        initialization_timeout=120,
    )

from cases import CASES  # noqa: E402
from small_problem import KEY, NUM_CLIENTS, ROUNDS, make_data, make_model  # noqa: E402

from fedjax_dp.algorithms import fedavg  # noqa: E402
from fedjax_dp.clients.base import LocalConfig  # noqa: E402
from fedjax_dp.clients.sgd import local_trainer  # noqa: E402
from fedjax_dp.core import devices  # noqa: E402
from fedjax_dp.data import participants, sampling  # noqa: E402
from fedjax_dp.engine import Simulation, simulation  # noqa: E402
from fedjax_dp.engine.layout import ExecutionConfig  # noqa: E402
from fedjax_dp.privacy.mechanisms.distributed import make_plan  # noqa: E402
from fedjax_dp.server.distributed import discrete_mean  # noqa: E402

NAMES = ("dp_fedavg", "scaffold", "robust_hdp", "discrete")


def discrete(execution: ExecutionConfig) -> Simulation:
    """Sums of whole numbers, in which each client adds its share of discrete Gaussian noise."""
    model = make_model()
    structure = jax.eval_shape(model.init, jax.random.key(0))
    plan = make_plan(4, 0.5, 1.0, num_clients=NUM_CLIENTS, bits=16)
    trainer = local_trainer(model, LocalConfig(0.1, 4, 1))
    return simulation(
        fedavg(model, trainer, aggregator=discrete_mean(structure, plan, NUM_CLIENTS)),
        make_data(),
        participants.participation(sampling.full_participation(), NUM_CLIENTS),
        execution,
    )


def refusals() -> list[str]:
    """What several processes are refused, by the words of each error."""
    found = []
    for name, choice in (
        ("fedavg", {"devices": 1}),
        ("fedavg", {"clients_per_chunk": "tuned"}),
        ("fedavg", {"placement": "host"}),
        ("fedavg", {"placement": "disk"}),
        ("r_dpcfl", {}),
    ):
        try:
            CASES[name].simulation(ExecutionConfig(**choice))
        except ValueError as error:
            found.append(str(error))
        else:
            found.append("")
    return found


def least_memory() -> float:
    """The memory of a device, where that of each process is another."""
    devices.memory_of_host = lambda: 2.0**30 * (2 - int(PROCESS))
    return devices.memory_per_device()


def main() -> None:
    """Saves model, client states, record and info after noisy rounds of each case."""
    arrays = {}
    for name in NAMES:
        execution = ExecutionConfig(clients_per_chunk=2, devices=2, rounds_per_call=2)
        sim = discrete(execution) if name == "discrete" else CASES[name].simulation(execution)
        key = jax.random.key(KEY)
        state, *left = sim.run(sim.init(key), key, ROUNDS)
        held = [x.addressable_shards for x in jax.tree.leaves(state.clients)]
        arrays[f"{name}/held"] = np.array([[s.data.shape[0] for s in shards] for shards in held])
        kept = sim.portable(state)
        # From host arrays, as after a checkpoint, the same program takes the state back.
        again, *_ = sim.run(kept, key, 1)
        arrays[f"{name}/traces"] = np.int32(sim.num_traces())
        for part, tree in (("state", kept), ("left", left), ("again", sim.portable(again))):
            for i, leaf in enumerate(jax.tree.leaves(tree)):
                arrays[f"{name}/{part}/{i}"] = leaf
    if int(NUM_PROCESSES) > 1:
        arrays["refusals"] = np.array(refusals())
        arrays["memory"] = least_memory()
    np.savez(OUTPUT, **arrays)


main()
