"""Client states on a node: each as of the round that changed it last, for each run on its own."""

import hashlib
import pathlib
from collections.abc import Mapping
from typing import Protocol

import numpy as np
from flwr.app import Array, ArrayRecord, RecordDict
from safetensors.numpy import load_file, save

from fedjax_dp.core import files
from fedjax_dp.core.disclosure import GuardedError
from fedjax_dp.io.params import DIGEST, digest_of_arrays, require_undamaged

_SUFFIX = ".safetensors"
# Enough that no two runs of a node share a name.
_DIGITS = 16


def run_digest(*names: str) -> str:
    """Computes the SHA-256 of a run's random name, or of its plan's digest and that name."""
    return hashlib.sha256(" ".join(names).encode()).hexdigest()


class States(Protocol):
    """The states of a node's clients in one run, as arrays by name."""

    def has(self, client: int, round: int) -> bool:
        """Whether a client's state as of a round is here."""

    def read(self, client: int, round: int) -> Mapping[str, np.ndarray] | None:
        """Reads a client's state as of a round, or None."""

    def write(self, client: int, round: int, arrays: Mapping[str, np.ndarray], last: int) -> None:
        """Writes a client's state after a round; deletes those of rounds before `last`.

        Those after it stay: a message that names an earlier round must not delete what the next one
        starts from.
        """


class StatesOnDisk:
    """States in files of a folder, which outlast the node's process."""

    def __init__(self, folder: str | pathlib.Path, run: str):
        """Opens a folder for a run; made, for its owner alone, where it is missing."""
        self._folder, self._run = pathlib.Path(folder), run
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def _of(self, client: int) -> dict[int, pathlib.Path]:
        prefix = _prefix(self._run, client)
        files = [(p.stem.removeprefix(prefix), p) for p in self._folder.glob(f"{prefix}*{_SUFFIX}")]
        # A file of another name is none of ours.
        return {int(number): path for number, path in files if number.isdecimal()}

    def has(self, client: int, round: int) -> bool:
        """Whether a client's state as of a round is here."""
        return round in self._of(client)

    def read(self, client: int, round: int) -> Mapping[str, np.ndarray] | None:
        """Reads a client's state as of a round, or None."""
        path = self._of(client).get(round)
        if path is None:
            return None
        try:
            arrays: dict[str, np.ndarray] = load_file(path)
            require_undamaged(path, arrays, path.name)
        except Exception as error:
            # The reader raises many types of errors for damaged files.
            rule = "must be as it was written: restore the node's folder of states from a copy"
            public = f"the state of a client {rule}"
            raise GuardedError(f"{path} {rule}: {error}", public) from error
        return arrays

    def write(self, client: int, round: int, arrays: Mapping[str, np.ndarray], last: int) -> None:
        """Writes a client's state after a round; deletes those of rounds before `last`."""
        path = self._folder / f"{_prefix(self._run, client)}{round}{_SUFFIX}"
        named = {name: np.asarray(x, order="C") for name, x in arrays.items()}
        content = save(named, {DIGEST: digest_of_arrays(named, path.name)})
        files.write_private(path, content)
        for old, place in self._of(client).items():
            if old < last:
                place.unlink()


class StatesInContext:
    """States in Flower's context of a node, which outlast a message but not the node's process."""

    def __init__(self, state: RecordDict, run: str):
        """Wraps `Context.state` for a run."""
        self._state, self._run = state, run

    def _of(self, client: int) -> dict[int, str]:
        prefix = _prefix(self._run, client)
        return {int(n.removeprefix(prefix)): n for n in self._state if n.startswith(prefix)}

    def has(self, client: int, round: int) -> bool:
        """Whether a client's state as of a round is here."""
        return round in self._of(client)

    def read(self, client: int, round: int) -> Mapping[str, np.ndarray] | None:
        """Reads a client's state as of a round, or None."""
        name = self._of(client).get(round)
        if name is None:
            return None
        return {n: array.numpy() for n, array in self._state.array_records[name].items()}

    def write(self, client: int, round: int, arrays: Mapping[str, np.ndarray], last: int) -> None:
        """Writes a client's state after a round; deletes those of rounds before `last`."""
        named = {name: Array(np.asarray(x, order="C")) for name, x in arrays.items()}
        self._state[f"{_prefix(self._run, client)}{round}"] = ArrayRecord(named)
        for old, name in self._of(client).items():
            if old < last:
                del self._state[name]


def _prefix(run: str, client: int) -> str:
    """Begins the names of a client's states in a run, which end with the round."""
    return f"run-{run[:_DIGITS]}-client-{client}-round-"
