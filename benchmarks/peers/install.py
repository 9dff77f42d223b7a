"""Makes one virtual environment for each peer.

    python benchmarks/peers/install.py [--folder benchmarks/peers/.venvs] [PEER ...]

Each environment is `FOLDER/PEER`, filled from `requirements/PEER.txt`, whose versions are pinned.
About 1 GB for each of pfl, flower and opacus with the CPU build of PyTorch, 0.65 GB for each of
the others. What follows `--` goes to `pip install`, such as the index that has the CPU build of
PyTorch. What cannot be installed is named at the end with pip's reason, and the exit status is 1;
`compare.py` leaves it out and says so.
"""

import argparse
import pathlib
import subprocess
import sys
import venv

HERE = pathlib.Path(__file__).resolve().parent
PEERS = tuple(sorted(path.stem for path in (HERE / "requirements").glob("*.txt")))


def install(peer: str, folder: pathlib.Path, pip_arguments: list[str]) -> str | None:
    """Makes one environment.

    Returns:
      None, or why it could not be made.
    """
    target = folder / peer
    venv.create(target, with_pip=True, clear=True)
    requirements = HERE / "requirements" / f"{peer}.txt"
    command = [str(target / "bin" / "python"), "-m", "pip", "install", "-r", str(requirements)]
    done = subprocess.run([*command, *pip_arguments], capture_output=True, text=True)
    if done.returncode == 0:
        return None
    (target / "bin" / "python").unlink()
    reasons = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
    return (reasons or done.stderr.splitlines() or ["unknown"])[-1][:300]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("peers", nargs="*", metavar="PEER", help=f"of {', '.join(PEERS)}")
    parser.add_argument("--folder", type=pathlib.Path, default=HERE / ".venvs")
    arguments = sys.argv[1:]
    split = arguments.index("--") if "--" in arguments else len(arguments)
    options = parser.parse_args(arguments[:split])
    unknown = set(options.peers) - set(PEERS)
    if unknown:
        parser.error(f"unknown peer {sorted(unknown)[0]!r}; there are {', '.join(PEERS)}")
    failed = {}
    for peer in options.peers or PEERS:
        print(f"{peer}: installing", flush=True)
        reason = install(peer, options.folder, arguments[split + 1 :])
        if reason is not None:
            failed[peer] = reason
    for peer, reason in failed.items():
        print(f"{peer}: NOT installed. {reason}", flush=True)
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
