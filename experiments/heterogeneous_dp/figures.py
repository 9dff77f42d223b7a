"""Figures 3.2, 3.3, 3.5 and 3.7 of the thesis: `python -m experiments.heterogeneous_dp.figures`.

3.2 and 3.3 need no training. The others are drawn from what ran: `--run FOLDER` (a run of
Robust-HDP, 3.7), `--precision SWEEP` (of the study `block_size`, 3.7), `--convergence SWEEP` (3.5).
"""

import argparse
import json
import pathlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from experiments import noise_levels, study_plots
from experiments.heterogeneous_dp import noise
from experiments.heterogeneous_dp.noise import DELTA, ROUNDS, N
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


def precision_by_block_size(sweep: pathlib.Path) -> dict[int, list[float]]:
    """Precision of the weights of each run of the study `block_size`, by p'."""
    found: dict[int, list[float]] = {}
    for row in runs_of(sweep):
        _, weights = weights_of_run(row["folder"])
        score = precision(weights["Robust-HDP"], weights["oracle"])
        found.setdefault(int(row["block_size"]), []).append(score)
    return dict(sorted(found.items()))


def accuracy_by_round(
    sweep: pathlib.Path, distribution: str
) -> dict[str, tuple[list[int], list[float], list[float]]]:
    """Test accuracy in percent of each method: rounds, means over seeds, and deviations."""
    seeds: dict[str, dict[int, list[float]]] = {}
    for row in runs_of(sweep):
        if row["distribution"] != distribution:
            continue
        of_method = seeds.setdefault(row["algorithm"], {})
        for entry in read_metrics(row["folder"]):
            if entry.get("test_accuracy") is not None:
                of_method.setdefault(entry["round"], []).append(100 * entry["test_accuracy"])
    if not seeds:
        raise SystemExit(f"{sweep} has no run of {distribution}")
    return {
        method: (
            sorted(rounds),
            [float(np.mean(rounds[r])) for r in sorted(rounds)],
            [_deviation(rounds[r]) for r in sorted(rounds)],
        )
        for method, rounds in seeds.items()
    }


def _deviation(values: Sequence[float]) -> float:
    return float(np.std(values, ddof=1)) if len(values) > 1 else 0.0


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
    parser.add_argument(
        "--precision", type=pathlib.Path, help="a sweep of block_size, for 3.7; gets precision.csv"
    )
    parser.add_argument("--convergence", type=pathlib.Path, help="a sweep, for 3.5")
    parser.add_argument("--distribution", default="Dist6", help="budgets of 3.5")
    known = parser.parse_args(arguments)
    draw_noise_levels(known.output)
    if known.run is not None:
        title, weights = weights_of_run(known.run)
        plots.save(study_plots.weights_of_clients(weights, title), known.output / "weights.png")
    if known.precision is not None:
        scores = precision_by_block_size(known.precision)
        curve = [float(np.mean(s)) for s in scores.values()], list(map(_deviation, scores.values()))
        title = "How near Robust-HDP's weights come to the oracle's"
        seeds = map(len, scores.values())
        figure = study_plots.precision_by_block_size(list(scores), *curve, title, seeds)
        plots.save(figure, known.output / "precision_by_block_size.png")
        found = [f"{size},{score!r}" for size, all_of in scores.items() for score in all_of]
        text = "\n".join(["block_size,precision", *found, ""])
        (known.precision / "precision.csv").write_text(text, encoding="utf-8")
    if known.convergence is not None:
        curves = accuracy_by_round(known.convergence, known.distribution)
        title = f"Budgets of {known.distribution}"
        runs = [r for r in runs_of(known.convergence) if r["distribution"] == known.distribution]
        seeds = Counter(run["algorithm"] for run in runs).values()
        figure = study_plots.accuracy_by_round(curves, title, seeds)
        plots.save(figure, known.output / "accuracy_by_round.png")


if __name__ == "__main__":
    main()
