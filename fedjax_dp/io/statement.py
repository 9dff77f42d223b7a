"""Writes the privacy statement of a run: in words, as JSON, and in LaTeX with BibTeX."""

import pathlib
import re
from collections.abc import Mapping
from typing import Any

from numpy.typing import ArrayLike

from fedjax_dp.core.decimals import shown
from fedjax_dp.core.files import write_text
from fedjax_dp.core.foreign_text import in_markdown
from fedjax_dp.io.logbook import write_json
from fedjax_dp.privacy.accounting.ledger import Ledger
from fedjax_dp.privacy.reports.latex import for_paper
from fedjax_dp.privacy.reports.statement import in_words, statement

# What each mark of a file says: whether it may be published, and why.
MARK_WORDS = {
    "public": "yes: it holds no figure of the data",
    "covered": "yes: it holds what ε covers, and public facts",
    "named": "no: it names clients or files, which `run.release` leaves out",
    "exact": "no: it holds exact figures of the data, which no ε covers",
    "secret": "no: it allows removing the noise, or shows who was drawn",
}
_LATER = "Files that are not listed were added later: do not publish them."
# Columns of a table, each present if clients differ.
_BY_UNIT = {
    "budget of ε": "budget_per_unit",
    "δ": "dp_delta_per_unit",
    "noise multiplier": "noise_multiplier_per_unit",
    "clip norm": "clip_norm_per_unit",
    "batch": "batch_size_per_unit",
}


def write_statement(
    folder: str | pathlib.Path,
    ledgers: Mapping[str, Ledger],
    dp_delta: Mapping[str, ArrayLike],
    accountant: str,
    facts: Mapping[str, Mapping[str, Any]],
    marks: Mapping[str, str] = {},
) -> list[dict[str, Any]]:
    """Writes `privacy.json`, `.md`, `.tex` and `.bib` into a folder and returns the claims."""
    folder = pathlib.Path(folder)
    claims = [
        statement(ledger, dp_delta[unit], accountant=accountant, **facts[unit])
        for unit, ledger in ledgers.items()
    ]
    files = {"files": dict(marks)} if marks else {}
    write_json(folder / "privacy.json", {"claims": claims, **files})
    parts = ["# Privacy\n"]
    if not claims:
        parts.append(
            "This run claims no privacy: no release of it was clipped, noised and accounted.\n"
        )
    for claim in claims:
        parts += section(claim)
    if marks:
        parts += ["## Files of this folder\n", _listing(marks)]
    write_text(folder / "privacy.md", "\n".join(parts))
    latex, bibtex = for_paper(claims)
    write_text(folder / "privacy.tex", latex)
    write_text(folder / "privacy.bib", bibtex)
    return claims


def section(claim: Mapping[str, Any]) -> list[str]:
    """Writes a claim as parts of a Markdown page, with a table if there are several clients."""
    parts = [f"## {claim['unit'].capitalize()} level\n", in_words(dict(claim))]
    return [*parts, _table(claim)] if len(claim["epsilon_per_unit"]) > 1 else parts


def _listing(marks: Mapping[str, str]) -> str:
    """Lists which files may be published."""
    rows = [
        ("file", "may be published"),
        *(
            (f"`{n}`" if re.fullmatch(r"[\w. -]+", n) else in_markdown(n), MARK_WORDS[mark])
            for n, mark in marks.items()
        ),
    ]
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    lines.insert(1, "|---|---|")
    return "\n".join([*lines, "", _LATER, ""])


def _table(claim: Mapping[str, Any]) -> str:
    numbers = range(len(claim["epsilon_per_unit"]))
    names = claim.get("client_names") or ()
    names = names if len(names) == len(numbers) else numbers
    columns = {
        "client": [in_markdown(str(name)) for name in names],
        "ε": [shown("epsilon", epsilon, 5) for epsilon in claim["epsilon_per_unit"]],
        "releases": claim["num_compositions"],
    }
    for title, name in _BY_UNIT.items():
        values = claim.get(name) or []
        if len(set(values)) > 1:
            columns[title] = [shown(name, value) for value in values]
    rows = [columns, *zip(*columns.values(), strict=True)]
    lines = ["| " + " | ".join(map(str, row)) + " |" for row in rows]
    lines.insert(1, "|" + "---|" * len(columns))
    return "\n".join([*lines, ""])
