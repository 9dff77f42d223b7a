"""Packages: the versions that are installed, and the error for an optional one that is not."""

import contextlib
import importlib.util
import pathlib
import re
import sys
from collections.abc import Iterator
from importlib import metadata

PACKAGE = "fedjax-dp"
_NOT_FOR_USERS = ("all", "tests", "docs", "nightly")


class MissingPackageError(ImportError):
    """A package is not installed; the message says what needs it and how to install it."""


@contextlib.contextmanager
def needed_for(what: str, extra: str) -> Iterator[None]:
    """Turns a failed import of an optional package into an error that names the extra."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = str(error.name).partition(".")[0]
        raise MissingPackageError(
            f"{what} needs the package {package}, which is not installed: {installing(extra)}"
        ) from None


def installer() -> str:
    """Writes the command that installs into this environment, up to the name of a package."""
    python = f'"{sys.executable}"' if " " in sys.executable else sys.executable or "python"
    # Environments that uv made have no pip.
    has_pip = importlib.util.find_spec("pip") is not None
    return f"{python} -m pip install" if has_pip else f"uv pip install --python {python}"


def installing(extra: str) -> str:
    """Writes the command that adds an extra; no index has to know an installed package."""
    try:
        metadata.version(PACKAGE)
        package = f'"{PACKAGE}[{extra}]"'
    except metadata.PackageNotFoundError:
        # Imported from a checkout, by its path.
        package = f'-e "{pathlib.Path(__file__).parents[2]}[{extra}]"'
    return f"{installer()} {package}"


def libraries() -> dict[str, str]:
    """Lists installed versions of the package, which comes first, and its dependencies."""
    versions = {}
    for name in (PACKAGE, *_needed()):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def extras() -> dict[str, list[str]]:
    """Lists for each extra, but those of developers and unions, the requirements that are unmet."""
    names = metadata.metadata(PACKAGE).get_all("Provides-Extra") or []
    return {name: unmet(PACKAGE, name) for name in names if name not in _NOT_FOR_USERS}


def unmet(package: str, extra: str = "") -> list[str]:
    """Lists the requirements of a package, or of one of its extras, that nothing here meets."""
    from packaging.requirements import Requirement

    found: list[str] = []
    for needed in map(Requirement, metadata.requires(package) or []):
        is_of = [needed.marker is None or needed.marker.evaluate({"extra": e}) for e in (extra, "")]
        if not is_of[0] or (extra and is_of[1]):
            continue
        try:
            version = metadata.version(needed.name)
        except metadata.PackageNotFoundError:
            found.append(f"{needed.name}{needed.specifier}")
            continue
        if not needed.specifier.contains(version, prereleases=True):
            found.append(f"{needed.name}{needed.specifier} (here is {version})")
        for name in sorted(needed.extras):
            found += unmet(needed.name, name)
    return list(dict.fromkeys(found))


def _needed() -> list[str]:
    """Names the direct dependencies, those of extras too, and the compiler behind JAX."""
    tools = re.compile(r"extra == .(tests|docs|nightly)")
    try:
        lines = metadata.requires(PACKAGE) or []
    except metadata.PackageNotFoundError:
        lines = []
    used = [line for line in lines if not tools.search(line)]
    names = [found[0] for line in used if (found := re.match(r"[A-Za-z0-9._-]+", line))]
    return [n for n in dict.fromkeys(["jax", "jaxlib", *names]) if n != PACKAGE]
