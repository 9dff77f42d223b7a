"""FedDyn by hand, from the paper, on models of participants rather than on what they changed."""

import numpy as np


def feddyn(theta, num_clients, replay, rounds, train, alpha):
    """FedDyn (Acar and others 2021, algorithm 1).

    `train(start, round, client, shift)` is local SGD with the proximal term α.
    """
    h, g = np.zeros_like(theta), np.zeros((num_clients, len(theta)))
    for r in range(rounds):
        models = []
        for i in replay.cohort(r):
            w = train(theta, r, i, -g[i])
            g[i] = g[i] - alpha * (w - theta)
            models.append(w)
        if models:
            h = h - alpha / num_clients * sum(w - theta for w in models)
            theta = np.mean(models, axis=0) - h / alpha
    return theta, h, g
