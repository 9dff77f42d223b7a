"""Client states on a node: each as of the round that changed it last."""

import pathlib
from collections.abc import Mapping
from typing import Protocol

import numpy as np
from flwr.app import Array, ArrayRecord, RecordDict
from safetensors.numpy import load_file, save

from fedjax_dp.core import files


class States(Protocol):
    """The states of a node's clients, as arrays by name."""

    def read(self, client: int, round: int) -> Mapping[str, np.ndarray] | None:
        """Reads a client's state as of a round, or None."""

    def write(self, client: int, round: int, arrays: Mapping[str, np.ndarray], last: int) -> None:
        """Writes a client's state after a round; deletes all others but that of round `last`."""


class StatesOnDisk:
    """States in files of a folder, which outlast the node's process."""

    def __init__(self, folder: str | pathlib.Path):
        """Opens a folder; made, for its owner alone, where it is missing."""
        self._folder = pathlib.Path(folder)
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def _of(self, client: int) -> dict[int, pathlib.Path]:
        found = self._folder.glob(f"client-{client}-round-*.safetensors")
        return {int(path.stem.rpartition("-")[2]): path for path in found}

    def read(self, client: int, round: int) -> Mapping[str, np.ndarray] | None:
        """Reads a client's state as of a round, or None."""
        path = self._of(client).get(round)
        return None if path is None else load_file(path)

    def write(self, client: int, round: int, arrays: Mapping[str, np.ndarray], last: int) -> None:
        """Writes a client's state after a round; deletes all others but that of round `last`."""
        path = self._folder / f"client-{client}-round-{round}.safetensors"
        content = save({name: np.asarray(x, order="C") for name, x in arrays.items()})
        files.write_private(path, content)
        for old, place in self._of(client).items():
            if old not in (round, last):
                place.unlink()


class StatesInContext:
    """States in Flower's context of a node, which outlast a message but not the node's process."""

    def __init__(self, state: RecordDict):
        """Wraps `Context.state`."""
        self._state = state

    def _rounds(self, client: int) -> list[int]:
        prefix = f"client-{client}-round-"
        return sorted(int(n.removeprefix(prefix)) for n in self._state if n.startswith(prefix))

    def read(self, client: int, round: int) -> Mapping[str, np.ndarray] | None:
        """Reads a client's state as of a round, or None."""
        if round not in self._rounds(client):
            return None
        record = self._state.array_records[f"client-{client}-round-{round}"]
        return {name: array.numpy() for name, array in record.items()}

    def write(self, client: int, round: int, arrays: Mapping[str, np.ndarray], last: int) -> None:
        """Writes a client's state after a round; deletes all others but that of round `last`."""
        named = {name: Array(np.asarray(x, order="C")) for name, x in arrays.items()}
        self._state[f"client-{client}-round-{round}"] = ArrayRecord(named)
        for old in self._rounds(client):
            if old not in (round, last):
                del self._state[f"client-{client}-round-{old}"]
