"""Masked averaging and fair objectives by hand, in float64, from the papers."""

import math

import numpy as np

from oracles import local, logistic


def mask(deltas, threshold, kind="soft", form="corrected"):
    """The mask of GMA from the updates `[clients, parameters]` of those who hold examples.

    Tenison and others 2022, equation 3: the agreement where it is below the threshold, else 1.
    The hard mask keeps nothing there. The listing steps the other way, and prints the hard mask
    without the absolute value.
    """
    n = len(deltas)
    votes = np.sign(deltas).sum(axis=0) if n else np.zeros(np.shape(deltas)[1:])
    counted = votes if (kind, form) == ("hard", "printed") else np.abs(votes)
    is_whole = counted >= math.ceil(threshold * n - 1e-6)
    below = np.abs(votes) / max(n, 1) if kind == "soft" else 0.0
    found = np.where(is_whole, 1.0, below)
    return -found if form == "printed" else found


def gma(theta, clients, replay, rounds, train, server, threshold, **how):
    """GMA on any server step: the step from the unmasked mean, times the mask (algorithm 1)."""
    for r in range(rounds):
        cohort = replay.cohort(r)
        deltas = {i: train(theta, r, i) - theta for i in cohort}
        total = sum(len(clients[i][1]) for i in cohort)
        mean = sum((len(clients[i][1]) * deltas[i] for i in cohort), np.zeros_like(theta))
        step = server(theta, mean / total if total else mean) - theta
        voters = np.array(list(deltas.values())).reshape(-1, len(theta))
        theta = theta + step * mask(voters, threshold, **how)
    return theta


def noised_gma(theta, clients, replay, rounds, train, clip, multiplier, expected, threshold, share):
    """GMA behind client-level privacy: update, then votes, are one noised vector."""
    size = len(theta)
    vote = share * clip / math.sqrt(size)
    for r in range(rounds):
        total = multiplier * clip * replay.central_noise(r)
        for i in replay.cohort(r):
            delta = train(theta, r, i) - theta
            kept = local.clip(delta, math.sqrt(1 - share**2) * clip)
            total += np.concatenate([kept, vote * np.sign(delta)])
        mean, votes = total[:size] / expected, total[size:] / expected / vote
        agreement = np.minimum(np.abs(votes), 1.0)
        theta = theta + mean * np.where(agreement >= threshold - 1e-6, 1.0, agreement)
    return theta


def onto_simplex(y):
    """The nearest point of the simplex, by bisection of the shift."""
    low, high = np.min(y) - 1.0, np.max(y)
    for _ in range(200):
        shift = (low + high) / 2
        low, high = (shift, high) if np.maximum(y - shift, 0).sum() > 1 else (low, shift)
    return np.maximum(y - (low + high) / 2, 0)


def _loss(theta, client):
    return logistic.losses(theta, *client).mean() if len(client[1]) else 0.0


def afl(theta, clients, replay, rounds, train, step_size):
    """AFL (Mohri and others 2019): the weights climb first, and weigh the updates of the round."""
    weights = np.full(len(clients), 1 / len(clients))
    for r in range(rounds):
        present = [i for i in replay.cohort(r) if len(clients[i][1])]
        if not present:
            continue
        losses = np.zeros(len(clients))
        losses[present] = [_loss(theta, clients[i]) for i in present]
        weights = onto_simplex(weights + step_size * losses)
        share = weights[present].sum()
        moved = sum(weights[i] * (train(theta, r, i) - theta) for i in present)
        theta = theta + (moved / share if share > 0 else 0.0)
    return theta, weights


def term(theta, clients, replay, rounds, train, tilt):
    """TERM over clients (Li and others 2021): the softmax of ln p + t f; R of the last round."""
    risk = 0.0
    for r in range(rounds):
        present = [i for i in replay.cohort(r) if len(clients[i][1])]
        if not present:
            continue
        sizes = np.array([len(clients[i][1]) for i in present], float)
        exponents = tilt * np.array([_loss(theta, clients[i]) for i in present])
        weights = sizes * np.exp(exponents - exponents.max())
        risk = (np.log(weights.sum() / sizes.sum()) + exponents.max()) / tilt
        deltas = np.array([train(theta, r, i) - theta for i in present])
        theta = theta + weights / weights.sum() @ deltas
    return theta, risk


def q_fedavg(theta, clients, replay, rounds, train, rates, q):
    """q-FedAvg (Li and others 2020, algorithm 2)."""
    for r in range(rounds):
        top, bottom = np.zeros_like(theta), 0.0
        for i in replay.cohort(r):
            if not len(clients[i][1]):
                continue
            f, lipschitz = _loss(theta, clients[i]), 1 / rates[i]
            moved = lipschitz * (theta - train(theta, r, i))
            # Over L, so that clients of other rates count the same.
            top += f**q * moved / lipschitz
            bottom += (q * f ** (q - 1) * moved @ moved + lipschitz * f**q) / lipschitz
        theta = theta - top / bottom if bottom else theta
    return theta


def propfair_slope(loss, baseline, margin):
    """The derivative of −ln(1 − ℓ/M), which is 1/ε beyond M − ε."""
    return 1 / max(baseline - loss, margin)


def propfair_sgd(clients, replay, settings, baseline, margin):
    """Local SGD on the objective of each batch's mean loss (Zhang and others 2022)."""

    def train(start, round_index, i):
        (x, y), theta = clients[i], start.copy()
        steps = local.num_steps(len(y), settings.batch_size[i], settings.num_epochs[i])
        for rows in replay.batches(round_index, i, steps):
            if not len(rows):
                continue
            slope = propfair_slope(
                logistic.losses(theta, x[rows], y[rows]).mean(), baseline, margin
            )
            gradient = logistic.gradients(theta, x[rows], y[rows]).mean(axis=0)
            theta -= settings.learning_rate[i] * slope * gradient
        return theta

    return train


def propfair_dp_sgd(clients, replay, settings, baseline, margin):
    """DP-SGD on the objective of each record's loss, clipped behind it."""

    def train(start, round_index, i):
        (x, y), theta = clients[i], start.copy()
        steps = local.num_steps(len(y), settings.batch_size[i], settings.num_epochs[i])
        batches = replay.batches(round_index, i, steps)
        bound, rate = settings.clip_norm[i], settings.learning_rate[i]
        for rows, noise in zip(batches, replay.record_noise(round_index, i, steps), strict=True):
            slopes = [
                propfair_slope(loss, baseline, margin)
                for loss in logistic.losses(theta, x[rows], y[rows])
            ]
            each = logistic.gradients(theta, x[rows], y[rows])
            each = each * np.array(slopes).reshape(-1, 1)
            total = local.clip(each, bound).sum(axis=0)
            total += settings.noise_multiplier[i] * bound * noise
            theta -= rate * total / settings.batch_size[i]
        return theta

    return train
