"""Federated algorithms by hand, from the papers, on `clients`: a list of `(x, y)` in float64."""

import numpy as np

from fedjax_dp.data import sampling
from oracles import local, logistic
from oracles.replay import batches


def local_sgd(clients, replay, settings, *, mu=0.0, radius=-1.0):
    """One client's plain local training as `train(start, round, client, shift) -> theta`."""

    def train(start, round_index, i, shift=0.0):
        x, y = clients[i]
        steps = local.num_steps(len(y), settings.batch_size[i], settings.num_epochs[i])
        batches = replay.batches(round_index, i, steps)
        rate = settings.learning_rate[i]
        return local.sgd(start, x, y, batches, rate, mu=mu, shift=shift, radius=radius)

    return train


def blur_lus(clients, replay, settings, strength, radius, sparsity, layers):
    """One client's training with BLUR, then LUS on each of `layers`, slices of the parameters.

    Cheng and others 2022, algorithm 2: the gradient at the final model over all of the data.
    """
    inner = local_sgd(clients, replay, settings, mu=strength, radius=radius)

    def train(start, round_index, i):
        x, y = clients[i]
        theta = inner(start, round_index, i)
        if len(y) == 0:
            return theta
        delta = theta - start
        cost = np.abs(logistic.gradients(theta, x, y).mean(axis=0) * delta)
        sparse = np.zeros_like(delta)
        for layer in layers:
            count = max(1, round((1 - sparsity) * len(cost[layer])))
            kept = np.arange(len(cost))[layer][np.argsort(-cost[layer], kind="stable")[:count]]
            sparse[kept] = delta[kept]
        return start + sparse

    return train


def local_dp_sgd(clients, replay, settings):
    """One client's DP-SGD, its own clip norm and noise multiplier."""

    def train(start, round_index, i):
        x, y = clients[i]
        steps = local.num_steps(len(y), settings.batch_size[i], settings.num_epochs[i])
        return local.dp_sgd(
            start,
            x,
            y,
            replay.batches(round_index, i, steps),
            replay.record_noise(round_index, i, steps),
            settings.learning_rate[i],
            settings.batch_size[i],
            settings.clip_norm[i],
            settings.noise_multiplier[i],
        )

    return train


def sgd_server(learning_rate=1.0, momentum=0.0):
    """FedAvg and FedAvgM (Hsu, Qi and Brown 2019): v = βv + Δ, w += η v."""
    velocity = 0.0

    def step(theta, delta):
        nonlocal velocity
        velocity = momentum * velocity + delta
        return theta + learning_rate * velocity

    return step


def adaptive_server(kind, learning_rate, b1, b2, tau):
    """FedAdam, FedYogi and FedAdagrad (Reddi and others 2021, algorithm 2)."""
    m, v = 0.0, tau**2

    def step(theta, delta):
        nonlocal m, v
        m = b1 * m + (1 - b1) * delta
        v = {
            "adagrad": lambda: v + delta**2,
            "yogi": lambda: v - (1 - b2) * delta**2 * np.sign(v - delta**2),
            "adam": lambda: b2 * v + (1 - b2) * delta**2,
        }[kind]()
        return theta + learning_rate * m / (np.sqrt(v) + tau)

    return step


def fedavg(theta, clients, replay, rounds, train, server):
    """FedAvg (McMahan and others 2017, algorithm 1) with any local training and server step."""
    for r in range(rounds):
        weighted, total = np.zeros_like(theta), 0.0
        for i in replay.cohort(r):
            size = len(clients[i][1])
            weighted += size * (train(theta, r, i) - theta)
            total += size
        theta = server(theta, weighted / total if total else weighted)
    return theta


def dp_fedavg(theta, replay, rounds, train, clip_norm, noise_multiplier, expected):
    """DP-FedAvg (McMahan and others 2018): clip, sum, one noise, a divisor fixed beforehand."""
    for r in range(rounds):
        total = np.zeros_like(theta)
        for i in replay.cohort(r):
            total += local.clip(train(theta, r, i) - theta, clip_norm)
        total += noise_multiplier * clip_norm * replay.central_noise(r)
        theta = theta + total / expected
    return theta


def ae_dpfl(theta, clients, replay, rounds, train, public, learning_rate, batch_size, epochs):
    """AE-DPFL (Zhu and others 2020) without noise; the label is -1 where votes tie."""
    start, block = theta.copy(), -(-len(public) // rounds)
    labels = np.full(len(public), -1)
    for r in range(rounds):
        votes = np.zeros((len(public), 2))
        for i in replay.cohort(r):
            if len(clients[i][1]):
                chosen = logistic.margins(train(start, r, i), public) > 0
                votes[np.arange(len(public)), chosen.astype(int)] += 1
        rows = np.arange(r * block, min((r + 1) * block, len(public)))
        ties = votes[rows, 0] == votes[rows, 1]
        labels[rows] = np.where(ties, -1, votes[rows].argmax(axis=1))
        asked = min((r + 1) * block, len(public))
        steps = local.num_steps(asked, batch_size, epochs)
        key = replay.server_key(r)
        sampler = sampling.shuffled()
        capacity = sampler.capacity(len(public), batch_size)
        for drawn in batches(sampler, key, asked, batch_size, steps, len(public), capacity):
            gradients = logistic.gradients(theta, public[drawn], labels[drawn])
            # An unanswered query has gradient 0, and counts in the mean.
            gradients[labels[drawn] < 0] = 0
            theta = theta - learning_rate * gradients.mean(axis=0)
    return theta, labels


def median(theta, replay, rounds, train):
    """FedAvg with the coordinate-wise median of the deltas in place of their mean."""
    for r in range(rounds):
        deltas = [train(theta, r, i) - theta for i in replay.cohort(r)]
        theta = theta + np.median(deltas, axis=0) if deltas else theta
    return theta


def scaffold(
    theta,
    clients,
    replay,
    rounds,
    train,
    settings,
    server_learning_rate,
    mask_of=lambda deltas: 1.0,
):
    """SCAFFOLD (Karimireddy and others 2020, algorithm 1, option II); its step may be masked."""
    num_clients = len(clients)
    c, c_i = np.zeros_like(theta), np.zeros((num_clients, len(theta)))
    for r in range(rounds):
        cohort = replay.cohort(r)
        deltas, changes = [], []
        for i in cohort:
            size = len(clients[i][1])
            steps = local.num_steps(size, settings.batch_size[i], settings.num_epochs[i])
            y = train(theta, r, i, c - c_i[i])
            deltas.append(y - theta)
            if steps == 0:
                continue
            new = c_i[i] - c + (theta - y) / (steps * settings.learning_rate[i])
            changes.append(new - c_i[i])
            c_i[i] = new
        if cohort:
            masked = mask_of(np.array(deltas).reshape(-1, len(theta)))
            theta = theta + masked * server_learning_rate * np.mean(deltas, axis=0)
        if changes:
            c = c + np.sum(changes, axis=0) / num_clients
    return theta, c, c_i


def scaffold_by_gradients(theta, clients, replay, rounds, settings, server_learning_rate, momentum):
    """SCAFFOLD with option I, whose clients take steps with momentum."""
    num_clients = len(clients)
    c, c_i = np.zeros_like(theta), np.zeros((num_clients, len(theta)))
    for r in range(rounds):
        cohort = replay.cohort(r)
        deltas, new = [], c_i.copy()
        for i in cohort:
            x, y = clients[i]
            steps = local.num_steps(len(y), settings.batch_size[i], settings.num_epochs[i])
            own, velocity = theta.copy(), np.zeros_like(theta)
            for rows in replay.batches(r, i, steps):
                gradient = logistic.gradients(own, x[rows], y[rows]).mean(axis=0)
                velocity = momentum * velocity + gradient + c - c_i[i]
                own = own - settings.learning_rate[i] * velocity
            deltas.append(own - theta)
            if len(y):
                new[i] = logistic.gradients(theta, x, y).mean(axis=0)
        if cohort:
            theta = theta + server_learning_rate * np.mean(deltas, axis=0)
        c, c_i = c + (new - c_i).sum(axis=0) / num_clients, new
    return theta, c, c_i


def ifca(models, clients, replay, rounds, train):
    """IFCA with averaging of models (Ghosh and others 2020, algorithm 1, option II)."""
    models, choices = models.copy(), np.zeros(len(clients), int)
    for r in range(rounds):
        weighted, total = np.zeros_like(models), np.zeros(len(models))
        for i in replay.cohort(r):
            x, y = clients[i]
            means = [logistic.losses(m, x, y).sum() / max(len(y), 1) for m in models]
            choices[i] = j = int(np.argmin(means))
            weighted[j] += len(y) * (train(models[j], r, i) - models[j])
            total[j] += len(y)
        models = models + weighted / np.where(total > 0, total, 1.0)[:, None]
    return models, choices


def local_only(theta, replay, rounds, train):
    """Every client's own model; it moves in the rounds that the client joins."""
    own = np.tile(theta, (len(replay.sizes), 1))
    for r in range(rounds):
        for i in replay.cohort(r):
            own[i] = train(own[i], r, i)
    return own
