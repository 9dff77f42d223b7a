"""Local training by hand."""

import math

import numpy as np

from oracles import logistic


def num_steps(size, batch_size, epochs):
    if size == 0:
        return 0
    return math.ceil(math.ceil(size / batch_size) * epochs)


def sgd(start, x, y, batches, learning_rate, *, mu=0.0, shift=0.0, radius=-1.0, decay=0.0):
    """Plain SGD on batches, with a direction, decay, and a proximal term beyond `radius`."""
    theta = start.copy()
    for rows in batches:
        gradient = np.zeros_like(theta)
        if len(rows):
            gradient = logistic.gradients(theta, x[rows], y[rows]).mean(axis=0)
        pull = mu * (theta - start) * (np.linalg.norm(theta - start) > radius)
        theta -= learning_rate * (gradient + pull + shift + decay * theta)
    return theta


def clip(vectors, bound):
    norms = np.linalg.norm(vectors, axis=-1, keepdims=True)
    return vectors * np.minimum(1.0, bound / np.maximum(norms, 1e-300))


def dp_sgd(start, x, y, batches, noises, learning_rate, batch_size, clip_norm, noise_multiplier):
    """DP-SGD: clipped gradients, standard normal `noises`, the public batch size as divisor."""
    theta = start.copy()
    for rows, noise in zip(batches, noises, strict=True):
        total = clip(logistic.gradients(theta, x[rows], y[rows]), clip_norm).sum(axis=0)
        total += noise_multiplier * clip_norm * noise
        theta -= learning_rate * total / batch_size
    return theta
