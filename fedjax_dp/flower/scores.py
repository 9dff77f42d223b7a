"""Scores that participants report, as the server stores them."""

import json
import pathlib
import warnings
from collections.abc import Sequence
from typing import Any, Literal

from fedjax_dp.core import checks, files
from fedjax_dp.flower.exchange import require_scores

# What a server collects, and what a node sends.
Scores = Literal["none", "exact"]
_MOST_BYTES = 2**20


class ScoresFile:
    """A file of reports, one per line: round, clients and scores."""

    def __init__(self, path: str | pathlib.Path) -> None:
        """Opens the file; a new one is readable by its owner alone."""
        self._path = pathlib.Path(path)
        self._path.touch(mode=0o600)

    def append(self, clients: Sequence[int], text: str) -> None:
        """Appends the reports in a reply; those that do not fit are left out, with a warning."""
        lost = f"scores of clients {list(clients)} are lost"
        try:
            checks.require(len(text) <= _MOST_BYTES, "scores", "have at most 1 MiB", len(text))
            found = files.parse_json(text, "scores")
            checks.require(isinstance(found, list), "scores", "be a list of reports", found)
        except ValueError as error:
            warnings.warn(f"{lost}: {error}", stacklevel=2)
            return
        for line in found:
            try:
                report = _report(line, clients)
            except ValueError as error:
                warnings.warn(f"{lost}: {error}", stacklevel=2)
                continue
            files.append_line(self._path, json.dumps(report))


def _report(line: Any, clients: Sequence[int]) -> dict[str, Any]:
    """Reads a report of a node."""
    require_scores(line)
    link = line["datalink"]
    rule = f"be None or one of {list(clients)}"
    checks.require(link is None or link in clients, "datalink", rule, link)
    of = list(clients) if link is None else [link]
    return {"round": line["round"], "clients": of, "scores": line["scores"]}
