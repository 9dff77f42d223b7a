"""How many clusters R-DPCFL finds: `python -m experiments.clustered_dp.number_of_clusters`.

First rounds alone, at the size of each configuration: 8,000 images a client and 200 rounds in the
paper's. The first update of a client is one clipped step on all of its data, plus Gaussian noise of
standard deviation η z C / N in every coordinate, z being that of a whole run with private choices.
The step is computed once for a configuration and a seed, a cell, and each budget adds several draws
of noise. `number_of_clusters.csv` has, for each way of making features, the number of clusters M
whose mixture is best separated by the plain and by the adjusted score, and whether the mixture of
as many components as there are clusters puts every client into the right one. Cells that the file
has are not run again.
"""

import argparse
import itertools
import pathlib
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.clustered_dp.first_round import MODELS, Row, read
from experiments.clustered_dp.grid import points, true_clusters
from experiments.heterogeneous_dp.first_round import write
from experiments.sweep import add_workers, each_of, workers
from fedjax_dp.clients.batches import WHOLE, WholeBatches
from fedjax_dp.engine import examples_of
from fedjax_dp.engine.cohort import typed
from fedjax_dp.engine.federation import init_key
from fedjax_dp.evaluation import is_partition_found
from fedjax_dp.experiment import Cluster, Config
from fedjax_dp.experiment.assembly.assemble import parts_of, population_of
from fedjax_dp.experiment.running.starting import new_root
from fedjax_dp.server.clustering import (
    best_separated,
    fit_mixture,
    principal_features,
    similarity_of,
)

HERE = pathlib.Path(__file__).parent
# Shortest first.
SETTINGS = ("mnist_two_cores", "fashion_mnist_two_cores", "mnist", "fashion_mnist")
EPSILONS = (15.0, 10.0, 5.0, 4.0, 3.0, 2.0)
SCORES = ("plain", "adjusted")
# The features of the updates, and how many principal components are clustered.
FEATURES = (("centred", 2), ("authors", 2), ("centred", 3))


class FirstStep(NamedTuple):
    """What clients compute in the first round, and what the noise of a budget does to it."""

    updates: np.ndarray  # Without noise, `[clients, parameters]`.
    noise: np.ndarray  # Standard deviation at noise multiplier 1, `[clients]`.
    multipliers: dict[float, float]  # By ε.
    true: np.ndarray  # The cluster of each client, `[clients]`.


def configs(setting: str, seed: int) -> dict[float, Config]:
    """The configurations of a run that is not given M, by ε."""
    grid = points(HERE / f"{setting}.toml", ["R-DPCFL, M unknown"], EPSILONS, [seed])
    return {point.setting.privacy.record.epsilon: point.config for point in grid}


def first_step(by_epsilon: dict[float, Config]) -> FirstStep:
    """Takes the first step of all clients; configurations differ by ε alone."""
    first = next(iter(by_epsilon.values()))
    population = population_of(first)
    multipliers = {}
    for epsilon, config in by_epsilon.items():
        parts = parts_of(config, population)
        z = np.unique(np.asarray(parts.algorithm.hyper.local.noise_multiplier, np.float64))
        (multipliers[epsilon],) = z.tolist()
    trainer = parts.trainer.reading_whole(WholeBatches())
    examples = jax.device_put(examples_of(population.train))
    key = new_root(first.run)
    start = jax.tree.map(lambda leaf: leaf[0], parts.algorithm.init(init_key(key)).models)
    whole = {"batch_size": WHOLE, "noise_multiplier": np.float32(0)}

    @jax.jit
    def update(start, examples, client):
        local = typed(parts.algorithm.hyper).of_client(client).local._replace(**whole)
        delta = trainer.train(start, examples.client(client), local, key).delta
        return jnp.concatenate([leaf.reshape(-1) for leaf in jax.tree.leaves(delta)])

    updates = [update(start, examples, i) for i in range(population.train.num_clients)]
    local = parts.algorithm.hyper.local
    noise = np.asarray(local.learning_rate) * np.asarray(local.clip_norm) / population.train.sizes
    return FirstStep(np.stack(updates), noise, multipliers, true_clusters(first))


def rows_of(step: FirstStep, seed: int, draws: int) -> Iterator[Row]:
    """Clusters updates with each draw of noise at every budget, with every kind of features."""
    num_clusters = len(np.unique(step.true))
    budgets = enumerate(step.multipliers.items())
    for (i, (epsilon, z)), draw in itertools.product(budgets, range(draws)):
        normal = np.random.default_rng([seed, i, draw]).normal(size=step.updates.shape)
        noised = np.float32(step.updates + z * step.noise[:, None] * normal)
        is_real = np.ones(len(noised), bool)
        for features, components in FEATURES:
            similarity = jax.device_get(similarity_of(noised, is_real, features=features))
            shown = principal_features(similarity, components)
            fitted = {count: fit_mixture(shown, count, seed) for count in MODELS}
            right = fitted[num_clusters]
            assigned = np.argmax(right.responsibilities, axis=1)
            yield {
                "seed": seed,
                "draw": draw,
                "epsilon": epsilon,
                "noise_multiplier": z,
                "features": features,
                "components": components,
                **{how: len(best_separated(fitted.values(), how).means) for how in SCORES},
                "separation": right.separation,
                "found": int(is_partition_found(assigned, step.true)),
            }


def run(
    settings: Sequence[str],
    seeds: Sequence[int],
    draws: int,
    path: pathlib.Path,
    seconds: float = float("inf"),
    cluster: Cluster | None = None,
) -> list[Row]:
    """Runs the cells that the file does not have, none later than some seconds after the call."""
    started = time.perf_counter()
    found = read(path)
    there = {(row["setting"], row["seed"]) for row in found}
    cells = ((s, seed, draws) for seed, s in itertools.product(seeds, settings))
    missing = (cell for cell in cells if cell[:2] not in there)
    in_time = itertools.takewhile(lambda _: time.perf_counter() - started <= seconds, missing)
    for (setting, seed, _), rows in each_of(cell_of, in_time, cluster):
        found += rows
        write(path, found)
        print(f"{setting}, seed {seed}", flush=True)
    return found


def cell_of(setting: str, seed: int, draws: int) -> list[Row]:
    """Computes the rows of a setting and seed."""
    step = first_step(configs(setting, seed))
    return [{"setting": setting} | row for row in rows_of(step, seed, draws)]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    default = HERE / "results" / "number_of_clusters.csv"
    parser.add_argument("--output", type=pathlib.Path, default=default)
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3])
    parser.add_argument("--draws", type=int, default=4, help="draws of noise for each cell")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start nothing later")
    add_workers(parser)
    known = parser.parse_args(arguments)
    with workers(known, known.output.parent) as cluster:
        run(known.settings, known.seeds, known.draws, known.output, known.seconds, cluster)


if __name__ == "__main__":
    main()
