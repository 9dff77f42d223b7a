"""Downloads data sets from their public addresses, checked against known digests."""

import hashlib
import http.client
import os
import pathlib
import shutil
import tarfile
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence

from fedjax_dp.core import checks
from fedjax_dp.data.datasets.files import Download, Source, find, resolve_data_dir
from fedjax_dp.data.datasets.registry import info

Progress = Callable[[str, int, int | None], None]

_BLOCK = 1 << 18
_AGENT = "fedjax-dp"


class FetchError(OSError):
    """Says which file could not be fetched, where it was looked for, and what to do by hand."""


def fetch(
    name: str,
    data_dir: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
    *,
    timeout: float = 30.0,
) -> list[pathlib.Path]:
    """Downloads the files of a data set that are not there yet.

    Every file is checked against its SHA-256 before it takes its name, so that a broken download is
    never taken for data. What was received before an interruption is continued the next time. A
    data set whose files are all there, by name, is left alone.

    Args:
      name: a data set.
      data_dir: the folder that holds the data sets; None takes the environment variable
        `FEDJAX_DP_DATA`, or `~/.cache/fedjax_dp` without it.
      progress: called with the file's name, the bytes received and their total (None where the
        server does not say), often.
      timeout: seconds without an answer after which an address is given up.

    Returns:
      The files that were downloaded; empty where nothing was missing.

    Raises:
      FetchError: if a file could not be had from any of its addresses; the message names each
        address with its reason, and what to put where instead.
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
    """Downloads one set of files.

    Args:
      source: the set; files that are there with the right digest are kept.
      data_dir: the data directory; the files go into the source's first folder.
      progress: as in `fetch`.
      timeout: as in `fetch`.

    Returns:
      The files that were downloaded.

    Raises:
      FetchError: as in `fetch`.
    """
    folder = data_dir / source.folders[0]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FetchError(f"cannot make the folder {folder}: {error}") from error
    fetched = []
    for download in source.downloads:
        target = folder / download.name
        if not target.is_file() or digest(target) != download.sha256:
            _fetch_file(download, target, progress, timeout)
            fetched.append(target)
        if download.unpack:
            _unpack(target, download.unpack)
    return fetched


def digest(path: pathlib.Path) -> str:
    """Computes the SHA-256 digest of a file.

    Args:
      path: the file.

    Returns:
      64 hexadecimal digits.
    """
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _fetch_file(
    download: Download, target: pathlib.Path, progress: Progress | None, timeout: float
) -> None:
    part = target.with_name(target.name + ".part")
    reasons = []
    for url in download.urls:
        # A part that another address, or an older file, left behind may not fit this one: if the
        # digest is wrong after a continued transfer, one transfer from the start decides.
        for resumed in (part.is_file(), False) if part.is_file() else (False,):
            if not resumed:
                part.unlink(missing_ok=True)
            try:
                _transfer(url, part, progress, timeout)
            except (OSError, http.client.HTTPException, ValueError) as error:
                reasons.append(f"{url}: {_reason(error)}")
                break
            found = digest(part)
            if found == download.sha256:
                os.replace(part, target)
                return
            part.unlink()
            if not resumed:
                reasons.append(f"{url}: the bytes have SHA-256 {found}, not the known one")
    raise FetchError(
        "\n".join(
            [
                f"could not fetch {download.name}. Looked at:",
                *(f"  {reason}" for reason in reasons),
                f"Put the file {download.name} (SHA-256 {download.sha256}) into {target.parent}"
                + (" and run this again to unpack it." if download.unpack else "."),
            ]
        )
    )


def _reason(error: Exception) -> str:
    if isinstance(error, urllib.error.HTTPError):
        return f"the server answered {error.code} {error.reason}"
    if isinstance(error, urllib.error.URLError):
        return f"no connection ({error.reason})"
    return str(error) or type(error).__name__


def _transfer(url: str, part: pathlib.Path, progress: Progress | None, timeout: float) -> None:
    done = part.stat().st_size if part.is_file() else 0
    headers = {"User-Agent": _AGENT} | ({"Range": f"bytes={done}-"} if done else {})
    try:
        response = urllib.request.urlopen(
            urllib.request.Request(url, headers=headers), timeout=timeout
        )
    except urllib.error.HTTPError as error:
        if done and error.code == http.client.REQUESTED_RANGE_NOT_SATISFIABLE:
            return  # everything is here already; the digest decides
        raise
    with response:
        if response.status != http.client.PARTIAL_CONTENT:
            done = 0
        length = response.headers.get("Content-Length")
        total = done + int(length) if length is not None else None
        with part.open("ab" if done else "wb") as file:
            while block := response.read(_BLOCK):
                file.write(block)
                done += len(block)
                if progress is not None:
                    progress(part.name.removesuffix(".part"), done, total)
    if total is not None and done != total:
        raise OSError(f"the connection ended after {done} of {total} bytes")


def _unpack(archive: pathlib.Path, names: Sequence[str]) -> None:
    wanted = {name for name in names if not (archive.parent / name).exists()}
    if not wanted:
        return
    with tarfile.open(archive, "r|*") as members:
        for member in members:
            name = pathlib.PurePosixPath(member.name).name
            content = members.extractfile(member) if member.isfile() else None
            if content is None or name not in wanted:
                continue
            part = archive.with_name(name + ".part")
            with part.open("wb") as file:
                shutil.copyfileobj(content, file, _BLOCK)
            os.replace(part, archive.with_name(name))
            wanted.discard(name)
    checks.require(not wanted, archive.name, f"hold {', '.join(sorted(names))}", sorted(wanted))
