"""Writes the privacy statement of a run, in words and as data."""

import pathlib
from collections.abc import Mapping
from typing import Any

from fedjax_dp.io.logbook import write_json, write_text
from fedjax_dp.privacy.accounting import Ledger
from fedjax_dp.privacy.statement import in_words, statement


def write_statement(
    folder: str | pathlib.Path,
    ledgers: Mapping[str, Ledger],
    dp_delta: Mapping[str, float],
    accountant: str,
    facts: Mapping[str, Mapping[str, Any]],
) -> None:
    """Writes `privacy.json` and `privacy.md` into a run folder.

    Args:
      folder: the run folder.
      ledgers: by unit, "client" and "record", what ran; empty where nothing is claimed.
      dp_delta: δ by unit.
      accountant: as for `Ledger.epsilon`.
      facts: by unit, more to say, such as `clip_norm`.
    """
    folder = pathlib.Path(folder)
    claims = [
        statement(ledger, dp_delta[unit], accountant=accountant, **facts[unit])
        for unit, ledger in ledgers.items()
    ]
    write_json(folder / "privacy.json", {"claims": claims})
    parts = ["# Privacy\n"]
    if not claims:
        parts.append(
            "This run claims no privacy: no release of it was clipped, noised and accounted.\n"
        )
    for claim in claims:
        parts += [f"## {claim['unit'].capitalize()} level\n", in_words(claim)]
        if len(claim["epsilon_per_unit"]) > 1:
            parts.append(_table(claim))
    write_text(folder / "privacy.md", "\n".join(parts))


def _table(claim: Mapping[str, Any]) -> str:
    rows = zip(claim["epsilon_per_unit"], claim["num_compositions"], strict=True)
    lines = [f"| {i} | {float(e):.4f} | {releases} |" for i, (e, releases) in enumerate(rows)]
    return "\n".join(["| client | ε | releases |", "|---|---|---|", *lines, ""])
