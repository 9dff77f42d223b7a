"""Published budgets and batch sizes of clients that differ, by name.

`budgets.csv` holds the lists that the authors of Robust-HDP drew once and released, for 20, 40 and
60 clients; comparisons with their tables need these, not new draws.
"""

import csv
import functools
import importlib.resources
import re

import numpy as np

from fedjax_dp.core import checks
from fedjax_dp.core.argument_checks import checked

NUM_CLIENTS = (20, 40, 60)
DISTRIBUTIONS = tuple(f"Dist{i}" for i in range(1, 10))
# A decimal number above 0.
FACTOR = r"(?=.*[1-9])\d+(\.\d+)?"
_FACTOR = re.compile(FACTOR)


@checked
def published_budgets(name: str, num_clients: int) -> np.ndarray:
    """Looks up the published budgets of a population.

    Args:
      name: "Dist1" to "Dist9", or a multiple, such as "Dist2 * 10", in which every ε is ten times
        as large: the source's CIFAR-100.
      num_clients: 20, 40 or 60.

    Returns:
      ε of each client, `[num_clients]`, float64.

    Raises:
      ValueError: if there is no such list.

    Source: Malekmohammadi and others 2024 (Robust-HDP), lists as released by the authors.
    """
    listed, times, factor = name.partition(" * ")
    checks.one_of("name", listed, DISTRIBUTIONS)
    rule = "multiply a list by a number above 0, such as 'Dist2 * 10'"
    checks.require(not times or _FACTOR.fullmatch(factor) is not None, "name", rule, name)
    numbers = _lists()[published_count("num_clients", num_clients), listed]
    return numbers * float(factor or 1)


@checked
def published_batch_sizes(num_clients: int) -> np.ndarray:
    """Looks up the published batch sizes of a population, the same for all budgets.

    Args:
      num_clients: 20, 40 or 60.

    Returns:
      Batch sizes of 16, 32, 64 or 128, `[num_clients]`, float64.

    Raises:
      ValueError: if there is no such list.

    Source: Malekmohammadi and others 2024 (Robust-HDP), lists as released by the authors.
    """
    return _lists()[published_count("num_clients", num_clients), "batch_size"].copy()


def published_count(argument: str, num_clients: int | None) -> int:
    """Requires a number of clients for which there are lists."""
    rule = f"be one of {', '.join(map(str, NUM_CLIENTS))}, for which there are published lists"
    checks.require(num_clients in NUM_CLIENTS, argument, rule, num_clients)
    assert num_clients is not None
    return num_clients


@functools.cache
def _lists() -> dict[tuple[int, str], np.ndarray]:
    file = importlib.resources.files("fedjax_dp.privacy").joinpath("budgets.csv")
    with file.open(encoding="utf-8") as text:
        return {
            (int(row["num_clients"]), row["name"]): np.array(row["values"].split(), np.float64)
            for row in csv.DictReader(text)
        }
