"""Tables and a picture of what has run: `python -m experiments.generalization.tables RUNS`.

RUNS holds a folder for each study. Aggregations are compared over the seeds that both have. Runs of
masking that `runs.csv` knows from earlier are kept; tables of other studies are written anew where
RUNS holds any of their runs.
"""

import argparse
import csv
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from experiments.generalization import paper
from fedjax_dp.io import drawing, plots

HERE = pathlib.Path(__file__).parent
METRIC = "test_accuracy_last_ten"
PAIR = ("AVG", "GMA")
LENGTHS = (20, 40, 80, 120, 180, 200)
FAIRNESS = {
    "test": "test_accuracy",
    "mean of clients": "mean_client_accuracy",
    "worst tenth": "worst_tenth_accuracy",
    "worst client": "worst_client_accuracy",
    "spread": "std_client_accuracy",
}

KEY = ("study", "algorithm", "setting", "aggregation", "seed")
# The last round's share of coordinates whose step no mask shortens.
SHARE = "unmasked_share"
COLUMNS = (*KEY, METRIC, "test_accuracy", "test_loss", SHARE, "seconds")
# The study with a curve of each accuracy by round: figures 3-2 to 3-5.
CURVES = "fedcmnist_curves"
CURVE_COLUMNS = (
    "algorithm",
    "aggregation",
    "seed",
    "round",
    "training_set_accuracy",
    "test_accuracy",
)

Run = Mapping[str, Any]


def _rows_of(folder: pathlib.Path) -> list[dict[str, Any]]:
    """Reads what a run measured in each round."""
    file = folder / "metrics.jsonl"
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    return [json.loads(line) for line in text.splitlines()]


def runs_in(folder: pathlib.Path) -> list[dict[str, Any]]:
    """Reads the summaries of all finished runs: study, what their names say, and what came out."""
    found = []
    for file in sorted(folder.glob("*/*=*/summary.json")):
        named = dict(part.split("=", 1) for part in file.parent.name.split(","))
        summary = json.loads(file.read_text(encoding="utf-8"))
        if summary.get("ended") == "interrupted":
            continue
        others = (f"{axis}={value}" for axis, value in named.items() if axis not in KEY)
        place = {"study": file.parent.parent.name, "setting": ",".join(others)}
        rows = _rows_of(file.parent)
        masked = {SHARE: rows[-1][SHARE]} if rows and SHARE in rows[-1] else {}
        found.append({**summary, **masked, **named, **place})
    return found


def with_earlier(runs: Sequence[Run], file: pathlib.Path) -> list[Run]:
    """Adds the runs of masking that an earlier table was made of."""
    earlier: list[dict[str, Any]] = []
    if file.is_file():
        with file.open(encoding="utf-8", newline="") as opened:
            earlier = [{**row, METRIC: float(row[METRIC])} for row in csv.DictReader(opened)]
    found = {tuple(str(run.get(c, "")) for c in KEY): run for run in [*earlier, *runs]}
    return [found[key] for key in sorted(found)]


def paired(runs: Sequence[Run], metric: str = METRIC) -> dict[str, np.ndarray]:
    """Values of both aggregations over the seeds that both have, in percent."""
    by_seed = {
        kind: {run["seed"]: 100 * run[metric] for run in runs if run["aggregation"] == kind}
        for kind in PAIR
    }
    seeds = sorted(set.intersection(*map(set, by_seed.values())))
    return {kind: np.array([values[s] for s in seeds]) for kind, values in by_seed.items()}


def shown(values: np.ndarray) -> str:
    """A mean, with the standard deviation where there are several."""
    spread = f" ± {values.std(ddof=1):.2f}" if len(values) > 1 else ""
    return f"{values.mean():.2f}{spread}"


def of_masking(runs: Sequence[Run], distribution: str) -> str:
    """Table 3.1 or 3.2, with the number of cells in which masking is at least as good."""
    lines = [
        "| data | algorithm | AVG | GMA | GMA − AVG | seeds | paper: AVG | GMA |",
        "|---" * 8 + "|",
    ]
    is_no_worse = []
    for data, name in ((d, paper.DATA[d]) for d, where in paper.CELLS if where == distribution):
        for algorithm in paper.ALGORITHMS:
            cell = (f"{data}_{distribution}", algorithm)
            of_cell = [r for r in runs if (r["study"], r["algorithm"]) == cell]
            values = paired(of_cell)
            if not len(values["AVG"]):
                continue
            gain = values["GMA"].mean() - values["AVG"].mean()
            is_no_worse.append(gain >= 0)
            printed = [paper.accuracy(data, distribution, algorithm, kind) for kind in PAIR]
            ours = [shown(values[kind]) for kind in PAIR]
            cells = [
                name,
                algorithm,
                *ours,
                f"{gain:+.2f}",
                str(len(values["AVG"])),
                *map(str, printed),
            ]
            lines.append(f"| {' | '.join(cells)} |")
    count = f"GMA is at least as good in {sum(is_no_worse)} of {len(is_no_worse)} cells."
    return "\n".join([*lines, "", count, ""])


def of_step_length(runs: Sequence[Run]) -> str:
    """Accuracy by the length of the server's step, 40 rounds."""
    lines = ["| server's step | AVG | GMA | seeds |", "|---" * 4 + "|"]
    for factor in ("x0.5", "x0.75", "", "x1.5", "x2"):
        cells, seeds = [], set()
        for kind in PAIR:
            name = f"{kind} {factor}".strip()
            values = np.array(
                [
                    100 * run[METRIC]
                    for run in runs
                    if (run["study"], run.get("rounds"), run["aggregation"])
                    == ("step_length", "40", name)
                ]
            )
            cells.append(shown(values) if len(values) else "–")
            seeds.add(len(values))
        lines.append(f"| {factor or 'x1'} | {' | '.join(cells)} | {max(seeds)} |")
    return "\n".join([*lines, ""])


def of_length(folder: pathlib.Path, studies: Sequence[str], rounds: Sequence[int]) -> str:
    """Both aggregations after so many rounds of the same runs, each the mean of ten evaluations."""
    head = ["study", "round", *PAIR, "GMA − AVG", "seeds"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for study in studies:
        curves: dict[str, dict[str, np.ndarray]] = {kind: {} for kind in PAIR}
        for path in sorted((folder / study).glob("*=*/metrics.jsonl")):
            named = dict(part.split("=", 1) for part in path.parent.name.split(","))
            rows = _rows_of(path.parent)
            values = np.array([100 * row["test_accuracy"] for row in rows])
            curves[named["aggregation"]][named["seed"]] = values
        seeds = sorted(set.intersection(*(set(of_kind) for of_kind in curves.values())))
        for last in rounds:
            found = {
                kind: np.array(
                    [of_seed[seed][last - 10 : last].mean() for seed in seeds]
                    if all(len(of_seed[seed]) >= last for seed in seeds)
                    else []
                )
                for kind, of_seed in curves.items()
            }
            if seeds and all(map(len, found.values())):
                gaps = found["GMA"] - found["AVG"]
                spread = f" ± {gaps.std(ddof=1):.2f}" if len(gaps) > 1 else ""
                cells = [study, str(last), *(shown(found[kind]) for kind in PAIR)]
                cells += [f"{gaps.mean():+.2f}{spread}", str(len(seeds))]
                lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def curves_in(folder: pathlib.Path) -> list[dict[str, Any]]:
    """Reads both accuracies of every round of a study that evaluates the training part too."""
    found = []
    for path in sorted(folder.glob("*=*/metrics.jsonl")):
        named = dict(part.split("=", 1) for part in path.parent.name.split(","))
        for row in _rows_of(path.parent):
            found.append(named | {name: row[name] for name in CURVE_COLUMNS if name in row})
    return found


def of_fairness(runs: Sequence[Run]) -> str:
    """Accuracy of the whole and by client, means over seeds, in percent."""
    lines = [f"| objective | {' | '.join(FAIRNESS)} | seeds |", "|---" * (len(FAIRNESS) + 2) + "|"]
    objectives = dict.fromkeys(run["objective"] for run in runs if run["study"] == "fairness")
    for objective in objectives:
        own = [r for r in runs if r["study"] == "fairness" and r["objective"] == objective]
        means = [f"{100 * np.mean([r[metric] for r in own]):.2f}" for metric in FAIRNESS.values()]
        lines.append(f"| {objective} | {' | '.join(means)} | {len(own)} |")
    return "\n".join([*lines, ""])


def draw(folder: pathlib.Path, study: str, algorithm: str, file: pathlib.Path) -> None:
    """Draws test accuracy by round of both aggregations of a cell: the mean, and each seed."""
    figure = drawing.new_figure()
    axes = figure.subplots()
    for k, kind in enumerate(PAIR):
        pattern = f"algorithm={algorithm},aggregation={kind},seed=*/metrics.jsonl"
        runs: list[dict[int, float]] = []
        for path in sorted((folder / study).glob(pattern)):
            rows = _rows_of(path.parent)
            measured = {r["round"]: 100 * r["test_accuracy"] for r in rows if "test_accuracy" in r}
            style = {"color": drawing.COLOURS[k], "alpha": 0.35, "linewidth": 0.8}
            axes.plot(*zip(*measured.items(), strict=True), **style)
            runs.append(measured)
        rounds = sorted(set.intersection(*map(set, runs))) if runs else []
        means = [float(np.mean([run[r] for run in runs])) for r in rounds]
        drawing.draw_curve(axes, k, rounds, means, f"{kind} (n = {len(runs)})")
    axes.set_ylabel("test accuracy, %")
    drawing.set_lines_below(axes, "round", "thick: mean of n seeds, thin: each seed")
    drawing.set_title(axes, f"{study}, {algorithm}")
    drawing.legend_above(axes)
    axes.grid(alpha=0.25)
    plots.save(figure, file)


def write(runs_folder: pathlib.Path, output: pathlib.Path) -> None:
    """Writes all tables of what is there, and a line for each run of masking."""
    output.mkdir(parents=True, exist_ok=True)
    runs = runs_in(runs_folder)
    new = [run for run in runs if "aggregation" in run]
    masking = with_earlier(new, output / "runs.csv")
    tables = {
        distribution: of_masking(masking, distribution) for distribution in ("non_iid", "iid")
    }
    if any(run["study"].endswith("_by_writer") for run in masking):
        tables["by_writer"] = of_masking(masking, "by_writer")
    if any(run["study"] == "step_length" for run in runs):
        tables["step_length"] = of_step_length(new)
    if any(run["study"] == "fairness" for run in runs):
        tables["fairness"] = of_fairness(runs)
    if any(run["study"].endswith("_long") for run in runs):
        studies = sorted({run["study"] for run in runs if run["study"].endswith("_long")})
        tables["long"] = of_length(runs_folder, studies, LENGTHS)
    for name, text in tables.items():
        (output / f"{name}.md").write_text(text, encoding="utf-8")
        print(text)
    _write_rows(output / "runs.csv", COLUMNS, masking)
    if curves := curves_in(runs_folder / CURVES):
        _write_rows(output / "curves.csv", CURVE_COLUMNS, curves)


def _write_rows(file: pathlib.Path, columns: Sequence[str], rows: Sequence[Run]) -> None:
    with file.open("w", encoding="utf-8", newline="") as opened:
        writer = csv.DictWriter(opened, columns, extrasaction="ignore", restval="")
        writer.writeheader()
        writer.writerows(rows)


def main(arguments: Sequence[str] | None = None) -> None:
    """Reads a folder of studies and writes what came out."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", type=pathlib.Path)
    parser.add_argument("--output", type=pathlib.Path, default=HERE / "results")
    known = parser.parse_args(arguments)
    write(known.runs, known.output)


if __name__ == "__main__":
    main()
