"""Packages: the versions that are installed, and the error for an optional one that is not."""

import contextlib
import importlib.util
import pathlib
import re
import sys
from collections.abc import Iterator
from importlib import metadata

PACKAGE = "fedjax-dp"


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
            f"{what} needs the package {package}, which is not installed: {_command(extra)}"
        ) from error


def installer() -> str:
    """Writes the command that installs into this environment, up to the name of a package."""
    python = f'"{sys.executable}"' if " " in sys.executable else sys.executable or "python"
    # Environments that uv made have no pip.
    has_pip = importlib.util.find_spec("pip") is not None
    return f"{python} -m pip install" if has_pip else f"uv pip install --python {python}"


def _command(extra: str) -> str:
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
