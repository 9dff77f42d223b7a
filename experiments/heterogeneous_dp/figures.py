"""Figures 3.2, 3.3 and 3.7, without training: `python -m experiments.heterogeneous_dp.figures`."""

import argparse
import json
import pathlib

import numpy as np

from fedjax_dp.io import noise_plots, plots
from fedjax_dp.privacy import budgets, noise_levels

N, ROUNDS, DELTA, CLIP, RATE, PARAMETERS = 2400, 200, 1e-4, 3.0, 0.01, 28_938
BATCHES, EPSILONS = (16, 32, 64, 128, 256), (0.25, 0.5, 1.0, 2.0, 5.0)


def multipliers(epsilon, batch, first=None):
    return noise_levels.noise_multiplier_of_run(
        epsilon, DELTA, N, batch, num_rounds=ROUNDS, first_batch_size=first
    )


def variance_of(z, batch):
    gradient = noise_levels.clipped_gradient_variance(
        z, batch, clip_norm=CLIP, num_parameters=PARAMETERS
    )
    return noise_levels.update_variance(gradient, N, batch, learning_rate=RATE)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("runs/figures"))
    parser.add_argument("--run", type=pathlib.Path, help="a run folder of robust_hdp, for 3.7")
    known = parser.parse_args()
    batches = np.array(BATCHES, float)
    curves = {f"ε = {e:g}": multipliers(e, batches) for e in EPSILONS}
    title = f"N = {N}, E = {ROUNDS}, δ = {DELTA:g}"
    figure = noise_plots.multipliers_by_batch_size(BATCHES, curves, title)
    plots.save(figure, known.output / "multipliers_by_batch_size.png")
    table = np.array([variance_of(curves[f"ε = {e:g}"], batches) for e in EPSILONS])
    figure = noise_plots.variance_by_setting(table, EPSILONS, BATCHES, title)
    plots.save(figure, known.output / "variance_by_setting.png")
    if known.run is not None:
        with (known.run / "metrics.jsonl").open(encoding="utf-8") as file:
            row = json.loads(file.readline())
        epsilon, batch = budgets.published_budgets("Dist2", 20), budgets.published_batch_sizes(20)
        optimum = noise_levels.inverse_variance_weights(
            variance_of(multipliers(epsilon, batch), batch)
        )
        weights = {
            "oracle": optimum,
            "Robust-HDP": row["weights"],
            "WeiAvg": epsilon / epsilon.sum(),
            "DPFedAvg": np.full(20, 1 / 20),
        }
        figure = noise_plots.weights_of_clients(weights, "weights under Dist2")
        plots.save(figure, known.output / "weights.png")


if __name__ == "__main__":
    main()
