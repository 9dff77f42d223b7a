"""A privacy statement as a LaTeX paragraph for a paper, with the BibTeX entries that it cites."""

import importlib.resources
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from fedjax_dp.core.foreign_text import in_latex
from fedjax_dp.privacy.reports.facts import Form, Words, sentences, without_privacy


class Paragraphs(NamedTuple):
    """A statement for a paper."""

    latex: str  # The text, one paragraph for each claim.
    bibtex: str  # The entries of all works that it cites, in order of citation.


def for_paper(claims: Sequence[Mapping[str, Any]]) -> Paragraphs:
    """Writes the claims of a run as LaTeX paragraphs, with the BibTeX entries that they cite.

    The text holds no seed and no key, and nothing that ε does not cover. It needs no LaTeX package.
    """
    text = "\n".join(_paragraph(claim) for claim in claims)
    if not claims:
        text = "No differential privacy is claimed.\n"
    cited = [key for group in re.findall(r"\\cite\{([^}]*)\}", text) for key in group.split(",")]
    entries = references()
    return Paragraphs(text, "\n".join(entries[key] for key in dict.fromkeys(cited)))


def references() -> dict[str, str]:
    """Reads the package's BibTeX entries, by key."""
    file = importlib.resources.files("fedjax_dp.privacy.reports").joinpath("references.bib")
    text = file.read_text("utf-8")
    return {m[1]: m[0] for m in re.finditer(r"^@\w+\{(\w+),$.*?^\}\n", text, re.DOTALL | re.M)}


def _paragraph(claim: Mapping[str, Any]) -> str:
    if (words := without_privacy(claim)) is not None:
        # There is no claim whose assumptions a paper could state.
        return words.paper.format(level=claim["unit"]) + "\n"
    return "\n".join(sentences(claim, _PAPER)) + "\n"


def _cited(words: Words) -> str:
    return re.sub(r"~\[([^]]*)\]", r"~\\cite{{\1}}", words.paper)


def _joined(numbers: Sequence[str]) -> str:
    """Writes numbers between the dollars of a sentence."""
    return "$ to $".join(map(in_math, numbers))


def in_math(text: str) -> str:
    """Writes a number for between dollars, 1e-05 as 10^{-5} and 2.5e-06 as 2.5 \\cdot 10^{-6}."""
    mantissa, has_exponent, exponent = text.partition("e")
    if not has_exponent:
        return text
    power = f"10^{{{int(exponent)}}}"
    return power if mantissa == "1" else rf"{mantissa} \cdot {power}"


_PAPER = Form(_cited, _joined, in_latex)
