"""The study of clustered federated learning under record-level privacy: runs, tables, pictures.

python -m experiments.clustered_dp.study run CONFIG --output FOLDER --methods … [--on local]
python -m experiments.clustered_dp.study table FOLDER
python -m experiments.clustered_dp.study draw FOLDER
python -m experiments.clustered_dp.study time CONFIG --output FILE --methods …

An interrupted run resumes from its last checkpoint, with the same bits.
"""

import argparse
import json
import os
import pathlib
import platform
import shutil
import time
from typing import Any

import jax
import numpy as np

from experiments.clustered_dp import pictures
from experiments.clustered_dp.first_round import read as read_rows
from experiments.clustered_dp.grid import (
    METHODS,
    PAPER_EPSILONS,
    Point,
    points,
    true_clusters,
)
from experiments.clustered_dp.tables import as_csv, as_markdown, read_results
from experiments.heterogeneous_dp.first_round import write as write_rows
from experiments.sweep import add_workers, workers
from fedjax_dp.engine.evaluation import Evaluator, FoundClusters
from fedjax_dp.evaluation import References, summarize
from fedjax_dp.experiment import Config, Study, assemble, load_run
from fedjax_dp.experiment.reading.config_diff import REPORTED, completed, require_same, tables_of
from fedjax_dp.experiment.running.starting import new_root
from fedjax_dp.experiment.schema.config import EvaluationSection, ReferencesSection
from fedjax_dp.experiment.studies.batched_runs import Job
from fedjax_dp.experiment.studies.sweep import run_all
from fedjax_dp.experiment.studies.worker import summaries_of
from fedjax_dp.io import plots

STUDY = Study("clustered", None, {}, "", "", {})

# Metrics by the names of the source, with those of a run, and factors: accuracies in percent.
METRICS_OF_RUNS = {
    "acc_all": ("mean_client_accuracy", 100.0),
    "acc_maj": ("majority_accuracy", 100.0),
    "acc_min": ("minority_accuracy", 100.0),
    "min_acc": ("worst_client_accuracy", 100.0),
    "acc_disparity": ("accuracy_disparity", 100.0),
    "F_acc": ("accuracy_cost_disparity", 100.0),
    "F_loss": ("loss_cost_disparity", 1.0),
    "clusters_found": ("clusters_found", 1.0),
    "minority_found": ("minority_found", 1.0),
    "clients_matched": ("clients_matched", 1.0),
}


def clusters_of(point: Point, arguments: argparse.Namespace) -> tuple[Evaluator, FoundClusters]:
    """Assembles what compares a run with its true clusters and with models of the same data."""
    references = ReferencesSection(
        epochs=arguments.reference_epochs, learning_rate=arguments.reference_learning_rate
    )
    evaluation = EvaluationSection(clusters=True, references=references)
    compared = assemble(point.config.model_copy(update={"evaluation": evaluation})).evaluator
    assert compared.clusters is not None
    return compared, compared.clusters


def reference_of(point: Point, arguments: argparse.Namespace) -> References:
    """Trains the models to compare with, or reads them where they were trained on the same data."""
    path = arguments.output / f"{point.reference_name}.json"
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
        return References(np.array(found["accuracy"]), np.array(found["loss"]))
    hidden = clusters_of(point, arguments)[1].hidden
    assert hidden.references is not None
    accuracy, loss = hidden.references()
    assert accuracy is not None
    write(path, {"setting": setting, "accuracy": accuracy.tolist(), "loss": loss.tolist()})
    return References(accuracy, loss)


def job_of(point: Point, arguments: argparse.Namespace) -> Job:
    """Returns the run of a point, whose folder is kept until its result is written."""
    section = point.config.run
    changes = {"plots": False, "evaluate_every": max(section.rounds // 20, 1)}
    changes["checkpoint_every"] = min(arguments.checkpoint_every, section.rounds)
    config = point.config.model_copy(update={"run": section.model_copy(update=changes)})
    return Job(config, arguments.output / "unfinished" / point.name)


def result_of(point: Point, arguments: argparse.Namespace) -> dict[str, Any]:
    """Evaluates one method from one seed, which ran, writes what it found, returns the same."""
    config, folder = point.config, job_of(point, arguments).folder
    compared, found = clusters_of(point, arguments)
    reference = reference_of(point, arguments)
    ran = load_run(folder)
    state, accounting = ran.state, ran.accounting
    experiment, sim = ran.experiment, ran.experiment.simulation
    spent = accounting.epsilon(experiment.dp_delta, config.privacy.accountant)["record"]
    assert compared.clients is not None and compared.training is not None
    held_out, on_train = compared.clients(state), compared.training(state)
    hidden, assigned = found.hidden._replace(references=lambda: reference), found.assigned(state)
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    fairness = summarize(held_out)
    metrics = fairness | dict(hidden.metrics(assigned, held_out, on_train))
    result: dict[str, Any] = {
        "method": point.method,
        "seed": config.run.seed,
        "epsilon": config.privacy.record.epsilon,
        "setting": tables_of(point.setting),
        "changes": list(point.words),
        "metrics": {
            ours: factor * metrics[name]
            for ours, (name, factor) in METRICS_OF_RUNS.items()
            if name in metrics
        },
        "client_accuracy": held_out.client_accuracy.tolist(),
        "clusters": None if assigned is None else assigned.tolist(),
        "epsilon_by_client": spent.tolist(),
        "dp_delta": experiment.dp_delta["record"],
        "noise_multiplier": np.unique(np.asarray(sim.hyper.local.noise_multiplier)).tolist(),
        "not_covered": sim.algorithm.claims.not_covered,
        "stages": [row["stage"] for row in ran.metrics],
        "train_loss_by_round": [row["train_loss"] for row in ran.metrics],
        "accuracy_by_round": [
            round(row["mean_client_accuracy"], 5)
            for row in ran.metrics
            if "mean_client_accuracy" in row
        ],
        "seconds": summary["seconds"],
        "seconds_compiling": summary["seconds_compiling"],
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
            "true_clusters": true_clusters(config),
            "features": server.features,
            "means": server.means[:count],
            "radii": server.radii[:count],
        }
        result["mixture"] = {k: np.round(v, 5).tolist() for k, v in mixture.items()}
    write(arguments.output / f"{point.name}.json", result)
    shutil.rmtree(folder)
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
    started, missing = time.perf_counter(), list[Point]()
    for point in grid:
        done = arguments.output / f"{point.name}.json"
        if done.is_file():
            found = json.loads(done.read_text(encoding="utf-8"))
            saved = completed(found["setting"], str(done))
            require_same(done, saved, tables_of(point.setting), REPORTED)
            require_same(done, {"changes": found["changes"]}, {"changes": list(point.words)})
            print(f"{done} is there already")
        else:
            missing.append(point)
    with workers(arguments, arguments.output) as cluster:
        # This process runs one after another, and writes the result of each at its end.
        for some in [[point] for point in missing] if cluster is None else [missing]:
            left = arguments.seconds - (time.perf_counter() - started)
            if left < 0:
                break
            for point in some:
                # References of other settings are refused before any work.
                reference_of(point, arguments)
            jobs = {i: job_of(point, arguments) for i, point in enumerate(some)}
            names = [point.name for point in some]
            run_all(STUDY, jobs, names, print, left, cluster=cluster)
            for place, summary in summaries_of(jobs).items():
                if summary["ended"] != "finished":
                    raise SystemExit(f"{jobs[place].folder} ended early ({summary['ended']})")
                point = some[place]
                result = result_of(point, arguments)
                shown = {k: round(v, 2) for k, v in result["metrics"].items()}
                print(f"{point.name}: {shown} in {result['seconds']:.0f} s", flush=True)


def table(arguments: argparse.Namespace) -> None:
    """Writes a table of all methods over their seeds, the paper's numbers beside ours."""
    folder = pathlib.Path(arguments.output)
    results = read_results(folder)
    text = as_markdown(results)
    (folder / "table.md").write_text(text, encoding="utf-8")
    (folder / "runs.csv").write_text(as_csv(results), encoding="utf-8")
    print(text)


def seconds_of(config: Config, rounds: int) -> dict[str, float]:
    """Measures the seconds of the first round, and of each of some later ones."""
    sim = assemble(config).simulation
    key = new_root(config.run)
    state = jax.block_until_ready(sim.compile(sim.init(key), key))
    seconds = []
    for count in (1, rounds):
        started = time.perf_counter()
        state = jax.block_until_ready(sim.run(state, key, count)[0])
        seconds.append((time.perf_counter() - started) / count)
    return {"first_round": seconds[0], "later_rounds": seconds[1]}


def measure(arguments: argparse.Namespace) -> None:
    """Measures how long a round of each method takes, as rows of a file that has none of it."""
    path = pathlib.Path(arguments.output)
    rows = read_rows(path)
    for point in points(arguments.config, arguments.methods, [], [0], arguments.set):
        known = {"setting": pathlib.Path(arguments.config).stem, "method": point.method}
        if any(row.items() >= known.items() for row in rows):
            continue
        seconds = seconds_of(point.config, arguments.rounds)
        rounds = {"rounds": point.config.run.rounds}
        hours = (seconds["first_round"] + (rounds["rounds"] - 1) * seconds["later_rounds"]) / 3600
        rows.append(known | rounds | seconds | {"hours": hours})
        write_rows(path, rows)
        print(rows[-1], flush=True)


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
    one.add_argument("--output", type=pathlib.Path, required=True)
    one.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    one.add_argument(
        "--epsilons",
        nargs="+",
        type=float,
        default=[],
        help=f"that of the configuration, if not given; the paper has {PAPER_EPSILONS}",
    )
    one.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    one.add_argument("--seconds", type=float, default=float("inf"), help="start nothing later")
    one.add_argument(
        "--checkpoint-every",
        type=int,
        default=10,
        help="rounds after which an interrupted run resumes, from OUTPUT/unfinished",
    )
    one.add_argument("--reference-epochs", type=int, default=10)
    one.add_argument("--reference-learning-rate", type=float, default=0.1)
    one.add_argument("--set", action="append", default=[], metavar="--section.key=value")
    add_workers(one)
    one.set_defaults(do=run)
    other = commands.add_parser("table", help="write a table of what ran")
    other.add_argument("output")
    other.set_defaults(do=table)
    timed = commands.add_parser("time", help="measure how long rounds take")
    timed.add_argument("config")
    timed.add_argument("--output", required=True)
    timed.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    timed.add_argument("--rounds", type=int, default=2, help="later rounds that are measured")
    timed.add_argument("--set", action="append", default=[], metavar="--section.key=value")
    timed.set_defaults(do=measure)
    drawn = commands.add_parser("draw", help="draw accuracy by ε and the mixtures of what ran")
    drawn.add_argument("output")
    drawn.set_defaults(do=draw)
    arguments = parser.parse_args(words)
    try:
        arguments.do(arguments)
    except (ValueError, OSError) as error:
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    main()
