"""Warns of a δ that protects less than publishing one unit at random does."""

import numpy as np
from numpy.typing import ArrayLike

from fedjax_dp.core.decimals import shown

_UNITS = {
    "client": ("{} clients", "all data of one of them"),
    "record": ("the {} records of a client", "one of them"),
    "unit": ("{} units", "all data of one of them"),
}


def large_delta(unit: str, dp_delta: ArrayLike, num_units: ArrayLike) -> str:
    """Returns a warning if δ is not below the share of one unit, else "".

    Publishing one of n units, each with the same probability, is private at ε = 0 and δ = 1/n. Of
    several clients it names the one whose δ exceeds 1/n by the largest factor.
    """
    deltas, counts = np.broadcast_arrays(np.asarray(dp_delta, float), np.asarray(num_units))
    deltas, counts = np.atleast_1d(deltas), np.atleast_1d(counts)
    shares = 1 / np.maximum(counts, 1)
    is_large = deltas >= shares
    if not np.any(is_large):
        return ""
    worst = int(np.argmax(deltas / shares))
    number, (units, what) = int(counts[worst]), _UNITS[unit]
    affected = f" ({int(np.sum(is_large))} of {is_large.size} clients)" * (unit == "record")
    largest = shown("dp_delta", deltas[worst])
    return (
        f"δ = {largest} is too large for {units.format(number)}{affected}: "
        f"publishing {what}, chosen at random, would already satisfy it; choose a δ well below "
        f"1/{number}"
    )
