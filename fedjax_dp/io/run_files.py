"""What a run folder holds, as its report shows it: figures, curves, budgets."""

import tomllib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard

from fedjax_dp.core.decimals import shown
from fedjax_dp.io.charts import Point

# Values beyond this are not drawn.
_LARGEST = 1e100


class RunFiles(NamedTuple):
    """What a report shows of a run folder."""

    state: str  # One word, such as "running".
    detail: str  # The state in a sentence.
    rounds: int | None  # Completed rounds; None if unknown.
    config: str  # The text of `config.toml`.
    environment: Mapping[str, Any]  # What `environment.json` holds.
    summary: Mapping[str, Any]  # What `summary.json` holds; empty while a run is under way.
    statement: str  # The text of `privacy.md`; "" while a run is under way.
    rows: Sequence[Mapping[str, Any]]  # Metrics by round, as `read_metrics` returns them.
    marks: Mapping[str, str]  # The mark of each file: public, covered, exact or secret.
    place: str = ""  # The path of the folder; "" if it must not be shown.
    scores: Sequence[Mapping[str, Any]] = ()  # Of participants: "round", rounds before, "scores".

    @property
    def tables(self) -> dict[str, Any]:
        """The configuration."""
        return tomllib.loads(self.config)

    def latest(self, name: str) -> Any:
        """Returns a figure of the summary, or else of the newest round that has it."""
        found = [row[name] for row in self.rows[::-1] if row.get(name) is not None]
        return self.summary.get(name) if self.summary else next(iter(found), None)

    def curve(self, name: str, scale: float = 1.0, by: str = "round") -> list[Point]:
        """Lists the rounds in which a metric is a number, as points against another metric."""
        return [
            (float(row[by]), scale * float(row[name]))
            for row in self.rows
            if is_number(row.get(name)) and is_number(row.get(by))
        ]


def is_number(value: Any) -> TypeGuard[float]:
    """Whether a value is a number that can be drawn."""
    is_real = isinstance(value, int | float) and not isinstance(value, bool)
    return is_real and abs(value) <= _LARGEST


def is_epsilon(value: Any) -> TypeGuard[float | str]:
    """Whether a value is an ε, which may be "inf"."""
    return is_number(value) or value == "inf"


def text_of(name: str, value: Any) -> str:
    """Writes a figure in at most six digits, counts in full."""
    if isinstance(value, list):
        return ", ".join(text_of(name, each) for each in value)
    return shown(name, value, 6) if isinstance(value, float) else str(value)


def entry_of(tables: Any, *keys: str) -> Any:
    """Returns an entry of nested tables, or None."""
    for key in keys:
        tables = tables.get(key) if isinstance(tables, Mapping) else None
    return tables


def units_of(tables: Any) -> list[str]:
    """Lists the units of privacy of a configuration."""
    unit = str(entry_of(tables, "privacy", "unit") or "none")
    return {"both": ["client", "record"], "none": []}.get(unit, [unit])


def budgets_of(tables: Any, unit: str) -> list[float]:
    """Lists the distinct budgets of a unit in order; none if ε has no limit."""
    given = entry_of(tables, "privacy", unit, "epsilon")
    each = given.values() if isinstance(given, Mapping) else given
    values = each if isinstance(given, Mapping | list) else [each]
    return sorted({float(value) for value in values if is_number(value)})
