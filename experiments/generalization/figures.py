"""Figures 3-1 to 3-5 and B-1, from `results`: `python -m experiments.generalization.figures`.

Beside our figures stand those that the thesis prints: tables B.8 and B.9. It prints no numbers of
its other curves.
"""

import argparse
import csv
import pathlib
from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from experiments.generalization import paper
from experiments.generalization.tables import METRIC, PAIR, settings_of
from fedjax_dp.io import drawing, plots

RESULTS = pathlib.Path(__file__).parent / "results"
SERIES = {"training_set_accuracy": "training", "test_accuracy": "test"}


def read_rows(file: pathlib.Path) -> list[dict[str, str]]:
    """Reads a table of results as texts."""
    with file.open(encoding="utf-8", newline="") as opened:
        return list(csv.DictReader(opened))


def newest(rows: Sequence[dict[str, str]], study: str) -> list[dict[str, str]]:
    """Chooses the runs of a study by the paper's settings, and of these the longest."""
    own = [row for row in rows if row["study"] == study]
    best = max(map(settings_of, own), default=None)
    return [row for row in own if settings_of(row) == best]


def _mean_and_spread(values: Sequence[float]) -> tuple[float, float]:
    return float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else 0.0


def by_setting(
    rows: Sequence[dict[str, str]], study: str, aggregation: str
) -> dict[float, list[float]]:
    """Collects accuracies in percent of all seeds of a study by its number, such as clients."""
    found: dict[float, list[float]] = {}
    for row in newest(rows, study):
        if row["aggregation"] == aggregation:
            number = float(row["setting"].split("=")[1])
            found.setdefault(number, []).append(100 * float(row[METRIC]))
    return dict(sorted(found.items()))


def accuracy_by_number(
    rows: Sequence[dict[str, str]], study: str, table: str, label: str
) -> Figure:
    """Draws our accuracies by a number of the setting, and the printed ones (figure 3-1)."""
    figure = drawing.new_figure()
    axes = figure.subplots()
    seeds: list[int] = []
    numbers = paper.numbers_of(table)
    for k, kind in enumerate(PAIR):
        found = by_setting(rows, study, kind)
        means, spreads = np.transpose([_mean_and_spread(v) for v in found.values()])
        line = drawing.draw_curve(axes, k, list(found), means, f"{kind}, ours", markevery=1)
        style = {"fmt": "none", "ecolor": line.get_color(), "capsize": 3}
        axes.errorbar(list(found), means, yerr=spreads, **style)
        seeds += map(len, found.values())
        printed = [paper.accuracy_of(table, f"{number:g}", kind) for number in numbers]
        more = {"color": line.get_color(), "markerfacecolor": "white", "linewidth": 1.0}
        drawing.draw_curve(
            axes, k + 2, numbers, printed, f"{kind}, the thesis", markevery=1, **more
        )
    axes.set_xscale("log")
    axes.set_xticks(numbers, [f"{number:g}" for number in numbers])
    axes.minorticks_off()
    axes.set_ylabel("test accuracy, %")
    drawing.set_lines_below(axes, label, drawing.words_of_spread(seeds, "bars"))
    drawing.set_title(axes, "Fashion-MNIST, non-IID, FedAvg")
    drawing.legend_above(axes)
    axes.grid(alpha=0.25)
    return figure


def accuracies_by_round(rows: Sequence[dict[str, str]]) -> Figure:
    """Draws both accuracies on FedCMNIST by round, for each algorithm (figures 3-2 to 3-5)."""
    ran = {row["algorithm"] for row in rows}
    algorithms = [name for name in paper.ALGORITHMS if name in ran]
    columns = min(2, len(algorithms))
    lines = -(-len(algorithms) // columns)
    width = drawing.PAGE if columns > 1 else drawing.COLUMN
    figure = drawing.new_figure(2.2 * lines + (0 if columns > 1 else 1), width)
    places = figure.subplots(lines, columns, sharex=True, sharey=True, squeeze=False).ravel()
    seeds = {row["seed"] for row in rows}
    for axes, algorithm in zip(places, algorithms, strict=False):
        for s, (metric, name) in enumerate(SERIES.items()):
            for k, kind in enumerate(PAIR):
                by_round: dict[int, list[float]] = {}
                for row in rows:
                    if (row["algorithm"], row["aggregation"]) == (algorithm, kind):
                        by_round.setdefault(int(row["round"]), []).append(100 * float(row[metric]))
                means, spreads = np.transpose([_mean_and_spread(v) for v in by_round.values()])
                label = f"{name}, {kind}"
                line = drawing.draw_curve(axes, 2 * s + k, list(by_round), means, label)
                drawing.draw_band(axes, line, spreads)
        axes.set_title(algorithm, fontsize=11)
        drawing.integer_ticks(axes)
        axes.grid(alpha=0.25)
    for axes in places[::columns]:
        axes.set_ylabel("accuracy, %")
    words = drawing.words_of_spread([len(seeds)], "band")
    empty = places[len(algorithms) :]
    for axes in places[len(algorithms) - columns : len(algorithms)]:
        axes.tick_params(labelbottom=True)
        drawing.set_lines_below(axes, "round", *([] if len(empty) else [words]))
    for axes in empty:
        axes.set_axis_off()
        axes.text(0.1, 0.5, words.replace(", ", ",\n"), transform=axes.transAxes)
    drawing.legend_below(figure, places[0], 2 * columns)
    return figure


def by_threshold(rows: Sequence[dict[str, str]]) -> Figure:
    """Draws accuracy and loss by the threshold τ (figure B-1)."""
    figure = drawing.new_figure(width=drawing.PAGE)
    figures = {METRIC: ("test accuracy, %", 100.0), "test_loss": ("test loss", 1.0)}
    own = [row for row in newest(rows, "threshold") if row["setting"] == "mask=soft"]
    for axes, (metric, (label, factor)) in zip(figure.subplots(1, 2), figures.items(), strict=True):
        by_tau: dict[float, list[float]] = {}
        for row in own:
            by_tau.setdefault(float(row["aggregation"]), []).append(factor * float(row[metric]))
        taus = sorted(by_tau)
        means, spreads = np.transpose([_mean_and_spread(by_tau[tau]) for tau in taus])
        line = drawing.draw_curve(axes, 0, taus, means, "GMA", markevery=1)
        axes.errorbar(taus, means, yerr=spreads, fmt="none", ecolor=line.get_color(), capsize=3)
        axes.set_ylabel(label)
        seeds = [len(values) for values in by_tau.values()]
        drawing.set_lines_below(axes, "threshold τ", drawing.words_of_spread(seeds, "bars"))
        axes.grid(alpha=0.25)
    return figure


def main(arguments: Sequence[str] | None = None) -> None:
    """Draws the figures of the studies that have run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=pathlib.Path, default=RESULTS)
    output = parser.parse_args(arguments).output
    rows = read_rows(RESULTS / "runs.csv")
    ran = {row["study"] for row in rows}
    figures: dict[str, Figure] = {}
    if "clients" in ran:
        label = "clients, all in each round"
        figures["figure_3.1a"] = accuracy_by_number(rows, "clients", "B.8", label)
    if "epochs" in ran:
        figures["figure_3.1b"] = accuracy_by_number(rows, "epochs", "B.9", "local epochs a round")
    if (RESULTS / "curves.csv").is_file():
        figures["figure_3.2"] = accuracies_by_round(read_rows(RESULTS / "curves.csv"))
    if "threshold" in ran:
        figures["figure_B.1"] = by_threshold(rows)
    for name, figure in figures.items():
        plots.save(figure, output / f"{name}.png")


if __name__ == "__main__":
    main()
