"""Figures E.1, E.2, H.4 and H.5: `python -m experiments.heterogeneous_dp.first_round`.

One round of Robust-HDP on MNIST with the noise of a whole run, from several seeds. Singular values
of the matrix of updates M and of its low-rank part L are in `singular_values.csv`, weights of
clients by method in `weights.csv`. With `--skewed`, weights of 60 clients of at most 8 labels
(H.4, H.5) are in `skewed_weights.csv`, and nothing else runs. `--draw` draws files again.
"""

import argparse
import contextlib
import csv
import itertools
import pathlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

from experiments import noise_levels, study_plots
from experiments.heterogeneous_dp import noise
from fedjax_dp.algorithms.base import FederatedAlgorithm
from fedjax_dp.engine import ExecutionConfig, Simulation, as_metrics, simulation
from fedjax_dp.experiment import assemble, load_config
from fedjax_dp.experiment.running.starting import new_root
from fedjax_dp.io import plots
from fedjax_dp.privacy.accounting import budgets
from fedjax_dp.server.noise_aware import principal_component_pursuit

HERE = pathlib.Path(__file__).parent
# Of E.1, and of E.2.
SPECTRA, WEIGHTS = ("Dist3", "Dist9"), "Dist8"
# Of H.4 and H.5: budgets, clients, records of each, and batch sizes.
SKEWED, MANY, FEW_RECORDS, EQUAL_BATCH = "Dist1", 60, 800, 128
Row = dict[str, Any]


def with_matrices(algorithm: FederatedAlgorithm) -> FederatedAlgorithm:
    """Adds M and L, `[slots, parameters]`, to the info of each round."""
    inner = algorithm.aggregator

    def combine(state, numbers, stack, close):
        state, aggregate, info = inner.combine(state, numbers, stack, close)
        updates = [leaf.reshape(len(leaf), -1) for leaf in jax.tree.leaves(stack[0])]
        matrix = jnp.concatenate(updates, axis=1)
        found = principal_component_pursuit(matrix, mode="inexact")
        return state, aggregate, info | {"M": matrix, "L": found.low_rank}

    return algorithm._replace(aggregator=inner._replace(combine=combine))


def simulation_of(seed: int, file: str = "mnist.toml", *more: str) -> tuple[Simulation, Any]:
    """Returns a simulation whose noise is a number of the round, and its key."""
    one = [f"--run.{name}=1" for name in ("rounds", "evaluate_every", "checkpoint_every")]
    words = (*one, f"--run.seed={seed}", "--privacy.record.noise_multiplier=1", *more)
    config = load_config(HERE / file, words)
    built = assemble(config)
    algorithm, train = with_matrices(built.simulation.algorithm), built.population.train
    layout = ExecutionConfig(clients_per_chunk=1)
    sim = simulation(algorithm, train, built.simulation.participation, layout)
    return sim, new_root(config.run)


def first_rounds(seeds: Sequence[int]) -> Iterator[tuple[str, int, dict[str, np.ndarray]]]:
    """Runs one round of each distribution and seed; yields the metrics of the round."""
    batch = budgets.published_batch_sizes(noise.CLIENTS)
    for seed in seeds:
        sim, key = simulation_of(seed)
        for name in (*SPECTRA, WEIGHTS):
            z = noise.multipliers(budgets.published_budgets(name, noise.CLIENTS), batch)
            yield name, seed, _round_of(sim, key, z)


def _round_of(sim: Simulation, key: Any, z: np.ndarray) -> dict[str, np.ndarray]:
    """Runs a round with those noise multipliers; returns its metrics."""
    local = sim.hyper.local._replace(noise_multiplier=np.float32(z))
    _, record, info = sim.run(sim.init(key), key, 1, sim.hyper._replace(local=local))
    return {k: v[0] for k, v in as_metrics(record, info).items()}


def skewed_weights(seeds: Sequence[int]) -> list[Row]:
    """Runs one round of 60 clients of at most 8 labels, with equal batch sizes and their own."""
    epsilon = budgets.published_budgets(SKEWED, MANY)
    sizes = {
        "equal": (np.full(MANY, EQUAL_BATCH), str(EQUAL_BATCH)),
        "own": (budgets.published_batch_sizes(MANY), "heterogeneous"),
    }
    rows = []
    for seed, (kind, (batch, word)) in itertools.product(seeds, sizes.items()):
        word = f"--training.batch_size={word}"
        sim, key = simulation_of(seed, "mnist_label_skew.toml", word)
        estimated = _round_of(sim, key, noise.multipliers(epsilon, batch, FEW_RECORDS))["weights"]
        found = weights_of(SKEWED, estimated, batch, FEW_RECORDS)
        rows += [
            {"batch_sizes": kind, "seed": seed, "method": method}
            | {"client": i - 1, "epsilon": float(epsilon[i - 1]), "weight": w}
            for method, own in found.items()
            for i, w in _from_1(own)
        ]
    return rows


def weights_of(
    name: str, estimated: np.ndarray, batch: np.ndarray | None = None, size: int = noise.N
) -> dict[str, np.ndarray]:
    """Lists the weights of clients by method; those of Robust-HDP are given."""
    count = len(estimated)
    epsilon = budgets.published_budgets(name, count)
    batch = budgets.published_batch_sizes(count) if batch is None else batch
    variance = noise.update_variances(epsilon, batch, size)
    return {
        "oracle": noise_levels.inverse_variance_weights(variance),
        "Robust-HDP": estimated,
        "WeiAvg": epsilon / epsilon.sum(),
        "DPFedAvg": np.full(count, 1 / count),
    }


def tables(seeds: Sequence[int]) -> tuple[list[Row], list[Row]]:
    """Computes the rows of both files."""
    values, weights = [], []
    for name, seed, metrics in first_rounds(seeds):
        row = {"distribution": name, "seed": seed}
        for matrix in ("M", "L"):
            found = np.linalg.svd(np.asarray(metrics[matrix], np.float64), compute_uv=False)
            values += [row | {"matrix": matrix, "rank": i, "value": v} for i, v in _from_1(found)]
        for method, own in weights_of(name, metrics["weights"]).items():
            weights += [
                row | {"method": method, "client": i - 1, "weight": w} for i, w in _from_1(own)
            ]
    return values, weights


def _from_1(numbers: np.ndarray) -> list[tuple[int, float]]:
    return list(enumerate(np.asarray(numbers, np.float64).tolist(), start=1))


def draw_spectra(values: Sequence[Row]) -> Figure:
    """Draws singular values over the largest of M, with bands of one deviation over seeds."""
    found: dict[tuple[str, str], dict[int, list[float]]] = {}
    for row in values:
        seeds = found.setdefault((row["distribution"], row["matrix"]), {})
        seeds.setdefault(row["seed"], []).append(row["value"])
    curves = {}
    for name, matrix in itertools.product(SPECTRA, ("M", "L")):
        seeds, largest = found[name, matrix], found[name, "M"]
        shares = np.array([np.divide(own, max(largest[seed])) for seed, own in seeds.items()])
        spread = shares.std(axis=0, ddof=1) if len(shares) > 1 else np.zeros(shares.shape[1])
        ranks = range(1, shares.shape[1] + 1)
        curves[f"{matrix}, {name}"] = ranks, shares.mean(axis=0).tolist(), spread.tolist()
    title = "Updates of the first round on MNIST (M) and their low-rank part (L)"
    figure = study_plots.accuracy_by_round(curves, title)
    axes = figure.axes[0]
    axes.set(xlabel="rank", ylabel="singular value over the largest of M", yscale="log")
    axes.set_ylim(1e-6, 2)
    return figure


def write(path: pathlib.Path, rows: Sequence[Row]) -> None:
    """Writes rows as a CSV file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def read(path: pathlib.Path) -> list[Row]:
    """Reads rows of a CSV file, in which what looks like a number is one."""
    with path.open(encoding="utf-8") as file:
        return [{name: _number(text) for name, text in row.items()} for row in csv.DictReader(file)]


def _number(text: str) -> str | int | float:
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return text


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("runs/first_round"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--skewed", action="store_true", help="H.4 and H.5 alone")
    parser.add_argument("--draw", action="store_true", help="draw what the folder has; run nothing")
    known = parser.parse_args(arguments)
    if known.skewed:
        if not known.draw:
            write(known.output / "skewed_weights.csv", skewed_weights(known.seeds))
        draw_skewed(read(known.output / "skewed_weights.csv"), known.output)
        return
    files = [known.output / f"{name}.csv" for name in ("singular_values", "weights")]
    if not known.draw:
        for file, rows in zip(files, tables(known.seeds), strict=True):
            write(file, rows)
    values, weights = map(read, files)
    plots.save(draw_spectra(values), known.output / "singular_values.png")
    shown = _of_first_seed(row for row in weights if row["distribution"] == WEIGHTS)
    figure = study_plots.weights_of_clients(shown, f"MNIST, {WEIGHTS}, first round")
    plots.save(figure, known.output / "weights.png")


def draw_skewed(rows: Sequence[Row], output: pathlib.Path) -> None:
    """Draws H.4 and H.5, in the order of budgets."""
    order = np.argsort(budgets.published_budgets(SKEWED, MANY), kind="stable")
    for kind in ("equal", "own"):
        shown = _of_first_seed(row for row in rows if row["batch_sizes"] == kind)
        title = f"MNIST, {SKEWED}, at most 8 labels, {kind} batch sizes; clients by ε"
        figure = study_plots.weights_of_clients(shown, title, order=order)
        plots.save(figure, output / f"skewed_weights_{kind}.png")


def _of_first_seed(rows: Iterable[Row]) -> dict[str, list[float]]:
    """Lists weights by method and client, of the seed that comes first."""
    found: dict[str, list[float]] = {}
    seed = None
    for row in rows:
        seed = row["seed"] if seed is None else seed
        if row["seed"] == seed:
            found.setdefault(row["method"], []).append(row["weight"])
    return found


if __name__ == "__main__":
    main()
