"""The report of a conformance check, as text, Markdown, JSON values and JUnit XML."""

from collections.abc import Iterator
from typing import Any, NamedTuple
from xml.etree import ElementTree

from fedjax_dp.audit.conformance.findings import Finding
from fedjax_dp.core.foreign_text import in_markdown, visible

HEADS = ("subject", "check", "verdict", "finding")


class Report(NamedTuple):
    """All findings of a conformance check.

    Attributes:
      findings: by subject and check.
      confidence: the probability, at least, that no check fails if all subjects do what they claim.
      seconds: how long the checks took.
    """

    findings: tuple[Finding, ...]
    confidence: float
    seconds: float

    @property
    def is_failed(self) -> bool:
        """Whether a check failed."""
        return any(finding.verdict == "failed" for finding in self.findings)

    @property
    def summary(self) -> str:
        """The numbers of verdicts."""
        verdicts = [finding.verdict for finding in self.findings]
        counts = ", ".join(f"{verdicts.count(v)} {v}" for v in ("passed", "failed", "open"))
        return f"{counts}; confidence {self.confidence:g}"

    def rows(self) -> Iterator[tuple[str, ...]]:
        """Lists the cells of a table, whose heads are `HEADS`."""
        for f in self.findings:
            yield f.subject, f.check, f.verdict, f.sentence

    def to_dict(self) -> dict[str, Any]:
        """Writes values for JSON."""
        return {
            "is_failed": self.is_failed,
            "confidence": self.confidence,
            "seconds": self.seconds,
            "findings": [finding._asdict() for finding in self.findings],
        }

    def to_text(self) -> str:
        """Writes the failures, with inputs that show them, and the numbers of verdicts."""
        lines = []
        for f in self.findings:
            if f.verdict == "failed":
                lines.append(f"{f.subject}, {f.check}: {f.sentence}")
                lines += [f"    {line}" for line in f.example.splitlines()]
        return _plain("\n".join([*lines, self.summary]))

    def to_markdown(self) -> str:
        """Writes a page: a table, and the input of every failure that has one."""
        lines = [f"# Conformance: {'failed' if self.is_failed else 'nothing failed'}", ""]
        lines += [f"{self.summary[0].upper()}{self.summary[1:]}.", ""]
        lines += [_line(HEADS), "|" + "---|" * len(HEADS)]
        lines += [_line(row) for row in self.rows()]
        for f in self.findings:
            if f.example:
                head = f"## {in_markdown(f.subject)}, {f.check}"
                lines += ["", head, "", f"{in_markdown(f.sentence)}:", ""]
                lines += [f"    {_plain(line)}" for line in f.example.splitlines()]
        return "\n".join(lines) + "\n"

    def to_junit(self) -> str:
        """Writes JUnit XML: a test case for each finding, skipped if it is open."""
        verdicts = [f.verdict for f in self.findings]
        numbers = {
            "name": "conformance",
            "tests": str(len(verdicts)),
            "failures": str(verdicts.count("failed")),
            "skipped": str(verdicts.count("open")),
            "time": f"{self.seconds:.3f}",
        }
        suite = ElementTree.Element("testsuite", numbers)
        for f in self.findings:
            where = {"classname": _plain(f.subject), "name": f.check}
            case = ElementTree.SubElement(suite, "testcase", where)
            if f.verdict != "passed":
                tag = "failure" if f.verdict == "failed" else "skipped"
                entry = ElementTree.SubElement(case, tag, {"message": _plain(f.sentence)})
                entry.text = _plain(f.example)
        ElementTree.indent(suite)
        return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"


def _plain(text: str) -> str:
    """Escapes control characters, which XML forbids and terminals obey."""
    return visible(text, keeps_lines=True)


def _line(cells: Any) -> str:
    """Writes a row of a Markdown table."""
    return f"| {' | '.join(in_markdown(cell) for cell in cells)} |"
