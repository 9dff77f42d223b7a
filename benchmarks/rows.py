"""What clients keep in device memory, in host memory and on the disk: seconds a round of each.

Clients keep a ResNet-18 with its batch norm and a mask (`jump_start`'s first stage, 46 MB each) and
take one step of eight images. Placements take their rounds in turn; all must end at the same bits.

    python benchmarks/rows.py [--clients 60] [--cohort 10] [--rounds 4] [--folder DIR]
"""

import argparse
import statistics
import tempfile
import time

import jax
import numpy as np

from fedjax_dp.algorithms import Tickets, jump_start
from fedjax_dp.clients import LocalConfig, local_trainer
from fedjax_dp.data import FederatedData, fixed_size, participation
from fedjax_dp.data.federated import example_structure
from fedjax_dp.engine import ExecutionConfig, simulation
from fedjax_dp.engine.client_store import ClientStore
from fedjax_dp.experiment.running.environment import use_compilation_cache
from fedjax_dp.models import resnet18

EXAMPLES = 10
PLACEMENTS = ("device", "host", "disk")


def images(num_clients: int, seed: int) -> FederatedData:
    """Ten images a client, of two classes that their mean separates."""
    rng = np.random.default_rng(seed)
    y = rng.integers(0, 2, num_clients * EXAMPLES).astype(np.int32)
    x = rng.normal(size=(len(y), 32, 32, 3)) + y[:, None, None, None]
    owner = np.repeat(np.arange(num_clients), EXAMPLES)
    return FederatedData.from_client_ids({"x": x.astype(np.float32), "y": y}, owner)


def main() -> None:
    """Times the placements, and prints a row of each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=60)
    parser.add_argument("--cohort", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--folder", default=None, help="where the rows on the disk go")
    given = parser.parse_args()
    # Rounds of the last two are one program.
    use_compilation_cache("auto")
    data, second = (images(given.clients, seed) for seed in (0, 1))
    structure = example_structure(data)
    model = resnet18(structure["x"], num_classes=2, norm="batch", stem="imagenet")
    trainer = local_trainer(model, LocalConfig(learning_rate=0.01, batch_size=8, num_steps=1))
    algorithm = jump_start(
        model, trainer, jump_rounds=10**6, tickets=Tickets(accuracy_threshold=0.4)
    )
    joins = participation(fixed_size(), given.clients, given.cohort)
    key, seconds, states, sims = jax.random.key(0), {}, {}, {}
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        for name in PLACEMENTS:
            execution = ExecutionConfig(
                clients_per_chunk=1,
                devices=None,
                placement=name,
                folder=folder if name == "disk" else None,
            )
            sims[name] = simulation(algorithm, data, joins, execution, validation=second)
            state = sims[name].init(key)
            # The first round compiles.
            states[name], *_ = sims[name].run(state, key, 1)
            seconds[name] = []
            print(f"{name} compiled", flush=True)
        for _ in range(3):
            for name in PLACEMENTS:
                start = time.perf_counter()
                state, *_ = sims[name].run(states[name], key, given.rounds)
                states[name] = jax.block_until_ready(state)
                seconds[name].append((time.perf_counter() - start) / given.rounds)
        rows = {
            name: state.clients.of_all(lambda row: row)
            if isinstance(state.clients, ClientStore)
            else state.clients
            for name, state in states.items()
        }
        for name in PLACEMENTS[1:]:
            for one, other in zip(
                *(jax.tree.leaves(rows[n]) for n in ("device", name)), strict=True
            ):
                np.testing.assert_array_equal(one, other)
    print("| what clients keep lies | s a round, median | fastest |\n|---|---|---|")
    for name, each in seconds.items():
        print(f"| {name} | {statistics.median(each):.2f} | {min(each):.2f} |")


if __name__ == "__main__":
    main()
