"""The tables of gradient masked averaging: `python -m experiments.generalization.masking NAME`.

NAME is a study, such as `mnist_non_iid`, or `non_iid`, `iid`, `femnist`, `lenet`, `long`, `small`
or `all` for several. What has run is left out, and what was stopped continues; `--seconds 3600`
starts no run later than that.
"""

import argparse
import itertools
import json
import pathlib
import sys
from collections.abc import Mapping, Sequence

from experiments import sweep
from experiments.generalization import paper, tables
from experiments.sweep import Study

HERE = pathlib.Path(__file__).parent
SEEDS = {str(seed): [f"--run.seed={seed}"] for seed in range(3)}
METRICS = {"test_accuracy_last_ten": 100.0}
# In the colours of other digits a trained model is right one time in eight: it goes by colour.
OPTIONS = {
    "fedcmnist": ["--data.options.test_colors=unseen"],
    # The paper's accuracies near 99 % are of digits; it does not say so.
    "femnist": ["--data.options.only_digits=true"],
}
PARTITIONS = {
    "non_iid": ["--data.partition=majority_classes"],
    "iid": ["--data.partition=iid"],
    # Ten of all writers a round; LEAF's files can hold other writers for testing, the copy cannot.
    "by_writer": [
        "--data.partition=natural",
        "--data.options.source=leaf",
        "--participation.sampler=fixed_size",
        "--participation.cohort_size=10",
    ],
}
THRESHOLD = 0.4


def masked(threshold: float, *options: str) -> list[str]:
    """The overrides that mask an algorithm's steps."""
    words = [f"threshold={threshold}", *options]
    # Clients hold the same number of images, and weigh the same in SCAFFOLD as elsewhere.
    return [
        "--algorithm.aggregator=gradient_mask",
        *(f"--algorithm.aggregator_options.{word}" for word in words),
    ]


AGGREGATIONS = {"AVG": [], "GMA": masked(THRESHOLD)}


def words_of(algorithm: str, found: paper.Rates) -> list[str]:
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
        return paper.accuracy(data, distribution, values["algorithm"], values["aggregation"])

    return published


def _table(data: str, distribution: str) -> Study:
    common = [f"--data.name={data}", *PARTITIONS[distribution], *OPTIONS.get(data, [])]
    return Study(
        name=f"{data}_{distribution}",
        file=HERE / "image.toml",
        axes={
            "algorithm": {
                one: [*common, *words_of(one, paper.rates(data, distribution, one))]
                for one in paper.ALGORITHMS
            },
            "aggregation": AGGREGATIONS,
            "seed": SEEDS,
        },
        rows="algorithm",
        columns="aggregation",
        metrics=METRICS,
        published=printed(data, distribution),
    )


TABLES = {study.name: study for study in itertools.starmap(_table, paper.CELLS)}
# Its files are not among those that the tables were run with.
_FEMNIST = [name for name in TABLES if name.startswith("femnist")]
_FMNIST = [
    "--data.name=fashion_mnist",
    *words_of("FedAvg", paper.rates("fashion_mnist", "non_iid", "FedAvg")),
]


def printed_of(table: str, axis: str):
    """Gives the paper's accuracy of a table with one variable."""

    def published(metric: str, values: Mapping[str, str]) -> float | None:
        return paper.accuracy_of(table, values[axis], values["aggregation"])

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
    "rates": _over(
        "rates",
        "rates",
        {
            f"{server:g};{local:g}": [
                f"--algorithm.options.server_learning_rate={server:g}",
                f"--training.learning_rate={local:g}",
            ]
            for server in (0.01, 0.1, 1, 1.5, 2)
            for local in (0.001, 0.01, 0.05, 0.1, 1)
        },
        published=printed_of("B.7", "rates"),
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
# Table B.3 without momentum; with it, it is part of tables 3.1 and 3.2.
STUDIES["momentum"] = _over("momentum", "cell", {})._replace(
    axes={
        "cell": {
            name: [
                *TABLES[name].axes["algorithm"]["FedAvg"],
                "--training.optimizer_options={momentum=0.0}",
            ]
            for name in TABLES
            if name.startswith(("mnist", "fashion_mnist", "cifar10"))
        },
        "aggregation": AGGREGATIONS,
        "seed": SEEDS,
    }
)
# Section 3.5.4: one step a round; the last ten evaluations are of the last 200 rounds.
STUDIES["convex"] = _over("convex", "distribution", {})._replace(
    axes={
        "distribution": {
            distribution: [
                *TABLES[f"mnist_{distribution}"].axes["algorithm"]["FedAvg"],
                "--model.name=logistic_regression",
                "--model.options={}",
                "--training.num_steps=1",
                "--run.rounds=2000",
                "--run.evaluate_every=20",
                "--run.checkpoint_every=1000",
                "--evaluation.training=true",
            ]
            for distribution in ("iid", "non_iid")
        },
        "aggregation": AGGREGATIONS,
        "seed": SEEDS,
    },
    metrics=METRICS | {"training_set_accuracy": 100.0},
)
# Figures 3-2 to 3-5: accuracy on the training part too, after every round.
STUDIES[tables.CURVES] = TABLES["fedcmnist_non_iid"]._replace(
    name=tables.CURVES,
    axes={
        **TABLES["fedcmnist_non_iid"].axes,
        "algorithm": {
            name: [*words, "--evaluation.training=true"]
            for name, words in TABLES["fedcmnist_non_iid"].axes["algorithm"].items()
        },
    },
)
# Table B.4, much reduced: a small network, and 16 local steps in place of an epoch of 157.
SMALL = [f"cifar10_{distribution}_small" for distribution in ("iid", "non_iid")]
for _name in SMALL:
    _whole = TABLES[_name.removesuffix("_small")]
    STUDIES[_name] = _whole._replace(
        name=_name,
        axes={
            "norm": {
                norm: [
                    "--model.name=experiments.generalization.small_resnet:small_resnet",
                    f"--model.options={{norm = '{norm}'}}",
                    "--training.num_steps=16",
                ]
                for norm in ("batch", "group")
            },
            **_whole.axes,
        },
    )


def _fedavg_with(name: str, *words: str) -> Study:
    """FedAvg of the non-IID table of a study's data, with other settings."""
    table = TABLES[f"{name.rpartition('_')[0]}_non_iid"]
    fedavg = [*table.axes["algorithm"]["FedAvg"], *words]
    return table._replace(name=name, axes={**table.axes, "algorithm": {"FedAvg": fedavg}})


# Tables 3.1 and 3.2 with the network of the thesis.
LENET = [f"{data}_lenet" for data in ("mnist", "fedcmnist")]
STUDIES |= {n: _fedavg_with(n, "--model.name=lenet5", "--model.options={}") for n in LENET}
# Five times as long, as far as the specification goes: what is left of a gap at round 40.
LONG = [f"{data}_long" for data in ("mnist", "fashion_mnist")]
STUDIES |= {n: _fedavg_with(n, "--run.rounds=200", "--run.checkpoint_every=100") for n in LONG}
GROUPS = {
    "long": LONG,
    "small": SMALL,
    "lenet": LENET,
    "non_iid": [n for n in TABLES if n.endswith("_non_iid") and n not in _FEMNIST],
    "iid": [n for n in TABLES if not n.endswith("_non_iid") and n not in _FEMNIST],
    "femnist": _FEMNIST,
    "all": [name for name in STUDIES if name not in _FEMNIST],
}


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
    if name in PARTITIONS:
        text = tables.of_masking(tables.runs_in(options.output), name)
        (options.output / f"{name}.md").write_text(text, encoding="utf-8")
        print(text)
    seconds = [json.loads((options.output / one / "runs.json").read_text()) for one in GROUPS[name]]
    total = sum(run["seconds"] for runs in seconds for run in runs)
    print(f"runs took {total:.0f} s")


if __name__ == "__main__":
    main(sys.argv[1:])
