"""The chapter's figures of networks: `python -m experiments.splitting.cnn STUDY`.

MNIST is reduced; of figure 2.3 (CIFAR-10) there is the whole study and a reduced one. Beside the
tables of every sweep, `curves.csv` has the accuracies by round.
"""

import argparse
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from experiments import sweep
from experiments.heterogeneous_dp.first_round import write
from fedjax_dp.algorithms import schedules
from fedjax_dp.experiment import grid_points
from fedjax_dp.io.logbook import read_metrics

HERE = pathlib.Path(__file__).parent
ACCURACY = {"test_accuracy": 100.0}
LOSS = ACCURACY | {"test_loss": 1.0}


def _options(**options: float | str | bool) -> list[str]:
    return [f"--algorithm.options.{name}={value!s}" for name, value in options.items()]


def _method(name: str, **options: float | str) -> list[str]:
    return [f"--algorithm.name={name}", *_options(**options)]


FEDAVG = _method("splitting", client_map="gradient")
METHODS: Mapping[str, list[str]] = {
    "FedAvg": FEDAVG,
    "FedProx": _method("splitting", step_size=1.0),
    "FedRP": _method("fedrp", step_size=1.0),
    "FedSplit": _method("fedsplit", step_size=1.0),
    "FedPi": _method("fedpi", step_size=1.0),
}
SPLITS = {
    "IID": ["--data.partition=iid"],
    "at most 6 classes": [
        "--data.partition=shards",
        "--data.partition_options.shards_per_client=6",
    ],
    "at most 2 classes": [
        "--data.partition=shards",
        "--data.partition_options.shards_per_client=2",
    ],
}
# The chapter's figures are means over four.
SEEDS = {str(seed): [f"--run.seed={seed}"] for seed in range(4)}
_FIVE_STEPS = [
    "--training.num_steps=5",
    "--data.num_clients=20",
    "--data.client_test_share=0.2",
]
_SHORT = ["--run.rounds=10", "--run.evaluate_every=10", "--run.checkpoint_every=10"]
MIDDLE = {"at most 6 classes": SPLITS["at most 6 classes"]}


def _shrinking(curve: schedules.Curve) -> list[str]:
    """FedProx with steps that shrink from 100; the inverse of the rate 0.1 grows as theirs does."""
    steps = [float(curve(t)) for t in range(25)]
    rates = [1 / (1 + 0.1 * (1 / step - 1) / 100) for step in steps]
    keys = {"algorithm.options.step_size": steps, "training.learning_rate": rates}
    return _method("splitting", step_size=100.0) + [
        f"--schedules.{key}={{curve='list', factors={factors}}}" for key, factors in keys.items()
    ]


def _steps() -> dict[str, list[str]]:
    """k and η of figures 2.3 and 2.4 (right part), two lines of the same c = η (k − 1)."""
    found = {}
    for line in (0.2, 0.8):
        for k in (3, 5, 17):
            words = [f"--training.num_steps={k}", f"--training.learning_rate={line / (k - 1):g}"]
            found[f"k={k} c={line:g}"] = [*FEDAVG, *words]
    return found


# How a proximal step is solved: as elsewhere, and by more and shorter inner steps.
INNER = {
    "k=10": [],
    "k=60": ["--training.num_steps=60"],
    "k=60 rate 0.03": ["--training.num_steps=60", "--training.learning_rate=0.03"],
}


STUDIES = {
    study.name: study
    for study in (
        sweep.Study(
            name="heterogeneity",
            file=HERE / "mnist.toml",
            axes={
                "method": {"FedAvg k=1": [*FEDAVG, "--training.num_steps=1"]} | dict(METHODS),
                "split": SPLITS,
                "seed": SEEDS,
            },
            rows="method",
            columns="split",
            metrics=ACCURACY,
        ),
        sweep.Study(
            name="acceleration",
            file=HERE / "mnist.toml",
            axes={
                "method": METHODS,
                "memory": {"none": [], "τ=10": ["--acceleration.memory=10"]},
                "split": MIDDLE,
                "seed": SEEDS,
            },
            rows="method",
            columns="memory",
            metrics=ACCURACY,
        ),
        sweep.Study(
            name="large_batches",
            file=HERE / "mnist.toml",
            axes={
                "method": {
                    "FedAvg": [*METHODS["FedAvg"], "--training.batch_size=600", "--run.rounds=15"]
                },
                "memory": {"none": [], "τ=3": ["--acceleration.memory=3"]},
                "split": MIDDLE,
                "seed": SEEDS,
            },
            rows="method",
            columns="memory",
            metrics=ACCURACY,
        ),
        # Figure B.2: the chapter's clients, whose 2,400 images for training are five batches.
        sweep.Study(
            name="batches",
            file=HERE / "mnist.toml",
            axes={
                "method": METHODS,
                "batch": {
                    "500": ["--training.batch_size=500", *_FIVE_STEPS],
                    "whole": ["--training.batch_size=2400", *_FIVE_STEPS],
                },
                "split": {"IID": SPLITS["IID"]},
                "seed": SEEDS,
            },
            rows="method",
            columns="batch",
            metrics=ACCURACY,
        ),
        sweep.Study(
            name="inner_steps",
            file=HERE / "mnist.toml",
            axes={
                "method": {name: METHODS[name] for name in ("FedPi", "FedSplit")},
                "inner": INNER,
                "split": MIDDLE,
                "seed": SEEDS,
            },
            rows="method",
            columns="inner",
            metrics=ACCURACY,
        ),
        sweep.Study(
            name="schedules",
            file=HERE / "mnist.toml",
            axes={
                "step": {
                    "η=0.1": _method("splitting", step_size=0.1),
                    "η=1": _method("splitting", step_size=1.0),
                    "η=100": _method("splitting", step_size=100.0),
                    "100 over ln t": _shrinking(schedules.inverse_log()),
                    "100 over t": _shrinking(schedules.inverse()),
                    "FedAvg": FEDAVG,
                },
                "split": MIDDLE,
                "seed": SEEDS,
            },
            rows="step",
            columns="split",
            metrics=ACCURACY,
        ),
        sweep.Study(
            name="local_steps",
            file=HERE / "mnist.toml",
            axes={"steps": _steps(), "split": MIDDLE, "seed": SEEDS},
            rows="steps",
            columns="split",
            metrics=LOSS,
        ),
        sweep.Study(
            name="cifar10",
            file=HERE / "cifar10.toml",
            axes={
                "epochs": {f"k={k}": [f"--training.num_epochs={k}"] for k in (1, 5, 20)},
                "seed": SEEDS,
            },
            rows="epochs",
            columns="epochs",
            metrics=LOSS,
        ),
        sweep.Study(
            name="cifar10_reduced",
            file=HERE / "cifar10.toml",
            axes={
                "steps": {f"k={k}": [f"--training.num_steps={k}", *_SHORT] for k in (5, 20, 40)},
                "seed": SEEDS,
            },
            rows="steps",
            columns="steps",
            metrics=LOSS,
        ),
    )
}


def main(arguments: Sequence[str]) -> None:
    """Runs the study that the first word names; the rest is as for every sweep."""
    if not arguments or arguments[0] not in STUDIES:
        raise SystemExit(f"the first word must be one of {', '.join(STUDIES)}")
    study = STUDIES[arguments[0]]
    sweep.main(study, arguments[1:])
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("runs") / study.name)
    output = parser.parse_known_args(arguments[1:])[0].output
    if rows := curves_of(study, output):
        write(output / "curves.csv", rows)


def curves_of(study: sweep.Study, output: pathlib.Path) -> list[dict[str, Any]]:
    """Reads the accuracy in percent of each scored round, of all points that have run."""
    rows: list[dict[str, Any]] = []
    for point in grid_points(study):
        ran = output / point.folder
        for entry in read_metrics(ran) if (ran / "summary.json").exists() else ():
            if "test_accuracy" in entry:
                accuracy = f"{100 * entry['test_accuracy']:.2f}"
                rows.append({**point.values, "round": entry["round"], "accuracy": accuracy})
    return rows


if __name__ == "__main__":
    main(sys.argv[1:])
