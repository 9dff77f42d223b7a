"""Data sets by name: list them, check which are on this computer, load them, fetch the others."""

import dataclasses
import os
import pathlib
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

from fedjax_dp.core import checks
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.registry import Registry, grouped, is_own, options_of
from fedjax_dp.data.datasets import (
    image_files,
    image_folder,
    instructions,
    mnist,
    public_tables,
    shakespeare,
    stackoverflow,
    stores,
    table,
)
from fedjax_dp.data.datasets.base import Dataset
from fedjax_dp.data.datasets.catalog import (
    CATALOG,
    DatasetInfo,
    Download,
    Source,
    explain_missing,
    find,
    resolve_data_dir,
)

# Options that name the client of each row.
_NAMES_CLIENTS = ("client", "clients_are_files", "clients_are_folders")

# A user's own is also a function `(data_dir, *, options…) -> Dataset`.
LOADERS: Registry[Callable[..., Dataset]] = Registry(
    {
        "digits": mnist.load_sklearn_digits,
        "mnist": mnist.load_mnist,
        "fashion_mnist": mnist.load_fashion_mnist,
        "mnist_by_writer": mnist.load_mnist_by_writer,
        "fedcmnist": mnist.load_fedcmnist,
        "fedrotmnist": mnist.load_fedrotmnist,
        "cifar10": image_files.load_cifar10,
        "cifar100": image_files.load_cifar100,
        "tiny_imagenet": image_files.load_tiny_imagenet,
        "emnist": mnist.load_emnist,
        "femnist": mnist.load_femnist,
        "adult": public_tables.load_adult,
        "heart_disease": public_tables.load_heart_disease,
        "shakespeare": shakespeare.load,
        "tiny_shakespeare": shakespeare.load_tiny,
        "stackoverflow": stackoverflow.load,
        "flair": image_files.load_flair,
        "kddcup99": public_tables.load_kddcup99,
        "credit_card_fraud": public_tables.load_credit_card_fraud,
        "table": table.load,
        "instructions": instructions.load,
        "parquet": stores.load_parquet,
        "image_folder": image_folder.load,
        "store": stores.load,
    }
)
Progress = Callable[[str, int, int | None], None]

_BLOCK = 1 << 18
# Servers must send the bytes whose digest is known, not a compressed copy of them.
_HEADERS = {"User-Agent": "fedjax-dp", "Accept-Encoding": "identity"}


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
      `(data_dir, *, options…) -> data set`. Options that belong together, such as those of columns,
      are one value here; `load` takes them one by one.

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
    complete = [(source, paths) for source, paths, missing in searches if not missing]
    origin, where = "", None
    missing: tuple[str, ...] = ()
    if complete:
        source, paths = complete[0]
        origin, where = source.name, next(iter(paths.values())).parent
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


class FetchError(OSError):
    """A file could not be fetched; the message names each address with its reason."""


def fetch(
    name: str,
    data_dir: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
    *,
    timeout: float = 30.0,
) -> list[pathlib.Path]:
    """Downloads the missing files of a data set.

    Every file is checked against its SHA-256 before it is renamed, so that a broken download is
    never taken for data, and a failed one leaves nothing behind. If all files exist, by name,
    nothing is downloaded.

    Args:
      name: a data set.
      data_dir: the folder that holds the data sets; None takes the environment variable
        `FEDJAX_DP_DATA`, or `~/.cache/fedjax_dp` if unset.
      progress: called with the file's name, the bytes received and their total (None if unknown),
        often.
      timeout: seconds without a response after which an address is given up.

    Returns:
      The files that were downloaded; empty if nothing was missing.

    Raises:
      FetchError: if a file could not be downloaded from any of its addresses; the message names
        each address with its reason, and which file to put where by hand.
      ValueError: if there is no such data set, or it has no public address.
    """
    described = info(name)
    checks.positive("timeout", timeout)
    folder = resolve_data_dir(data_dir)
    if not described.sources or any(not find(source, folder)[1] for source in described.sources):
        return []
    sources = [source for source in described.sources if source.downloads]
    checks.require(bool(sources), "name", "name a data set with a public address", name)
    return fetch_source(sources[0], folder, progress, timeout=timeout)


def fetch_source(
    source: Source,
    data_dir: pathlib.Path,
    progress: Progress | None = None,
    *,
    timeout: float = 30.0,
) -> list[pathlib.Path]:
    """Downloads one set of files into its first folder; returns those that were missing."""
    folder = data_dir / source.folders[0]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FetchError(f"cannot make the folder {folder}: {error}") from error
    fetched = []
    for download in source.downloads:
        if _fetch_file(download, folder, progress, timeout):
            fetched.append(folder / download.name)
        if not all((folder / name).exists() for name in download.unpack):
            _unpack(folder / download.name, download.unpack)
    return fetched


def _fetch_file(
    download: Download, folder: pathlib.Path, progress: Progress | None, timeout: float
) -> bool:
    """Downloads a file from the first address that has it, unless it is there already."""
    # Slow to import, and used only here.
    import pooch

    pooch.get_logger().setLevel("WARNING")
    actions: list[str] = []
    reasons = []
    for url in download.urls:
        bar = progress is not None and _Bar(download.name, progress)
        try:
            pooch.retrieve(
                url,
                download.sha256,
                download.name,
                folder,
                lambda path, action, _: actions.append(action),
                pooch.HTTPDownloader(bar, _BLOCK, headers=_HEADERS, timeout=timeout),
            )
        except (OSError, ValueError) as error:
            reasons.append(f"  {url}: {_reason(error)}")
            continue
        is_new = actions != ["fetch"]
        if is_new:
            # pooch leaves it readable by its owner alone.
            (folder / download.name).chmod(0o644)
        return is_new
    by_hand = f"Put the file {download.name} (SHA-256 {download.sha256}) into {folder}"
    end = " and run this again to unpack it." if download.unpack else "."
    raise FetchError("\n".join([f"cannot fetch {download.name}:", *reasons, by_hand + end]))


class _Bar:
    """A progress bar of pooch that calls a function."""

    def __init__(self, name: str, progress: Progress):
        self.name, self.progress, self.total, self.done = name, progress, 0, 0

    def update(self, amount: int) -> None:
        # pooch counts the last block in full, and the whole file again at the end.
        self.done = min(self.done + amount, self.total) if self.total else self.done + amount
        self.progress(self.name, self.done, self.total or None)

    def reset(self) -> None:
        """Does nothing: progress only rises."""

    def close(self) -> None:
        """Does nothing."""


def _reason(error: Exception) -> str:
    """Explains why an address failed."""
    import requests

    if isinstance(error, requests.HTTPError) and error.response is not None:
        return f"the server answered {error.response.status_code} {error.response.reason}"
    if isinstance(error, requests.ConnectionError):
        return f"no connection ({error})"
    return str(error) or type(error).__name__


def _unpack(archive: pathlib.Path, names: tuple[str, ...]) -> None:
    """Unpacks members of an archive next to it; each is renamed when complete."""
    import pooch

    with tempfile.TemporaryDirectory(dir=archive.parent) as inside:
        pooch.Untar(list(names), inside)(str(archive), "download", None)
        for name in names:
            member = pathlib.Path(inside, name)
            checks.require(member.is_file(), archive.name, f"hold {name}", "no such member")
            os.replace(member, archive.with_name(name))
