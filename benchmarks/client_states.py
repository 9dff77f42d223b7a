"""The memory of SCAFFOLD on FEMNIST's shape: 3,400 clients with 4.8 MB of state each, on the disk.

The states of all clients are 16 GB, and are written before the first round, so that every round
reads and replaces those of its cohort. The network is the one of the federated EMNIST literature
(1,206,590 parameters), images are random.

    python benchmarks/client_states.py [--clients 3400] [--cohort 50] [--rounds 4] [--folder DIR]
"""

import argparse
import os
import resource
import tempfile
import time

import jax
import numpy as np

from fedjax_dp.algorithms import scaffold
from fedjax_dp.clients import LocalConfig, local_trainer
from fedjax_dp.data import FederatedData, fixed_size, participation
from fedjax_dp.data.federated import example_structure
from fedjax_dp.engine import ExecutionConfig, simulation
from fedjax_dp.engine.client_store import ClientStore
from fedjax_dp.models import emnist_cnn

NUM_CLASSES, MEAN_SIZE, SIZE_SPREAD, LARGEST = 62, 200, 0.5, 500


def images(num_clients: int) -> FederatedData:
    """Draws random images of 28×28 bytes for clients of log-normal sizes, about 200 each."""
    rng = np.random.default_rng(0)
    sizes = MEAN_SIZE * rng.lognormal(-(SIZE_SPREAD**2) / 2, SIZE_SPREAD, num_clients)
    offsets = np.concatenate([[0], np.cumsum(sizes.clip(1, LARGEST).astype(int))])
    x = rng.integers(0, 256, (offsets[-1], 28, 28, 1), dtype=np.uint8)
    y = rng.integers(0, NUM_CLASSES, offsets[-1], dtype=np.int32)
    return FederatedData({"x": x, "y": y}, offsets)


def written(store: ClientStore) -> ClientStore:
    """Writes a state of every client, and returns the store that knows of them."""
    rng, num_clients = np.random.default_rng(1), len(store.slots)
    state = jax.tree.map(lambda x: rng.normal(0, 1e-3, x.shape).astype(x.dtype), store.first)
    store.file.open()
    digests = [store.file.write(client, state) for client in range(num_clients)]
    slots = np.arange(num_clients, dtype=np.int32)
    table = np.stack([np.frombuffer(digest, np.uint8) for digest in digests])
    return ClientStore(slots, table, store.first, store.file)


def peak_gib() -> float:
    """Returns the most memory that the process has held so far; Linux counts in KiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def main() -> None:
    """Plays the rounds, and prints seconds and memory."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=3400)
    parser.add_argument("--cohort", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=1, help="local steps of 20 images")
    parser.add_argument("--folder", default=None, help="where the states go; 16 GB for all clients")
    given = parser.parse_args()
    started = time.perf_counter()
    data = images(given.clients)
    model = emnist_cnn(example_structure(data)["x"], num_classes=NUM_CLASSES)
    config = LocalConfig(learning_rate=0.05, batch_size=20, num_steps=given.steps)
    algorithm = scaffold(model, local_trainer(model, config), num_clients=given.clients)
    joins = participation(fixed_size(), given.clients, given.cohort)
    key = jax.random.key(0)
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        execution = ExecutionConfig(placement="disk", folder=folder)
        sim = simulation(algorithm, data, joins, execution)
        state_bytes = sim.federation.facts.own_bytes
        total = given.clients * state_bytes / 2**30
        print(f"{given.clients} clients of {state_bytes:,} bytes of state each: {total:.1f} GiB")
        print(f"{data.num_examples:,} images, {data.num_bytes / 2**30:.2f} GiB", flush=True)
        state = sim.init(key)
        state = sim.compile(state._replace(clients=written(state.clients)), key)
        print(f"ready after {time.perf_counter() - started:.0f} s, {peak_gib():.2f} GiB at most")
        for done in range(1, given.rounds + 1):
            before = time.perf_counter()
            state, record, _ = sim.run(state, key, 1)
            jax.block_until_ready(state)
            drawn, elapsed = int(np.sum(record.num_drawn)), time.perf_counter() - before
            print(f"round {done}: {drawn} clients, {elapsed:.1f} s", flush=True)
        changed = int(np.sum(state.clients.slots != np.arange(given.clients)))
        on_disk = os.stat(state.clients.file.path).st_blocks * 512 / 2**30
        print(f"{on_disk:.1f} GiB on the disk, the states of {changed} clients were replaced")
    seconds = time.perf_counter() - started
    print(f"{given.rounds} rounds, {seconds:.0f} s in all, peak memory {peak_gib():.2f} GiB")


if __name__ == "__main__":
    main()
