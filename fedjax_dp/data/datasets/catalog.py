"""The data sets of `catalog.toml`: descriptions, files and where they are, public addresses."""

import dataclasses
import importlib.resources
import os
import pathlib
import tomllib
from collections.abc import Sequence
from typing import Any, NamedTuple

from fedjax_dp.core import checks, files

DATA_DIR_VARIABLE = "FEDJAX_DP_DATA"


@dataclasses.dataclass(frozen=True)
class Download:
    """One public file: `urls` hold the same bytes, and `unpack` names the members to take out."""

    name: str
    sha256: str
    urls: tuple[str, ...]
    unpack: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Source:
    """One set of files that suffices to read a data set, with the fields of the catalogue."""

    name: str
    files: tuple[str, ...]
    folders: tuple[str, ...]
    downloads: tuple[Download, ...] = ()
    note: str = ""


@dataclasses.dataclass(frozen=True)
class DatasetInfo:
    """The description of a data set and its sources, the preferred one first."""

    name: str
    summary: str
    licence: str
    sources: tuple[Source, ...]
    names_clients: bool = False


def _source(published: dict[str, Any], entry: dict[str, Any]) -> Source:
    """Builds a source from its entry in the catalogue."""
    files = tuple(entry.get("files", ()))
    downloads = tuple(
        Download(name, sha256, tuple(host + name for host in published[group]["hosts"]), files)
        for group in entry.get("published", ())
        for name, sha256 in published[group]["sha256"].items()
    )
    files = files or tuple(download.name for download in downloads)
    return Source(entry["name"], files, tuple(entry["folders"]), downloads, entry.get("note", ""))


def _read() -> dict[str, DatasetInfo]:
    """Reads the catalogue that is installed with the package."""
    path = importlib.resources.files("fedjax_dp.data.datasets") / "catalog.toml"
    content = tomllib.loads(path.read_text("utf-8"))
    return {
        name: DatasetInfo(
            name,
            entry["summary"],
            entry["licence"],
            tuple(_source(content["published"], source) for source in entry.get("sources", ())),
            entry.get("names_clients", False),
        )
        for name, entry in content["datasets"].items()
    }


CATALOG = _read()


class MissingDataError(FileNotFoundError):
    """The files of a data set are missing; the message says which, where, and how to get them."""


class Located(NamedTuple):
    """The files that were found, each by its name in `source.files`."""

    source: Source
    paths: dict[str, pathlib.Path]


def resolve_data_dir(data_dir: str | os.PathLike[str] | None = None) -> pathlib.Path:
    """Finds the folder that holds the data sets.

    Args:
      data_dir: the folder, or None for the environment variable `FEDJAX_DP_DATA`, or
        `~/.cache/fedjax_dp` if unset.

    Returns:
      The folder, which need not exist.
    """
    named = data_dir if data_dir is not None else os.environ.get(DATA_DIR_VARIABLE)
    folder = files.expanded(named or "~/.cache/fedjax_dp")
    if data_dir is None and named:
        files.require_folder(folder, f"the environment variable {DATA_DIR_VARIABLE}")
    return folder


def candidate_folders(source: Source, data_dir: pathlib.Path) -> list[pathlib.Path]:
    """Lists the folders to search; a data directory named like one of them counts as that one."""
    folders = [data_dir / folder for folder in source.folders]
    return [*folders, data_dir] if data_dir.name in source.folders else folders


def find(source: Source, data_dir: pathlib.Path) -> tuple[dict[str, pathlib.Path], list[str]]:
    """Finds a source's files in the folder that has most of them, and lists the missing ones."""
    # One folder: data sets that use the same file names must not be mixed.
    best: dict[str, pathlib.Path] = {}
    for folder in candidate_folders(source, data_dir):
        paths = {}
        for name in source.files:
            for candidate in dict.fromkeys((name, name.removesuffix(".gz"))):
                if (folder / candidate).exists():
                    paths[name] = folder / candidate
                    break
        if len(paths) > len(best):
            best = paths
    return best, [name for name in source.files if name not in best]


def locate(named: str | DatasetInfo, data_dir: pathlib.Path, source: str | None = None) -> Located:
    """Finds the first complete source, or the named one; raises MissingDataError without one."""
    info = CATALOG[named] if isinstance(named, str) else named
    sources: Sequence[Source] = info.sources
    if source is not None:
        checks.one_of("source", source, [s.name for s in sources])
        sources = [s for s in sources if s.name == source]
    for candidate in sources:
        paths, missing = find(candidate, data_dir)
        if not missing:
            return Located(candidate, paths)
    raise MissingDataError(explain_missing(info, data_dir, sources))


def explain_missing(
    info: DatasetInfo, data_dir: pathlib.Path, sources: Sequence[Source] | None = None
) -> str:
    """Describes in several lines which files are missing, where they belong and how to get them."""
    sources = info.sources if sources is None else sources
    lines = [f"The files of data set {info.name!r} are not all in the data directory {data_dir}."]
    if len(sources) > 1:
        lines.append("Any one of these sets of files is enough:")
    for source in sources:
        _, missing = find(source, data_dir)
        lines.append(f"[{source.name}] missing: {', '.join(missing) or 'nothing'}")
        lines.append("  searched: " + ", ".join(map(str, candidate_folders(source, data_dir))))
        for download in source.downloads:
            lines.append(f"  {download.name} (SHA-256 {download.sha256})")
            lines.extend(f"    {url}" for url in download.urls)
            if download.unpack:
                lines.append(f"    holds {', '.join(download.unpack)}; unpack them next to it")
        if source.note:
            lines.append(f"  {source.note}")
    if any(source.downloads for source in sources):
        lines.append(
            f"With a network, `fedjax-dp data fetch {info.name}` gets them. The data directory is "
            f"the argument data_dir, else the environment variable {DATA_DIR_VARIABLE}, else "
            "~/.cache/fedjax_dp."
        )
    return "\n".join(lines)
