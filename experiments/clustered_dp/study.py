"""The study of clustered federated learning under record-level privacy: runs, tables, pictures.

python experiments/clustered_dp/study.py run CONFIG --output FOLDER --methods … --seeds …
python experiments/clustered_dp/study.py table FOLDER
"""

import argparse
import csv
import json
import os
import pathlib
import platform
import time
from typing import Any

import jax
import numpy as np

from fedjax_dp.algorithms import local_only
from fedjax_dp.cli import config as configuration
from fedjax_dp.cli.assemble import Experiment, assemble
from fedjax_dp.cli.config import Config
from fedjax_dp.clients import LocalConfig, local_trainer
from fedjax_dp.data import sampling
from fedjax_dp.data.clusters import CLUSTER_SIZES
from fedjax_dp.data.federated import FederatedData
from fedjax_dp.engine import PrivacyAccounting, evaluator, simulation
from fedjax_dp.evaluation.clustering import is_minority_found, is_partition_found, matched_share
from fedjax_dp.evaluation.evaluate import personal_evaluator
from fedjax_dp.evaluation.fairness import cluster_fairness, over_seeds
from fedjax_dp.io import plots

HERE = pathlib.Path(__file__).parent
SELECTION_SHARE = 0.03  # of the total ε, for one private choice

# The paper's names, and how it calls the same thing in its tables.
METHODS = {
    "R-DPCFL": None,
    "RC-DPFL": "RC-DPFL",
    "f-CDPFL": "f-CDPFL",
    "IFCA": None,
    "KM-CDPFL": "KM-CDPFL",
    "MR-MTL": None,
    "Local": None,
    "Global": "DPFedAvg",
    "Oracle": "O-CDPFL",
}


# Where the paper trains a method with other numbers than R-DPCFL, by the name of the setting.
LARGE_BATCHES = ("--training.batch_size=64",)
OTHER_NUMBERS: dict[str, dict[str, tuple[str, ...]]] = {
    "clustered_mnist": {"Local": ("--training.learning_rate=0.01",)},
    "clustered_cifar10_labels": dict.fromkeys(
        ("IFCA", "f-CDPFL", "Global", "MR-MTL", "Local"), LARGE_BATCHES
    ),
    "clustered_cifar10_rotation": dict.fromkeys(("IFCA", "f-CDPFL"), LARGE_BATCHES)
    | dict.fromkeys(
        ("Global", "MR-MTL", "Local"),
        (*LARGE_BATCHES, "--training.learning_rate=0.0005", "--privacy.record.clip_norm=4.0"),
    ),
}


def true_clusters(config: Config) -> np.ndarray:
    """The cluster of each client, as the partition deals them out."""
    sizes = config.data.partition_options.get("cluster_sizes", CLUSTER_SIZES)
    return np.repeat(np.arange(len(sizes)), sizes)


def words_of(method: str, config: Config) -> list[str]:
    """What a method changes in the configuration of the study."""
    clusters = true_clusters(config)
    options = {"num_models": int(clusters.max()) + 1}
    choice = {"selection_epsilon": SELECTION_SHARE * float(config.privacy.record.epsilon)}
    name, options = {
        "R-DPCFL": ("r_dpcfl", options | choice),
        "RC-DPFL": ("rc_dpfl", options),
        "f-CDPFL": ("f_cdpfl", options | {"selection": "exact"}),
        "IFCA": ("f_cdpfl", options | choice),
        "KM-CDPFL": ("km_cdpfl", options),
        "MR-MTL": ("mr_mtl", {}),
        "Local": ("local_only", {}),
        "Global": ("dp_sgd", {}),
        "Oracle": ("o_dpcfl", {"clusters": clusters.tolist()}),
    }[method]
    given = [f"--algorithm.options.{key}={json.dumps(value)}" for key, value in options.items()]
    numbers = OTHER_NUMBERS.get(config.run.name, {}).get(method, ())
    return [f"--algorithm.name={name}", *given, *numbers]


def assigned_clusters(experiment: Experiment, state: Any, true: np.ndarray) -> np.ndarray | None:
    """The cluster that each client ended in; None where a method has none."""
    name = experiment.simulation.algorithm.name
    if name in ("r_dpcfl", "rc_dpfl", "f_cdpfl"):
        return np.asarray(state.rows)
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
    everybody = sampling.participation(sampling.everybody(), pooled.num_clients)
    sim = simulation(local_only(model, trainer), pooled, everybody)
    key = jax.random.key(experiment.config.run.seed)
    state, _ = sim.run(sim.init(key), key, epochs)
    table = jax.numpy.asarray(true)

    def params_of(client, rows):
        return jax.tree.map(lambda r: r[table[client]], rows)

    held_out = experiment.population.client_test
    assert held_out is not None
    accuracy = personal_evaluator(model, held_out, params_of)(state.rows).client_accuracy
    return accuracy, personal_evaluator(model, train, params_of)(state.rows).client_loss


def run_one(config: Config, method: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Runs one method from one seed, writes what it found, returns the same."""
    started = time.perf_counter()
    true = true_clusters(config)
    experiment = assemble(config)
    sim, key = experiment.simulation, jax.random.key(config.run.seed)
    state = sim.init(key)
    accounting = PrivacyAccounting(sim, state, config.privacy.relation, config.privacy.accountant)
    before_compiling = time.perf_counter()
    state = jax.block_until_ready(sim.compile(state, key))
    before_rounds = time.perf_counter()
    state, info = sim.run(state, key, config.run.rounds)
    jax.block_until_ready(state)
    seconds_rounds = time.perf_counter() - before_rounds
    accounting.charge(info, state)
    spent = accounting.epsilon(experiment.dp_delta, config.privacy.accountant)["record"]

    held_out = experiment.evaluator.clients
    assert held_out is not None
    accuracy = held_out(state).client_accuracy
    train = experiment.population.train
    on_train = evaluator(sim, experiment.model, train, clients=train).clients
    assert on_train is not None
    loss = on_train(state).client_loss
    folder = pathlib.Path(arguments.output)
    cached = folder / f"reference-{config.run.seed}.json"
    if not cached.is_file():
        numbers = references(
            experiment, true, arguments.reference_epochs, arguments.reference_learning_rate
        )
        write(cached, {"accuracy": numbers[0].tolist(), "loss": numbers[1].tolist()})
    reference = json.loads(cached.read_text())
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
        "metrics": metrics,
        "client_accuracy": accuracy.tolist(),
        "clusters": None if assigned is None else assigned.tolist(),
        "epsilon_by_client": spent.tolist(),
        "dp_delta": experiment.dp_delta["record"],
        "noise_multiplier": np.unique(np.asarray(state.config.noise_multiplier)).tolist(),
        "not_covered": sim.algorithm.not_covered,
        "stages": np.asarray(info["stage"]).tolist() if "stage" in info else None,
        "train_loss_by_round": np.asarray(info["train_loss"]).tolist(),
        "num_traces": sim.num_traces(),
        "seconds": seconds,
        "seconds_compiling": before_rounds - before_compiling,
        "seconds_rounds": seconds_rounds,
        "share_of_rounds": seconds_rounds / seconds,
        "examples_per_second": float(np.sum(info["num_examples"])) / seconds_rounds,
        "hardware": f"{os.cpu_count()} {platform.machine()} cores, {jax.default_backend()}",
    }
    if method in ("R-DPCFL", "RC-DPFL"):
        server = jax.device_get(state.server)
        result["separation"] = float(server.separation)
        result["overlap"] = float(server.overlap)
        result["soft_rounds"] = int(server.soft_rounds)
        count = int(server.num_models)
        figure = plots.updates_and_mixture(
            server.features, true, server.means[:count], server.radii[:count],
            f"updates of round 1, MSS {server.separation:.1f}",
        )  # fmt: skip
        plots.save(figure, folder / f"mixture-{method}-{config.run.seed}.png")
    write(folder / f"{method}-{config.run.seed}.json", result)
    return result


def write(path: pathlib.Path, data: Any) -> None:
    """Writes JSON into a folder that is made where it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def run(arguments: argparse.Namespace) -> None:
    """Runs a grid of methods and seeds, leaving out what is there already."""
    for seed in arguments.seeds:
        for method in arguments.methods:
            done = pathlib.Path(arguments.output) / f"{method}-{seed}.json"
            if done.is_file():
                print(f"{done} is there already")
                continue
            words = [f"--run.seed={seed}", *arguments.set]
            plain = configuration.load(arguments.config, words)
            config = configuration.load(arguments.config, [*words, *words_of(method, plain)])
            result = run_one(config, method, arguments)
            shown = {k: round(v, 2) for k, v in result["metrics"].items()}
            print(f"{method} seed {seed}: {shown} in {result['seconds']:.0f} s", flush=True)


def table(arguments: argparse.Namespace) -> None:
    """Writes a table of all methods over their seeds, the paper's numbers beside ours."""
    folder = pathlib.Path(arguments.output)
    paper: dict[tuple[str, str], tuple[float, float]] = {}
    with open(HERE / "paper_tables.csv", newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if (row["dataset"], row["shift"]) == (arguments.dataset, arguments.shift) and float(
                row["epsilon"]
            ) == arguments.paper_epsilon:
                paper[row["algorithm"], row["metric"]] = float(row["mean"]), float(row["std"])
    names = ("acc_all", "acc_maj", "acc_min", "min_acc", "acc_disparity", "F_acc", "F_loss")
    lines = [
        f"Ours over seeds, mean ± standard deviation; in brackets the paper's numbers for "
        f"{arguments.dataset}, {arguments.shift} shift, ε = {arguments.paper_epsilon:g}, at its "
        "full size.",
        "",
        "| method | seeds | " + " | ".join(names) + " | clusters found | minority found | ε |",
        "|" + "---|" * (len(names) + 5),
    ]
    for method, printed in METHODS.items():
        results = [json.loads(p.read_text()) for p in sorted(folder.glob(f"{method}-[0-9]*.json"))]
        if not results:
            continue
        summary = over_seeds([r["metrics"] for r in results])
        cells = []
        for name in names:
            mean, spread = summary[name]
            cell = f"{mean:.2f} ± {spread:.2f}"
            if printed is not None and (printed, name) in paper:
                cell += " ({:.2f} ± {:.2f})".format(*paper[printed, name])
            cells.append(cell)
        for name in ("clusters_found", "minority_found"):
            cells.append(f"{summary[name][0]:.0%}" if name in summary else "")
        spent = [e for r in results for e in r["epsilon_by_client"]]
        star = "*" if results[0]["not_covered"] else ""
        cells.append(f"{min(spent):.3f} to {max(spent):.3f}{star}")
        lines.append(f"| {method} | {len(results)} | " + " | ".join(cells) + " |")
    lines += ["", "\\* of the updates alone: the choice of a cluster is exact and not private.", ""]
    text = "\n".join(lines)
    (folder / "table.md").write_text(text, encoding="utf-8")
    print(text)


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("run", help="run methods from seeds")
    one.add_argument("config")
    one.add_argument("--output", required=True)
    one.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    one.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    one.add_argument("--reference-epochs", type=int, default=10)
    one.add_argument("--reference-learning-rate", type=float, default=0.1)
    one.add_argument("--set", action="append", default=[], metavar="--section.key=value")
    one.set_defaults(do=run)
    other = commands.add_parser("table", help="write a table of what ran")
    other.add_argument("output")
    other.add_argument("--dataset", default="MNIST")
    other.add_argument("--shift", default="covariate")
    other.add_argument("--paper-epsilon", type=float, default=5.0)
    other.set_defaults(do=table)
    arguments = parser.parse_args()
    arguments.do(arguments)


if __name__ == "__main__":
    main()
