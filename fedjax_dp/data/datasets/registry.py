"""Data sets by name: list them, check which are on this computer, load them."""

import dataclasses
import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

from fedjax_dp.core import checks
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.registry import Registry, grouped, is_own, options_of
from fedjax_dp.data.datasets import (
    adult,
    cifar,
    credit_card_fraud,
    digits,
    emnist,
    femnist,
    flair,
    heart_disease,
    kddcup99,
    mnist,
    shakespeare,
    stackoverflow,
    stores,
    table,
    tiny_imagenet,
)
from fedjax_dp.data.datasets.base import Dataset
from fedjax_dp.data.datasets.catalog import (
    CATALOG,
    DatasetInfo,
    explain_missing,
    find,
    resolve_data_dir,
)

# Options that name the client of each row.
_NAMES_CLIENTS = ("client", "clients_are_files")

# A user's own is also a function `(data_dir, *, options…) -> Dataset`.
LOADERS: Registry[Callable[..., Dataset]] = Registry(
    {
        "digits": digits.load,
        "mnist": mnist.load_mnist,
        "fashion_mnist": mnist.load_fashion_mnist,
        "mnist_by_writer": mnist.load_mnist_by_writer,
        "fedcmnist": mnist.load_fedcmnist,
        "fedrotmnist": mnist.load_fedrotmnist,
        "cifar10": cifar.load,
        "tiny_imagenet": tiny_imagenet.load,
        "emnist": emnist.load,
        "femnist": femnist.load,
        "adult": adult.load,
        "heart_disease": heart_disease.load,
        "shakespeare": shakespeare.load,
        "tiny_shakespeare": shakespeare.load_tiny,
        "stackoverflow": stackoverflow.load,
        "flair": flair.load,
        "kddcup99": kddcup99.load,
        "credit_card_fraud": credit_card_fraud.load,
        "table": table.load,
        "parquet": stores.load_parquet,
        "store": stores.load,
    }
)


@dataclasses.dataclass(frozen=True)
class DatasetStatus:
    """Whether a data set can be loaded on this computer.

    Attributes:
      name: the name for `load`.
      summary: its contents, in a line.
      licence: the terms that its source states.
      is_present: whether all files are there.
      origin: the set of files that `load` would read; empty if none is complete.
      folder: where those files are, or where missing ones belong; None if no files are needed.
      missing: names of missing files, of the most complete set.
      can_fetch: whether `fetch` knows a public address.
      how_to_get: what to do about missing files, several lines; empty if nothing is missing.
    """

    name: str
    summary: str
    licence: str
    is_present: bool
    origin: str
    folder: pathlib.Path | None
    missing: tuple[str, ...]
    can_fetch: bool
    how_to_get: str


def available() -> tuple[str, ...]:
    """Names all data sets that can be loaded, whether their files are on this computer or not.

    Returns:
      The names, in the order of the documentation.
    """
    return tuple(LOADERS)


def info(name: str) -> DatasetInfo:
    """Describes a data set.

    Args:
      name: one of `available()`.

    Returns:
      Its description and the files it is read from.

    Raises:
      ValueError: if there is no such data set; the message names the nearest.
    """
    checks.one_of("name", name, CATALOG)
    return CATALOG[name]


@checked
def options(name: str) -> dict[str, Any]:
    """Lists the options of a data set's loader with their defaults.

    Args:
      name: one of `available()`.

    Returns:
      The default of each keyword that `load` accepts for this data set.

    Raises:
      ValueError: if there is no such data set.
    """
    return options_of(loader(name), ("data_dir",))


def option_naming_clients(name: Any, options: Any) -> str | None:
    """Returns the option by which a data set of the package names its clients, if it is given."""
    if not isinstance(name, str) or is_own(name) or not isinstance(options, Mapping):
        return None
    given = (key for key in _NAMES_CLIENTS if options.get(key) not in (None, False, "none"))
    return next(given, None)


def names_clients(name: Any, options: Any) -> bool:
    """Whether a data set of the package has natural clients; one of a user shows it when loaded."""
    is_named = isinstance(name, str) and name in CATALOG and CATALOG[name].names_clients
    return is_named or option_naming_clients(name, options) is not None


def loader(name: str) -> Callable[..., Dataset]:
    """Finds the function that loads a data set.

    Args:
      name: one of `available()`.

    Returns:
      `(data_dir, *, options…) -> data set`.

    Raises:
      ValueError: if there is no such data set.
    """
    if not is_own(name):
        checks.one_of("name", name, CATALOG)
    return LOADERS[name]


def load(name: str, data_dir: str | os.PathLike[str] | None = None, **choices: Any) -> Dataset:
    """Loads a data set by name.

    Args:
      name: one of `available()`.
      data_dir: the folder that holds the data sets; None takes the environment variable
        `FEDJAX_DP_DATA`, or `~/.cache/fedjax_dp` if unset.
      **choices: options of this data set's loader, as `options(name)` lists them.

    Returns:
      The data set, in host memory.

    Raises:
      MissingDataError: if files are missing; the message says which, which folders were searched,
        and where they are published.
      ValueError: if the name or an option is unknown (the message names the nearest), or a
        file is damaged.
    """
    known = options(name)
    for key in choices:
        checks.one_of(f"option of data set {name!r}", key, known)
    data = LOADERS[name](resolve_data_dir(data_dir), **grouped(LOADERS[name], choices))
    checks.require(isinstance(data, Dataset), f"the result of {name}", "be a Dataset", type(data))
    return data


def status(name: str, data_dir: str | os.PathLike[str] | None = None) -> DatasetStatus:
    """Checks whether the files of a data set are on this computer, by their names alone.

    Args:
      name: one of `available()`.
      data_dir: the folder that holds the data sets, as in `load`.

    Returns:
      What is there, what is missing, and how to get it.

    Raises:
      ValueError: if there is no such data set.
    """
    described = info(name)
    folder = resolve_data_dir(data_dir)
    searches = [(source, *find(source, folder)) for source in described.sources]
    complete = [(source, found) for source, found, missing in searches if not missing]
    origin, where = "", None
    missing: tuple[str, ...] = ()
    if complete:
        source, found = complete[0]
        origin, where = source.name, next(iter(found.values())).parent
    elif searches:
        source, _, absent = min(searches, key=lambda search: len(search[2]))
        where, missing = folder / source.folders[0], tuple(absent)
    else:
        origin = "scikit-learn" if name == "digits" else "data.options.path"
    return DatasetStatus(
        name=name,
        summary=described.summary,
        licence=described.licence,
        is_present=bool(complete) or not searches,
        origin=origin,
        folder=where,
        missing=missing,
        can_fetch=any(source.downloads for source in described.sources),
        how_to_get=explain_missing(described, folder) if missing else "",
    )
