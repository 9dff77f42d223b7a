"""Checks other packages, each in its own environment, and writes `results/conformance.md`.

    python -m benchmarks.conformance [PEER ...] [--minutes N] [--newest] [--draws N] [--resume]

Environments are made as for `benchmarks.peers.install`, whose folder it shares: `--folder` names
another. `--newest` takes the newest versions in place of those that are pinned. What is found is
added to `results/conformance.json`, where it replaces what was found for the same environment;
`--write` only writes the page. `--only NAME` checks one subject; the others' findings stay.
`--resume` leaves out subjects that were checked with the same versions by the same checks. Subjects
that need more draws than `--draws` say so.
"""

import argparse
import datetime
import importlib
import json
import pathlib
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

from benchmarks.conformance import page
from benchmarks.peers import install
from fedjax_dp.audit.conformance import Served, check

HERE = pathlib.Path(__file__).resolve().parent
RESULTS = HERE.parent / "results" / "conformance.json"
SUBJECTS = "benchmarks.conformance.subjects"
OURS = "ours"
PEERS = (OURS, *sorted(path.stem.removeprefix("of_") for path in (HERE / "served").glob("of_*.py")))
# Seconds of a call: the first imports the package, and one draws 46,341 masks.
TIMEOUT = 900.0


def versions_of(python: pathlib.Path, requirements: str) -> list[str]:
    """Asks an environment for the versions of its requirements."""
    names = [re.split(r"[\[=]", line)[0] for line in requirements.split()]
    code = (
        "import platform, sys; from importlib.metadata import version as v; "
        "print('Python', platform.python_version()); [print(n, v(n)) for n in sys.argv[1:]]"
    )
    command = [str(python), "-c", code, *names]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


def examined(environment: str, options: argparse.Namespace, end: float) -> Iterator[dict[str, Any]]:
    """Checks the subjects of a package in an environment, one after another."""
    peer = environment.removesuffix(install.NEWEST)
    python, requirements = pathlib.Path(sys.executable), "fedjax-dp\njax\n"
    if peer != OURS:
        python = install.python_of(environment, options.folder)
        requirements = install.requirements_of(environment)
    file = HERE / "served" / f"of_{peer}.py" if peer != OURS else HERE / "subjects" / "ours.py"
    served = Served(file, str(python), timeout=TIMEOUT)
    about = {
        "date": datetime.date.today().isoformat(),
        "versions": versions_of(python, requirements),
        "confidence": options.confidence,
    }
    module = importlib.import_module(f"{SUBJECTS}.{peer}")
    before = kept(read().get(environment), about) if options.resume else []
    kit = page.kit()
    left = {
        f["subject"] for f in before if f["sentence"].startswith("not begun") or f.get("kit") != kit
    }
    done = {f["subject"] for f in before} - left
    for subject in module.subjects(served):
        is_chosen = subject.name not in done and subject.name in (options.only or [subject.name])
        if not is_chosen or time.monotonic() > end:
            continue
        draws = max(options.draws, getattr(module, "DRAWS", {}).get(subject.name, 0))
        print(f"{environment}: {subject.name}", flush=True)
        report = check(
            subject,
            draws=draws,
            confidence=options.confidence,
            budget=max(1.0, end - time.monotonic()),
        )
        found = [
            {key: plain(value) for key, value in finding.items()} | {"draws": draws, "kit": kit}
            for finding in report.to_dict()["findings"]
        ]
        yield about | {"findings": found}


def plain(value: Any) -> Any:
    """Makes a number that JSON lacks a text."""
    return str(value) if isinstance(value, float) and value - value != 0 else value


def read() -> dict[str, Any]:
    """Reads what was found so far."""
    return json.loads(RESULTS.read_text("utf-8")) if RESULTS.exists() else {}


def save(results: dict[str, Any]) -> None:
    """Writes what was found so far."""
    RESULTS.write_text(json.dumps(results, indent=1, allow_nan=False) + "\n", "utf-8")


def kept(before: dict[str, Any] | None, about: dict[str, Any]) -> list[dict[str, Any]]:
    """Lists what was found before, with the same versions and confidence."""
    same = before is not None and all(before[k] == about[k] for k in ("versions", "confidence"))
    return before["findings"] if before is not None and same else []


def merged(before: dict[str, Any] | None, after: dict[str, Any]) -> dict[str, Any]:
    """Keeps what was found before of subjects that were not checked again."""
    names = {finding["subject"] for finding in after["findings"]}
    old = [f for f in kept(before, after) if f["subject"] not in names]
    return (before or {}) | after | {"findings": old + after["findings"]}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("peers", nargs="*", metavar="PEER", help=f"of {', '.join(PEERS)}")
    parser.add_argument("--minutes", type=float, default=60.0, help="after which none is begun")
    parser.add_argument("--newest", action="store_true", help="versions that are not pinned")
    parser.add_argument("--draws", type=int, default=256, help="seeds of a test of noise")
    parser.add_argument("--confidence", type=float, default=0.999, help="of each subject's checks")
    parser.add_argument("--folder", type=pathlib.Path, default=install.HERE / ".venvs")
    parser.add_argument("--only", action="append", metavar="NAME", help="check this subject")
    parser.add_argument("--resume", action="store_true", help="check what was not checked yet")
    parser.add_argument("--write", action="store_true", help="write the page alone")
    options = parser.parse_args()
    unknown = set(options.peers) - set(PEERS)
    if unknown:
        parser.error(f"unknown peer {sorted(unknown)[0]!r}; there are {', '.join(PEERS)}")
    end, failed = time.monotonic() + 60 * options.minutes, {}
    for peer in () if options.write else options.peers or PEERS:
        environment = peer + (install.NEWEST if options.newest and peer != OURS else "")
        if time.monotonic() > end:
            failed[environment] = "no time was left"
            continue
        if peer != OURS and not install.is_installed(environment, options.folder):
            print(f"{environment}: installing", flush=True)
            reason = install.install(environment, options.folder)
            if reason is not None:
                failed[environment] = reason
                continue
        try:
            for found in examined(environment, options, end):
                results = read()
                results[environment] = merged(results.get(environment), found)
                save(results)
        except (RuntimeError, ValueError, subprocess.SubprocessError) as error:
            failed[environment] = str(error)
    results = read()
    for environment, found in results.items():
        python = install.python_of(environment, options.folder)
        peer = environment.removesuffix(install.NEWEST)
        found["readings"] = page.readings(peer, python, found.get("readings", []))
    save(results)
    page.write(results, RESULTS.with_suffix(".md"))
    for environment, reason in failed.items():
        print(f"{environment}: NOT checked. {reason}", flush=True)
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
