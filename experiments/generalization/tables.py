"""Tables and a picture of what has run: `python -m experiments.generalization.tables RUNS`.

RUNS holds a folder for each study. Runs of masking that `runs.csv` knows from earlier are kept, and
`pairs.csv` compares the two aggregations over the seeds that both have; tables of other studies are
written anew where RUNS holds any of their runs.
"""

import argparse
import csv
import json
import pathlib
import tomllib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

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

# The share of each client's images that train, and the strength of L2 in the loss.
KEY = ("study", "algorithm", "setting", "aggregation", "seed", "rounds", "share", "l2")
# The last round's share of coordinates whose step no mask shortens.
WHOLE_STEPS = "unmasked_share"
# How far accuracy moves in the last quarter of a run, from one mean of ten evaluations to another.
CHANGE = "change"
# Whether a comparison is that of its cell: the paper's settings and the most rounds.
NEWEST = "newest"
# What two runs that are compared have in common.
_OF_PAIR = tuple(name for name in KEY if name not in ("aggregation", "seed"))
COLUMNS = (
    *(*KEY, METRIC, CHANGE, "test_accuracy", "test_loss", "training_set_accuracy"),
    *(WHOLE_STEPS, "seconds"),
)
# In percent: the means of both, that of their differences and its standard error, and the larger
# change.
PAIR_COLUMNS = (
    *(*_OF_PAIR, "seeds", "avg", "gma", "avg_spread", "gma_spread", "gain", "error"),
    *(CHANGE, WHOLE_STEPS, NEWEST),
)
# The study with a curve of each accuracy by round: figures 3-2 to 3-5.
CURVES = "fedcmnist_non_iid"
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


def change_of(accuracies: Sequence[float]) -> float | None:
    """Compares the last ten evaluations with those before three quarters of a run."""
    until = 3 * len(accuracies) // 4
    # Of fewer the two would overlap.
    if len(accuracies) - until < 10:
        return None
    return float(np.mean(accuracies[-10:]) - np.mean(accuracies[until - 10 : until]))


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
        measured = {WHOLE_STEPS: rows[-1][WHOLE_STEPS]} if rows and WHOLE_STEPS in rows[-1] else {}
        change = change_of([row["test_accuracy"] for row in rows if "test_accuracy" in row])
        measured |= {} if change is None else {CHANGE: change}
        found.append({**summary, **_setting_of(file.parent), **measured, **named, **place})
    return found


def _setting_of(folder: pathlib.Path) -> dict[str, float]:
    """Reads the share of images and the L2 of a run."""
    config = tomllib.loads((folder / "config.toml").read_text(encoding="utf-8"))
    held_out = config["data"].get("client_validation_share", 0.0)
    options = config["training"].get("optimizer_options", {})
    return {"share": round(1 - held_out, 6), "l2": options.get("weight_decay", 0.0)}


def with_earlier(runs: Sequence[Run], file: pathlib.Path) -> list[Run]:
    """Adds the runs of masking that an earlier table was made of."""
    earlier: list[dict[str, Any]] = []
    if file.is_file():
        with file.open(encoding="utf-8", newline="") as opened:
            earlier = list(csv.DictReader(opened))
    found = {_key(run): run for run in [*earlier, *runs]}
    return [found[key] for key in sorted(found)]


def _key(run: Run) -> tuple[str, ...]:
    return tuple(str(run.get(column, "")) for column in KEY)


def pairs(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Compares both aggregations over the seeds that both have."""
    groups: dict[tuple[str, ...], dict[str, dict[str, Run]]] = {}
    for run in runs:
        names = tuple(str(run.get(column, "")) for column in _OF_PAIR)
        of_kind = groups.setdefault(names, {kind: {} for kind in PAIR})
        if run["aggregation"] in PAIR:
            of_kind[run["aggregation"]][str(run["seed"])] = run
    found = []
    for names, of_kind in sorted(groups.items()):
        if seeds := sorted(set.intersection(*map(set, of_kind.values()))):
            both = {kind: [of_kind[kind][seed] for seed in seeds] for kind in PAIR}
            found.append(dict(zip(_OF_PAIR, names, strict=True)) | _compared(both))
    best = {_cell_of(pair): pair for pair in sorted(found, key=settings_of)}
    return [pair | {NEWEST: int(best[_cell_of(pair)] is pair)} for pair in found]


def settings_of(run: Run) -> tuple[float, float]:
    """Orders runs of a cell: the paper's L2 goes before none, and more rounds before fewer."""
    return float(run.get("l2") or 0), float(run.get("rounds") or 0)


def _cell_of(pair: Run) -> tuple[str, ...]:
    return pair["study"], pair["algorithm"], pair["setting"]


def _compared(both: Mapping[str, Sequence[Run]]) -> dict[str, Any]:
    """Compares runs of both aggregations, seed by seed."""

    def known(kind: str, name: str) -> np.ndarray:
        return np.array([float(run[name]) for run in both[kind] if run.get(name) not in (None, "")])

    avg, gma = (100 * known(kind, METRIC) for kind in PAIR)
    changes, shares = [known(kind, CHANGE) for kind in PAIR], known("GMA", WHOLE_STEPS)
    is_known = all(len(some) == len(avg) for some in changes)
    figures: dict[str, Any] = {
        "seeds": len(avg),
        "avg": avg.mean(),
        "gma": gma.mean(),
        "gain": (gma - avg).mean(),
        # Where a run has none, nothing is known of whether both have converged.
        CHANGE: 100 * max(abs(some.mean()) for some in changes) if is_known else "",
        WHOLE_STEPS: shares.mean() if len(shares) else "",
    }
    if len(avg) > 1:
        spreads = {"avg_spread": avg, "gma_spread": gma, "error": gma - avg}
        figures |= {name: values.std(ddof=1) for name, values in spreads.items()}
        figures["error"] /= np.sqrt(len(avg))
    return {name: f"{x:.4f}" if isinstance(x, float) else x for name, x in figures.items()}


def shown(values: np.ndarray) -> str:
    """A mean, with the standard deviation where there are several."""
    spread = f" ± {values.std(ddof=1):.2f}" if len(values) > 1 else ""
    return f"{values.mean():.2f}{spread}"


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
            if "training_set_accuracy" in row:
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
    tables = {}
    if any(run["study"] == "fairness" for run in runs):
        tables["fairness"] = of_fairness(runs)
    if any(run["study"].endswith("_long") for run in runs):
        studies = sorted({run["study"] for run in runs if run["study"].endswith("_long")})
        tables["long"] = of_length(runs_folder, studies, LENGTHS)
    for name, text in tables.items():
        (output / f"{name}.md").write_text(text, encoding="utf-8")
        print(text)
    _write_rows(output / "runs.csv", COLUMNS, masking)
    _write_rows(output / "pairs.csv", PAIR_COLUMNS, pairs(masking))
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
