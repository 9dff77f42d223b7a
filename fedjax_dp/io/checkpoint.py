"""Checkpoints of a run, written so that an interrupted write leaves the last one whole."""

import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from numpy.typing import ArrayLike

from fedjax_dp.algorithms.base import Hyper
from fedjax_dp.core import checks, trees
from fedjax_dp.core.trees import PyTree
from fedjax_dp.engine.cohort import typed
from fedjax_dp.engine.round import SimulationState

# Holds the root of a secret run, beside the checkpoints.
ROOT_FILE = "root.key"


class Checkpoints:
    """Saves and restores the states of a simulation, with the numbers of its run, in a folder.

    Attributes:
      directory: where they are kept.
    """

    def __init__(self, directory: str | pathlib.Path, *, keep: int = 2, is_secret: bool = False):
        """Opens a folder of checkpoints.

        Args:
          directory: the folder; made where it is missing.
          keep: how many of the newest checkpoints stay, at least 1.
          is_secret: whether nobody but the owner may enter the folder, where the system has such
            permissions.
        """
        checks.whole("keep", keep)
        self.directory = pathlib.Path(directory).absolute()
        if is_secret:
            # Before anything lies in it; what is made in it later cannot be reached either.
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.directory.chmod(0o700)
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep,
            create=True,
            enable_async_checkpointing=False,
            # What an interrupted write left behind is in nobody's way, but takes room.
            cleanup_tmp_directories=True,
        )
        self._manager = ocp.CheckpointManager(self.directory, options=options)

    def save(self, state: SimulationState, hyper: Hyper, extra: dict[str, Any]) -> None:
        """Writes a checkpoint of the rounds done so far; a round that is there is not rewritten.

        Args:
          state: the simulation's state, as `Simulation.portable` gives it: then another number of
            devices can go on with it.
          hyper: the numbers of the run.
          extra: what else resuming needs, as JSON values.
        """
        step = int(state.round)
        if step in self._manager.all_steps():
            return
        self._manager.save(
            step,
            args=ocp.args.Composite(
                state=ocp.args.StandardSave(_named(state)),
                hyper=ocp.args.StandardSave(_named(typed(hyper))),
                extra=ocp.args.JsonSave(extra),
            ),
        )
        self._manager.wait_until_finished()

    def keep_root(self, root: ArrayLike) -> None:
        """Writes the secret root of a run, for its owner alone to read.

        Args:
          root: what `jax.random.key_data` gives of it.

        Raises:
          ValueError: if there is one already: another must never take its place.
        """
        path = self.directory / ROOT_FILE
        checks.require(
            not path.exists(), ROOT_FILE, "not be there when a run starts", str(self.directory)
        )
        # Made with its permissions, and on the disk before anything is drawn from it.
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            json.dump(np.asarray(root).tolist(), file)
            file.flush()
            os.fsync(file.fileno())

    def root(self) -> np.ndarray | None:
        """Reads the secret root of a run.

        Returns:
          What `keep_root` was given, or None where there is none.
        """
        path = self.directory / ROOT_FILE
        if not path.exists():
            return None
        return np.array(json.loads(path.read_text(encoding="utf-8")), np.uint32)

    def latest_round(self) -> int | None:
        """Finds the newest checkpoint.

        Returns:
          The number of rounds done in it, or None where there is none.
        """
        return self._manager.latest_step()

    def restore(
        self, like: SimulationState, hyper: Hyper
    ) -> tuple[SimulationState, Hyper, dict[str, Any]]:
        """Reads the newest checkpoint.

        Args:
          like: a state of the same simulation, as `Simulation.portable` gives it, for its structure
            and shapes.
          hyper: numbers of the same simulation, for the same.

        Returns:
          The saved state and the saved numbers, on the host, and what was saved beside them.

        Raises:
          ValueError: if there is no checkpoint, or it belongs to another simulation.
        """
        step = self.latest_round()
        checks.require(step is not None, "checkpoint", "exist", str(self.directory))
        # Asked for without a target: given one, Orbax would cast to its types.
        as_saved = ocp.args.StandardRestore()
        saved = self._manager.restore(
            step,
            args=ocp.args.Composite(state=as_saved, hyper=as_saved, extra=ocp.args.JsonRestore()),
        )
        state = _like(like, saved["state"], "state")
        numbers = _like(typed(hyper), saved["hyper"], "hyper")
        return state, numbers, json.loads(json.dumps(saved["extra"]))

    def close(self) -> None:
        """Waits for writes and lets the folder go."""
        self._manager.close()


def _named(tree: PyTree) -> dict[str, np.ndarray]:
    """Numbers the leaves of a tree, on the host."""
    return {f"{i:05d}": np.asarray(x) for i, x in enumerate(jax.tree.leaves(tree))}


def _like(like: PyTree, saved: Mapping[str, Any] | None, what: str) -> PyTree:
    """Puts saved arrays into the structure of a tree whose shapes and types they have."""
    arrays = [np.asarray(array) for _, array in sorted((saved or {}).items())]
    leaves, structure = jax.tree.flatten(like)
    rule = f"hold {len(leaves)} arrays as this simulation's {what} does"
    checks.require(len(arrays) == len(leaves), "checkpoint", rule, len(arrays))
    for path, array, leaf in zip(trees.paths(like), arrays, leaves, strict=True):
        checks.require(
            array.shape == leaf.shape and array.dtype == leaf.dtype,
            f"checkpoint {what} {path}",
            f"be {leaf.dtype}{list(leaf.shape)} as in this simulation",
            f"{array.dtype}{list(array.shape)}",
        )
    return jax.tree.unflatten(structure, arrays)
