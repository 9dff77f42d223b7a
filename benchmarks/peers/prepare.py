"""Writes workloads as .npz files: data, initial weights, batches and numbers.

    python benchmarks/peers/prepare.py [--folder benchmarks/peers/.work] [NAME ...]

Runs in the environment of fedjax_dp, whose own workloads and models it reads.
"""

import argparse
import pathlib

import jax
import numpy as np
from problem import Problem

from fedjax_dp.data.federated import example_structure
from fedjax_dp.experiment.studies.workloads import WORKLOADS, Workload, synthetic_data
from fedjax_dp.models import registry

NAMES = ("W1", "W1dp", "W2", "W2dp", "W3", "W3nodp", "W4", "W4dp", "W5", "W5nodp")
FOLDER = pathlib.Path(__file__).parent / ".work"


def build(name: str, workload: Workload) -> Problem:
    """Draws a workload: its own data, weights of seed 0, and batches without repetition.

    Every pass over a client's examples is in a fresh order; a step's batch is the next part of it.
    """
    data = synthetic_data(workload)
    model = registry.build(
        workload.model, example_structure(data), workload.num_classes, **workload.model_options
    )
    params = jax.tree_util.tree_leaves_with_path(model.init(jax.random.key(0))["params"])
    size, batch_size = workload.examples_per_client, workload.batch_size
    num_steps = workload.num_steps or -(-size // batch_size)
    return Problem(
        name=name,
        model=workload.model,
        unit=workload.unit,
        num_classes=workload.num_classes,
        learning_rate=0.1,
        clip_norm=workload.clip_norm,
        noise_multiplier=0.0 if workload.clip_norm is None else 1.0,
        x=data.examples["x"].reshape(workload.num_clients, size, *workload.shape),
        y=data.examples["y"].reshape(workload.num_clients, size),
        batches=draw_batches(workload.num_clients, size, num_steps, batch_size),
        params={
            jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(leaf)
            for path, leaf in params
        },
    )


def draw_batches(num_clients: int, size: int, num_steps: int, batch_size: int) -> np.ndarray:
    """Draws which examples each client reads, `[clients, steps, batch]`."""
    if num_steps == 1 and batch_size == size:
        rows = np.broadcast_to(np.arange(size), (num_clients, size))
    else:
        rng = np.random.default_rng(1)
        passes = -(-num_steps * batch_size // size)
        once = np.tile(np.arange(size), (num_clients, 1))
        orders = [rng.permuted(once, axis=1) for _ in range(passes)]
        rows = np.concatenate(orders, axis=1)[:, : num_steps * batch_size]
    return rows.reshape(num_clients, num_steps, batch_size).astype(np.int32)


def ensure(name: str, folder: pathlib.Path) -> pathlib.Path:
    """Writes a workload's file unless it is there."""
    path = folder / f"{name}.npz"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        unfinished = folder / f"{name}.unfinished.npz"
        build(name, WORKLOADS[name]).save(unfinished)
        unfinished.rename(path)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=NAMES)
    parser.add_argument("--folder", type=pathlib.Path, default=FOLDER)
    options = parser.parse_args()
    for name in options.names:
        print(ensure(name, options.folder), flush=True)


if __name__ == "__main__":
    main()
