"""Figures 3, 4 and E.7 (right), without training: `python -m experiments.clustered_dp.figures`.

The noise multiplier, and the noise variance of the first and of later updates, over the batch sizes
of the first round b¹ and of all others b^{>1}; and by how much a full first batch raises the
multiplier. The numbers are in `noise.csv` beside the figures.
"""

import argparse
import csv
import itertools
import pathlib
from collections.abc import Iterator, Sequence

import numpy as np

from experiments import noise_levels, study_plots
from fedjax_dp.io import plots

# CIFAR-10 with ResNet-18, as the paper draws it.
N, EPSILON, DELTA, CLIP, ROUNDS = 6600, 5.0, 1e-4, 3.0, 200
PARAMETERS, RATE = 11_181_642, 5e-4
ACCOUNTANT = "rdp-classic-64"
FIRST_BATCHES = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 6600)
LATER_BATCHES = (16, 32, 64, 128, 256)


def multipliers() -> np.ndarray:
    """Noise multipliers, `[first batch sizes, later batch sizes]`."""
    first, later = np.meshgrid(FIRST_BATCHES, LATER_BATCHES, indexing="ij")
    found = noise_levels.noise_multiplier_of_run(
        EPSILON,
        DELTA,
        N,
        later.ravel(),
        num_rounds=ROUNDS,
        first_batch_size=first.ravel(),
        accountant=ACCOUNTANT,
    )
    return found.reshape(first.shape)


def variances(z: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Noise variance by lemma 4.1 of the first update and of a later one, as `multipliers`."""
    first, later = np.meshgrid(FIRST_BATCHES, LATER_BATCHES, indexing="ij")

    def of(batch: np.ndarray) -> np.ndarray:
        gradient = noise_levels.clipped_gradient_variance(
            z, batch, clip_norm=CLIP, num_parameters=PARAMETERS
        )
        return noise_levels.update_variance(
            gradient, N, batch, learning_rate=RATE, rounds_steps_up=False
        )

    return of(first), of(later)


def full_batch_ratios(num_examples: int, batch_sizes: Sequence[int]) -> Iterator[dict[str, float]]:
    """Computes z of a full first batch over z of equal batches, for budgets and batch sizes."""
    budgets = (2.0, 3.0, 4.0, 5.0, 10.0, 15.0)
    for epsilon in budgets:
        full, equal = (
            noise_levels.noise_multiplier_of_run(
                epsilon,
                DELTA,
                num_examples,
                np.array(batch_sizes, float),
                num_rounds=ROUNDS,
                first_batch_size=first,
                accountant=ACCOUNTANT,
            )
            for first in (num_examples, None)
        )
        for later, ratio in zip(batch_sizes, full / equal, strict=True):
            yield {"num_examples": num_examples, "epsilon": epsilon, "later": later, "ratio": ratio}


def rows(z: np.ndarray) -> Iterator[dict[str, str | float]]:
    """What the figures show, as rows of a table."""
    at_first, at_later = variances(z)
    sizes = itertools.product(enumerate(FIRST_BATCHES), enumerate(LATER_BATCHES))
    for (i, first), (j, later) in sizes:
        row = {"num_examples": N, "epsilon": EPSILON, "first": first, "later": later}
        noise = {"multiplier": z[i, j], "first_update": at_first[i, j]}
        yield {"of": "3 and 4", **row, **noise, "later_update": at_later[i, j]}
    for ratio in full_batch_ratios(50_000, (16, 32, 64, 128, 256, 512, 1024)):
        yield {"of": "E.7", **ratio}
    for ratio in full_batch_ratios(N, (32,)):
        yield {"of": "first batch", **ratio}


def write(output: pathlib.Path, z: np.ndarray) -> None:
    """Writes `noise.csv`."""
    names = ["of", "num_examples", "epsilon", "first", "later"]
    names += ["multiplier", "first_update", "later_update", "ratio"]
    output.mkdir(parents=True, exist_ok=True)
    with (output / "noise.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows(z))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("runs/figures"))
    output = parser.parse_args(arguments).output
    z = multipliers()
    write(output, z)
    title = f"{N:,} records, {ROUNDS} rounds, ε = {EPSILON:g}, δ = {DELTA:g}"
    curves = {f"later batches of {b}": z[:, j].tolist() for j, b in enumerate(LATER_BATCHES)}
    label = "first batch size $b^1$"
    figure = study_plots.multipliers_by_batch_size(FIRST_BATCHES, curves, title, label=label)
    plots.save(figure, output / "multipliers_by_batch_sizes.png")
    labels = ("first batch size $b^1$", "later batch size $b^{>1}$")
    for name, table in zip(("first", "later"), variances(z), strict=True):
        about = f"clip norm {CLIP:g}, {PARAMETERS:,} parameters, η = {RATE:g}"
        heads = f"Noise of the {name} update", title, about
        figure = study_plots.variance_by_setting(
            table, FIRST_BATCHES, LATER_BATCHES, *heads, labels=labels
        )
        plots.save(figure, output / f"variance_of_{name}_update.png")


if __name__ == "__main__":
    main()
