"""Personal models and tickets: `python -m experiments.personalization.study NAME`.

NAME is a table of the thesis at its length (`table_4_1`, `table_4_3`, `table_4_4`), or what two
cores can do of it: `two_classes` (4.1 with LeNet-5), `batch_norm` (4.1 with ResNet-18 for twenty
rounds), `longer` (LeNet-5 for four times the rounds), `many` (4.3, shorter) or `mixtures` (4.4 with
LeNet-5). What has run is left out, and what was stopped continues; `--seconds 3600` starts no run
later than that, `--only method=FedAvg` narrows an axis.
"""

import argparse
import csv
import pathlib
import sys
from collections.abc import Iterable, Mapping, Sequence

from experiments import sweep
from experiments.personalization import tables
from experiments.sweep import Study

HERE = pathlib.Path(__file__).parent


def ltn(target: float, *options: str, name: str = "fed_ltn") -> list[str]:
    """The overrides that make FedLTN with a target."""
    words = [f"target={target}", *options]
    return [f"--algorithm.name={name}", *(f"--algorithm.options.{word}" for word in words)]


# FedLTN's paper runs LotteryFL with what its authors use: batches of 32, 60 local epochs.
_OF_LOTTERY = ["--training.batch_size=32", "--training.num_epochs=60"]


def lottery(target: float) -> list[str]:
    """The overrides that make LotteryFL with a target, by its own paper's batches and epochs."""
    return [*ltn(target, name="lottery_fl"), *_OF_LOTTERY]


def jump_start(rounds: int) -> list[str]:
    """The overrides that put so many rounds of clients on their own first."""
    words = ltn(0.9, f"jump_rounds={rounds}", name="jump_start")
    return [*words, f"--participation.full_participation_first={rounds}"]


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
    # Half of the rounds are clients' own, and the other half is what is sent.
    "FedLTN(0.9;jumpstart)": jump_start(25),
    "FedLTN(0.9;rewind)": ltn(0.9, "rewinds=true"),
}
METRICS = {
    f"{name}{when}": 100.0
    for name in (
        "mean_client_accuracy",
        "worst_client_accuracy",
        "worst_tenth_accuracy",
        "std_client_accuracy",
    )
    for when in ("", tables.AFTER)
}
_COLUMNS = {"mean_client_accuracy": "mean", "worst_client_accuracy": "minimum"}


def printed(table: str):
    """Gives the paper's figure of a method on some data."""
    lines = (HERE / "paper_tables.csv").read_text(encoding="utf-8").splitlines()
    rows = list(csv.DictReader(line for line in lines if not line.startswith("#")))

    def published(metric: str, values: Mapping[str, str]) -> float | None:
        data, _, alpha = values["data"].partition(" α=")
        for row in rows:
            is_it = (row["table"], row["data"], row["algorithm"]) == (table, data, values["method"])
            is_it = is_it and (not alpha or row["setting"].endswith(f"alpha={alpha}"))
            column = _COLUMNS.get(metric.removesuffix(tables.AFTER))
            if is_it and column is not None:
                return float(row[column])
        return None

    return published


CIFAR = {"CIFAR-10": []}
WITH_TINY = {
    **CIFAR,
    # Ten classes, drawn once.
    "TinyImageNet": ["--data.name=tiny_imagenet", "--data.options={num_classes = 10}"],
}
MIXTURES = {
    f"CIFAR-10 α={alpha}": [
        "--data.partition=class_mixtures",
        f"--data.partition_options={{alpha = {alpha}}}",
    ]
    for alpha in (0.5, 0.7)
}


def _study(
    name: str,
    file: str,
    table: str,
    methods: Iterable[str],
    words: Sequence[str] = (),
    *,
    jump_rounds: int = 25,
    data: Mapping[str, list[str]] = CIFAR,
    more: Mapping[str, list[str]] = {},
) -> Study:
    how = {**METHODS, "FedLTN(0.9;jumpstart)": jump_start(jump_rounds)}
    return Study(
        name=name,
        file=HERE / file,
        axes={
            "method": {m: [*words, *how[m], *more.get(m, [])] for m in methods},
            "data": data,
            "seed": {str(seed): [f"--run.seed={seed}"] for seed in range(3)},
        },
        rows="method",
        columns="data",
        metrics=METRICS,
        published=printed(table),
    )


_NORMED = ["--run.rounds=20", "--run.checkpoint_every=10", "--run.evaluate_every=10"]
_MANY = ["--run.rounds=60", "--run.checkpoint_every=60", "--run.evaluate_every=20"]
# Sixty more epochs at each of a hundred clients take as long as twenty rounds.
_SELDOM = {f"LotteryFL({x})": ["--run.evaluate_every=60"] for x in (0.1, 0.5)}
_LONGER = ["--run.rounds=200", "--run.checkpoint_every=100", "--run.evaluate_every=25"]
_OF_4_1 = [m for m in METHODS if m not in ("FedPer", "Ditto", "MR-MTL")]
_OF_4_3 = ["FedAvg", "LotteryFL(0.1)", "LotteryFL(0.5)", *(f"FedLTN({x})" for x in (0.1, 0.5, 0.9))]
_OF_4_4 = ["LotteryFL(0.5)", "FedLTN(0.5)", "FedLTN(0.9)"]
STUDIES = {
    study.name: study
    for study in (
        _study("table_4_1", "table_4_1.toml", "4.1", _OF_4_1, data=WITH_TINY),
        _study("table_4_3", "table_4_3.toml", "4.3", _OF_4_3),
        _study("table_4_4", "table_4_1.toml", "4.4", _OF_4_4, data=MIXTURES),
        _study("two_classes", "two_classes.toml", "4.1", METHODS),
        _study("longer", "two_classes.toml", "4.1", ("FedAvg", "FedLTN(0.9)"), _LONGER),
        _study("batch_norm", "table_4_1.toml", "4.1", _OF_4_1, _NORMED, jump_rounds=10),
        _study("many", "table_4_3.toml", "4.3", _OF_4_3, _MANY, more=_SELDOM),
        _study("mixtures", "two_classes.toml", "4.4", _OF_4_4, data=MIXTURES),
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
