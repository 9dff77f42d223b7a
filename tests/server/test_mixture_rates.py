"""How often mixtures find the number of clusters, and how fast: claims of the source as rates."""

import numpy as np
from marks import slow

from fedjax_dp.evaluation import is_partition_found
from fedjax_dp.privacy import calibrate_poisson
from fedjax_dp.server import fit_best_mixture, fit_mixture

TRUE = np.repeat(np.arange(4), (3, 6, 6, 6))
CORNERS = np.array([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
SEEDS = range(12)


def drawn(distance, stddev, seed):
    noise = np.random.default_rng(seed).normal(size=(21, 2))
    return distance * CORNERS[TRUE] + stddev * noise


def rates(distance):
    """How often MSS has its peak at four clusters by the plain rule and by ours, and four fit."""
    plain = ours = parts = 0
    for seed in SEEDS:
        points = drawn(distance, 1.0, seed)
        fits = [fit_mixture(points, m, 0) for m in range(2, 11)]
        plain += len(max(fits, key=lambda mixture: mixture.separation).means) == 4
        ours += len(fit_best_mixture(points, range(2, 11), 0).means) == 4
        parts += is_partition_found(fits[2].responsibilities.argmax(axis=1), TRUE)
    return plain / len(SEEDS), ours / len(SEEDS), parts / len(SEEDS)


@slow
def test_six_standard_deviations_are_not_enough_for_the_number_of_clusters():
    """With 21 clients only about half of the draws have four clusters."""
    plain, ours, parts = rates(6.0)
    assert 0.25 <= plain < 1 and 0.4 <= ours < 1 and 0.4 <= parts < 1
    assert ours >= plain


@slow
def test_mixtures_are_found_in_fewer_steps_as_the_first_batch_grows():
    """Theorem 4.3, with noise and drift of lemma 4.1 at N = 6,600 and ε = 5."""
    batches = np.array([256.0, 6600.0])
    drift = 6600 / batches
    rates = np.stack([1 / drift, [32 / 6600] * 2], axis=1)
    steps = np.array([1, 199]) / rates
    z = calibrate_poisson(5.0, 1e-4, rates, steps, accountant="rdp-classic-64")
    stddev = np.sqrt(drift) * 3 * z / batches
    # A step's length such that clusters are one score apart by the small batch.
    drift *= 2 * stddev[0] / drift[0]
    steps = [
        np.mean([fit_mixture(drawn(d, s, seed), 4, 0).num_iterations for seed in SEEDS])
        for d, s in zip(drift, stddev, strict=True)
    ]
    assert drift[1] / (2 * stddev[1]) > 4
    assert steps[1] < steps[0] / 2
