"""Downloads data sets from their public addresses with pooch, checked against known digests."""

import os
import pathlib
import tempfile
from collections.abc import Callable

from fedjax_dp.core import checks
from fedjax_dp.data.datasets.catalog import Download, Source, find, resolve_data_dir
from fedjax_dp.data.datasets.registry import info

Progress = Callable[[str, int, int | None], None]

_BLOCK = 1 << 18
# Servers must send the bytes whose digest is known, not a compressed copy of them.
_HEADERS = {"User-Agent": "fedjax-dp", "Accept-Encoding": "identity"}


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
            found = pathlib.Path(inside, name)
            checks.require(found.is_file(), archive.name, f"hold {name}", "no such member")
            os.replace(found, archive.with_name(name))
