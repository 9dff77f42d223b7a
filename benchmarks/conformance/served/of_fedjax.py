"""FedJAX's samplers of clients, its aggregator and its clipping, as functions of arrays."""

import jax
import numpy as np

jax.tree_map = jax.tree.map  # FedJAX 0.0.17 calls it by the name that JAX has removed.

import fedjax  # noqa: E402

NAMES = [b"%02d" % i for i in range(32)]
CLIENTS = fedjax.InMemoryFederatedData({name: {"x": np.zeros((1, 1))} for name in NAMES})


def _drawn(sampler, rounds):
    return [[int(client[0]) for client in sampler.sample()] for _ in range(rounds)]


def uniform(rounds, seed):
    sampler = fedjax.client_samplers.UniformGetClientSampler(CLIENTS, 4, seed)
    return _drawn(sampler, rounds)


def shuffled(rounds, seed):
    clients = CLIENTS.shuffled_clients(buffer_size=len(NAMES), seed=seed)
    return _drawn(fedjax.client_samplers.UniformShuffledClientSampler(clients, 4), rounds)


def clipped_mean(rows, seed):
    clip = fedjax.tree_util.tree_clip_by_global_norm
    aggregator = fedjax.aggregators.mean_aggregator()
    layers = [{"a": row[:6], "b": row[6:]} for row in rows]
    clients = [(name, clip(tree, 1.0), 1.0) for name, tree in zip(NAMES, layers, strict=False)]
    mean, _ = aggregator.apply(clients, aggregator.init())
    return np.concatenate([np.asarray(x) for x in jax.tree.leaves(mean)])


def weighted_mean(rows, weights, seed):
    clip = fedjax.tree_util.tree_clip_by_global_norm
    aggregator = fedjax.aggregators.mean_aggregator()
    clients = [
        (name, clip(row, 1.0), float(w)) for name, row, w in zip(NAMES, rows, weights, strict=False)
    ]
    mean, _ = aggregator.apply(clients, aggregator.init())
    return np.asarray(mean)
