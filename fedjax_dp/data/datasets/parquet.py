"""Your own Parquet files with a column of clients, larger than memory if need be."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Literal

from fedjax_dp.core import checks
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.ranges import Index
from fedjax_dp.data.datasets.base import Dataset
from fedjax_dp.data.datasets.stores import (
    Source,
    as_dataset,
    opened,
    require_counted,
    require_same_arrays,
)
from fedjax_dp.data.datasets.table import find_files
from fedjax_dp.data.federated import FederatedData


@checked
def load(
    data_dir: pathlib.Path,
    *,
    path: str,
    client: str,
    x: Sequence[str],
    y: str,
    num_classes: Index = 0,
    task: Literal["classification", "next_token", "regression"] = "classification",
    test_path: str | None = None,
    padding: Mapping[str, Sequence[float]] = {},
    store: str | None = None,
) -> Dataset:
    """Loads Parquet files by client, through a store on disk that is written once.

    The files are read in batches and never held in memory; a later run opens the store. With the
    partition "natural" and no test share of clients, training reads cohorts from it.

    Guarantee: each example depends only on its own row and the options.

    Args:
      data_dir: where to search for a relative path that is not in the current folder.
      path: a Parquet file, or a pattern such as part-*.parquet of several with one schema.
      client: the column that names the client of each row, for the partition "natural".
      x: the input column, of numbers or of lists of one length; or several columns of numbers.
      y: the target column: classes or tokens from 0, or numbers for regression.
      num_classes: the number of classes or tokens, known without the data; 0 for regression.
      task: what the target means.
      test_path: a file, or a pattern, of test rows with the same columns.
      padding: for columns of lists of several lengths: the length, and the value that fills
        shorter lists at the end, such as { tokens = [20, 0] }.
      store: the folder for stores; by default parquet/ in the data directory. It holds the
        examples, so it is as private as the files.

    Returns:
      Arrays `x` and `y`, memory-mapped, with the clients' ids.

    Raises:
      ValueError: naming file, column and row; see `FederatedData.from_parquet`.
      ImportError: if pyarrow is not installed.
    """
    require_counted(num_classes, task)
    checks.require(len(x) > 0, "x", "name at least one column", list(x))
    columns = {"x": list(x), "y": y}
    folder = data_dir / "parquet" if store is None else pathlib.Path(store).expanduser()

    def part(name: str, where: str) -> tuple[FederatedData, list[pathlib.Path]]:
        paths = find_files(name, where, data_dir)
        choices = {"client": client, "columns": columns, "padding": dict(padding)}

        def write(directory: pathlib.Path) -> None:
            FederatedData.from_parquet(paths, client, columns, directory=directory, padding=padding)

        return opened(folder, Source(paths, choices), write), paths

    train, paths = part("path", path)
    test = None
    if test_path is not None:
        test, more = part("test_path", test_path)
        require_same_arrays(train, test)
        paths += more
    return as_dataset(
        "parquet",
        train,
        test,
        num_classes=num_classes,
        task=task,
        origin=", ".join(map(str, paths)),
    )
