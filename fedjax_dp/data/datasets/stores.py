"""Data sets that are written once into a store on disk and opened from there."""

import contextlib
import hashlib
import json
import os
import pathlib
import shutil
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedjax_dp.core import checks
from fedjax_dp.data.datasets.base import Dataset, Task
from fedjax_dp.data.federated import FederatedData


class Source(NamedTuple):
    """What a store is written from; one written from the same files and choices is reused.

    Attributes:
      files: the files that are read.
      choices: the options that decide on the contents, for JSON.
    """

    files: Sequence[pathlib.Path]
    choices: Any


def opened(
    folder: pathlib.Path, source: Source, write: Callable[[pathlib.Path], object]
) -> FederatedData:
    """Opens the store of a source below a folder; `write(new folder)` makes a missing one."""
    stats = [(str(path.resolve()), path.stat()) for path in source.files]
    facts = [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats]
    text = json.dumps([facts, source.choices], sort_keys=True)
    store = folder / hashlib.sha256(text.encode()).hexdigest()[:16]
    if not store.exists():
        unfinished = folder / f".{store.name}-{os.getpid()}"
        shutil.rmtree(unfinished, ignore_errors=True)
        try:
            write(unfinished)
            # Another process may have made it meanwhile.
            with contextlib.suppress(OSError):
                unfinished.rename(store)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    return FederatedData.open(store)


def as_dataset(
    name: str,
    train: FederatedData,
    test: FederatedData | None,
    *,
    num_classes: int,
    task: Task,
    class_names: tuple[str, ...] = (),
    origin: str = "",
    exact_statistics: tuple[str, ...] = (),
) -> Dataset:
    """Makes a data set of stores, whose examples stay on disk."""
    empty = {key: array[:0] for key, array in train.examples.items()}
    return Dataset(
        name,
        train.examples,
        empty if test is None else test.examples,
        num_classes=num_classes,
        task=task,
        train_clients=_client_ids(train),
        test_clients=np.zeros(0, np.int64) if test is None else _client_ids(test),
        class_names=class_names,
        origin=origin,
        exact_statistics=exact_statistics,
    )


def require_same_arrays(train: FederatedData, test: FederatedData) -> None:
    """Requires the arrays of both parts to have the same types."""
    for name, array in train.examples.items():
        found, rule = test.examples[name].dtype, f"have the type {array.dtype} of the training part"
        checks.require(found == array.dtype, f"{name!r} of the test part", rule, found)


def _client_ids(data: FederatedData) -> np.ndarray:
    """Returns the client of each example, in an order that sorting keeps."""
    names = np.asarray(data.client_names)
    with contextlib.suppress(ValueError, OverflowError):
        numbers = names.astype(np.int64)
        if np.all(np.diff(numbers) > 0) and np.array_equal(numbers.astype(str), names):
            names = numbers
    return np.repeat(names, data.sizes)
