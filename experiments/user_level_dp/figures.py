"""Pictures of a finished sweep, its norms, accuracy by round and by seed.

python -m experiments.user_level_dp.figures SWEEP_FOLDER --output FOLDER [--norms VALUE]

A folder that has no runs, such as `results/compare`, has accuracy drawn from its table alone.
"""

import argparse
import csv
import json
import math
import pathlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from experiments import study_plots
from fedjax_dp.experiment import load_config
from fedjax_dp.io import plots
from fedjax_dp.io.logbook import read_metrics

FIGURES = {
    "update_norm_median": "median norm before clipping",
    "clipped_client_share": "clipped clients",
    "noise_stddev": "noise of a coordinate",
    "noise_in_clip_norms": "norm of the noise / S",
    "bits_per_parameter": "bits a parameter",
}
# Axes as they are written in tables and pictures.
SYMBOLS = {"budget": "ε", "lambda": "λ", "alpha": "α"}
# Titles, and labels of the horizontal axis.
LABELS = {
    "budget": ("Test accuracy by budget", "ε"),
    "lambda": ("Test accuracy by strength of BLUR", "strength λ"),
    "c": ("Test accuracy by sparsity of LUS", "sparsity c"),
    "Q": ("Test accuracy by number of local steps", "local steps Q"),
    "q": ("Test accuracy by cohort size", "expected clients a round"),
    "S": ("Test accuracy by clip norm", "clip norm S"),
    "alpha": ("Test accuracy by label skew", "Dirichlet parameter α"),
}
Run = Mapping[str, Any]
# Numbers by curve: places on the horizontal axis, means, deviations over seeds.
Curves = dict[str, tuple[list[float], list[float], list[float]]]


def runs_of(sweep: pathlib.Path) -> list[dict[str, Any]]:
    """The runs of a sweep: their summary, their value on each axis, and the noise they had."""
    rows = json.loads((sweep / "runs.json").read_text(encoding="utf-8"))
    found = []
    for folder in sorted(path.parent for path in sweep.glob("*/summary.json")):
        values = dict(part.split("=", 1) for part in folder.name.split(","))
        (row,) = (row for row in rows if row.items() >= values.items())
        private = load_config(folder / "config.toml", ()).privacy
        clip_norm = float(private.client.clip_norm) if private.unit == "client" else None
        noise = None
        # Votes have a norm and a dimension of their own.
        if clip_norm and row["method"] != "AE-DPFL" and row.get("noise_stddev") is not None:
            noise = row["noise_stddev"] * math.sqrt(row["num_parameters"]) / clip_norm
        (axis,) = (name for name in values if name not in ("method", "model", "seed"))
        more = {"axis": axis, "folder": folder, "clip_norm": clip_norm}
        found.append(row | more | {"noise_in_clip_norms": noise})
    order = [tuple(row[axis] for axis in ("method", found[0]["axis"], "seed")) for row in rows]
    return sorted(found, key=lambda r: order.index((r["method"], r[r["axis"]], r["seed"])))


def curves_of(points: Iterable[tuple[str, float, float]]) -> Curves:
    """Averages `(curve, place, number)` over what has the same curve and place: the seeds."""
    found: dict[str, dict[float, list[float]]] = {}
    for name, place, number in points:
        found.setdefault(name, {}).setdefault(place, []).append(number)
    return {
        name: (
            sorted(places),
            [float(np.mean(places[p])) for p in sorted(places)],
            [float(np.std(v, ddof=1)) if len(v := places[p]) > 1 else 0.0 for p in sorted(places)],
        )
        for name, places in found.items()
    }


def by_round(
    runs: Sequence[Run], name_of: Callable[[Run], str], number_of: Callable[[Run], float | None]
) -> Curves:
    """Averages a number of each round over seeds."""
    return curves_of(
        (name_of(run), entry["round"], number)
        for run in runs
        for entry in read_metrics(run["folder"])
        if (number := number_of(entry)) is not None
    )


def accuracy(row: Run) -> float | None:
    """Test accuracy in percent, of a run or a round."""
    return None if row.get("test_accuracy") is None else 100 * row["test_accuracy"]


def median_norm(row: Run) -> float | None:
    """The median norm of a round's updates before clipping."""
    quantiles = row.get("update_norm_quantiles")
    return None if quantiles is None else quantiles[len(quantiles) // 2]


def norms_table(runs: Sequence[Run]) -> str:
    """What was measured of the updates, averaged over rounds and over the runs of one setting."""
    axis = runs[0]["axis"]
    shown = [f for f in FIGURES if any(run.get(f) is not None for run in runs)]
    heads = ["method", SYMBOLS.get(axis, axis), *(FIGURES[f] for f in shown)]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    groups: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        is_open = axis == "budget" and run["epsilon"] is None
        groups.setdefault((run["method"], "none" if is_open else run[axis]), []).append(run)
    for names, members in groups.items():
        cells = []
        for figure in shown:
            found = [m[figure] for m in members if m.get(figure) is not None]
            cells.append(f"{np.mean(found):.3g}" if found else "–")
        lines.append(f"| {' | '.join([*names, *cells])} |")
    return "\n".join(lines)


def rounds_table(runs: Sequence[Run]) -> str:
    """Accuracy by round as a CSV file: means and deviations over seeds."""
    axis = runs[0]["axis"]
    lines = [f"method,{axis},round,mean,std"]
    curves = by_round(runs, lambda run: f"{run['method']},{run[axis]}", accuracy)
    for name, columns in curves.items():
        lines += [f"{name},{r:g},{m:.6g},{d:.6g}" for r, m, d in zip(*columns, strict=True)]
    return "\n".join(lines)


def seeds_table(runs: Sequence[Run]) -> str:
    """Each run alone as a CSV file: accuracy after half of the rounds and after all, and norms."""
    axis = runs[0]["axis"]
    lines = [f"method,{axis},seed,half,last,norm,clipped"]
    for run in runs:
        rounds = [(entry["round"], accuracy(entry)) for entry in read_metrics(run["folder"])]
        halfway = max(number for number, _ in rounds) / 2
        half = next((a for number, a in rounds if number >= halfway and a is not None), None)
        numbers = (
            half,
            accuracy(run),
            run.get("update_norm_median"),
            run.get("clipped_client_share"),
        )
        cells = ("" if number is None else f"{number:.6g}" for number in numbers)
        lines.append(",".join([run["method"], run[axis], run["seed"], *cells]))
    return "\n".join(lines)


def title_of(folder: str) -> str:
    """Says in words what the folder of a run, such as "method=A,budget=4,seed=0", holds."""
    words = {"method": "", "seed": "seed "}
    words |= {axis: f"{symbol} = " for axis, symbol in SYMBOLS.items()}
    parts = (part.partition("=") for part in folder.split(","))
    return ", ".join(words.get(axis, f"{axis} ") + value for axis, _, value in parts)


def draw_table(table: pathlib.Path, output: pathlib.Path) -> None:
    """Draws test accuracy by the axis of a sweep, from its table."""
    with table.open(encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["metric"] == "test_accuracy"]
    (axis,) = (name for name in rows[0] if name in LABELS)
    levels = {r["method"]: float(r["mean"]) for r in rows if r["method"].endswith("not private")}
    curves: Curves = {}
    for row in rows:
        if row["method"] not in levels:
            numbers = curves.setdefault(row["method"], ([], [], []))
            values = row[axis], row["mean"], row["std"] or 0.0
            for column, value in zip(numbers, values, strict=True):
                column.append(float(value))
    if any(len(places) > 1 for places, _, _ in curves.values()):
        seeds = [int(row["seeds"]) for row in rows if row["method"] in curves]
        figure = study_plots.accuracy_by_number(curves, *LABELS[axis], seeds, levels=levels)
        name = "epsilon" if axis == "budget" else axis
        plots.save(figure, output / f"accuracy_by_{name}.png")


def draw_rounds(runs: Sequence[Run], output: pathlib.Path) -> None:
    """Draws accuracy and norms by round for each strength of BLUR."""
    for method in dict.fromkeys(run["method"] for run in runs):
        chosen = [run for run in runs if run["method"] == method]
        slug = "" if method == runs[0]["method"] else "_" + slug_of(method)
        seeds = Counter(run["lambda"] for run in chosen).values()

        def name_of(run: Run) -> str:
            return f"λ = {run['lambda']}"

        figure = study_plots.accuracy_by_round(by_round(chosen, name_of, accuracy), method, seeds)
        plots.save(figure, output / f"accuracy_by_round{slug}.png")
        figure = study_plots.accuracy_by_round(
            by_round(chosen, name_of, median_norm),
            method,
            seeds,
            label="median norm before clipping",
            levels={"clip norm": chosen[0]["clip_norm"]},
        )
        figure.axes[0].set_ylim(bottom=0)
        plots.save(figure, output / f"norms_by_round{slug}.png")


def slug_of(name: str) -> str:
    return "".join(c if c.isalnum() else "_" for c in name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sweep", type=pathlib.Path)
    parser.add_argument("--output", type=pathlib.Path, required=True)
    parser.add_argument("--norms", help="the place on the axis where runs have their norms drawn")
    options = parser.parse_args()
    draw_table(options.sweep / "table.csv", options.output)
    if not (options.sweep / "runs.json").is_file():
        return
    runs = runs_of(options.sweep)
    if runs[0]["axis"] == "lambda":
        draw_rounds(runs, options.output)
    for run in runs:
        rounds = read_metrics(run["folder"])
        if run["seed"] == "0" and run[run["axis"]] == options.norms and len(rounds) > 1:
            name = run["folder"].name
            figure = plots.update_norms(rounds, run["clip_norm"], title_of(name))
            plots.save(figure, options.output / f"norms_{slug_of(name)}.png")
    tables = {"norms.md": norms_table, "rounds.csv": rounds_table, "seeds.csv": seeds_table}
    for name, table in tables.items():
        (options.output / name).write_text(table(runs) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
