"""How many examples each client gets."""

import numpy as np

from fedjax_dp.core import checks
from fedjax_dp.core.argument_checks import checked

Seed = np.random.Generator | int


def even_sizes(total: int, parts: int) -> np.ndarray:
    """Divides a whole number evenly.

    Args:
      total: the number to divide, at least 0.
      parts: how many parts there are.

    Returns:
      Whole numbers `[parts]`; the first are larger by one where it does not divide.
    """
    sizes = np.full(parts, total // parts, dtype=np.int64)
    sizes[: total % parts] += 1
    return sizes


@checked
def power_law_sizes(
    num_examples: int, num_clients: int, rng: Seed, *, exponent: float = 1.0, min_size: int = 1
) -> np.ndarray:
    """Divides examples by a power law of the rank.

    Above `min_size`, the client of rank r gets a share proportional to r^(-exponent); which client
    has which rank is drawn.

    Args:
      num_examples: how many examples there are.
      num_clients: how many clients there are.
      rng: a NumPy generator, or a seed for one.
      exponent: at least 0; 0 gives equal sizes, 1 is Zipf's law.
      min_size: the fewest examples of a client; may be 0.

    Returns:
      The size of each client, `[clients]`, which sum to `num_examples`.

    Raises:
      ValueError: if an argument is out of range.
    """
    check_pool(num_examples, num_clients, min_size)
    checks.non_negative("exponent", exponent)
    weights = np.arange(1, num_clients + 1, dtype=np.float64) ** -float(exponent)
    sizes = min_size + apportion(num_examples - min_size * num_clients, weights)
    return np.random.default_rng(rng).permutation(sizes)


def apportion(total: int, weights: np.ndarray) -> np.ndarray:
    """Divides a whole number in proportion to weights, by largest remainders.

    Args:
      total: the number to divide, at least 0.
      weights: `[parts]`, at least 0 and not all 0.

    Returns:
      Whole numbers `[parts]` that sum to `total`, each within one of its exact share.
    """
    shares = total * (weights / weights.sum())
    parts = np.floor(shares).astype(np.int64)
    order = np.argsort(parts - shares, kind="stable")
    parts[order[: total - int(parts.sum())]] += 1
    return parts


def check_pool(num_examples: int, num_clients: int, min_size: int) -> None:
    """Requires that a pool is large enough for its clients.

    Args:
      num_examples: how many examples the pool has.
      num_clients: how many clients there are.
      min_size: the fewest examples of a client; may be 0.

    Raises:
      ValueError: if an argument is out of range, or the examples do not go round.
    """
    checks.whole("num_examples", num_examples)
    checks.whole("num_clients", num_clients)
    checks.whole("min_size", min_size, at_least=0)
    checks.require(
        num_clients * min_size <= num_examples,
        "num_clients",
        f"leave at least {min_size} of {num_examples} examples to each client",
        num_clients,
    )
