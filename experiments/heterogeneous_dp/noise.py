"""Noise without training, of table 3.4 and figures 3.2 and 3.3, as a CSV file.

`python -m experiments.heterogeneous_dp.noise --output FOLDER`: budgets and batch sizes are the
published ones, noise multipliers those of the authors' accountant.
"""

import argparse
import csv
import pathlib
from collections.abc import Iterator, Sequence

import numpy as np

from experiments import noise_levels
from fedjax_dp.privacy.accounting import budgets

CLASSIC = "rdp-classic-64"
N, ROUNDS, DELTA, CLIP, CLIENTS = 2400, 200, 1e-4, 3.0, 20
METHODS = ("WeiAvg", "DPFedAvg", "minimum_epsilon", "oracle")
Row = dict[str, str | float]


def multipliers(epsilon: np.ndarray | float, batch_sizes: np.ndarray, size: int = N) -> np.ndarray:
    """Noise multipliers of the thesis' setting, for clients of that number of records."""
    return noise_levels.noise_multiplier_of_run(
        epsilon, DELTA, size, batch_sizes, num_rounds=ROUNDS, accountant=CLASSIC
    )


def update_variances(
    epsilon: np.ndarray | float, batch_sizes: np.ndarray, size: int = N
) -> np.ndarray:
    """Variances of updates of clients, for one parameter and a learning rate of 1: (3.5)."""
    gradient = noise_levels.clipped_gradient_variance(
        multipliers(epsilon, batch_sizes, size), batch_sizes, clip_norm=CLIP, num_parameters=1
    )
    return noise_levels.update_variance(gradient, size, batch_sizes, learning_rate=1.0)


def normalised_variance(name: str, method: str, moved: float = 0.0) -> float:
    """Computes `Σ w² σ²/(p η²)` of a method on the published budgets, all moved by a number.

    Source: Malekmohammadi, chapter 3, table 3.4.
    """
    batch = budgets.published_batch_sizes(CLIENTS)
    epsilon = budgets.published_budgets(name, CLIENTS) + moved
    calibrated = np.full(CLIENTS, epsilon.min()) if method == "minimum_epsilon" else epsilon
    variance = update_variances(calibrated, batch)
    weights = {
        "WeiAvg": epsilon / epsilon.sum(),
        "DPFedAvg": np.full(CLIENTS, 1 / CLIENTS),
        "minimum_epsilon": np.full(CLIENTS, 1 / CLIENTS),
        "oracle": noise_levels.inverse_variance_weights(variance),
    }[method]
    return float(np.sum(weights**2 * variance))


def rows() -> Iterator[Row]:
    """Computes what the table and the figures show."""
    for name in budgets.DISTRIBUTIONS:
        for method in METHODS:
            variances = {
                key: normalised_variance(name, method, moved)
                for key, moved in (("value", 0.0), ("value_at_smaller_epsilon", -0.001))
            }
            yield {"of": "3.4", "distribution": name, "method": method, **variances}
    batch = np.array([16.0, 32.0, 64.0, 128.0, 256.0])
    for epsilon in (0.5, 1.0, 2.0, 5.0):
        for size, z in zip(batch, multipliers(epsilon, batch), strict=True):
            yield {"of": "3.2", "epsilon": epsilon, "batch_size": size, "value": float(z)}
    sizes = budgets.published_batch_sizes(CLIENTS)
    for name in budgets.DISTRIBUTIONS:
        epsilon = budgets.published_budgets(name, CLIENTS)
        found = zip(epsilon, sizes, update_variances(epsilon, sizes), strict=True)
        for own, size, variance in found:
            row: Row = {"of": "3.3", "distribution": name, "epsilon": float(own)}
            yield row | {"batch_size": float(size), "value": float(variance)}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=pathlib.Path, required=True)
    output = parser.parse_args(arguments).output
    output.mkdir(parents=True, exist_ok=True)
    with (output / "noise.csv").open("w", newline="", encoding="utf-8") as file:
        names = ["of", "distribution", "method", "epsilon", "batch_size"]
        names += ["value", "value_at_smaller_epsilon"]
        writer = csv.DictWriter(file, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows())


if __name__ == "__main__":
    main()
