"""Runs cases in one of several processes, or in one process with as many devices."""

import pathlib
import sys
from typing import Any

import jax
import numpy as np

OUTPUT, PROCESS, NUM_PROCESSES, ADDRESS, *EARLIER = sys.argv[1:]
if int(NUM_PROCESSES) > 1:
    jax.distributed.initialize(
        ADDRESS,
        int(NUM_PROCESSES),
        int(PROCESS),
        coordinator_bind_address=ADDRESS,
        initialization_timeout=300,
    )

from cases import CASES  # noqa: E402
from small_problem import KEY, NUM_CLIENTS, ROUNDS, make_data, make_model  # noqa: E402

from fedjax_dp.algorithms import fedavg  # noqa: E402
from fedjax_dp.clients.base import LocalConfig  # noqa: E402
from fedjax_dp.clients.sgd import local_trainer  # noqa: E402
from fedjax_dp.core import devices  # noqa: E402
from fedjax_dp.data import FederatedData, participants, sampling  # noqa: E402
from fedjax_dp.engine import Simulation, simulation  # noqa: E402
from fedjax_dp.engine.layout import ExecutionConfig  # noqa: E402
from fedjax_dp.experiment.running.processes import chosen_by_first  # noqa: E402
from fedjax_dp.io import Checkpoints, checkpoint  # noqa: E402
from fedjax_dp.privacy.mechanisms.distributed import make_plan  # noqa: E402
from fedjax_dp.server import secure, uniform_mean  # noqa: E402
from fedjax_dp.server.base import Summed  # noqa: E402
from fedjax_dp.server.private import discrete_mean  # noqa: E402

# Some of them on cohorts that are streamed from the host.
STREAMED = ("fedavg:host", "scaffold:host")
PRIVATE = ("dp_fedavg", "robust_hdp", "discrete", "masked")
# One of them has work on the host between its rounds.
NAMES = ("fedavg", "scaffold", "r_dpcfl", *PRIVATE, *STREAMED)
# Those that are saved, and restored by other numbers of processes.
SAVED = ("dp_fedavg", "scaffold", "scaffold:host")


def discrete() -> Summed:
    """Sums of whole numbers, in which each client adds its share of discrete Gaussian noise."""
    structure = jax.eval_shape(make_model().init, jax.random.key(0))
    plan = make_plan(4, 0.5, 1.0, num_clients=NUM_CLIENTS, bits=16)
    return discrete_mean(structure, plan, NUM_CLIENTS)


def masked() -> Summed:
    """Sums of words under masks of all pairs."""
    graph = secure.all_pairs(NUM_CLIENTS)
    return secure.masked(uniform_mean(), secure.fixed_point(NUM_CLIENTS), graph)


AGGREGATORS = {"discrete": discrete, "masked": masked}


def built(name: str, execution: ExecutionConfig) -> Simulation:
    """A case by its name, or plain averaging by an aggregator in rounds that all clients join."""
    if name not in AGGREGATORS:
        return CASES[name].simulation(execution)
    model = make_model()
    trainer = local_trainer(model, LocalConfig(0.1, 4, 1))
    return simulation(
        fedavg(model, trainer, aggregator=AGGREGATORS[name]()),
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
        ("fedavg", {"placement": "disk"}),
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
    devices.memory_of_host = lambda: 2.0**30 * (int(NUM_PROCESSES) - int(PROCESS))
    return devices.memory_per_device()


def chosen() -> np.ndarray:
    """What all processes receive, where each would choose otherwise."""
    own = int(PROCESS)
    found = [
        chosen_by_first(lambda: "b" if own == 0 else "a", ["a", "b"]),
        chosen_by_first(lambda: None if own == 0 else "a", ["a", "b"]),
    ]
    return np.array([str(one) for one in found])


def held(clients: Any) -> list[int]:
    """The clients whose states this process holds, by array."""
    arrays = jax.tree.leaves(clients)
    return [
        sum(shard.data.shape[0] for shard in x.addressable_shards)
        if isinstance(x, jax.Array)
        else len(x)
        for x in arrays
    ]


def read_clients() -> list[np.ndarray]:
    """A list that receives the clients whose examples are read, of each reading."""
    examples_of, found = FederatedData.examples_of, []

    def reading(data: FederatedData, clients: np.ndarray) -> dict[str, np.ndarray]:
        found.append(np.array(clients))
        return examples_of(data, clients)

    FederatedData.examples_of = reading  # type: ignore[method-assign]
    return found


def unshared() -> str:
    """The words of the error where each process has a folder of its own."""
    checkpoint._PATIENCE = 0.0
    try:
        Checkpoints(pathlib.Path(OUTPUT).with_suffix(""))
    except ValueError as error:
        return str(error)
    return ""


def restored(sim: Simulation, folder: pathlib.Path) -> list[np.ndarray]:
    """The arrays of the newest checkpoint in a folder, by way of this program's devices."""
    key = jax.random.key(KEY)
    like = sim.for_checkpoint(sim.init(key))
    state, *_ = Checkpoints(folder).restore(like, sim.hyper)
    return jax.tree.leaves(sim.portable(sim.compile(state, key)))


def main() -> None:
    """Saves model, client states, record and info after noisy rounds of each case."""
    arrays, read = {}, read_clients()
    for name in NAMES:
        case, _, placement = name.partition(":")
        execution = ExecutionConfig(
            clients_per_chunk=2,
            devices=jax.device_count(),
            placement=placement or "device",
            rounds_per_call=2,
        )
        sim = built(case, execution)
        key = jax.random.key(KEY)
        read.clear()
        state, *left = sim.run(sim.init(key), key, ROUNDS)
        arrays[f"{name}/read"] = np.concatenate([*read, []])
        arrays[f"{name}/held"] = held(state.clients)
        kept = sim.portable(state)
        if name in SAVED:
            folder = pathlib.Path(OUTPUT).parent / name
            Checkpoints(folder).save(sim.for_checkpoint(state), sim.hyper, {})
            for i, earlier in enumerate([*EARLIER, folder.parent]):
                for j, leaf in enumerate(restored(sim, pathlib.Path(earlier) / name)):
                    arrays[f"{name}/restored {i}/{j}"] = leaf
        # From host arrays, as after a checkpoint, the same program takes the state back.
        again, *_ = sim.run(kept, key, 1)
        arrays[f"{name}/traces"] = np.int32(sim.num_traces())
        for part, tree in (("state", kept), ("left", left), ("again", sim.portable(again))):
            for i, leaf in enumerate(jax.tree.leaves(tree)):
                arrays[f"{name}/{part}/{i}"] = leaf
    if int(NUM_PROCESSES) > 1:
        arrays["refusals"] = np.array(refusals())
        arrays["memory"] = least_memory()
        arrays["chosen"] = chosen()
        arrays["unshared"] = unshared()
    np.savez(OUTPUT, **arrays)


main()
