"""Figures 3.2, 3.3 and 3.5 to 3.7 of the thesis: `python -m experiments.heterogeneous_dp.figures`.

3.2 and 3.3 need no training. The others are drawn from what ran: `--run FOLDER` (a run of
Robust-HDP, 3.7), `--precision SWEEP` (of the study `block_size`, 3.7), `--convergence SWEEP` (3.5),
`--robustness SWEEP` (of `num_clients` or `falsified`, 3.6). What they show is written to a CSV file
in FOLDER or SWEEP; a folder that has this file alone is drawn from it.
"""

import argparse
import json
import pathlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from experiments import noise_levels, study_plots
from experiments.heterogeneous_dp import noise
from experiments.heterogeneous_dp.first_round import Row, read, write
from experiments.heterogeneous_dp.noise import DELTA, ROUNDS, N
from experiments.heterogeneous_dp.sweep import ALGORITHMS, LIAR, LIES
from fedjax_dp.core.titles import title_of
from fedjax_dp.experiment import Config, assemble, load_config
from fedjax_dp.experiment.running.run_folder import CONFIG_FILE
from fedjax_dp.io import plots
from fedjax_dp.io.logbook import read_metrics
from fedjax_dp.privacy.accounting import budgets

# Of figures 3.2 and 3.3; their model has 28,938 parameters, the paper prints 28,939.
RATE, PARAMETERS = 0.01, 28_938
BATCHES, EPSILONS = (16, 32, 64, 128, 256), (0.25, 0.5, 1.0, 2.0, 5.0)


def multipliers(epsilon: float) -> np.ndarray:
    """Noise multipliers of one budget at all batch sizes, by the authors' recipe."""
    return noise.multipliers(epsilon, np.array(BATCHES, float))


def variances() -> np.ndarray:
    """Noise variance of an update, `[budgets, batch sizes]`."""
    rows = [noise.update_variances(epsilon, np.array(BATCHES, float)) for epsilon in EPSILONS]
    return PARAMETERS * RATE**2 * np.array(rows)


def weights_of_run(folder: pathlib.Path) -> tuple[str, dict[str, np.ndarray]]:
    """Reads what Robust-HDP weighed in a run, and what others weigh at the noise of that run.

    Everything comes from the run's own configuration, whose experiment is assembled again.

    Returns:
      What ran, and for each method the weights of the clients.
    """
    config = load_config(folder / CONFIG_FILE)
    if config.algorithm.name != "robust_hdp":
        raise SystemExit(f"{folder} must be a run of robust_hdp, got {config.algorithm.name}")
    if config.training.num_steps is not None:
        raise SystemExit(f"{folder} must count epochs, got num_steps {config.training.num_steps}")
    experiment = assemble(config)
    sizes = experiment.population.train.sizes
    numbers = experiment.simulation.hyper.local
    batch = np.asarray(numbers.batch_size, np.float64)
    gradient = noise_levels.clipped_gradient_variance(
        numbers.noise_multiplier,
        batch,
        clip_norm=numbers.clip_norm,
        num_parameters=experiment.num_parameters,
    )
    variance = noise_levels.update_variance(
        gradient,
        sizes,
        batch,
        learning_rate=numbers.learning_rate,
        num_epochs=numbers.num_epochs,
    )
    epsilon = np.broadcast_to(np.asarray(config.privacy.record.epsilon, float), sizes.shape)
    weights = {
        "oracle": noise_levels.inverse_variance_weights(variance),
        "Robust-HDP": np.array(read_metrics(folder)[0]["weights"]),
        "WeiAvg": epsilon / epsilon.sum(),
        "DPFedAvg": sizes / sizes.sum(),
    }
    return _what_ran(config, experiment.num_parameters), weights


def _what_ran(config: Config, num_parameters: int) -> str:
    epsilon, count = config.privacy.record.epsilon, config.data.num_clients
    names = [
        name
        for name in budgets.DISTRIBUTIONS
        if count in budgets.NUM_CLIENTS
        and np.array_equal(budgets.published_budgets(name, count), epsilon)
    ]
    parts = [config.data.name, config.model.name, f"p = {num_parameters:,}", *names]
    options = config.algorithm.options
    if "block_size" in options:
        parts.append(f"p' = {options['block_size']:,}")
    return ", ".join(parts)


def precision(weights: np.ndarray, optimum: np.ndarray) -> float:
    """The share of all weight that lies where the oracle puts it, 1 at best: Σ min(w, w*)."""
    return float(np.minimum(weights, optimum).sum())


def runs_of(sweep: pathlib.Path) -> list[dict[str, Any]]:
    """The runs of a sweep that are finished: their value on each axis, and their folder."""
    rows = json.loads((sweep / "runs.json").read_text(encoding="utf-8"))
    found = []
    for folder in sorted(p.parent for p in sweep.glob("*/summary.json")):
        values = dict(part.split("=", 1) for part in folder.name.split(","))
        found.append(values | {"folder": folder})
    if len(found) != len(rows):
        raise SystemExit(f"{sweep} has {len(found)} finished runs and a table of {len(rows)}")
    return found


def rows_of(
    folder: pathlib.Path, name: str, compute: Callable[[pathlib.Path], list[Row]]
) -> list[Row]:
    """Computes and writes what a figure shows of runs; without runs, reads what was written."""
    if (folder / "runs.json").exists() or (folder / CONFIG_FILE).exists():
        write(folder / name, compute(folder))
    return read(folder / name)


def weights_by_client(folder: pathlib.Path) -> list[Row]:
    """Weights of a run by method and client."""
    ran, weights = weights_of_run(folder)
    return [
        {"run": ran, "method": method, "client": client, "weight": float(weight)}
        for method, of_clients in weights.items()
        for client, weight in enumerate(of_clients)
    ]


def precision_by_block_size(sweep: pathlib.Path) -> list[Row]:
    """Precision of the weights of each run of the study `block_size`, by p'."""
    found = []
    for row in runs_of(sweep):
        _, weights = weights_of_run(row["folder"])
        score = precision(weights["Robust-HDP"], weights["oracle"])
        found.append({"block_size": int(row["block_size"]), "precision": score})
    return sorted(found, key=lambda row: row["block_size"])


def accuracy_of_runs(sweep: pathlib.Path) -> list[Row]:
    """Test accuracy in percent of each run of a sweep, by round."""
    return [
        {name: row[name] for name in ("distribution", "algorithm", "seed")}
        | {"round": entry["round"], "test_accuracy": 100 * entry["test_accuracy"]}
        for row in runs_of(sweep)
        for entry in read_metrics(row["folder"])
        if entry.get("test_accuracy") is not None
    ]


def curves_of(
    rows: Sequence[Row], curve: str, place: str, value: str
) -> dict[str, tuple[list[Any], list[float], list[float]]]:
    """Averages rows over seeds: for each curve its places, means and deviations."""
    found: dict[str, dict[Any, list[float]]] = {}
    for row in rows:
        found.setdefault(row[curve], {}).setdefault(row[place], []).append(row[value])
    return {
        name: (
            sorted(places),
            [float(np.mean(places[x])) for x in sorted(places)],
            [_deviation(places[x]) for x in sorted(places)],
        )
        for name, places in found.items()
    }


def _deviation(values: Sequence[float]) -> float:
    return float(np.std(values, ddof=1)) if len(values) > 1 else 0.0


def _in_order(curves: Mapping[str, Any]) -> dict[str, Any]:
    """Puts methods in the order of the studies, so that each has its colour in all figures."""
    places = {name: place for place, name in enumerate(ALGORITHMS)}
    return dict(sorted(curves.items(), key=lambda item: places.get(item[0], len(places))))


def accuracy_by_claim(rows: Sequence[Row]) -> list[Row]:
    """Rows of the study `falsified` by claim; what reads no claim has one accuracy for all."""
    found = []
    for row in rows:
        method, _, times = row["algorithm"].partition(" x")
        for claim in [int(times)] if times else LIES:
            found.append({**row, "algorithm": method, "claim": claim})
    return found


def draw_robustness(rows: Sequence[Row], output: pathlib.Path) -> None:
    """Draws figure 3.6, middle or right, of accuracies averaged over seeds."""
    is_clients = "clients" in rows[0]
    name, label = "clients", "number of clients"
    if not is_clients:
        rows = accuracy_by_claim(rows)
        name, label = "claim", f"declared over true ε of client {LIAR}"
    curves: dict[str, tuple[list[float], list[float], list[float]]] = {}
    for row in sorted(rows, key=lambda row: row[name]):
        curve = curves.setdefault(row["algorithm"], ([], [], []))
        for values, value in zip(curve, (row[name], row["mean"], row["std"] or 0.0), strict=True):
            values.append(value)
    title, seeds = f"MNIST, budgets of {rows[0]['distribution']}", [row["seeds"] for row in rows]
    figure = study_plots.accuracy_by_number(_in_order(curves), title, label, seeds)
    places = sorted({row[name] for row in rows})
    figure.axes[0].set_xticks(places, [str(place) for place in places])
    plots.save(figure, output / f"accuracy_by_{name}.png")


def draw_convergence(rows: Sequence[Row], distribution: str, output: pathlib.Path) -> None:
    """Draws figure 3.5 of accuracies by round and seed."""
    curves = _in_order(curves_of(rows, "algorithm", "round", "test_accuracy"))
    seeds = Counter(row["algorithm"] for row in rows if row["round"] == rows[0]["round"])
    title = f"MNIST, budgets of {distribution}"
    named = {title_of(name): curve for name, curve in curves.items()}
    figure = study_plots.accuracy_by_round(named, title, seeds.values())
    plots.save(figure, output / "accuracy_by_round.png")


def draw_rates(folder: pathlib.Path, output: pathlib.Path) -> None:
    """Draws figures 3.5 and 3.6, middle and right, of what `rates.py` has run."""
    tested = {}
    for study in ("mnist", "num_clients", "falsified"):
        rows = read(folder / f"{study}.csv") if (folder / f"{study}.csv").exists() else []
        tested[study] = [
            {**row, "algorithm": row["method"], "test_accuracy": row["accuracy"]}
            for row in rows
            if row["data"] == "test"
        ]
    twenty = [row for row in tested["mnist"] if row["distribution"] == "Dist6"]
    if twenty:
        draw_convergence(twenty, "Dist6", output)
    # Some seeds have a row for every round.
    last = max((row["round"] for rows in tested.values() for row in rows), default=0)
    ends = {name: [row for row in rows if row["round"] == last] for name, rows in tested.items()}
    if twenty and ends["num_clients"]:
        compared = {row["algorithm"] for row in ends["num_clients"]}
        few = [
            r for r in ends["mnist"] if r["distribution"] == "Dist6" and r["algorithm"] in compared
        ]
        draw_robustness(_over_seeds([*few, *ends["num_clients"]], "clients"), output)
    if ends["falsified"]:
        draw_robustness(_over_seeds(ends["falsified"]), output)


def _over_seeds(rows: Sequence[Row], *axes: str) -> list[Row]:
    """Averages the accuracies of a method, and of a value of each axis, over seeds."""
    found: dict[tuple[Any, ...], list[float]] = {}
    names = "distribution", "algorithm", *axes
    for row in rows:
        found.setdefault(tuple(row[name] for name in names), []).append(row["accuracy"])
    return [
        dict(zip(names, values, strict=True))
        | {"mean": float(np.mean(each)), "std": _deviation(each), "seeds": len(each)}
        for values, each in found.items()
    ]


def draw_noise_levels(output: pathlib.Path) -> None:
    """Draws figures 3.2 and 3.3."""
    title = f"{N:,} records, {ROUNDS} rounds, δ = {DELTA:g}"
    curves: Mapping[str, Any] = {f"ε = {e:g}": multipliers(e) for e in EPSILONS}
    figure = study_plots.multipliers_by_batch_size(BATCHES, curves, title)
    plots.save(figure, output / "multipliers_by_batch_size.png")
    figure = study_plots.variance_by_setting(variances(), EPSILONS, BATCHES, title)
    plots.save(figure, output / "variance_by_setting.png")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("runs/figures"))
    parser.add_argument("--run", type=pathlib.Path, help="a run folder of robust_hdp, for 3.7")
    parser.add_argument("--precision", type=pathlib.Path, help="a sweep of block_size, for 3.7")
    parser.add_argument("--convergence", type=pathlib.Path, help="a sweep, for 3.5")
    parser.add_argument("--distribution", default="Dist6", help="budgets of 3.5")
    parser.add_argument(
        "--robustness",
        type=pathlib.Path,
        action="append",
        default=[],
        help="a sweep of num_clients or falsified, for 3.6",
    )
    parser.add_argument("--rates", type=pathlib.Path, help="results of rates.py, for 3.5 and 3.6")
    known = parser.parse_args(arguments)
    draw_noise_levels(known.output)
    if known.run is not None:
        rows = rows_of(known.run, "weights.csv", weights_by_client)
        weights: dict[str, list[float]] = {}
        for row in rows:
            weights.setdefault(row["method"], []).append(row["weight"])
        figure = study_plots.weights_of_clients(weights, rows[0]["run"])
        plots.save(figure, known.output / "weights.png")
    if known.precision is not None:
        rows = rows_of(known.precision, "precision.csv", precision_by_block_size)
        everything = [{"curve": "precision", **row} for row in rows]
        curve = curves_of(everything, "curve", "block_size", "precision")["precision"]
        title = "Robust-HDP's weights beside the oracle's"
        seeds = Counter(row["block_size"] for row in rows).values()
        figure = study_plots.precision_by_block_size(*curve, title, seeds)
        plots.save(figure, known.output / "precision_by_block_size.png")
    if known.convergence is not None:
        rows = rows_of(known.convergence, "accuracy_by_round.csv", accuracy_of_runs)
        rows = [row for row in rows if row["distribution"] == known.distribution]
        if not rows:
            raise SystemExit(f"{known.convergence} has no run of {known.distribution}")
        draw_convergence(rows, known.distribution, known.output)
    for folder in known.robustness:
        table = [row for row in read(folder / "table.csv") if row["metric"] == "test_accuracy"]
        draw_robustness(table, known.output)
    if known.rates is not None:
        draw_rates(known.rates, known.output)


if __name__ == "__main__":
    main()
