"""Checkpoints of a run, written so that an interrupted write leaves the last one whole."""

import json
import os
import pathlib
import shutil
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from numpy.typing import ArrayLike

from fedjax_dp.algorithms.base import Hyper
from fedjax_dp.core import checks, trees
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.ranges import Count
from fedjax_dp.core.trees import PyTree
from fedjax_dp.engine.cohort import typed
from fedjax_dp.engine.execution.client_store import Rows
from fedjax_dp.engine.round import SimulationState
from fedjax_dp.io.digests import damage, digest_of, write_digests
from fedjax_dp.io.disk import require_space

# Holds the root of a secret run, beside the checkpoints.
ROOT_FILE = "root.key"
# Holds the digests of each checkpoint, by its round.
_DIGESTS = "digests"
# How many of the newest checkpoints stay.
KEPT = 2
# Asked for without a target: given one, Orbax would cast to its types.
_AS_SAVED = ocp.args.StandardRestore()


class Checkpoints:
    """Saves and restores the states of a simulation, with the numbers of its run, in a folder.

    Attributes:
      directory: where they are kept.
    """

    @checked
    def __init__(
        self,
        directory: str | pathlib.Path,
        *,
        keep: Count = KEPT,
        is_secret: bool = False,
        is_read_only: bool = False,
    ):
        """Opens a folder of checkpoints.

        Args:
          directory: the folder; made where it is missing.
          keep: how many of the newest checkpoints stay, at least 1.
          is_secret: whether nobody but the owner may enter the folder, where the system has such
            permissions.
          is_read_only: whether nothing in the folder is touched, as beside a run that goes on.
        """
        self.directory = pathlib.Path(directory).absolute()
        if is_secret and not is_read_only:
            # Before anything lies in it; what is made in it later cannot be reached either.
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.directory.chmod(0o700)
        options = ocp.CheckpointManagerOptions(
            max_to_keep=None if is_read_only else keep,
            create=not is_read_only,
            enable_async_checkpointing=False,
            # What an interrupted write left behind is in nobody's way, but takes room.
            cleanup_tmp_directories=not is_read_only,
        )
        self._manager = ocp.CheckpointManager(self.directory, options=options)

    def save(self, state: SimulationState, hyper: Hyper, extra: dict[str, Any]) -> None:
        """Writes a checkpoint of the rounds done so far; a round that is there is not rewritten.

        Args:
          state: the simulation's state, as `Simulation.portable` gives it: then another number of
            devices can go on with it.
          hyper: the numbers of the run.
          extra: what else resuming needs, as JSON values.

        Raises:
          DiskFull: where there is no room for it; nothing is written then.
        """
        step = int(state.round)
        if step in self._manager.all_steps():
            return
        arrays, numbers = _named(state), _named(typed(hyper))
        if isinstance(state.clients, Rows):
            # Before the checkpoint that refers to them.
            state.clients.file.sync()
        require_space(self.directory, trees.num_bytes((arrays, numbers)) + len(json.dumps(extra)))
        self._manager.save(
            step,
            args=ocp.args.Composite(
                state=ocp.args.StandardSave(arrays),
                hyper=ocp.args.StandardSave(numbers),
                extra=ocp.args.JsonSave(extra),
            ),
        )
        self._manager.wait_until_finished()
        # Last: a checkpoint without its digests was cut off.
        write_digests(self.directory / str(step), self._record(step))
        for old in self._record(step).parent.iterdir():
            if not (self.directory / old.stem).exists():
                old.unlink()
        if isinstance(state.clients, Rows):
            file, kept = state.clients.file, set(self._manager.all_steps())
            slots = {**file.pinned, step: state.clients.slots}
            file.pin({rounds: each for rounds, each in slots.items() if rounds in kept})

    def _record(self, step: int) -> pathlib.Path:
        return self.directory / _DIGESTS / f"{step}.json"

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
        words = np.asarray(root).tolist()
        content = {"root": words, "digest": digest_of(json.dumps(words).encode())}
        # Made with its permissions, and on the disk before anything is drawn from it.
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            json.dump(content, file)
            file.flush()
            os.fsync(file.fileno())

    def root(self) -> np.ndarray | None:
        """Reads the secret root of a run.

        Returns:
          What `keep_root` was given, or None where there is none.

        Raises:
          ValueError: if the file has changed since.
        """
        path = self.directory / ROOT_FILE
        if not path.exists():
            return None
        try:
            content = json.loads(path.read_bytes())
            words = content["root"]
            is_whole = content["digest"] == digest_of(json.dumps(words).encode())
        except (ValueError, TypeError, LookupError):
            is_whole = False
        if not is_whole:
            raise ValueError(
                f"{path} must be as it was written: it has changed, and another root would draw "
                "other noise for rounds that were released; nearest valid choice: a copy of it"
            )
        return np.array(words, np.uint32)

    def newest_intact(
        self, like: SimulationState | None = None
    ) -> tuple[int | None, dict[int, str]]:
        """Finds the newest checkpoint that is as it was written.

        Args:
          like: as for `restore`; where rows of clients are on the disk, they are looked at too, and
            those of all intact checkpoints are not written over from now on.

        Returns:
          The number of rounds done in it, None where there is none; and of each newer one, by its
          rounds, what is wrong with it.
        """
        damaged: dict[int, str] = {}
        for step in self._newest_first():
            wrong = self._damage(step)
            if wrong is None and like is not None and isinstance(like.clients, Rows):
                wrong = self._state(step, like).clients.damage()
            if wrong is None:
                self._pin(like, step)
                return step, damaged
            damaged[step] = wrong
        return None, damaged

    def _newest_first(self) -> list[int]:
        return sorted(self._manager.all_steps(), reverse=True)

    def _damage(self, step: int) -> str | None:
        return damage(self.directory / str(step), self._record(step))

    def _pin(self, like: SimulationState | None, newest: int) -> None:
        """Keeps the rows on the disk that any checkpoint up to the newest intact one refers to."""
        if like is None or not isinstance(like.clients, Rows):
            return
        steps = [s for s in self._newest_first() if s <= newest and self._damage(s) is None]
        like.clients.file.pin({s: self._state(s, like).clients.slots for s in steps})

    def set_aside(self, rounds: Iterable[int]) -> None:
        """Renames damaged checkpoints, so that their rounds can be saved again.

        Args:
          rounds: the rounds done in them.
        """
        for step in rounds:
            folder = self.directory / f"damaged-{step}"
            if folder.exists():
                shutil.rmtree(folder)
            (self.directory / str(step)).rename(folder)
            self._record(step).unlink(missing_ok=True)
        self._manager.reload()

    def restore(
        self, like: SimulationState, hyper: Hyper, step: int | None = None
    ) -> tuple[SimulationState, Hyper, dict[str, Any]]:
        """Reads a checkpoint.

        Args:
          like: a state of the same simulation, as `Simulation.portable` gives it, for its structure
            and shapes; where rows of clients are on the disk, with the folder of these.
          hyper: numbers of the same simulation, for the same.
          step: the rounds done in it; the newest that is intact where it is None. Where rows of
            clients are on the disk, those of all intact checkpoints are not written over from now
            on.

        Returns:
          The saved state and the saved numbers, on the host, and what was saved beside them.

        Raises:
          ValueError: if there is no such checkpoint, or it belongs to another simulation.
        """
        if step is None:
            step, _ = self.newest_intact(like)
            checks.require(step is not None, "checkpoint", "exist", str(self.directory))
        elif isinstance(like.clients, Rows) and step not in like.clients.file.pinned:
            self._pin(like, max(self._newest_first(), default=step))
        saved = self._saved(step, hyper=_AS_SAVED, extra=ocp.args.JsonRestore())
        numbers = _like(typed(hyper), saved["hyper"], "hyper")
        return self._state(step, like), numbers, json.loads(json.dumps(saved["extra"]))

    def _state(self, step: int | None, like: SimulationState) -> SimulationState:
        return _like(like, self._saved(step, state=_AS_SAVED)["state"], "state")

    def _saved(self, step: int | None, **parts: Any) -> Any:
        return self._manager.restore(step, args=ocp.args.Composite(**parts))

    def close(self) -> None:
        """Waits for writes and lets the folder go."""
        self._manager.close()


def _named(tree: PyTree) -> dict[str, np.ndarray]:
    """Numbers the leaves of a tree, on the host, those apart that hold nothing."""
    return {f"{i:05d}": np.asarray(x) for i, x in enumerate(jax.tree.leaves(tree)) if np.size(x)}


def _like(like: PyTree, saved: Mapping[str, Any] | None, what: str) -> PyTree:
    """Puts saved arrays into the structure of a tree whose shapes and types they have."""
    leaves, structure = jax.tree.flatten(like)
    names = list(_named(like))
    rule = f"hold {len(names)} arrays as this simulation's {what} does"
    checks.require(sorted(saved or {}) == names, "checkpoint", rule, len(saved or {}))
    arrays = [np.zeros(np.shape(leaf), leaf.dtype) for leaf in leaves]
    for name, array in (saved or {}).items():
        arrays[int(name)] = np.asarray(array)
    for path, array, leaf in zip(trees.paths(like), arrays, leaves, strict=True):
        checks.require(
            array.shape == leaf.shape and array.dtype == leaf.dtype,
            f"checkpoint {what} {path}",
            f"be {leaf.dtype}{list(leaf.shape)} as in this simulation",
            f"{array.dtype}{list(array.shape)}",
        )
    return jax.tree.unflatten(structure, arrays)
