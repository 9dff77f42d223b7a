"""Checks other packages, each in its own environment, and writes `results/conformance.md`.

    python -m benchmarks.conformance [PEER ...] [--minutes N] [--newest] [--draws N]

Environments are made as for `benchmarks.peers.install`, whose folder it shares: `--folder` names
another. `--newest` takes the newest versions in place of those that are pinned. What is found is
added to `results/conformance.json`, where it replaces what was found for the same environment;
`--write` only writes the page. `--only NAME` checks one subject; the others' findings stay.
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
from typing import Any

from benchmarks.conformance import page
from benchmarks.peers import install
from fedjax_dp.audit.conformance import Served, check

HERE = pathlib.Path(__file__).resolve().parent
RESULTS = HERE.parent / "results" / "conformance.json"
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


def examined(environment: str, options: argparse.Namespace, seconds: float) -> dict[str, Any]:
    """Checks the subjects of a package in an environment."""
    peer = environment.removesuffix(install.NEWEST)
    python = pathlib.Path(sys.executable)
    requirements = "fedjax-dp\njax\n"
    if peer != OURS:
        python = install.python_of(environment, options.folder)
        requirements = install.requirements_of(environment)
    file = HERE / "served" / f"of_{peer}.py" if peer != OURS else HERE / "subjects" / "ours.py"
    served = Served(file, str(python), timeout=TIMEOUT)
    subjects = importlib.import_module(f"benchmarks.conformance.subjects.{peer}").subjects(served)
    if options.only:
        subjects = [s for s in subjects if s.name in options.only]
    report = check(*subjects, draws=options.draws, budget=seconds)
    found = report.to_dict()["findings"]
    reads = page.readings(peer, python) if peer != OURS else []
    return {
        "date": datetime.date.today().isoformat(),
        "versions": versions_of(python, requirements),
        "confidence": report.confidence,
        "draws": options.draws,
        "seconds": round(report.seconds),
        "findings": [{k: plain(v) for k, v in finding.items()} for finding in found],
        "readings": reads,
    }


def plain(value: Any) -> Any:
    """Makes a number that JSON lacks a text."""
    return str(value) if isinstance(value, float) and value - value != 0 else value


def merged(before: dict[str, Any] | None, after: dict[str, Any]) -> dict[str, Any]:
    """Keeps what was found before of subjects that were not checked again."""
    names = {finding["subject"] for finding in after["findings"]}
    old = [f for f in (before or {}).get("findings", []) if f["subject"] not in names]
    return after | {"findings": old + after["findings"]}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("peers", nargs="*", metavar="PEER", help=f"of {', '.join(PEERS)}")
    parser.add_argument("--minutes", type=float, default=60.0, help="after which none is begun")
    parser.add_argument("--newest", action="store_true", help="versions that are not pinned")
    parser.add_argument("--draws", type=int, default=256, help="seeds of a test of noise")
    parser.add_argument("--folder", type=pathlib.Path, default=install.HERE / ".venvs")
    parser.add_argument("--only", action="append", metavar="NAME", help="check this subject")
    parser.add_argument("--write", action="store_true", help="write the page alone")
    options = parser.parse_args()
    unknown = set(options.peers) - set(PEERS)
    if unknown:
        parser.error(f"unknown peer {sorted(unknown)[0]!r}; there are {', '.join(PEERS)}")
    results = json.loads(RESULTS.read_text("utf-8")) if RESULTS.exists() else {}
    end, failed = time.monotonic() + 60 * options.minutes, {}
    for peer in () if options.write else options.peers or PEERS:
        environment = peer + (install.NEWEST if options.newest and peer != OURS else "")
        left = end - time.monotonic()
        if left <= 0:
            failed[environment] = "no time was left"
            continue
        if peer != OURS and not install.is_installed(environment, options.folder):
            print(f"{environment}: installing", flush=True)
            reason = install.install(environment, options.folder)
            if reason is not None:
                failed[environment] = reason
                continue
        print(f"{environment}: checking", flush=True)
        try:
            found = examined(environment, options, left)
        except RuntimeError as error:
            failed[environment] = str(error)
            continue
        results[environment] = merged(results.get(environment), found)
        RESULTS.write_text(json.dumps(results, indent=1, allow_nan=False) + "\n", "utf-8")
        page.write(results, RESULTS.with_suffix(".md"))
    page.write(results, RESULTS.with_suffix(".md"))
    for environment, reason in failed.items():
        print(f"{environment}: NOT checked. {reason}", flush=True)
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
