"""Clustered federated algorithms by hand: principal components by SVD, choices from their draws."""

import jax
import numpy as np
from sklearn.mixture import GaussianMixture

from fedjax_dp.core.keys import Purpose, fold
from fedjax_dp.privacy.mechanisms import random_bits
from oracles import local, logistic


def accuracy(theta, x, y):
    """The share of labels on the right side of the plane."""
    return np.mean((x @ theta[1:] + theta[0] > 0) == (y > 0.5)) if len(y) else 0.0


def mean_loss(theta, x, y):
    return logistic.losses(theta, x, y).sum() / max(len(y), 1)


def gumbel(replay, round_index, client, count):
    """The draws of a client's choice."""
    key = fold(replay._client_key(round_index, client), Purpose.SELECTION)
    return np.asarray(random_bits.gumbel(key, (count,)), np.float64)


def public_gumbel(replay, round_index, client, count):
    """The draws of a client's choice among clusters whose chances are known."""
    key = fold(replay._client_key(round_index, client), Purpose.SELECTION)
    return np.asarray(jax.random.gumbel(key, (count,)), np.float64)


def choose_privately(models, x, y, epsilon, noise):
    """The exponential mechanism on accuracies of sensitivity 1/(n - 1)."""
    scores = np.array([accuracy(m, x, y) for m in models])
    return int(np.argmax(scores * epsilon * (len(y) - 1) / 2 + noise))


def choose_exactly(models, x, y):
    return int(np.argmin([mean_loss(m, x, y) for m in models]))


def principal_features(deltas, count):
    """Scores of the centred rows on their first principal components, scaled to [0, 1]."""
    centred = deltas - deltas.mean(axis=0)
    u, s, _ = np.linalg.svd(centred, full_matrices=False)
    for k in range(len(s)):
        far = [i for i in range(len(u)) if abs(u[i, k]) >= max(abs(u[:, k])) / 2]
        u[:, k] *= np.sign(u[far[0], k])
    scores = (u * s)[:, :count]
    low, high = scores.min(axis=0), scores.max(axis=0)
    is_used = s[: scores.shape[1]] > 1e-2 * s[0]
    return np.where(is_used, (scores - low) / np.where(high > low, high - low, 1.0), 0.0)


def fitted(points, num_clusters, seed):
    """A spherical mixture by expectation-maximisation."""
    return GaussianMixture(
        num_clusters,
        covariance_type="spherical",
        tol=1e-6,
        max_iter=1000,
        n_init=10,
        init_params="k-means++",
        random_state=seed,
    ).fit(points)


def smallest_separation(points, num_clusters, seed):
    """MSS: the smallest distance of two centres over twice the larger width."""
    mixture = fitted(points, num_clusters, seed)
    means, widths = mixture.means_, np.sqrt(mixture.covariances_)
    return min(
        np.sqrt(np.sum((means[i] - means[j]) ** 2)) / (2 * max(widths[i], widths[j]))
        for i in range(num_clusters)
        for j in range(i)
    )


def responsibilities(features, num_clusters, seed):
    """Those of a spherical mixture whose clusters are equally likely beforehand."""
    mixture = fitted(np.round(features, 4), num_clusters, seed)
    squared = ((np.round(features, 4)[:, None] - mixture.means_) ** 2).sum(axis=2)
    dim = features.shape[1]
    log = -squared / (2 * mixture.covariances_) - dim / 2 * np.log(mixture.covariances_)
    chances = np.exp(log - log.max(axis=1, keepdims=True))
    order = sorted(range(num_clusters), key=lambda m: tuple(mixture.means_[m]))
    return (chances / chances.sum(axis=1, keepdims=True))[:, order]


def r_dpcfl(
    run, train, train_whole, rounds, num_models, soft_rounds, choose, weight_of, trained=None
):
    """R-DPCFL with a given E_c: one round on whole batches, soft clusters, then choices.

    After `trained` rounds, all of them by default, clients choose and nothing moves.
    """
    trained = rounds if trained is None else trained
    theta = np.concatenate(
        [np.asarray(run.initial.server.models[k][0], np.float64).reshape(-1) for k in ("b", "w")]
    )
    models = np.tile(theta, (num_models, 1))
    sizes, replay = np.array([len(y) for _, y in run.clients]), run.replay
    choices = np.zeros(len(sizes), int)
    cohort = [i for i in replay.cohort(0) if sizes[i]]
    deltas = np.array([train_whole(theta, 0, i) - theta for i in cohort])
    seed = int(jax.random.bits(fold(replay.key, Purpose.SERVER, 1), (), np.uint32))
    chances = np.full((len(sizes), num_models), 1 / num_models)
    chances[cohort] = responsibilities(principal_features(deltas, 3), num_models, seed)
    for r in range(1, rounds):
        summed, total = np.zeros_like(models), np.zeros(num_models)
        for i in replay.cohort(r):
            if sizes[i] == 0:
                continue
            if r + 1 <= soft_rounds:
                # A draw from what is public by now: no noise of privacy, but the library's own.
                with np.errstate(divide="ignore"):
                    choices[i] = np.argmax(
                        np.log(chances[i]) + public_gumbel(replay, r, i, num_models)
                    )
            else:
                choices[i] = choose(models, r, i)
            if r >= trained:
                continue
            m = choices[i]
            summed[m] += weight_of(i) * (train(models[m], r, i) - models[m])
            total[m] += weight_of(i)
        models = models + summed / np.where(total > 0, total, 1.0)[:, None]
    return {"models": models, "choices": choices, "chances": chances}


def f_cdpfl(run, train, rounds, num_selections, epsilon, trained=None):
    """IFCA with private choices in the first rounds and uniform means.

    After `trained` rounds, all of them by default, clients choose and nothing moves.
    """
    trained = rounds if trained is None else trained
    models = np.concatenate(
        [np.asarray(run.initial.server.models[k], np.float64).reshape(2, -1) for k in ("b", "w")],
        axis=1,
    )
    choices = np.zeros(len(run.clients), int)
    for r in range(rounds):
        summed, total = np.zeros_like(models), np.zeros(len(models))
        for i in run.replay.cohort(r):
            x, y = run.clients[i]
            if len(y) == 0:
                continue
            if r < num_selections or r >= trained:
                noise = gumbel(run.replay, r, i, len(models))
                choices[i] = choose_privately(models, x, y, epsilon, noise)
            if r >= trained:
                continue
            summed[choices[i]] += train(models[choices[i]], r, i) - models[choices[i]]
            total[choices[i]] += 1
        models = models + summed / np.where(total > 0, total, 1.0)[:, None]
    return {"models": models, "choices": choices}


def o_dpcfl(theta, clients, replay, rounds, train, clusters):
    """A federation for each cluster."""
    models = np.tile(theta, (max(clusters) + 1, 1))
    for r in range(rounds):
        before = models.copy()
        for m in range(len(models)):
            members = [i for i in replay.cohort(r) if clusters[i] == m and len(clients[i][1])]
            if members:
                models[m] = np.mean([train(before[m], r, i) for i in members], axis=0)
    return models


def best_partition(points, num_clusters):
    """The partition of least inertia, by trying all of them."""
    best, found = np.inf, None
    for code in range(num_clusters ** len(points)):
        labels = (code // num_clusters ** np.arange(len(points))) % num_clusters
        inertia = sum(
            ((points[labels == c] - points[labels == c].mean(axis=0)) ** 2).sum()
            for c in np.unique(labels)
        )
        if inertia < best - 1e-12:
            best, found = inertia, labels
    return found


def km_cdpfl(theta, clients, replay, rounds, train, num_models):
    """Myopic clustering: the best partition of each round's updates, places by nearest model."""
    models, clusters = np.tile(theta, (num_models, 1)), np.zeros(len(clients), int)
    for r in range(rounds):
        cohort = [i for i in replay.cohort(r) if len(clients[i][1])]
        if not cohort:
            continue
        ends = {i: train(models[clusters[i]], r, i) for i in cohort}
        deltas = np.array([ends[i] - models[clusters[i]] for i in cohort])
        labels = best_partition(deltas, num_models)
        new = {
            c: np.mean([ends[i] for i, label in zip(cohort, labels, strict=True) if label == c], 0)
            for c in np.unique(labels)
        }
        pairs = sorted(
            (np.sum((new[c] - models[m]) ** 2), c, m) for c in new for m in range(num_models)
        )
        place = {}
        for _, c, m in pairs:
            if c not in place and m not in place.values():
                place[c] = m
        for c, m in place.items():
            models[m] = new[c]
        for i, label in zip(cohort, labels, strict=True):
            clusters[i] = place[label]
    return models, clusters


def mr_mtl(theta, clients, replay, rounds, settings, strength):
    """Every client's own model by plain SGD, pulled towards the mean of all."""
    own = np.tile(theta, (len(clients), 1))
    for r in range(rounds):
        mean = own.mean(axis=0)
        for i in replay.cohort(r):
            x, y = clients[i]
            steps = local.num_steps(len(y), settings.batch_size[i], settings.num_epochs[i])
            for rows in replay.batches(r, i, steps):
                gradient = logistic.gradients(own[i], x[rows], y[rows]).mean(axis=0)
                gradient = gradient + strength * (own[i] - mean)
                own[i] = own[i] - settings.learning_rate[i] * gradient
    return own
