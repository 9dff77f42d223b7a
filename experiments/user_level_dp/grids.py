"""The paper's tables and sweeps as grids: budgets, λ, c, S, q, Q, label skew.

    python -m experiments.user_level_dp.grids NAME [--on CONFIG] --output DIR [--only AXIS=A,B] …

An `--on` after the configuration names workers, such as ray.

`table1`, `table2` and `table3` start from the paper's settings and show its numbers beside ours as
long as no further word changes them; all other grids start from any configuration of this folder.
"""

import csv
import pathlib
import sys
from collections.abc import Callable, Mapping, Sequence

from experiments.sweep import Study, main

HERE = pathlib.Path(__file__).parent
# Words that change where and how fast something runs, and not what.
_HARMLESS = ("--data.data_dir", "--execution", "--output", "--only", "--seconds")

MODELS = {
    "CNN-2-Layers": ("--model.options.dropout=[0.25, 0.5]",),
    "ResNet-18": ("--model.name=resnet18",),
}
DP_FEDAVG = ("--algorithm.name=dp_fedavg",)


def regularised(strength: float, sparsity: float) -> tuple[str, ...]:
    return (
        "--algorithm.name=blur_lus",
        f"--algorithm.options.strength={strength}",
        f"--algorithm.options.sparsity={sparsity}",
    )


def votes(public_examples: int, num_steps: int) -> tuple[str, ...]:
    """AE-DPFL in one round of all clients."""
    return (
        "--algorithm.name=ae_dpfl",
        "--algorithm.options.server_epochs=30",
        f"--data.public_examples={public_examples}",
        "--run.rounds=1",
        "--run.evaluate_every=1",
        "--run.checkpoint_every=1",
        "--participation.sampler=full_participation",
        "--participation.cohort_size=none",
        f"--training.num_steps={num_steps}",
    )


METHODS = {
    "DP-FedAvg": DP_FEDAVG,
    "DDGauss": (*DP_FEDAVG, "--privacy.client.mechanism=discrete_gaussian"),
    "AE-DPFL": votes(9000, 200),
    "DP-FedAvg+BLUR+LUS": regularised(0.4, 0.7),
}
# For two CPU cores.
REDUCED = METHODS | {"AE-DPFL": votes(1000, 60)}
TUNED = {name: METHODS[name] for name in ("DP-FedAvg", "DP-FedAvg+BLUR+LUS")}


def seeds(number: int) -> dict[str, tuple[str, ...]]:
    return {str(seed): (f"--run.seed={seed}",) for seed in range(number)}


def overrides(key: str, values: Sequence[float]) -> dict[str, tuple[str, ...]]:
    return {f"{value:g}": (f"--{key}={value}",) for value in values}


def published(table: str, variable: str) -> Callable[[str, Mapping[str, str]], float | None]:
    """Looks up the paper's accuracy by model, method and the value on the axis `variable`."""
    with (HERE / "paper_tables.csv").open(encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["source_table"] == table]
    found = {
        (row["model"], row["algorithm"], f"{float(row['variable_value']):g}"): row for row in rows
    }

    def look_up(metric: str, values: Mapping[str, str]) -> float | None:
        key = (values.get("model", "ResNet-18"), values["method"], values[variable])
        return float(found[key]["accuracy_mean"]) if key in found else None

    return look_up


def tables(is_full: bool) -> dict[str, Study]:
    epsilons = overrides("privacy.client.epsilon", (2.0, 4.0, 6.0, 8.0))
    alphas = {
        f"{a:g}": (f"--data.partition_options={{alpha = {a}}}",) for a in (0.1, 1.0, 10.0, 100.0)
    }
    shares = (0.1, 0.3, 0.5, 0.7, 0.9)
    sparse = {f"{c:g}": (f"--algorithm.options.sparsity={c}",) for c in shares}
    parts = {
        "DP-FedAvg+LUS": regularised(0.0, 0.0),
        "DP-FedAvg+BLUR+LUS": regularised(0.4, 0.0),
    }
    emnist, cifar, fashion, perceptron = (
        HERE / f"{name}.toml"
        for name in ("emnist_by_writer", "cifar10", "fashion_mnist", "fashion_perceptron")
    )
    accuracy = {"test_accuracy": 100.0}

    def table(name, file, axes, column, source):
        shown = published(source, column) if is_full and source else lambda metric, values: None
        return Study(name, file, {**axes, "seed": seeds(3)}, "method", column, accuracy, shown)

    full = {"model": MODELS, "method": METHODS}
    return {
        "table1": table("table1", emnist, {**full, "budget": epsilons}, "budget", "1"),
        "table2": table("table2", cifar, {**full, "alpha": alphas}, "alpha", "2"),
        "table3": table(
            "table3",
            emnist,
            {"model": {"ResNet-18": MODELS["ResNet-18"]}, "method": parts, "c": sparse},
            "c",
            "3",
        ),
        "fashion": table("fashion", fashion, {"method": REDUCED, "alpha": alphas}, "alpha", ""),
        "fashion_perceptron": table(
            "fashion_perceptron", perceptron, {"method": REDUCED, "alpha": alphas}, "alpha", ""
        ),
    }


def sweeps(file: pathlib.Path) -> dict[str, Study]:
    axes = {
        "budget": (REDUCED, "privacy.client.epsilon", (2.0, 4.0, 6.0, 8.0)),
        "S": (TUNED, "privacy.client.clip_norm", (0.01, 0.03, 0.1, 0.3, 1.0)),
        "q": (TUNED, "participation.cohort_size", (8, 16, 32, 64)),
        "Q": (TUNED, "training.num_steps", (5, 10, 20, 30, 40)),
        "lambda": (
            {"DP-FedAvg+BLUR": regularised(0.0, 0.0), "DP-FedAvg+BLUR+LUS": regularised(0.0, 0.7)},
            "algorithm.options.strength",
            (0.0, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8),
        ),
        "c": (
            {"DP-FedAvg+LUS": regularised(0.0, 0.0), "DP-FedAvg+BLUR+LUS": regularised(0.4, 0.0)},
            "algorithm.options.sparsity",
            (0.0, 0.1, 0.3, 0.5, 0.7, 0.9),
        ),
    }
    return {
        name: Study(
            name,
            file,
            {"method": methods, name: overrides(key, values), "seed": seeds(5)},
            "method",
            name,
            {"test_accuracy": 100.0, "client_test_accuracy": 100.0},
        )
        for name, (methods, key, values) in axes.items()
    }


if __name__ == "__main__":
    name, *words = sys.argv[1:]
    base = HERE / "mnist_by_writer.toml"
    # Other values of `--on` name workers.
    if words[:1] == ["--on"] and words[1:] and words[1].endswith(".toml"):
        base, words = pathlib.Path(words[1]), words[2:]
    is_full = all(not w.startswith("--") or w.startswith(_HARMLESS) for w in words)
    studies = tables(is_full) | sweeps(base)
    if name not in studies:
        sys.exit(f"NAME must be one of {list(studies)}, got {name!r}")
    main(studies[name], words)
