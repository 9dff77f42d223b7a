"""The tables of gradient masked averaging: `python -m experiments.generalization.masking NAME`.

NAME is a study, such as `mnist_non_iid`, or `non_iid`, `iid` or `all` for several. What has run is
left out, and what was stopped goes on; `--seconds 3600` starts no run later than that.
"""

import argparse
import csv
import functools
import itertools
import json
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from experiments import sweep
from experiments.sweep import Study

HERE = pathlib.Path(__file__).parent
SEEDS = {str(seed): [f"--run.seed={seed}"] for seed in range(3)}
METRICS = {"test_accuracy_last_ten": 100.0}
# Ours and the paper's names of data; table 3.1 or 3.2 has the accuracies.
DATA = {
    "mnist": "MNIST",
    "fashion_mnist": "FMNIST",
    "fedcmnist": "FedCMNIST",
    "fedrotmnist": "FedRotMNIST",
    "cifar10": "CIFAR-10",
}
# In the colours of other digits a trained model is right one time in eight: it goes by colour.
OPTIONS = {"fedcmnist": ["--data.options.test_colors=unseen"]}
DISTRIBUTIONS = {"non_iid": ("Non-IID", "majority_classes"), "iid": ("IID", "iid")}
ALGORITHMS = ("FedAvg", "FedProx", "SCAFFOLD", "FedAdam", "FedYogi")
THRESHOLD = 0.4


class Rates(NamedTuple):
    """The paper's step sizes of a cell."""

    server: float
    local: float


@functools.cache
def _rows(name: str) -> list[dict[str, str]]:
    with (HERE / name).open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def rates(data: str, distribution: str, algorithm: str) -> Rates:
    """Gives the best step sizes of tables B.5 and B.6, the same for both aggregations."""
    (row,) = (
        row
        for row in _rows("paper_rates.csv")
        if (row["dataset"], row["distribution"], row["algorithm"])
        == (data, distribution, algorithm)
    )
    return Rates(float(row["eta_g"]), float(row["eta_l"]))


def masked(threshold: float, *options: str) -> list[str]:
    """The overrides that mask an algorithm's steps."""
    words = [f"threshold={threshold}", *options]
    # Clients hold the same number of images, and weigh the same in SCAFFOLD as elsewhere.
    return [
        "--algorithm.aggregator=gradient_mask",
        *(f"--algorithm.aggregator_options.{word}" for word in words),
    ]


AGGREGATIONS = {"AVG": [], "GMA": masked(THRESHOLD)}


def words_of(algorithm: str, found: Rates) -> list[str]:
    """The overrides that make an algorithm with its rates.

    Control variates are computed from plain steps: SCAFFOLD takes them without momentum, ten times
    as long, which is what a momentum of 0.9 comes to.
    """
    is_plain = algorithm == "SCAFFOLD"
    local = found.local * (10 if is_plain else 1)
    return [
        f"--algorithm.name={algorithm.lower()}",
        f"--algorithm.options.server_learning_rate={found.server}",
        f"--training.learning_rate={local:g}",
        *([] if is_plain else ["--training.optimizer_options={momentum=0.9}"]),
        *(["--algorithm.options.mu=1.0"] if algorithm == "FedProx" else []),
    ]


def printed(data: str, distribution: str):
    """Gives the paper's accuracy of a cell of table 3.1 or 3.2."""

    def published(metric: str, values: Mapping[str, str]) -> float | None:
        cell = (DATA[data], distribution, values["algorithm"], values["aggregation"])
        for row in _rows("paper_tables.csv"):
            names = (row["dataset"], row["distribution"], row["algorithm"], row["aggregation"])
            if row["source_table"] in ("3.1", "3.2") and names == cell:
                return float(row["value"])
        return None

    return published


def _table(data: str, distribution: str) -> Study:
    name, partition = DISTRIBUTIONS[distribution]
    common = [f"--data.name={data}", f"--data.partition={partition}", *OPTIONS.get(data, [])]
    return Study(
        name=f"{data}_{distribution}",
        file=HERE / "image.toml",
        axes={
            "algorithm": {
                one: [*common, *words_of(one, rates(DATA[data], name, one))] for one in ALGORITHMS
            },
            "aggregation": AGGREGATIONS,
            "seed": SEEDS,
        },
        rows="algorithm",
        columns="aggregation",
        metrics=METRICS,
        published=printed(data, name),
    )


TABLES = {
    study.name: study for study in itertools.starmap(_table, itertools.product(DATA, DISTRIBUTIONS))
}
_FMNIST = [
    "--data.name=fashion_mnist",
    *words_of("FedAvg", rates("FMNIST", "Non-IID", "FedAvg")),
]


def printed_of(table: str, axis: str):
    """Gives the paper's accuracy of a table with one variable."""

    def published(metric: str, values: Mapping[str, str]) -> float | None:
        for row in _rows("paper_tables.csv"):
            cell = (row["source_table"], row["variable_value"], row["aggregation"])
            if cell == (table, values[axis], values["aggregation"]):
                return float(row["value"])
        return None

    return published


def _over(name: str, axis: str, values: Mapping[str, list[str]], **changes) -> Study:
    return Study(
        name=name,
        file=HERE / "image.toml",
        axes={
            axis: {value: [*_FMNIST, *words] for value, words in values.items()},
            "aggregation": AGGREGATIONS,
            "seed": SEEDS,
        },
        rows=axis,
        columns="aggregation",
        metrics=METRICS,
    )._replace(**changes)


# Further studies, all on Fashion-MNIST non-IID with FedAvg. What masking does beside shortening a
# step shows beside plain averaging whose server takes shorter steps.
STUDIES = TABLES | {
    "epochs": _over(
        "epochs",
        "epochs",
        {str(n): [f"--training.num_epochs={n}"] for n in (3, 5, 10, 20)},
        published=printed_of("B.9", "epochs"),
    ),
    "clients": _over(
        "clients",
        "clients",
        {str(n): [f"--data.num_clients={n}"] for n in (10, 50, 100, 250)},
        published=printed_of("B.8", "clients"),
    ),
    "threshold": _over("threshold", "mask", {})._replace(
        axes={
            "mask": {
                mask: [*_FMNIST, f"--algorithm.aggregator_options.mask={mask}"]
                for mask in ("soft", "hard")
            },
            "aggregation": {str(tau): masked(tau) for tau in (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)},
            "seed": SEEDS,
        }
    ),
    "step_length": _over("step_length", "rounds", {})._replace(
        axes={
            "rounds": {str(n): [*_FMNIST, f"--run.rounds={n}"] for n in (40, 120)},
            "aggregation": AGGREGATIONS
            | {
                f"AVG x{rate:g}": [f"--algorithm.options.server_learning_rate={rate}"]
                for rate in (0.75, 0.5)
            }
            | {
                f"{name} x{rate:g}": [
                    *words,
                    f"--algorithm.options.server_learning_rate={rate}",
                ]
                for rate in (1.5, 2.0)
                for name, words in AGGREGATIONS.items()
            },
            "seed": SEEDS,
        }
    ),
}
GROUPS = {
    "non_iid": [name for name in TABLES if name.endswith("_non_iid")],
    "iid": [name for name in TABLES if not name.endswith("_non_iid")],
    "all": list(STUDIES),
}


def compare(output: pathlib.Path, names: Sequence[str]) -> str:
    """Sets the tables of a group side by side, and counts the cells in which GMA is no worse."""
    lines = ["| data | algorithm | AVG | GMA | GMA − AVG | paper: AVG | GMA |", "|---" * 7 + "|"]
    is_no_worse = []
    for name in names:
        file = output / name / "table.csv"
        if not file.is_file():
            continue
        with file.open(encoding="utf-8") as opened:
            entries = list(csv.DictReader(opened))
        for algorithm in ALGORITHMS:
            cell = {e["aggregation"]: e for e in entries if e["algorithm"] == algorithm}
            if len(cell) < 2:
                continue
            avg, gma = (float(cell[kind]["mean"]) for kind in ("AVG", "GMA"))
            is_no_worse.append(gma >= avg)
            spread = [f" ± {float(e['std']):.2f}" if e["std"] else "" for e in cell.values()]
            paper = " | ".join(cell[kind]["published"] for kind in ("AVG", "GMA"))
            shown = f"{avg:.2f}{spread[0]} | {gma:.2f}{spread[1]} | {gma - avg:+.2f} | {paper}"
            lines.append(f"| {name} | {algorithm} | {shown} |")
    count = f"GMA is at least as good in {sum(is_no_worse)} of {len(is_no_worse)} cells."
    return "\n".join([*lines, "", count, ""])


def main(arguments: Sequence[str]) -> None:
    """Runs the study or the group that the first word names."""
    known = [*STUDIES, *GROUPS]
    if not arguments or arguments[0] not in known:
        raise SystemExit(f"the first word must be one of {', '.join(known)}")
    name, *words = arguments
    if name in STUDIES:
        sweep.main(STUDIES[name], words)
        return
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("runs/generalization"))
    options, rest = parser.parse_known_args(words)
    for one in GROUPS[name]:
        sweep.main(STUDIES[one], [*rest, f"--output={options.output / one}"])
    tables = [one for one in GROUPS[name] if one in TABLES]
    text = compare(options.output, tables)
    (options.output / f"{name}.md").write_text(text, encoding="utf-8")
    seconds = [json.loads((options.output / one / "runs.json").read_text()) for one in GROUPS[name]]
    total = sum(run["seconds"] for runs in seconds for run in runs)
    print(text, f"runs took {total:.0f} s", sep="\n")


if __name__ == "__main__":
    main(sys.argv[1:])
