"""Means by noise and by budget, from the paper, in float64 NumPy and with full decompositions."""

import numpy as np
from sklearn.decomposition import PCA

from oracles import local


def pursuit(matrix, *, mode="fixed", tolerance=1e-7, max_iterations=1000, growth=1.05):
    """Principal component pursuit of `[parameters, clients]`: both parts.

    Candès and others 2011, algorithm 1; with mode "inexact" the penalty of Lin, Chen and Ma 2010.
    """
    p, n = matrix.shape
    sparsity, norm = 1 / np.sqrt(max(p, n)), np.linalg.norm(matrix)
    mu = p * n / (4 * np.abs(matrix).sum())
    if mode == "inexact":
        mu = 1.25 / np.linalg.norm(matrix, 2)
    sparse, dual = np.zeros_like(matrix), np.zeros_like(matrix)
    for _ in range(max_iterations):
        u, s, v = np.linalg.svd(matrix - sparse + dual / mu, full_matrices=False)
        low_rank = (u * np.maximum(s - 1 / mu, 0)) @ v
        rest = matrix - low_rank + dual / mu
        sparse = np.sign(rest) * np.maximum(np.abs(rest) - sparsity / mu, 0)
        dual = dual + mu * (matrix - low_rank - sparse)
        if np.linalg.norm(matrix - low_rank - sparse) <= tolerance * norm:
            break
        mu *= growth if mode == "inexact" else 1
    return low_rank, sparse


def inverse(levels):
    """Weights that are inverse to levels."""
    return (1 / levels) / np.sum(1 / levels)


def pfa_mean(deltas, epsilon, is_public, num_components=1):
    """PFA by scikit-learn's PCA: standardise, project the private ones, average by budget."""
    deltas, public = np.asarray(deltas, float), np.asarray(is_public)
    weights = np.asarray(epsilon, float) / np.sum(epsilon)
    if public.sum() >= 2:
        mean, spread = deltas[public].mean(axis=0), deltas[public].std(axis=0)
        spread = np.where(spread > 0, spread, 1.0)
        scaled = (deltas - mean) / spread
        space = PCA(min(num_components, public.sum() - 1)).fit(scaled[public])
        back = space.inverse_transform(space.transform(scaled)) * spread + mean
        deltas = np.where(public[:, None], deltas, back)
    return weights @ deltas


def averaged(theta, run, rounds, train, mean):
    """FedAvg with another mean: `mean(round, clients, deltas)` over clients with examples."""
    for r in range(rounds):
        members = [i for i in run.replay.cohort(r) if len(run.clients[i][1])]
        if members:
            deltas = np.array([train(theta, r, i) - theta for i in members])
            theta = theta + mean(r, np.array(members), deltas)
    return theta


def oracle_levels(settings, sizes):
    """(3.5) with (3.3) for one parameter, client by client."""
    steps = np.array(
        [
            local.num_steps(n, b, k)
            for n, b, k in zip(sizes, settings.batch_size, settings.num_epochs, strict=True)
        ]
    )
    step = settings.clip_norm * settings.noise_multiplier / settings.batch_size
    return steps * (settings.learning_rate * step) ** 2


class FirstEstimates:
    """Robust-HDP's weights: a client's level is that of the first round that it joins."""

    def __init__(self):
        self.levels = {}

    def __call__(self, round_index, members, deltas):
        if any(i not in self.levels for i in members):
            _, sparse = pursuit(deltas.T, mode="inexact", tolerance=1e-6)
            for i, level in zip(members, np.sum(sparse**2, axis=0), strict=True):
                self.levels.setdefault(i, level)
        return inverse(np.array([self.levels[i] for i in members])) @ deltas
