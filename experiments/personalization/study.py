"""Personal models and tickets: `python -m experiments.personalization.study NAME`.

NAME is `two_classes` (table 4.1), `batch_norm` (the same with ResNet-18 for few rounds) or `many`
(table 4.3, shorter). What has run is left out, and what was stopped goes on; `--seconds 3600`
starts no run later than that, and `--only method=FedAvg` narrows an axis.
"""

import argparse
import csv
import pathlib
import sys
from collections.abc import Mapping

from experiments import sweep
from experiments.personalization import tables
from experiments.sweep import Study

HERE = pathlib.Path(__file__).parent


def ltn(target: float, *options: str, name: str = "fed_ltn") -> list[str]:
    """The overrides that make FedLTN with a target."""
    words = [f"target={target}", *options]
    return [f"--algorithm.name={name}", *(f"--algorithm.options.{word}" for word in words)]


def lottery(target: float) -> list[str]:
    """The overrides that make LotteryFL with a target."""
    return ltn(target, name="lottery_fl")


# Half of the rounds are clients' own, and the other half is what is sent.
_JUMP = [
    *ltn(0.9, "jump_rounds=25", name="jump_start"),
    "--participation.everybody_first=25",
]
METHODS: Mapping[str, list[str]] = {
    "FedAvg": [],
    "FedBN": ["--algorithm.name=fedbn"],
    "FedPer": ["--algorithm.name=fedper", "--algorithm.options.head=params/Dense_2"],
    "Ditto": ["--algorithm.name=ditto"],
    "MR-MTL": ["--algorithm.name=mr_mtl"],
    "LotteryFL(0.1)": lottery(0.1),
    "LotteryFL(0.5)": lottery(0.5),
    "FedLTN(0.1)": ltn(0.1),
    "FedLTN(0.5)": ltn(0.5),
    "FedLTN(0.9)": ltn(0.9),
    "FedLTN(0.9;jumpstart)": _JUMP,
    "FedLTN(0.9;rewind)": ltn(0.9, "rewinds=true"),
}
METRICS = {
    "mean_client_accuracy": 100.0,
    "worst_client_accuracy": 100.0,
    "worst_tenth_accuracy": 100.0,
    "std_client_accuracy": 100.0,
}
_COLUMNS = {"mean_client_accuracy": "mean", "worst_client_accuracy": "minimum"}


def printed(table: str):
    """Gives the paper's figure of a method, for CIFAR-10."""
    lines = (HERE / "paper_tables.csv").read_text(encoding="utf-8").splitlines()
    rows = list(csv.DictReader(line for line in lines if not line.startswith("#")))

    def published(metric: str, values: Mapping[str, str]) -> float | None:
        for row in rows:
            is_it = row["table"] == table and row["data"] == "CIFAR-10"
            if is_it and row["algorithm"] == values["method"] and metric in _COLUMNS:
                return float(row[_COLUMNS[metric]])
        return None

    return published


def _study(name: str, table: str, words: list[str], methods: Mapping[str, list[str]]) -> Study:
    return Study(
        name=name,
        file=HERE / "two_classes.toml",
        axes={
            "method": {method: [*words, *own] for method, own in methods.items()},
            "data": {"CIFAR-10": []},
            "seed": {str(seed): [f"--run.seed={seed}"] for seed in range(3)},
        },
        rows="method",
        columns="data",
        metrics=METRICS,
        published=printed(table),
    )


_NORMED = [
    "--model.name=resnet18",
    '--model.options={norm = "batch", stem = "imagenet"}',
    "--run.rounds=10",
    "--run.checkpoint_every=10",
    "--participation.cohort_size=5",
]
_MANY = [
    "--data.num_clients=100",
    "--run.rounds=200",
    "--run.checkpoint_every=200",
    "--run.evaluate_every=50",
]
_BY_BATCH_NORM = ("FedAvg", "FedBN", "FedLTN(0.9)")
STUDIES = {
    study.name: study
    for study in (
        _study("two_classes", "4.1", [], METHODS),
        _study("batch_norm", "4.1", _NORMED, {m: METHODS[m] for m in _BY_BATCH_NORM}),
        _study(
            "many",
            "4.3",
            _MANY,
            {m: METHODS[m] for m in METHODS if not m.endswith(("jumpstart)", "FedBN"))},
        ),
    )
}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("name", choices=STUDIES)
    parser.add_argument("--output", type=pathlib.Path)
    given, rest = parser.parse_known_args(sys.argv[1:])
    output = given.output or pathlib.Path("runs") / given.name
    sweep.main(STUDIES[given.name], ["--output", str(output), *rest])
    tables.write(STUDIES[given.name], output)
