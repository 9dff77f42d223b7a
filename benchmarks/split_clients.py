"""Rounds of one long client and many short ones, with and without splitting the long one.

Nine clients of one batch and one of 36, eight times the mean size, on virtual CPU devices: the
steps of the busiest device as packed, and wall time and processor time of rounds in turn. All must
end at the same model.

    python benchmarks/split_clients.py [--devices 4] [--batch 32] [--rounds 5]
"""

import argparse
import os
import statistics
import time
from typing import Any

import jax
import numpy as np

from fedjax_dp.algorithms import fedavg
from fedjax_dp.clients import LocalConfig, local_trainer
from fedjax_dp.data import FederatedData, full_participation, participation
from fedjax_dp.data.federated import example_structure
from fedjax_dp.engine import ExecutionConfig, Simulation, simulation
from fedjax_dp.experiment.studies.timing import cohort_loads
from fedjax_dp.models import thesis_cnn

BATCHES, NUM_CLASSES = (36,) + (1,) * 9, 10


def images(batch: int) -> FederatedData:
    """Draws random images of 28×28, and labels."""
    rng = np.random.default_rng(0)
    offsets = np.concatenate([[0], np.cumsum(BATCHES) * batch])
    x = rng.random((offsets[-1], 28, 28, 1), dtype=np.float32)
    y = rng.integers(0, NUM_CLASSES, offsets[-1], dtype=np.int32)
    return FederatedData({"x": x, "y": y}, offsets)


def timed(sim: Simulation, state: Any, key: Any) -> tuple[Any, float, float]:
    """Runs a round; returns the state, seconds, and processor seconds of all threads."""
    wall, processor = time.perf_counter(), time.process_time()
    state, *_ = sim.run(state, key, 1)
    jax.block_until_ready(state)
    return state, time.perf_counter() - wall, time.process_time() - processor


def main() -> None:
    """Prints a row of each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", given.devices)
    data = images(given.batch)
    model = thesis_cnn(example_structure(data)["x"], num_classes=NUM_CLASSES)
    config = LocalConfig(learning_rate=0.05, batch_size=given.batch)
    joins = participation(full_participation(), len(BATCHES))
    key, sims, states = jax.random.key(0), {}, {}
    for splits in (False, True):
        execution = ExecutionConfig(1, given.devices, "device", 1, split_clients=splits)
        algorithm = fedavg(model, local_trainer(model, config))
        sims[splits] = simulation(algorithm, data, joins, execution)
        # The first round compiles.
        states[splits], *_ = timed(sims[splits], sims[splits].init(key), key)
    seconds: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    for _ in range(given.rounds):
        for splits, sim in sims.items():
            states[splits], *spent = timed(sim, states[splits], key)
            seconds[splits].append(tuple(spent))
    models = [sim.federation.shared(states[splits]) for splits, sim in sims.items()]
    apart = max(
        float(np.max(np.abs(np.asarray(a) - np.asarray(b))))
        for a, b in zip(*map(jax.tree.leaves, models), strict=True)
    )
    print(f"{given.devices} devices, {os.cpu_count()} cores; models differ by {apart:.1e} at most")
    print("| | steps of the busiest device | balance | s a round, median | fastest | processor |")
    print("|---|---|---|---|---|---|")
    for splits, sim in sims.items():
        load = cohort_loads(sim, sim.layout, [0])
        wall, processor = zip(*seconds[splits], strict=True)
        balance = load.by_device.mean() / load.most[0]
        name = "split" if splits else "whole"
        print(
            f"| {name} | {load.most[0]:g} | {balance:.2f} | {statistics.median(wall):.2f} | "
            f"{min(wall):.2f} | {min(processor):.2f} |"
        )


if __name__ == "__main__":
    main()
