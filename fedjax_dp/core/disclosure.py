"""Errors in two parts: what others may read, and what stays with the owner of the data."""

import contextlib
from collections.abc import Collection, Iterator
from typing import Any

from fedjax_dp.core import checks

_DETAILS = "the log of the machine that holds the data has the details"


class GuardedError(ValueError):
    """An error for the owner of the data; others read `public`, without value, row, name, path."""

    def __init__(self, text: str, public: str = "") -> None:
        """Makes an error of its whole text, and of the part that others may read."""
        super().__init__(text)
        self.public = public


def require(
    condition: bool,
    argument: str,
    rule: str,
    value: Any,
    *,
    where: str = "",
    public: str | None = None,
) -> None:
    """As `checks.require`, of data: others read argument and rule, and never value and place.

    `where` is the file or row, and `public` the rule as others read it, if not the whole rule.
    """
    if not condition:
        text = f"{where and f'{where}, '}{argument} must {rule}, got {checks.shown(value)}"
        raise GuardedError(text, f"{argument} must {rule if public is None else public}")


def require_of_file(
    condition: bool, path: str, rule: str, value: Any, *, public: str | None = None
) -> None:
    """As `require`, of a whole file: others do not read its path."""
    if not condition:
        text = f"{path} must {rule}, got {checks.shown(value)}"
        raise GuardedError(text, f"a file of the data must {rule if public is None else public}")


def one_of(argument: str, value: str, choices: Collection[str]) -> None:
    """As `checks.one_of`: others read the choices, and not the value."""
    try:
        checks.one_of(argument, value, choices)
    except ValueError as error:
        public = f"{argument} must be one of {checks.listed(sorted(choices))}"
        raise GuardedError(str(error), public) from None


def require_column(option: str, name: str, where: str, columns: Collection[str]) -> None:
    """Requires a column of a file, whose others are not named: they may be a record."""
    try:
        checks.one_of(f"{option}, a column of {where},", name, columns)
    except ValueError as error:
        public = f"{option} must name columns of the data, and {name!r} is none of them"
        raise GuardedError(str(error), public) from None


@contextlib.contextmanager
def in_public() -> Iterator[None]:
    """Lets the whole text of errors be read by others: no data have been read where they arise."""
    try:
        yield
    except GuardedError:
        raise
    except ValueError as error:
        raise GuardedError(str(error), str(error)) from error


def public_text(error: BaseException) -> str:
    """Returns what others may read of an error: its public part, or its kind."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, GuardedError) and cause.public:
            return f"{cause.public}; {_DETAILS}"
        cause = cause.__cause__ or cause.__context__
    return f"{type(error).__name__}: {_DETAILS}"
