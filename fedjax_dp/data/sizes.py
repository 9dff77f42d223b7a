"""How many examples each client gets."""

import numpy as np

from fedjax_dp.core import checks
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.ranges import Count, Index, NonNegative

Seed = np.random.Generator | int


def even_sizes(total: int, parts: int) -> np.ndarray:
    """Divides an integer into equal parts, the first larger by one if it does not divide evenly."""
    sizes = np.full(parts, total // parts, dtype=np.int64)
    sizes[: total % parts] += 1
    return sizes


@checked
def power_law_sizes(
    num_examples: Count,
    num_clients: Count,
    rng: Seed,
    *,
    exponent: NonNegative = 1.0,
    min_size: Index = 1,
) -> np.ndarray:
    """Draws sizes `[clients]` that are `min_size` plus a share ∝ rank^(-exponent)."""
    check_pool(num_examples, num_clients, min_size)
    weights = np.arange(1, num_clients + 1, dtype=np.float64) ** -float(exponent)
    sizes = min_size + apportion(num_examples - min_size * num_clients, weights)
    return np.random.default_rng(rng).permutation(sizes)


def apportion(total: int, weights: np.ndarray) -> np.ndarray:
    """Divides an integer in proportion to weights, by largest remainders."""
    shares = total * (weights / weights.sum())
    parts = np.floor(shares).astype(np.int64)
    order = np.argsort(parts - shares, kind="stable")
    parts[order[: total - int(parts.sum())]] += 1
    return parts


def check_pool(num_examples: int, num_clients: int, min_size: int) -> None:
    """Requires that a pool has `min_size` examples for every client."""
    rule = f"leave at least {min_size} of {num_examples} examples to each client"
    checks.require(num_clients * min_size <= num_examples, "num_clients", rule, num_clients)
