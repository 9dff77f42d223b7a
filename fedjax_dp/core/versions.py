"""The versions of the libraries that computed a result."""

import re
from importlib import metadata

PACKAGE = "fedjax-dp"


def libraries() -> dict[str, str]:
    """Lists installed versions of the package, which comes first, and its dependencies."""
    found = {}
    for name in (PACKAGE, *_needed()):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


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
