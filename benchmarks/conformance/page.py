"""From findings to the page of results: what passed first, what failed with input and cause."""

import fnmatch
import hashlib
import pathlib
import tomllib
from collections.abc import Iterator, Sequence
from typing import Any

from fedjax_dp.audit import conformance
from fedjax_dp.core.foreign_text import in_markdown

HERE = pathlib.Path(__file__).resolve().parent
TITLES = {
    "fedjax": "FedJAX",
    "flower": "Flower",
    "jax_privacy": "jax-privacy and Optax",
    "nvflare": "NVFlare",
    "opacus": "Opacus",
    "ours": "fedjax_dp",
    "pfl": "pfl-research",
    "tensorflow_privacy": "TensorFlow Privacy",
}
INTRODUCTION = """# Conformance of other packages

[The conformance checks](../../docs/privacy/conformance.md) on parts of other packages, each in an
environment of its own: `python -m benchmarks.conformance`, whose
[subjects](../conformance/subjects) say what is claimed. A claim is that of the package's own pages
and docstrings: clip norm 1 and noise multiplier 1 unless one says otherwise, small cohorts, layers
of 6 and 2 numbers. Written from [conformance.json](conformance.json). The column *kit* has a digest
of the checks' sources, which is `{kit}` for this page; *older* is a kit from before this column.

*Failed* says that a part did not keep the claim on the input below, on hostile input too, such as
an update that is not finite. It does not say that a training with ordinary updates is unsafe. What
a package documents is quoted where it was found. Lines are those of the version above. Subjects
that are not listed have not been checked yet.
"""


def kit() -> str:
    """A digest of the sources of the checks."""
    folder = pathlib.Path(conformance.__file__).parent
    sources = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    return hashlib.sha256(sources).hexdigest()[:8]


def readings(
    peer: str, python: pathlib.Path, before: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Reads what was found in a package's source, and finds its lines in an environment.

    Where there is none, lines are those that were found before.
    """
    every = tomllib.loads((HERE / "readings.toml").read_text("utf-8"))
    packages = next((python.parent.parent / "lib").glob("python*/site-packages"), None)
    known = {(reading["file"], reading["text"]): reading["line"] for reading in before}
    return [
        reading
        | {
            "line": _line(packages, reading)
            if packages
            else known.get((reading["file"], reading["text"]))
        }
        for reading in every.get(peer, [])
    ]


def note(peer: str) -> str:
    """Says how a package was set up."""
    return tomllib.loads((HERE / "readings.toml").read_text("utf-8"))["notes"].get(peer, "")


def _line(packages: pathlib.Path, reading: dict[str, Any]) -> int | None:
    """The number of the line that contains a text, None where it is not there any more."""
    file = packages / reading["file"]
    lines = file.read_text("utf-8").splitlines() if file.exists() else []
    return next((i for i, line in enumerate(lines, 1) if reading["text"] in line), None)


def write(results: dict[str, Any], path: pathlib.Path) -> None:
    """Writes the page."""
    path.write_text("\n".join(lines(results)) + "\n", encoding="utf-8")


def lines(results: dict[str, Any]) -> Iterator[str]:
    """Writes the lines of the page."""
    yield INTRODUCTION.format(kit=kit())
    yield from _row("package", "versions", "date", "passed", "failed", "open")
    yield from _row(*["---"] * 6)
    ordered = sorted(results, key=lambda name: (name == "ours", name))
    for name in ordered:
        found = results[name]
        verdicts = [finding["verdict"] for finding in found["findings"]]
        counts = (str(verdicts.count(v)) for v in ("passed", "failed", "open"))
        yield from _row(_title(name), ", ".join(found["versions"]), found["date"], *counts)
    missing = [title for peer, title in TITLES.items() if peer not in results]
    if missing:
        yield f"\nNot checked yet: {', '.join(missing)}."
    for name in ordered:
        yield from _section(name, results[name])


def _section(name: str, found: dict[str, Any]) -> Iterator[str]:
    findings = found["findings"]
    yield f"\n## {_title(name)}\n"
    yield (
        f"{found['date']}, {', '.join(found['versions'])}; confidence {found['confidence']:g} of "
        "each subject's checks.\n"
    )
    if text := note(name.removesuffix("-newest")):
        yield f"{text}\n"
    subjects = list(dict.fromkeys(f["subject"] for f in findings))
    yield from _row("subject", "draws", "kit", "passed", "failed", "open")
    yield from _row(*["---"] * 6)
    of = {s: [f for f in findings if f["subject"] == s] for s in subjects}
    for subject in sorted(subjects, key=lambda s: sum(f["verdict"] == "failed" for f in of[s])):
        cells = (
            _checks(f["check"] for f in of[subject] if f["verdict"] == verdict)
            for verdict in ("passed", "failed", "open")
        )
        first = of[subject][0]
        about = in_markdown(subject), str(first["draws"]), first.get("kit", "older")
        yield from _row(*about, *cells)
    reads = found.get("readings", [])
    failures = [f for f in findings if f["verdict"] == "failed" or _is_read(f, reads)]
    if failures:
        yield "\n### What failed, or is open for a reason that was read\n"
    for finding in failures:
        yield f"**{in_markdown(finding['subject'])}, {finding['check']}**:"
        yield f"{in_markdown(finding['sentence'])}.\n"
        if finding["example"]:
            yield "\n".join(f"    {line}" for line in finding["example"].splitlines()) + "\n"
        for number in causes(finding, reads):
            yield f"Cause {number}.\n"
    if any(causes(f, reads) for f in failures):
        yield "### Causes\n"
    for number, reading in enumerate(reads, 1):
        if any(number in causes(f, reads) for f in failures):
            place = f"`{reading['file']}`"
            if reading["line"]:
                place += f", line {reading['line']}, `{reading['text'].strip()}`"
            yield f"{number}. {reading['why']} {place}. {reading['documented']}\n"


def _is_read(finding: dict[str, Any], reads: Sequence[dict[str, Any]]) -> bool:
    """Whether a finding is open, and a reading says why."""
    return finding["verdict"] == "open" and bool(causes(finding, reads))


def causes(finding: dict[str, Any], reads: Sequence[dict[str, Any]]) -> list[int]:
    """The numbers of the readings that concern a finding."""
    return [
        number
        for number, reading in enumerate(reads, 1)
        if any(fnmatch.fnmatchcase(finding["subject"], each) for each in reading["subjects"])
        and any(part in finding["check"] for part in reading["checks"])
        and any(part in finding["sentence"] for part in reading.get("says", [""]))
    ]


def _checks(names: Iterator[str]) -> str:
    """Names checks, each group once."""
    groups: dict[str, list[str]] = {}
    for name in names:
        group, _, rest = name.partition(": ")
        groups.setdefault(group, []).append(rest)
    return "; ".join(f"*{group}* {', '.join(rest)}" for group, rest in groups.items())


def _row(*cells: str) -> Iterator[str]:
    yield f"| {' | '.join(cells)} |"


def _title(name: str) -> str:
    peer, _, newest = name.partition("-")
    return TITLES[peer] + (" (newest)" if newest else "")
