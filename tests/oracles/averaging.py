"""PrivacyFL's algorithms 2 and 3 without noise, by hand, on `clients`: `(x, y)` in float64."""

import numpy as np

from oracles import local
from oracles.replay import batches


def averaged_models(theta, clients, replay, rounds, settings, rows, decay, *, is_new, is_warm):
    """The mean of models on `rows` new records a round, or on all so far; and the own models.

    `is_warm`: from the mean of the last round (algorithm 2), not from zero (algorithm 3).
    """
    own = np.tile(theta, (len(clients), 1))
    for r in range(rounds):
        found = []
        for i in replay.cohort(r):
            (x, y), last = clients[i], (r + 1) * rows[i]
            if last > len(y):
                continue
            first = last - rows[i] if is_new else 0
            x, y = x[first:last], y[first:last]
            steps = local.num_steps(len(y), settings.batch_size[i], settings.num_epochs[i])
            key, batch = replay._client_key(r, i), settings.batch_size[i]
            read = batches(replay.sampler, key, len(y), batch, steps, replay.limit, replay.capacity)
            start = theta if is_warm else np.zeros_like(theta)
            own[i] = local.sgd(start, x, y, read, settings.learning_rate[i], decay=decay)
            found.append(own[i])
        theta = np.mean(found, axis=0) if found else theta
    return theta, own
