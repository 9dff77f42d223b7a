"""Budgets and batch sizes of clients that differ: published lists by name, and their distributions.

`budgets.csv` holds the lists that the authors of Robust-HDP drew once and released, for 20, 40 and
60 clients; comparisons with their tables need these and no new draws.
"""

import csv
import functools
import importlib.resources
from collections.abc import Mapping

import numpy as np

from fedjax_dp.core import checks
from fedjax_dp.core.argument_checks import checked

NUM_CLIENTS = (20, 40, 60)
BATCH_SIZES = (16, 32, 64, 128)
_SMALLEST = 0.25

# Shares of normal distributions (share, mean, standard deviation), or the ends of a uniform one.
DISTRIBUTIONS: Mapping[str, tuple[tuple[float, ...], ...]] = {
    "Dist1": ((1.0, 2.0, 1.0),),
    "Dist2": ((0.2, 0.2, 0.01), (0.6, 1.0, 0.1), (0.2, 5.0, 1.0)),
    "Dist3": ((0.2, 5.0),),
    "Dist4": ((0.2, 0.2, 0.01), (0.6, 0.5, 0.1), (0.2, 2.0, 1.0)),
    "Dist5": ((0.2, 2.0),),
    "Dist6": ((0.3, 0.2, 0.01), (0.5, 0.5, 0.1), (0.2, 1.0, 0.1)),
    "Dist7": ((0.2, 1.0),),
    "Dist8": ((0.6, 0.2, 0.01), (0.4, 0.5, 0.1)),
    "Dist9": ((0.2, 0.5),),
}


@checked
def published_budgets(name: str, num_clients: int) -> np.ndarray:
    """Looks up the published budgets of a population.

    Args:
      name: "Dist1" to "Dist9".
      num_clients: 20, 40 or 60.

    Returns:
      ε of each client, `[num_clients]`, float64.

    Raises:
      ValueError: if there is no such list.

    Source: Malekmohammadi and others 2024, section 3.6, as released by the authors.
    """
    checks.one_of("name", name, DISTRIBUTIONS)
    return _lists()[_key(name, num_clients)].copy()


@checked
def published_batch_sizes(num_clients: int) -> np.ndarray:
    """Looks up the published batch sizes of a population, the same for all budgets.

    Args:
      num_clients: 20, 40 or 60.

    Returns:
      Batch sizes of 16, 32, 64 or 128, `[num_clients]`, float64.

    Raises:
      ValueError: if there is no such list.

    Source: Malekmohammadi and others 2024, section 3.6, as released by the authors.
    """
    return _lists()[_key("batch_size", num_clients)].copy()


@checked
def draw_budgets(name: str, num_clients: int, rng: np.random.Generator) -> np.ndarray:
    """Draws budgets of another population from a published distribution.

    Args:
      name: "Dist1" to "Dist9".
      num_clients: at least 1.
      rng: the generator.

    Returns:
      ε of each client, `[num_clients]`; draws that are not positive become 0.25, as in the
      published lists.

    Raises:
      ValueError: if there is no such distribution.

    Source: Malekmohammadi and others 2024, section 3.6; the second number of a normal distribution
    is its standard deviation, as the published lists show.
    """
    checks.one_of("name", name, DISTRIBUTIONS)
    checks.whole("num_clients", num_clients)
    parts = DISTRIBUTIONS[name]
    if len(parts[0]) == 2:
        return rng.uniform(*parts[0], size=num_clients)
    shares, means, stddevs = np.array(parts).T
    which = rng.choice(len(shares), size=num_clients, p=shares)
    drawn = rng.normal(means[which], stddevs[which])
    return np.where(drawn > 0, drawn, _SMALLEST)


def _key(name: str, num_clients: int) -> tuple[int, str]:
    rule = f"be one of {', '.join(map(str, NUM_CLIENTS))}, for which there are published lists"
    checks.require(num_clients in NUM_CLIENTS, "num_clients", rule, num_clients)
    return num_clients, name


@functools.cache
def _lists() -> dict[tuple[int, str], np.ndarray]:
    file = importlib.resources.files("fedjax_dp.privacy").joinpath("budgets.csv")
    with file.open(encoding="utf-8") as text:
        return {
            (int(row["num_clients"]), row["name"]): np.array(row["values"].split(), np.float64)
            for row in csv.DictReader(text)
        }
