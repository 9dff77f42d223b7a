"""Where the files of a data set may lie, and what is said when they do not."""

import dataclasses
import os
import pathlib
from collections.abc import Mapping, Sequence

from fedjax_dp.core import checks

DATA_DIR_VARIABLE = "FEDJAX_DP_DATA"


class MissingDataError(FileNotFoundError):
    """Says which files of a data set are missing, where they were looked for, how to get them."""


@dataclasses.dataclass(frozen=True)
class Download:
    """Describes one file that can be fetched.

    Attributes:
      name: its file name.
      sha256: the SHA-256 digest of its bytes, in hexadecimal.
      urls: public addresses of the same bytes, tried in this order.
      unpack: names of files that are taken out of it once it is there.
    """

    name: str
    sha256: str
    urls: tuple[str, ...]
    unpack: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Source:
    """Describes one set of files from which a data set can be read.

    Attributes:
      name: what the set is called.
      files: the files or folders that have to be there; a name in `.gz` may also lie unpacked.
      folders: where they may lie, relative to the data directory; the first is where fetched files
        are put, and "." stands for the data directory itself.
      downloads: what to fetch; empty where there is no public address.
      note: how to come by the files where they cannot be fetched.
    """

    name: str
    files: tuple[str, ...]
    folders: tuple[str, ...]
    downloads: tuple[Download, ...] = ()
    note: str = ""


@dataclasses.dataclass(frozen=True)
class DatasetInfo:
    """Describes a data set for people and for the file search.

    Attributes:
      name: the name that `load` knows it by.
      summary: what it holds, in a line.
      licence: the terms that its source states.
      sources: the sets of files it can be read from, the preferred one first; empty for data that
        come with an installed library.
    """

    name: str
    summary: str
    licence: str
    sources: tuple[Source, ...]


@dataclasses.dataclass(frozen=True)
class Located:
    """Names the files that were found.

    Attributes:
      source: the set of files they belong to.
      paths: for each file of the set, by its name in `Source.files`, where it lies.
    """

    source: Source
    paths: Mapping[str, pathlib.Path]


def resolve_data_dir(data_dir: str | os.PathLike[str] | None = None) -> pathlib.Path:
    """Decides which folder holds the data sets.

    Args:
      data_dir: the folder, or None for the one that the environment variable `FEDJAX_DP_DATA` names
        or, without it, `~/.cache/fedjax_dp`.

    Returns:
      The folder, which need not exist.
    """
    if data_dir is not None:
        return pathlib.Path(data_dir).expanduser()
    named = os.environ.get(DATA_DIR_VARIABLE)
    return pathlib.Path(named or "~/.cache/fedjax_dp").expanduser()


def candidate_folders(source: Source, data_dir: pathlib.Path) -> list[pathlib.Path]:
    """Lists the folders in which the files of a source are looked for.

    A data directory that is itself called like one of the folders counts as that folder.

    Args:
      source: the set of files.
      data_dir: the data directory.

    Returns:
      Folders in the order in which they are searched.
    """
    folders = [data_dir / folder for folder in source.folders]
    if data_dir.name in source.folders:
        folders.append(data_dir)
    return folders


def find(source: Source, data_dir: pathlib.Path) -> tuple[dict[str, pathlib.Path], list[str]]:
    """Looks for the files of a source.

    All files have to lie in one folder, so that copies of different data sets, which use the same
    names, are never mixed.

    Args:
      source: the set of files.
      data_dir: the data directory.

    Returns:
      What was found in the folder that holds most of it, and the names that are missing there.
    """
    best: dict[str, pathlib.Path] = {}
    for folder in candidate_folders(source, data_dir):
        found = {}
        for name in source.files:
            for candidate in dict.fromkeys((name, name.removesuffix(".gz"))):
                if (folder / candidate).exists():
                    found[name] = folder / candidate
                    break
        if len(found) > len(best):
            best = found
    return best, [name for name in source.files if name not in best]


def locate(info: DatasetInfo, data_dir: pathlib.Path, source: str | None = None) -> Located:
    """Finds the files of a data set, or says what is missing.

    Args:
      info: the data set.
      data_dir: the data directory.
      source: which set of files to use, by name; None takes the first that is complete.

    Returns:
      The complete set of files.

    Raises:
      MissingDataError: if no set of files is complete; the message names the folders searched, the
        files, their public addresses and digests.
      ValueError: if there is no such source.
    """
    sources: Sequence[Source] = info.sources
    if source is not None:
        checks.one_of("source", source, [s.name for s in sources])
        sources = [s for s in sources if s.name == source]
    for candidate in sources:
        found, missing = find(candidate, data_dir)
        if not missing:
            return Located(candidate, found)
    raise MissingDataError(explain_missing(info, data_dir, sources))


def explain_missing(
    info: DatasetInfo, data_dir: pathlib.Path, sources: Sequence[Source] | None = None
) -> str:
    """Writes down which files are missing, where they belong and where they come from.

    Args:
      info: the data set.
      data_dir: the data directory.
      sources: the sets of files to speak of; all of the data set where it is None.

    Returns:
      Several lines of text.
    """
    sources = info.sources if sources is None else sources
    lines = [f"The files of data set {info.name!r} are not all in the data directory {data_dir}."]
    if len(sources) > 1:
        lines.append("Any one of these sets of files is enough:")
    for source in sources:
        _, missing = find(source, data_dir)
        lines.append(f"[{source.name}] missing: {', '.join(missing) or 'nothing'}")
        lines.append("  looked in: " + ", ".join(map(str, candidate_folders(source, data_dir))))
        for download in source.downloads:
            lines.append(f"  {download.name} (SHA-256 {download.sha256})")
            lines.extend(f"    {url}" for url in download.urls)
            if download.unpack:
                lines.append(f"    holds {', '.join(download.unpack)}; unpack them beside it")
        if source.note:
            lines.append(f"  {source.note}")
    if any(source.downloads for source in sources):
        lines.append(
            f"With a network, `fedjax-dp data fetch {info.name}` does this. The data directory is "
            f"the argument data_dir, else the environment variable {DATA_DIR_VARIABLE}, else "
            "~/.cache/fedjax_dp."
        )
    return "\n".join(lines)
