"""Makes one virtual environment for each peer.

    python -m benchmarks.peers.install [--folder benchmarks/peers/.venvs] [--again] [PEER ...]

`compare.py` does the same for the peers that it needs. Each environment is `FOLDER/PEER`, filled
from `requirements/PEER.txt`, whose versions are pinned; one filled from the same file is kept.
About 1 GB for each of pfl, flower and opacus with the CPU build of PyTorch, 0.65 GB for each of
the others. Packages come from the index of pip's own configuration; what follows `--` goes to
`pip install`, such as another index. What cannot be installed is named at the end with pip's
reason, and the exit status is 1.
"""

import argparse
import pathlib
import re
import subprocess
import sys
from collections.abc import Sequence

HERE = pathlib.Path(__file__).resolve().parent
PEERS = tuple(sorted(path.stem for path in (HERE / "requirements").glob("*.txt")))
# A peer's environment without the pins of its versions.
NEWEST = "-newest"
_CONFORMANCE = HERE.parent / "conformance" / "requirements"
_MARK = "installed.txt"


def python_of(peer: str, folder: pathlib.Path) -> pathlib.Path:
    """Returns the Python of a peer's environment."""
    return folder / peer / "bin" / "python"


def is_installed(peer: str, folder: pathlib.Path) -> bool:
    """Returns whether an environment was filled to its end, from the versions of today."""
    mark = folder / peer / _MARK
    return (
        python_of(peer, folder).exists()
        and mark.exists()
        and mark.read_text("utf-8") == requirements_of(peer)
    )


def install(peer: str, folder: pathlib.Path, pip_arguments: Sequence[str] = ()) -> str | None:
    """Makes one environment, in place of one that is there.

    Returns:
      None, or why it could not be made: the last line of the error.
    """
    target = folder / peer
    text = requirements_of(peer)
    make = [sys.executable, "-m", "venv", "--clear", str(target)]
    fill = [str(python_of(peer, folder)), "-m", "pip", "install", *text.split(), *pip_arguments]
    for command in (make, fill):
        try:
            done = subprocess.run(command, capture_output=True, text=True, errors="replace")
        except OSError as error:
            return str(error)
        if done.returncode != 0:
            return last_line(done.stderr or done.stdout)
    (target / _MARK).write_text(text, encoding="utf-8")
    return None


def last_line(messages: str) -> str:
    """Picks the last error that a command reports, else the last thing that it says."""
    lines = [line.strip() for line in messages.splitlines() if line.strip()]
    errors = [line for line in lines if line.lower().startswith("error")]
    return (errors or lines or ["no reason given"])[-1][:300]


def requirements_of(peer: str) -> str:
    """Reads what an environment is filled from, a requirement a line."""
    name = peer.removesuffix(NEWEST)
    folder = HERE / "requirements" if name in PEERS else _CONFORMANCE
    text = (folder / f"{name}.txt").read_text("utf-8")
    return text if name == peer else re.sub("==.*", "", text)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("peers", nargs="*", metavar="PEER", help=f"of {', '.join(PEERS)}")
    parser.add_argument("--folder", type=pathlib.Path, default=HERE / ".venvs")
    parser.add_argument("--again", action="store_true", help="replace what is installed")
    arguments = sys.argv[1:]
    split = arguments.index("--") if "--" in arguments else len(arguments)
    options = parser.parse_args(arguments[:split])
    unknown = set(options.peers) - set(PEERS)
    if unknown:
        parser.error(f"unknown peer {sorted(unknown)[0]!r}; there are {', '.join(PEERS)}")
    failed = {}
    for peer in options.peers or PEERS:
        if is_installed(peer, options.folder) and not options.again:
            print(f"{peer}: is installed", flush=True)
            continue
        print(f"{peer}: installing", flush=True)
        reason = install(peer, options.folder, arguments[split + 1 :])
        if reason is not None:
            failed[peer] = reason
    for peer, reason in failed.items():
        print(f"{peer}: NOT installed. {reason}", flush=True)
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
