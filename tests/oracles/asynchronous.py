"""Buffered asynchronous rounds by hand: a simulation from instant to instant, in float64."""

import math

import numpy as np


def rounds_of(orders, seconds, *, buffer, concurrency, server, oldest, separation=1, most=math.inf):
    """For each round the pairs of client and staleness, in order of arrival, and its seconds.

    Nguyen and others 2022, algorithm 1. `orders` has for each round all clients in the order in
    which idle places are filled. At an instant updates arrive first, then the server takes its
    step, and only then, if it is not at work, it sends its model.
    """
    now, version, turn, ready = 0.0, 0, 0, 0.0
    at_work: dict[int, tuple] = {}
    last, times = {}, {}
    arrived: list[tuple[int, int]] = []
    found = []

    def is_free(client):
        return (
            client not in at_work
            and last.get(client, -separation) + separation <= version
            and times.get(client, 0) < most
        )

    while len(found) < len(orders):
        # The updates that are there by now, in the order in which they came.
        for when, _, client, start in sorted((w, t, c, v) for c, (w, t, v) in at_work.items()):
            is_full = sum(age <= oldest for _, age in arrived) >= buffer
            if when > now or is_full:
                break
            del at_work[client]
            arrived.append((client, version - start))
            last[client], times[client] = version, times.get(client, 0) + 1
        if sum(age <= oldest for _, age in arrived) >= buffer:
            found.append((arrived, now + server - ready))
            arrived, version = [], version + 1
            ready = now = now + server
            continue
        for client in orders[version]:
            if len(at_work) < concurrency and is_free(client):
                at_work[client] = now + seconds[client], turn, version
                turn += 1
        if not at_work:
            found.append((arrived, now + server - ready))
            arrived, version = [], version + 1
            ready = now = now + server
            continue
        now = max(now, min(when for when, _, _ in at_work.values()))
    return found


def weighted_mean(deltas, sizes, weights):
    """Σ n s Δ / Σ n: weights for staleness are in no divisor."""
    return np.einsum("i,i,ij->j", sizes, weights, deltas) / np.sum(sizes)


def clipped_sum(deltas, weights, clip, divisor):
    """The sum of clipped updates, each times its weight, over a public divisor."""
    norms = np.linalg.norm(deltas, axis=1)
    factors = np.minimum(1, clip / np.maximum(norms, 1e-30))
    return np.einsum("i,i,ij->j", weights, factors, deltas) / divisor
