"""Pictures and the table of norms of a finished sweep.

python -m experiments.user_level_dp.figures SWEEP_FOLDER --output FOLDER
"""

import argparse
import json
import pathlib
from collections import Counter
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
    "bits_per_parameter": "bits a parameter",
}


def accuracy_by_epsilon(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Accuracies in percent by method: budgets, means, deviations over seeds."""
    curves = {}
    for method in dict.fromkeys(row["method"] for row in rows):
        by_budget: dict[float, list[float]] = {}
        for row in rows:
            if row["method"] == method and row["epsilon"] is not None:
                by_budget.setdefault(float(row["budget"]), []).append(100 * row["test_accuracy"])
        if by_budget:
            values = [by_budget[budget] for budget in sorted(by_budget)]
            spread = [float(np.std(v, ddof=1)) if len(v) > 1 else 0.0 for v in values]
            curves[method] = (sorted(by_budget), [float(np.mean(v)) for v in values], spread)
    return curves


def norms_table(rows: list[dict[str, Any]]) -> str:
    """What was measured of the updates, averaged over rounds and over the runs at one budget."""
    lines = ["| method | ε | " + " | ".join(FIGURES.values()) + " |", "|---" * 6 + "|"]
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        budget = "none" if row["epsilon"] is None else row["budget"]
        groups.setdefault((row["method"], budget), []).append(row)
    for (method, budget), members in groups.items():
        cells = []
        for figure in FIGURES:
            found = [m[figure] for m in members if m.get(figure) is not None]
            cells.append(f"{np.mean(found):.3g}" if found else "–")
        lines.append(f"| {method} | {budget} | {' | '.join(cells)} |")
    return "\n".join(lines)


def title_of(folder: str) -> str:
    """Says in words what the folder of a run, such as "method=A,budget=4,seed=0", holds."""
    words = {"method": "", "budget": "ε = ", "seed": "seed "}
    parts = (part.partition("=") for part in folder.split(","))
    return ", ".join(words.get(axis, f"{axis} ") + value for axis, _, value in parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sweep", type=pathlib.Path)
    parser.add_argument("--output", type=pathlib.Path, required=True)
    options = parser.parse_args()
    rows = json.loads((options.sweep / "runs.json").read_text(encoding="utf-8"))
    folders = [p.name for p in options.sweep.iterdir() if (p / "summary.json").is_file()]
    curves = accuracy_by_epsilon(rows)
    if any(len(budgets) > 1 for budgets, _, _ in curves.values()):
        private = [row for row in rows if row["epsilon"] is not None]
        seeds = Counter((row["method"], row["budget"]) for row in private).values()
        figure = study_plots.accuracy_by_epsilon(curves, "Test accuracy by budget", seeds)
        plots.save(figure, options.output / "accuracy_by_epsilon.png")
    for name in sorted(folders):
        if not name.endswith("seed=0"):
            continue
        run = options.sweep / name
        chosen = load_config(run / "config.toml", ())
        clip_norm = chosen.privacy.client.clip_norm
        is_private = chosen.privacy.unit == "client"
        figure = plots.update_norms(
            read_metrics(run), float(clip_norm) if is_private else None, title_of(name)
        )
        slug = "".join(c if c.isalnum() else "_" for c in name)
        plots.save(figure, options.output / f"norms_{slug}.png")
    (options.output / "norms.md").write_text(norms_table(rows) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
