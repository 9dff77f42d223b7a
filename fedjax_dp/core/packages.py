"""Optional packages: what is missing is reported with what needs it and the extra that has it."""

import contextlib
from collections.abc import Iterator


class MissingPackageError(ImportError):
    """A package that is not installed; its words say what needs it and how to install it."""


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
