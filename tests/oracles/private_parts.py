"""Algorithms under privacy of clients by hand: all parts of an update are one vector.

`private` is `(clip norm, noise multiplier, expected cohort)`. Noise comes from `replay` in the
order of the update's leaves, whose shapes the caller has set there.
"""

import numpy as np

from oracles import local, logistic


def noised_mean(messages, replay, round_index, private):
    """Σ of clipped messages, one draw of noise, a divisor that no cohort changes."""
    clip_norm, multiplier, expected = private
    total = multiplier * clip_norm * replay.central_noise(round_index)
    for message in messages:
        total = total + local.clip(message, clip_norm)
    return total / expected


def scaffold(theta, clients, replay, rounds, train, settings, rate, private, weigh=None):
    """SCAFFOLD, option II; `weigh` is `(before, after)`, applied to (change of c_i, delta)."""
    before, after = weigh or (np.asarray, np.asarray)
    num_clients, size = len(clients), len(theta)
    c, c_i = np.zeros(size), np.zeros((num_clients, size))
    for r in range(rounds):
        messages = []
        for i in replay.cohort(r):
            records = len(clients[i][1])
            steps = local.num_steps(records, settings.batch_size[i], settings.num_epochs[i])
            if steps == 0:
                continue
            y = train(theta, r, i, c - c_i[i])
            new = c_i[i] - c + (theta - y) / (steps * settings.learning_rate[i])
            messages.append(before(np.concatenate([new - c_i[i], y - theta])))
            c_i[i] = new
        mean = after(noised_mean(messages, replay, r, private))
        c = c + private[2] / num_clients * mean[:size]
        theta = theta + rate * mean[size:]
    return theta, c, c_i


def scaled(of_control, of_params):
    """Parts of SCAFFOLD times public numbers at the client, divided by them at the server."""

    def factors(vector):
        half = len(vector) // 2
        return np.repeat([of_control, of_params], half)

    return lambda v: v * factors(v), lambda v: v / factors(v)


def shared(of_control, of_params, clip_norm):
    """Parts of SCAFFOLD clipped one by one."""

    def before(vector):
        control, params = np.split(vector, 2)
        return np.concatenate(
            [local.clip(control, of_control * clip_norm), local.clip(params, of_params * clip_norm)]
        )

    return before, np.asarray


def feddyn(theta, clients, replay, rounds, train, alpha, private):
    """FedDyn, whose share of participants is that of an expected cohort."""
    num_clients = len(clients)
    h, g = np.zeros_like(theta), np.zeros((num_clients, len(theta)))
    for r in range(rounds):
        deltas = []
        for i in replay.cohort(r):
            delta = train(theta, r, i, -g[i]) - theta
            g[i] = g[i] - alpha * delta
            deltas.append(delta)
        mean = noised_mean(deltas, replay, r, private)
        h = h - alpha * private[2] / num_clients * mean
        theta = theta + mean - h / alpha
    return theta, h, g


def mr_mtl(theta, clients, replay, rounds, settings, strength, private):
    """Models of the clients, and a mean that only noised changes of them reach."""
    own, mean = np.tile(theta, (len(clients), 1)), theta
    for r in range(rounds):
        deltas = []
        for i in replay.cohort(r):
            (x, y), start = clients[i], own[i].copy()
            steps = local.num_steps(len(y), settings.batch_size[i], settings.num_epochs[i])
            for rows in replay.batches(r, i, steps):
                gradient = logistic.gradients(own[i], x[rows], y[rows]).mean(axis=0)
                gradient = gradient + strength * (own[i] - mean)
                own[i] = own[i] - settings.learning_rate[i] * gradient
            deltas.append(own[i] - start)
        mean = mean + private[2] / len(clients) * noised_mean(deltas, replay, r, private)
    return own, mean


def splitting(client_map, theta, sizes, replay, rounds, numbers, private):
    """Operator splitting whose clients wait; z̄ moves by the noised mean of z_i − z̄."""
    (alpha, beta, gamma), count = numbers, len(sizes)
    u, mean = np.tile(theta, (count, 1)), theta
    z, has_joined = u.copy(), np.zeros(count, bool)

    def resumed(i, r):
        moved = (1 - gamma) * u[i] + gamma * ((1 - beta) * z[i] + beta * mean)
        return u[i] if r == 0 else moved

    for r in range(rounds):
        moves = []
        for i in replay.cohort(r):
            if sizes[i] == 0:
                continue
            u[i] = resumed(i, r)
            z[i] = (1 - alpha) * u[i] + alpha * client_map(r, i, u[i], mean)
            has_joined[i] = True
            moves.append(z[i] - mean)
        mean = mean + noised_mean(moves, replay, r, private)
    points = np.array([resumed(i, rounds) for i in range(count)])
    return mean, np.where(has_joined[:, None], points, theta)


def o_dpcfl(theta, clients, replay, rounds, train, clusters, private):
    """A federation for each cluster, with the public expected number of its clients."""
    sizes = np.bincount(clusters)
    models = np.tile(theta, (len(sizes), 1))
    for r in range(rounds):
        messages = []
        for i in replay.cohort(r):
            block = np.zeros_like(models)
            block[clusters[i]] = train(models[clusters[i]], r, i) - models[clusters[i]]
            messages.append(by_leaf(block))
        mean = by_row(noised_mean(messages, replay, r, private), len(sizes))
        models = models + len(clients) / sizes[:, None] * mean
    return models


def ifca(models, clients, replay, rounds, train, private):
    """IFCA; a model moves by its noised sum over its noised count, or over 1 if that is less."""
    models, choices = models.copy(), np.zeros(len(clients), int)
    count = len(models)
    for r in range(rounds):
        messages = []
        for i in replay.cohort(r):
            x, y = clients[i]
            losses = [logistic.losses(m, x, y).sum() / max(len(y), 1) for m in models]
            choices[i] = j = int(np.argmin(losses))
            if len(y) == 0:
                continue
            block = np.zeros_like(models)
            block[j] = train(models[j], r, i) - models[j]
            messages.append(np.concatenate([np.eye(count)[j], by_leaf(block)]))
        total = private[2] * noised_mean(messages, replay, r, private)
        divisors = np.maximum(total[:count], 1.0)
        models = models + by_row(total[count:], count) / divisors[:, None]
    return models, choices


def by_leaf(models):
    """Rows (b, w) of several models in the order of leaves: all b, then all w."""
    return np.concatenate([models[:, 0], models[:, 1:].reshape(-1)])


def by_row(vector, count):
    """The reverse of `by_leaf`."""
    return np.concatenate([vector[:count, None], vector[count:].reshape(count, -1)], axis=1)
