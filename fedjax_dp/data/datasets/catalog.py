"""The data sets of `catalog.toml`: descriptions, files, and public addresses."""

import dataclasses
import importlib.resources
import tomllib
from typing import Any


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
