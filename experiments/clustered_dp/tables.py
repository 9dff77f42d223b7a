"""Tables of what ran, the paper's numbers for the same data, shift and ε beside ours."""

import csv
import io
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from experiments.clustered_dp.grid import METHODS
from fedjax_dp.core import checks
from fedjax_dp.data.clusters import CLUSTER_SIZES
from fedjax_dp.experiment.reading.config_diff import EXECUTED, REPORTED, completed, differences

HERE = pathlib.Path(__file__).parent
METRICS = ("acc_all", "acc_maj", "acc_min", "min_acc", "acc_disparity", "F_acc", "F_loss")
# What the paper calls the data sets and shifts.
DATASETS = {"mnist": "MNIST", "fashion_mnist": "FMNIST", "cifar10": "CIFAR10"}
SHIFTS = {"rotation": "covariate", "label": "concept"}


def read_results(folder: pathlib.Path) -> list[dict[str, Any]]:
    """Reads the results of a folder, which must be of one setting but for ε and seed."""
    files = sorted(folder.glob("method=*.json"))
    results = [json.loads(path.read_text(encoding="utf-8")) for path in files]
    for path, result in zip(files, results, strict=True):
        result["setting"] = completed(result["setting"], str(path))
    if not results:
        raise SystemExit(f"{folder} holds no result")
    first = results[0]
    for result in results[1:]:
        besides = (*EXECUTED, *REPORTED, "run.seed", "privacy.record.epsilon")
        lines = differences(first["setting"], result["setting"], besides)
        if lines:
            raise SystemExit(
                f"{folder} mixes settings: {first['method']} and {result['method']} differ in\n"
                + "\n".join(lines)
            )
    return results


Printed = dict[tuple[str, str], tuple[float, float]]


def published(dataset: str, shift: str, epsilon: float) -> Printed:
    """The paper's mean and deviation by method and metric; empty where it prints none."""
    with open(HERE / "paper_tables.csv", newline="", encoding="utf-8") as file:
        return {
            (row["algorithm"], row["metric"]): (float(row["mean"]), float(row["std"]))
            for row in csv.DictReader(file)
            if (row["dataset"], row["shift"]) == (dataset, shift)
            and float(row["epsilon"]) == epsilon
        }


# What a row of `runs.csv` has besides the metrics; of runs without clusters some are empty.
FACTS = ("separation", "num_models", "seconds")


def as_csv(results: Sequence[dict[str, Any]]) -> str:
    """Writes a row for each run: its metrics, its noise, and mean accuracies by true cluster.

    `earlier` is the mean accuracy at about three quarters of the rounds, 10 of 14 or 150 of 200.
    """
    metrics = (*METRICS, "clusters_found", "minority_found", "clients_matched")
    rows = []
    for result in results:
        sizes = result["setting"]["data"]["partition_options"].get("cluster_sizes", CLUSTER_SIZES)
        ends = np.cumsum(sizes)
        accuracy = np.split(np.array(result["client_accuracy"]), ends[:-1])
        data, rounds = result["setting"]["data"], result["setting"]["run"]["rounds"]
        images = data["partition_options"]["samples_per_client"]
        # Results from before it was recorded have no curve.
        curve = result.get("accuracy_by_round")
        rows.append(
            {name: result[name] for name in ("method", "epsilon", "seed")}
            | {"dataset": data["name"], "images": images, "rounds": rounds}
            | {name: result["metrics"].get(name) for name in metrics}
            | {"earlier": 100 * curve[3 * len(curve) // 4 - 1] if curve else None}
            | {"noise_multiplier": result["noise_multiplier"][0]}
            | {name: result.get(name) for name in FACTS}
            | {f"cluster_{c}": 100 * float(part.mean()) for c, part in enumerate(accuracy)}
        )
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def over_seeds(results: Sequence[Mapping[str, float]]) -> dict[str, tuple[float, float]]:
    """Computes mean and standard deviation (n - 1) over seeds of the metrics that all have."""
    checks.require(len(results) > 0, "results", "hold at least one seed", results)
    shared = set.intersection(*(set(r) for r in results))
    summary = {}
    for name in (n for n in results[0] if n in shared):
        values = np.array([r[name] for r in results], dtype=np.float64)
        spread = float(values.std(ddof=1)) if len(values) > 1 else float("nan")
        summary[name] = (float(values.mean()), spread)
    return summary


def as_markdown(results: Sequence[dict[str, Any]]) -> str:
    """Writes one table for each ε."""
    data = results[0]["setting"]["data"]
    dataset = DATASETS.get(data["name"], data["name"])
    shift = SHIFTS[data["partition_options"].get("shift", "rotation")]
    parts = []
    for epsilon in sorted({r["epsilon"] for r in results}, reverse=True):
        paper = published(dataset, shift, epsilon)
        beside = (
            f"in brackets the paper's numbers for {dataset}, {shift} shift, ε = {epsilon:g}, at "
            "its full size."
            if paper
            else f"the paper prints no numbers for {dataset}, {shift} shift, ε = {epsilon:g}."
        )
        parts += [
            f"Ours at ε = {epsilon:g} over seeds, mean ± standard deviation; {beside}",
            "",
            "| method | seeds | "
            + " | ".join(METRICS)
            + " | clusters found | minority found | ε spent |",
            "|" + "---|" * (len(METRICS) + 5),
            *_rows([r for r in results if r["epsilon"] == epsilon], paper),
            "",
        ]
    if any(r["not_covered"] for r in results):
        note = "\\* of the updates alone: the choice of a cluster is exact and not private."
        parts += [note, ""]
    return "\n".join(parts)


def _rows(results: Sequence[dict[str, Any]], paper: Printed) -> list[str]:
    lines = []
    for method, printed in METHODS.items():
        mine = [r for r in results if r["method"] == method]
        if not mine:
            continue
        summary = over_seeds([r["metrics"] for r in mine])
        cells = []
        for name in METRICS:
            mean, spread = summary[name]
            # Of one seed there is no deviation.
            cell = f"{mean:.2f} ± {spread:.2f}" if len(mine) > 1 else f"{mean:.2f}"
            if printed is not None and (printed, name) in paper:
                cell += " ({:.2f} ± {:.2f})".format(*paper[printed, name])
            cells.append(cell)
        for name in ("clusters_found", "minority_found"):
            cells.append(f"{summary[name][0]:.0%}" if name in summary else "")
        spent = [e for r in mine for e in r["epsilon_by_client"]]
        star = "*" if mine[0]["not_covered"] else ""
        cells.append(f"{min(spent):.3f} to {max(spent):.3f}{star}")
        lines.append(f"| {method} | {len(mine)} | " + " | ".join(cells) + " |")
    return lines
