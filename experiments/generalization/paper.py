"""What the paper prints: accuracies and step sizes, by the names of ours."""

import csv
import functools
import pathlib
from typing import NamedTuple

HERE = pathlib.Path(__file__).parent
# Ours and the paper's names of data; table 3.1 or 3.2 has the accuracies.
DATA = {
    "mnist": "MNIST",
    "fashion_mnist": "FMNIST",
    "fedcmnist": "FedCMNIST",
    "fedrotmnist": "FedRotMNIST",
    "cifar10": "CIFAR-10",
    "femnist": "FEMNIST",
}
DISTRIBUTIONS = {"non_iid": "Non-IID", "iid": "IID", "by_writer": "Real-World"}
# Which data the tables have in which distribution.
CELLS = (
    *((data, distribution) for data in DATA for distribution in ("non_iid", "iid")),
    ("femnist", "by_writer"),
)
ALGORITHMS = ("FedAvg", "FedProx", "SCAFFOLD", "FedAdam", "FedYogi")


class Rates(NamedTuple):
    """The paper's step sizes of a cell."""

    server: float
    local: float


@functools.cache
def _rows(name: str) -> list[dict[str, str]]:
    with (HERE / name).open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def rates(data: str, distribution: str, algorithm: str) -> Rates:
    """Gives the best step sizes of tables B.5 and B.6, the same for both aggregations."""
    cell = (DATA[data], DISTRIBUTIONS[distribution], algorithm)
    (row,) = (
        row
        for row in _rows("paper_rates.csv")
        if (row["dataset"], row["distribution"], row["algorithm"]) == cell
    )
    return Rates(float(row["eta_g"]), float(row["eta_l"]))


def accuracy(data: str, distribution: str, algorithm: str, aggregation: str) -> float | None:
    """Gives an accuracy of table 3.1 or 3.2, in percent."""
    cell = (DATA[data], DISTRIBUTIONS[distribution], algorithm, aggregation)
    for row in _rows("paper_tables.csv"):
        names = (row["dataset"], row["distribution"], row["algorithm"], row["aggregation"])
        if row["source_table"] in ("3.1", "3.2") and names == cell:
            return float(row["value"])
    return None


def accuracy_of(table: str, value: str, aggregation: str) -> float | None:
    """Gives an accuracy of a table with one variable, in percent."""
    for row in _rows("paper_tables.csv"):
        if (row["source_table"], row["variable_value"], row["aggregation"]) == (
            table,
            value,
            aggregation,
        ):
            return float(row["value"])
    return None


def numbers_of(table: str) -> list[float]:
    """Gives the values of the variable of a table, in order."""
    rows = (row for row in _rows("paper_tables.csv") if row["source_table"] == table)
    return sorted({float(row["variable_value"]) for row in rows})
