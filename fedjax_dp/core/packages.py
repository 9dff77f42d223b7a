"""Optional packages: the error for a missing one names its user and the extra to install."""

import contextlib
from collections.abc import Iterator


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
            f"{what} needs the package {package}, which is not installed: "
            f"pip install 'fedjax-dp[{extra}]'"
        ) from error
