"""Logistic regression by hand: parameters are one row, the bias first, then the weights."""

import numpy as np


def margins(theta, x):
    return theta[0] + x @ theta[1:]


def losses(theta, x, y):
    z = margins(theta, x)
    return np.logaddexp(0.0, z) - y * z


def gradients(theta, x, y):
    """Gradients of each example, `[examples, parameters]`."""
    residual = 1.0 / (1.0 + np.exp(-margins(theta, x))) - y
    return residual[:, None] * np.concatenate([np.ones((len(x), 1)), x], axis=1)
