"""The trimmed mean by hand: one coordinate at a time, from a sorted list."""

import math

import numpy as np


def trimmed_mean(rows, share):
    """Mean of what is left when ⌊share · n⌋ are taken from either end (Yin and others 2018)."""
    count = math.floor(round(share * len(rows), 9))
    left = [sorted(column)[count : len(rows) - count] for column in np.asarray(rows).T]
    return np.array([sum(column) / len(column) for column in left])
