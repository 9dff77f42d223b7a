"""Checkpoints of a run; an interrupted write leaves the previous one intact."""

import glob
import json
import math
import os
import pathlib
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from numpy.typing import ArrayLike

from fedjax_dp.algorithms.base import Hyper
from fedjax_dp.core import checks, trees
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.devices import (
    any_of_processes,
    is_distributed,
    of_all_processes,
    of_first_process,
)
from fedjax_dp.core.files import digest_of, kind_of, parse_json
from fedjax_dp.core.keys import require_settings, settings
from fedjax_dp.core.ranges import Count
from fedjax_dp.core.trees import PyTree
from fedjax_dp.data.record_file import bytes_of
from fedjax_dp.engine.client_store import ClientStore
from fedjax_dp.engine.cohort import typed
from fedjax_dp.engine.execution.placement import Spread
from fedjax_dp.engine.round import SimulationState
from fedjax_dp.io.digests import DiskFull, damage, require_space, write_digests

# The root of a secret run, next to the checkpoints.
ROOT_FILE = "root.key"
# The digests of each checkpoint, by round.
_DIGESTS = "digests"
# The number of newest checkpoints to keep.
KEPT = 2
# Without a target: Orbax would cast to its types.
_AS_SAVED = ocp.args.StandardRestore()
# In Orbax's metadata: the clients of tables that several processes have saved with padding.
_CLIENTS = "clients"
# The same: the settings of JAX that random numbers follow from.
_RANDOM = "random"
# What the first process writes to find out whether the others can read it, and for how long they
# try: a network file system may show a file late.
_MARK, _PATIENCE = ".shared", 10.0
# Bytes of a checkpoint that are read back at once, unless one array has more.
_READ_BACK = 1 << 28
# What an interrupted write of Orbax leaves.
_UNFINISHED = "*.orbax-checkpoint-tmp*"
# Longer than the part of a path that Orbax adds.
_LONGEST = "x" * 200


class _Folder(type(epath.Path())):  # type: ignore[misc]
    """A folder whose own path is no pattern for Orbax, whatever characters it has."""

    def glob(self, pattern: str) -> Iterator["_Folder"]:
        """Lists the paths in the folder that match a pattern."""
        return iter([self / name for name in glob.glob(pattern, root_dir=os.fspath(self))])


def require_usable(folder: str | os.PathLike[str], name: str) -> None:
    """Requires a path that files of checkpoints can have; `name` is for errors."""
    path = os.path.abspath(folder)
    # Orbax and TensorStore read them as separators and addresses, or not at all.
    is_text = path == path.encode(errors="ignore").decode()
    is_plain = is_text and ":/" not in f"{path}/".removeprefix(os.path.splitdrive(path)[0])
    is_plain &= os.sep == "\\" or "\\" not in path
    rule = "have no backslash, no part that ends in a colon, and be valid UTF-8, for checkpoints"
    checks.require(is_plain, name, rule, path)
    kind_of(os.path.join(path, _LONGEST), name)


def record_of(rounds: int) -> str:
    """Names the file with the digests of a checkpoint, below the folder of checkpoints."""
    return f"{_DIGESTS}/{rounds}.json"


class Checkpoints:
    """Saves and restores the states and hyperparameters of a run in a folder.

    With several processes all of them open the folder, which they have to share, and call the same
    methods in the same order. Each writes and reads the states of its own clients; the first writes
    everything else. A checkpoint counts once all have written.

    Attributes:
      directory: the folder.
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
        """Opens a folder of checkpoints, of which the `keep` newest stay.

        Only the owner may enter a secret one, if the system has such permissions; nothing is
        changed in a read-only one, which a run may be using.
        """
        require_usable(directory, "directory")
        self.directory = pathlib.Path(directory).absolute()
        self._is_read_only = is_read_only
        self._is_shared = is_distributed() and not is_read_only
        self._is_first = not self._is_shared or jax.process_index() == 0
        if self._is_first and not is_read_only:
            self.directory.mkdir(mode=0o700 if is_secret else 0o777, parents=True, exist_ok=True)
            if is_secret:
                # While the folder is empty; files made in it later cannot be reached either.
                self.directory.chmod(0o700)
            for path in filter(pathlib.Path.is_dir, self.directory.glob(_UNFINISHED)):
                shutil.rmtree(path)
        if self._is_shared:
            _require_shared(self.directory)
        self._keep = keep
        processes = _alone() if is_read_only else ocp.options.MultiprocessingOptions()
        options = ocp.CompositeOptions(multiprocessing_options=processes)
        self._orbax = ocp.Checkpointer(
            ocp.CompositeCheckpointHandler(composite_options=options),
            multiprocessing_options=processes,
        )

    def save(self, state: SimulationState, hyper: Hyper, extra: dict[str, Any]) -> None:
        """Writes a checkpoint of the completed rounds, unless there is one already.

        Args:
          state: the state, as `Simulation.for_checkpoint` or `Simulation.portable` returns it, so
            that a run can resume on another number of devices and processes.
          hyper: the hyperparameters of the run.
          extra: JSON values that are saved too.

        Raises:
          DiskFull: if the disk has no space for it; nothing is written then.
          OSError: if it cannot be read back as it was written; it does not count then.
        """
        step = int(state.round)
        if any_of_processes(step in self._steps()):
            return
        arrays, numbers = _named(state), _named(_saved_of(hyper))
        if isinstance(state.clients, ClientStore):
            # Before the checkpoint, which refers to them.
            state.clients.file.sync()
        self._require_space(trees.num_bytes((arrays, numbers)) + len(json.dumps(extra)))
        self._orbax.save(
            _Folder(self._folder(step)),
            args=ocp.args.Composite(
                state=ocp.args.StandardSave(arrays, custom_metadata=_facts(state)),
                hyper=ocp.args.StandardSave(numbers),
                extra=ocp.args.JsonSave(extra),
            ),
        )
        self._require_read_back(step, arrays, numbers, extra)
        if not self._is_first:
            return
        # Last: a checkpoint without digests is incomplete.
        write_digests(self._folder(step), self._record(step))
        for old in self._steps()[: -self._keep]:
            shutil.rmtree(self._folder(old))
        for record in self._record(step).parent.iterdir():
            if not (self.directory / record.stem).exists():
                record.unlink()
        if isinstance(state.clients, ClientStore):
            file, kept = state.clients.file, self._steps()
            slots = {**file.pinned, step: state.clients.slots}
            file.pin({rounds: each for rounds, each in slots.items() if rounds in kept})

    def _require_space(self, num_bytes: int) -> None:
        """Requires free disk space, in all processes if it is missing in one."""
        full = None
        try:
            require_space(self.directory, num_bytes)
        except DiskFull as error:
            full = error
        if any_of_processes(full is not None):
            raise full or DiskFull(f"{self.directory} is full for another process")

    def _require_read_back(
        self, step: int, arrays: dict[str, Any], numbers: dict[str, Any], extra: dict[str, Any]
    ) -> None:
        """Requires that a new checkpoint can be read, a part of its arrays at a time."""
        names, parts = list(arrays), list[list[str]]()
        while names:
            ends = np.cumsum([arrays[name].nbytes for name in names])
            count = max(1, int(np.searchsorted(ends, _READ_BACK, side="right")))
            parts, names = [*parts, names[:count]], names[count:]
        is_same = True
        try:
            for part in parts:
                target = {n: x if n in part else ocp.PLACEHOLDER for n, x in arrays.items()}
                saved = self._saved(step, state=ocp.args.StandardRestore(target))["state"]
                is_same &= all(_is_same(arrays[name], saved[name]) for name in part)
            beside = self._saved(step, hyper=_AS_SAVED, extra=ocp.args.JsonRestore())
            is_same &= all(_is_same(x, beside["hyper"][n]) for n, x in numbers.items())
            # Those of the first process are saved; seconds differ.
            is_same &= not self._is_first or beside["extra"] == json.loads(json.dumps(extra))
            reason = None if is_same else "its content differs"
        except (OSError, ValueError, LookupError) as error:
            reason = str(error).partition("\n")[0]
        if any_of_processes(reason is not None):
            reason = reason or "another process could not read it"
            raise OSError(
                f"{self._folder(step)} must be read as it was written, but {reason}; "
                "the checkpoint before it is kept"
            )

    def _steps(self) -> list[int]:
        """Lists the checkpoints of a folder in order, intact or not."""
        folders = (path.name for path in self.directory.glob("*") if path.is_dir())
        return sorted(int(name) for name in folders if name.isdecimal())

    def _folder(self, step: int | None) -> pathlib.Path:
        return self.directory / str(step)

    def _record(self, step: int) -> pathlib.Path:
        return self.directory / record_of(step)

    def write_root(self, root: ArrayLike) -> None:
        """Writes the secret root of a run, readable only by the owner.

        Args:
          root: the root, as `jax.random.key_data` returns it.

        Raises:
          ValueError: if there is one already, which must never be replaced.
        """
        path = self.directory / ROOT_FILE
        checks.require(
            not path.exists(), ROOT_FILE, "not exist when a run starts", str(self.directory)
        )
        numbers = np.asarray(root).tolist()
        content = {"root": numbers, "digest": digest_of([json.dumps(numbers).encode()]).hex()}
        # Created with its permissions, and saved before anything is drawn from it.
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(json.dumps(content).encode())
            file.flush()
            os.fsync(file.fileno())

    def root(self) -> np.ndarray | None:
        """Reads the secret root of a run.

        Returns:
          The root, or None if there is none.

        Raises:
          ValueError: if the file was changed.
        """
        path = self.directory / ROOT_FILE
        if not path.exists():
            return None
        try:
            content = parse_json(path.read_bytes(), path)
            numbers = content["root"]
            is_whole = content["digest"] == digest_of([json.dumps(numbers).encode()]).hex()
        except (ValueError, TypeError, LookupError):
            is_whole = False
        if not is_whole:
            raise ValueError(
                f"{path} must be unchanged, but it was damaged, and another root would draw other "
                "noise for released rounds; nearest valid choice: restore it from a copy"
            )
        return np.array(numbers, np.uint32)

    def newest_intact(
        self, like: SimulationState | None = None
    ) -> tuple[int | None, dict[int, str]]:
        """Finds the newest intact checkpoint.

        Args:
          like: as for `restore`; client state on disk is checked too, and what intact checkpoints
            refer to is not overwritten from now on.

        Returns:
          Its number of completed rounds, or None if there is none; and for each newer checkpoint,
          by its rounds, what is damaged, which with several processes the first alone reports.
        """
        damaged: dict[int, str] = {}
        steps = self._newest_first() if self._is_first else []
        newest = next((s for s in steps if self._is_intact(s, like, damaged)), None)
        if self._is_shared:
            step = int(of_first_process(np.asarray(-1 if newest is None else newest)))
            newest = None if step < 0 else step
        if newest is not None:
            self._pin(like, newest)
        return newest, damaged

    def _is_intact(self, step: int, like: SimulationState | None, damaged: dict[int, str]) -> bool:
        """Whether a checkpoint is intact; adds what is damaged."""
        wrong = self._damage(step)
        if wrong is None and like is not None and isinstance(like.clients, ClientStore):
            wrong = self._state(step, like).clients.damage()
        if wrong is not None:
            damaged[step] = wrong
        return wrong is None

    def _newest_first(self) -> list[int]:
        """Lists the checkpoints, those that were lost but for their digests too."""
        records = (self.directory / _DIGESTS).glob("*.json")
        recorded = (int(path.stem) for path in records if path.stem.isdecimal())
        return sorted({*self._steps(), *recorded}, reverse=True)

    def _damage(self, step: int) -> str | None:
        return damage(self._folder(step), self._record(step))

    def _pin(self, like: SimulationState | None, newest: int) -> None:
        """Protects client state on disk that intact checkpoints refer to."""
        if like is None or not isinstance(like.clients, ClientStore):
            return
        steps = [s for s in self._newest_first() if s <= newest and self._damage(s) is None]
        like.clients.file.pin({s: self._state(s, like).clients.slots for s in steps})

    def set_aside(self, rounds: Iterable[int]) -> None:
        """Renames damaged checkpoints, so that their rounds can be saved again.

        Args:
          rounds: the number of rounds of each.
        """
        for step in rounds:
            folder = self.directory / f"damaged-{step}"
            if folder.exists():
                shutil.rmtree(folder)
            if self._folder(step).exists():
                self._folder(step).rename(folder)
            self._record(step).unlink(missing_ok=True)
        # With several processes the first has renamed before the others read.
        any_of_processes(False)

    def restore(
        self, like: SimulationState, hyper: Hyper, step: int | None = None
    ) -> tuple[SimulationState, Hyper, dict[str, Any]]:
        """Reads a checkpoint.

        Client state on disk that intact checkpoints refer to is not overwritten from now on.

        Args:
          like: a state of the same simulation, as `Simulation.for_checkpoint` or
            `Simulation.portable` returns it, for structure, shapes, the processes of client states,
            and the folder of client state on disk.
          hyper: hyperparameters of the same simulation, for structure and shapes; its factors by
            round, which a configuration determines, are returned as they are.
          step: its number of completed rounds; None for the newest intact checkpoint.

        Returns:
          The saved state, hyperparameters and extra values, on the host; client states as `like`
          has them.

        Raises:
          ValueError: if there is no such checkpoint, it belongs to another simulation, or JAX would
            draw other random numbers than those of its rounds.
        """
        if step is None:
            step, _ = self.newest_intact(like)
            checks.require(step is not None, "checkpoint", "exist", str(self.directory))
        elif isinstance(like.clients, ClientStore) and step not in like.clients.file.pinned:
            self._pin(like, max(self._newest_first(), default=step))
        saved = self._saved(step, hyper=_AS_SAVED, extra=ocp.args.JsonRestore())
        numbers = _like(_saved_of(hyper), saved["hyper"], "hyper")
        numbers = numbers._replace(factors=hyper.factors)
        return self._state(step, like), numbers, json.loads(json.dumps(saved["extra"]))

    def extra(self, step: int) -> dict[str, Any]:
        """Reads the extra values of a checkpoint alone.

        Args:
          step: its number of completed rounds.

        Returns:
          The values.
        """
        extra = self._saved(step, extra=ocp.args.JsonRestore())["extra"]
        return dict(json.loads(json.dumps(extra)))

    def _state(self, step: int | None, like: SimulationState) -> SimulationState:
        folder = _Folder(self._folder(step)) / "state"
        metadata = ocp.StandardCheckpointHandler().metadata(folder)
        leaves = {f"{i:05d}": x for i, x in enumerate(jax.tree.leaves(like))}
        target = {name: _target(each, leaves.get(name)) for name, each in metadata.tree.items()}
        # Not strict: a table has another number of padding rows for other devices.
        saved = self._saved(step, state=ocp.args.StandardRestore(target, strict=False))["state"]
        facts = metadata.custom_metadata or {}
        if not self._is_read_only:
            require_settings(facts.get(_RANDOM, {}))
        counts = facts.get(_CLIENTS, {})
        for name, table in saved.items():
            if isinstance(table, jax.Array):
                saved[name] = Spread(table, counts.get(name, metadata.tree[name].shape[0]))
            elif name in counts:
                saved[name] = table[: counts[name]]
        return _like(like, saved, "state")

    def _saved(self, step: int | None, **parts: Any) -> Any:
        return self._orbax.restore(_Folder(self._folder(step)), args=ocp.args.Composite(**parts))

    def close(self) -> None:
        """Waits for writes and closes the folder."""
        self._orbax.close()


def _alone() -> ocp.options.MultiprocessingOptions:
    """Lets a process save and restore without the others of its program."""
    if not is_distributed():
        return ocp.options.MultiprocessingOptions()
    process = jax.process_index()
    return ocp.options.MultiprocessingOptions(
        primary_host=process,
        active_processes={process},
        barrier_sync_key_prefix=f"process {process}",
    )


def _require_shared(folder: pathlib.Path) -> None:
    """Requires that all processes find a file that the first writes into a folder."""
    mark, is_first = folder / _MARK, jax.process_index() == 0
    token = np.frombuffer(os.urandom(16), np.uint8)
    if is_first:
        mark.write_bytes(token.tobytes())
    # Received once it is written.
    expected, limit = of_first_process(token).tobytes(), time.monotonic() + _PATIENCE
    while not (is_visible := mark.is_file() and mark.read_bytes() == expected):
        if time.monotonic() > limit:
            break
        time.sleep(0.1)
    missing = np.flatnonzero(~of_all_processes(np.asarray(is_visible)))
    if is_first:
        mark.unlink()
    rule = (
        "be in a file system that all processes share, at the same path, but it is another folder "
        f"for processes {missing.tolist()}"
    )
    checks.require(not len(missing), "the folder of checkpoints", rule, str(folder))


def _saved_of(hyper: Hyper) -> Hyper:
    """Selects what is saved of hyperparameters: a longer run has more factors by round."""
    return typed(hyper._replace(factors={}))


def _is_same(saved: Any, restored: Any) -> bool:
    """Whether an array was read back bit for bit, or the part of it that this process holds."""
    if isinstance(saved, jax.Array):
        pairs = zip(saved.addressable_shards, restored.addressable_shards, strict=True)
        return all(_is_same(np.asarray(one.data), np.asarray(two.data)) for one, two in pairs)
    restored = np.asarray(restored)
    is_alike = saved.dtype == restored.dtype and saved.shape == restored.shape
    return is_alike and np.array_equal(bytes_of(saved), bytes_of(restored))


def _named(tree: PyTree) -> dict[str, Any]:
    """Numbers the leaves of a tree that are not empty, those of one process on the host."""
    leaves = enumerate(jax.tree.leaves(tree))
    return {
        f"{i:05d}": x.array if isinstance(x, Spread) else np.asarray(x)
        for i, x in leaves
        if math.prod(np.shape(x))
    }


def _facts(state: SimulationState) -> dict[str, Any]:
    """Returns the settings of random numbers, and the clients of tables of several processes."""
    leaves = enumerate(jax.tree.leaves(state))
    counts = {f"{i:05d}": x.num_clients for i, x in leaves if isinstance(x, Spread)}
    return {_RANDOM: settings(), **({_CLIENTS: counts} if counts else {})}


def _target(saved: Any, leaf: Any) -> Any:
    """Returns what Orbax restores an array to: the saved type, on the processes of a leaf."""
    if isinstance(leaf, Spread) and saved.shape:
        shape = len(leaf.array), *saved.shape[1:]
        return jax.ShapeDtypeStruct(shape, saved.dtype, sharding=leaf.array.sharding)
    return np.broadcast_to(np.zeros((), saved.dtype), saved.shape)


def _like(like: PyTree, saved: Mapping[str, Any] | None, what: str) -> PyTree:
    """Puts saved arrays into a tree, whose shapes and types they must have."""
    leaves, structure = jax.tree.flatten(like)
    names = list(_named(like))
    rule = f"hold {len(names)} arrays as this simulation's {what} does"
    checks.require(sorted(saved or {}) == names, "checkpoint", rule, len(saved or {}))
    arrays: list[Any] = [np.zeros(np.shape(leaf), leaf.dtype) for leaf in leaves]
    for name, array in (saved or {}).items():
        arrays[int(name)] = array if isinstance(array, Spread) else np.asarray(array)
    for path, array, leaf in zip(trees.paths(like), arrays, leaves, strict=True):
        checks.require(
            array.shape == leaf.shape and array.dtype == leaf.dtype,
            f"checkpoint {what} {path}",
            f"be {leaf.dtype}{list(leaf.shape)} as in this simulation",
            f"{array.dtype}{list(array.shape)}",
        )
    return jax.tree.unflatten(structure, arrays)
