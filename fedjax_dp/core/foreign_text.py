"""Text of foreign origin, such as names of clients, where people and other programs read it."""

import re
import unicodedata

# Controls, which escapes of a terminal begin with; what reorders text; ends of lines.
_HIDDEN = {"Cc", "Cf", "Cs", "Zl", "Zp"}
# Joiners, with which some languages are spelt.
_SPELT = "\u200c\u200d"
# An underscore within a word marks nothing.
_MARKDOWN = re.compile(r"[\\`*\[\]<>|~&$]|(?<![^\W_])_|_(?![^\W_])")
# Spreadsheets run cells that begin with these as formulas.
_FORMULA = ("=", "+", "-", "@")
_LATEX = {c: "\\" + c for c in "&%$#_{}"} | {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "ε": r"$\varepsilon$",
    "δ": r"$\delta$",
}


def visible(text: str, *, keeps_lines: bool = False) -> str:
    """Writes controls, and ends of lines unless `keeps_lines`, as escapes without an effect."""
    if text.isascii() and text.isprintable():
        return text

    def escaped(character: str) -> str:
        if character in _SPELT or (keeps_lines and character in "\n\t"):
            return character
        is_hidden = unicodedata.category(character) in _HIDDEN
        return character.encode("unicode_escape").decode() if is_hidden else character

    return "".join(map(escaped, text))


def in_markdown(text: str) -> str:
    """Writes a text that Markdown shows as it is, also within a cell of a table."""
    return _MARKDOWN.sub(r"\\\g<0>", visible(text))


def in_latex(text: str) -> str:
    """Writes a text that LaTeX prints as it is."""
    return "".join(_LATEX.get(character, character) for character in visible(text))


def in_csv(text: str) -> str:
    """Writes a CSV cell that no spreadsheet runs as a formula; numbers stay numbers."""
    shown = visible(text)
    return "'" + shown if shown.lstrip().startswith(_FORMULA) and not _is_number(shown) else shown


def in_plot(text: str) -> str:
    """Writes a label that Matplotlib draws as it is, and not as a formula."""
    return visible(text).replace("$", r"\$")


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
