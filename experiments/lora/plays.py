"""Shakespeare in two parts: public comedies, and other plays, whose roles are clients."""

import dataclasses
import pathlib

import numpy as np

from fedjax_dp.core.ranges import Count
from fedjax_dp.data.datasets import Dataset, shakespeare

# The comedies of the First Folio that the data have.
COMEDIES = (
    "allswellthatendswell",
    "asyoulikeit",
    "comedyoferrors",
    "loveslabourslost",
    "measureforemeasure",
    "merchantofvenice",
    "merrywivesofwindsor",
    "midsummersnightsdream",
    "muchadoaboutnothing",
    "tamingoftheshrew",
    "tempest",
    "twelfthnight",
    "twogentlemenofverona",
    "winterstale",
)


def public(
    data_dir: pathlib.Path, *, sequence_length: Count = 32, num_test: Count = 1000
) -> Dataset:
    """Loads the comedies."""
    return _plays(data_dir, sequence_length, 2, num_test, are_comedies=True)


def private(
    data_dir: pathlib.Path,
    *,
    sequence_length: Count = 32,
    min_speeches: Count = 10,
    num_test: Count = 1000,
) -> Dataset:
    """Loads all other plays, of which no role is in a comedy of `public`."""
    return _plays(data_dir, sequence_length, min_speeches, num_test, are_comedies=False)


def _plays(
    data_dir: pathlib.Path,
    sequence_length: int,
    min_speeches: int,
    num_test: int,
    *,
    are_comedies: bool,
) -> Dataset:
    """Keeps the roles of one part, and about `num_test` test windows at equal distances."""
    whole = shakespeare.load(
        data_dir, sequence_length=sequence_length, min_speeches=min_speeches, source="plays"
    )
    train = _rows(whole.train_clients, are_comedies=are_comedies)
    test = _rows(whole.test_clients, are_comedies=are_comedies)
    test = test[:: max(1, len(test) // num_test)]
    return dataclasses.replace(
        whole,
        name="comedies" if are_comedies else "other plays",
        train={name: array[train] for name, array in whole.train.items()},
        test={name: array[test] for name, array in whole.test.items()},
        train_clients=np.asarray(whole.train_clients)[train],
        test_clients=np.asarray(whole.test_clients)[test],
    )


def _rows(clients: np.ndarray | None, *, are_comedies: bool) -> np.ndarray:
    """Finds the windows of one part by their clients, which are named `play|ROLE`."""
    plays = np.char.partition(np.asarray(clients), "|")[:, 0]
    return np.flatnonzero(np.isin(plays, COMEDIES) == are_comedies)
