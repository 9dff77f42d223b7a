"""The study of clustered federated learning under record-level privacy: runs, tables, pictures.

python -m experiments.clustered_dp.study run CONFIG --output FOLDER --methods … --epsilons …
python -m experiments.clustered_dp.study table FOLDER
python -m experiments.clustered_dp.study draw FOLDER
"""

import argparse
import json
import os
import pathlib
import platform
import time
from typing import Any

import jax
import numpy as np

from experiments.clustered_dp import pictures
from experiments.clustered_dp.grid import (
    METHODS,
    PAPER_EPSILONS,
    Point,
    points,
    true_clusters,
)
from experiments.clustered_dp.metrics import (
    cluster_fairness,
    is_minority_found,
    is_partition_found,
    matched_share,
)
from experiments.clustered_dp.tables import as_markdown, read_results
from fedjax_dp.algorithms import local_only
from fedjax_dp.clients import LocalConfig, local_trainer
from fedjax_dp.data import participants, sampling
from fedjax_dp.data.federated import FederatedData
from fedjax_dp.engine import evaluator, simulation
from fedjax_dp.evaluation.evaluate import personal_evaluator
from fedjax_dp.experiment import Experiment, assemble
from fedjax_dp.experiment.reading.config_diff import REPORTED, completed, require_same, tables_of
from fedjax_dp.experiment.running.starting import accounting_of, first_state, new_root
from fedjax_dp.io import plots


def assigned_clusters(experiment: Experiment, state: Any, true: np.ndarray) -> np.ndarray | None:
    """The cluster that each client ended in; None where a method has none."""
    name = experiment.simulation.algorithm.name
    if name in ("r_dpcfl", "rc_dpfl", "f_cdpfl"):
        return np.asarray(state.clients)
    return {"km_cdpfl": lambda: np.asarray(state.server.clusters), "o_dpcfl": lambda: true}.get(
        name, lambda: None
    )()


def references(
    experiment: Experiment, true: np.ndarray, epochs: int, learning_rate: float
) -> tuple[np.ndarray, np.ndarray]:
    """Held-out accuracy and training loss of models trained centrally on each cluster's pool."""
    train, model = experiment.population.train, experiment.model
    pooled = FederatedData.from_clients(
        [
            {
                key: np.concatenate([train.client(i)[key] for i in np.flatnonzero(true == c)])
                for key in train.examples
            }
            for c in np.unique(true)
        ]
    )
    trainer = local_trainer(model, LocalConfig(learning_rate=learning_rate, batch_size=32))
    all_clients = participants.participation(sampling.full_participation(), pooled.num_clients)
    sim = simulation(local_only(model, trainer), pooled, all_clients)
    key = jax.random.key(experiment.config.run.seed)
    state, *_ = sim.run(sim.init(key), key, epochs)
    table = jax.numpy.asarray(true)

    def params_of(client, rows):
        return jax.tree.map(lambda r: r[table[client]], rows)

    held_out = experiment.population.client_test
    assert held_out is not None
    accuracy = personal_evaluator(model, held_out, params_of)(state.clients).client_accuracy
    return accuracy, personal_evaluator(model, train, params_of)(state.clients).client_loss


def reference_of(
    point: Point, experiment: Experiment, true: np.ndarray, arguments: argparse.Namespace
) -> dict[str, Any]:
    """Trains the models to compare with, or reads them where they were trained on the same data."""
    path = pathlib.Path(arguments.output) / f"{point.reference_name}.json"
    training = {
        "epochs": arguments.reference_epochs,
        "learning_rate": arguments.reference_learning_rate,
    }
    setting = tables_of(point.setting)
    setting = {k: v for k, v in setting.items() if k in ("data", "model")} | {"training": training}
    if path.is_file():
        found = json.loads(path.read_text(encoding="utf-8"))
        saved = dict(found["setting"])
        its_training = saved.pop("training")
        require_same(path, completed(saved, str(path)) | {"training": its_training}, setting)
        return found
    accuracy, loss = references(experiment, true, **training)
    found = {"setting": setting, "accuracy": accuracy.tolist(), "loss": loss.tolist()}
    write(path, found)
    return found


def run_one(point: Point, arguments: argparse.Namespace) -> dict[str, Any]:
    """Runs one method from one seed, writes what it found, returns the same."""
    started = time.perf_counter()
    config, method = point.config, point.method
    true = true_clusters(config)
    experiment = assemble(config)
    folder = pathlib.Path(arguments.output)
    # References of other settings are refused before any work.
    reference = reference_of(point, experiment, true, arguments)
    # Nothing here is resumed: a secret root is forgotten with the process.
    sim, key = experiment.simulation, new_root(config.run)
    state = first_state(experiment)
    accounting = accounting_of(experiment, sim.hyper)
    before_compiling = time.perf_counter()
    state = jax.block_until_ready(sim.compile(state, key))
    before_rounds = time.perf_counter()
    state, record, info = sim.run(state, key, config.run.rounds)
    jax.block_until_ready(state)
    seconds_rounds = time.perf_counter() - before_rounds
    accounting.charge(record)
    spent = accounting.epsilon(experiment.dp_delta, config.privacy.accountant)["record"]

    held_out = experiment.evaluator.clients
    assert held_out is not None
    accuracy = held_out(state).client_accuracy
    train = experiment.population.train
    on_train = evaluator(sim, experiment.model, train, clients=train).clients
    assert on_train is not None
    loss = on_train(state).client_loss
    smallest = np.argmin(np.bincount(true))
    metrics = cluster_fairness(
        accuracy, loss, reference["accuracy"], reference["loss"], true == smallest
    )
    assigned = assigned_clusters(experiment, state, true)
    if assigned is not None:
        metrics |= {
            "clusters_found": float(is_partition_found(assigned, true)),
            "minority_found": float(is_minority_found(assigned, true)),
            "clients_matched": matched_share(assigned, true),
        }
    seconds = time.perf_counter() - started
    result: dict[str, Any] = {
        "method": method,
        "seed": config.run.seed,
        "epsilon": config.privacy.record.epsilon,
        "setting": tables_of(point.setting),
        "changes": list(point.words),
        "metrics": metrics,
        "client_accuracy": accuracy.tolist(),
        "clusters": None if assigned is None else assigned.tolist(),
        "epsilon_by_client": spent.tolist(),
        "dp_delta": experiment.dp_delta["record"],
        "noise_multiplier": np.unique(np.asarray(sim.hyper.local.noise_multiplier)).tolist(),
        "not_covered": sim.algorithm.claims.not_covered,
        "stages": record.stage.tolist(),
        "train_loss_by_round": info.training.train_loss.tolist(),
        "num_traces": sim.num_traces(),
        "seconds": seconds,
        "seconds_compiling": before_rounds - before_compiling,
        "seconds_rounds": seconds_rounds,
        "share_of_rounds": seconds_rounds / seconds,
        "examples_per_second": float(np.sum(info.training.num_examples)) / seconds_rounds,
        "hardware": f"{num_cores()} {platform.machine()} cores, {jax.default_backend()}",
    }
    if sim.algorithm.name in ("r_dpcfl", "rc_dpfl"):
        server = jax.device_get(state.server)
        result["separation"] = float(server.separation)
        result["overlap"] = float(server.overlap)
        result["soft_rounds"] = int(server.soft_rounds)
        result["num_models"] = count = int(server.num_models)
        result["num_iterations"] = int(server.num_iterations)
        mixture = {
            "true_clusters": true,
            "features": server.features,
            "means": server.means[:count],
            "radii": server.radii[:count],
        }
        result["mixture"] = {k: np.round(v, 5).tolist() for k, v in mixture.items()}
    write(folder / f"{point.name}.json", result)
    return result


def num_cores() -> int:
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def write(path: pathlib.Path, data: Any) -> None:
    """Writes JSON into a folder that is made where it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def run(arguments: argparse.Namespace) -> None:
    """Runs a grid of methods, budgets and seeds, leaving out what is there already."""
    grid = points(
        arguments.config, arguments.methods, arguments.epsilons, arguments.seeds, arguments.set
    )
    for point in grid:
        done = pathlib.Path(arguments.output) / f"{point.name}.json"
        if done.is_file():
            found = json.loads(done.read_text(encoding="utf-8"))
            saved = completed(found["setting"], str(done))
            require_same(done, saved, tables_of(point.setting), REPORTED)
            require_same(done, {"changes": found["changes"]}, {"changes": list(point.words)})
            print(f"{done} is there already")
            continue
        result = run_one(point, arguments)
        shown = {k: round(v, 2) for k, v in result["metrics"].items()}
        print(f"{point.name}: {shown} in {result['seconds']:.0f} s", flush=True)


def table(arguments: argparse.Namespace) -> None:
    """Writes a table of all methods over their seeds, the paper's numbers beside ours."""
    folder = pathlib.Path(arguments.output)
    text = as_markdown(read_results(folder))
    (folder / "table.md").write_text(text, encoding="utf-8")
    print(text)


def draw(arguments: argparse.Namespace) -> None:
    """Draws accuracy by ε and the mixtures of what ran."""
    folder = pathlib.Path(arguments.output)
    for name, figure in pictures.draw(read_results(folder)).items():
        plots.save(figure, folder / f"{name}.png")


def main(words: list[str] | None = None) -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("run", help="run methods at budgets from seeds")
    one.add_argument("config")
    one.add_argument("--output", required=True)
    one.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    one.add_argument(
        "--epsilons",
        nargs="+",
        type=float,
        default=[],
        help=f"that of the configuration, if not given; the paper has {PAPER_EPSILONS}",
    )
    one.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    one.add_argument("--reference-epochs", type=int, default=10)
    one.add_argument("--reference-learning-rate", type=float, default=0.1)
    one.add_argument("--set", action="append", default=[], metavar="--section.key=value")
    one.set_defaults(do=run)
    other = commands.add_parser("table", help="write a table of what ran")
    other.add_argument("output")
    other.set_defaults(do=table)
    drawn = commands.add_parser("draw", help="draw accuracy by ε and the mixtures of what ran")
    drawn.add_argument("output")
    drawn.set_defaults(do=draw)
    arguments = parser.parse_args(words)
    try:
        arguments.do(arguments)
    except ValueError as error:
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    main()
