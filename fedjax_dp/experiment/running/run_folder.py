"""Run folders: names, lock, newest intact checkpoint, and what a resumed run must share."""

import contextlib
import os
import pathlib
import shutil
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from filelock import BaseFileLock, FileLock, Timeout

from fedjax_dp.algorithms.base import Hyper
from fedjax_dp.algorithms.registry import ALGORITHMS
from fedjax_dp.core import checks, files
from fedjax_dp.core.keys import require_settings
from fedjax_dp.data.disk_arrays import is_on_disk
from fedjax_dp.data.federated import FederatedData, flat
from fedjax_dp.engine.round import SimulationState
from fedjax_dp.experiment.components.experiment import Experiment, Population
from fedjax_dp.experiment.reading import config_files
from fedjax_dp.experiment.reading.config_diff import differences
from fedjax_dp.experiment.running.environment import RANDOM, environment
from fedjax_dp.experiment.running.keeping import Kept, parted, with_kept
from fedjax_dp.experiment.schema.config import BoundedLaplaceLevel, Config, CorrelatedGaussianLevel
from fedjax_dp.experiment.schema.constraints import ConfigError
from fedjax_dp.io.checkpoint import Checkpoints, require_usable
from fedjax_dp.io.digests import damage_of, read_sealed_object, sealed_names
from fedjax_dp.io.logbook import read_metrics, write_json
from fedjax_dp.models import kinds

CONFIG_FILE, CHECKPOINT_FOLDER = "config.toml", "checkpoint"
# Client state that is stored on disk.
CLIENTS_FOLDER = "clients"
ENVIRONMENT_FILE, SUMMARY_FILE = "environment.json", "summary.json"
# Sizes, types and digests of the data, which a resumed run compares.
DATA_FILE = "data.json"
# What a statement says of the sweep that the run is part of.
SWEEP_FILE = "sweep.json"
# What a run writes when it starts, and does not write again.
AT_START = (CONFIG_FILE, DATA_FILE, SWEEP_FILE, ENVIRONMENT_FILE)
# What the ledgers of the nodes of a deployment claim, and the scores that scripts report.
NODES_FILE, SCORES_FILE = "nodes.json", "scores.jsonl"
# The publishable part of a run.
RELEASE_FOLDER = "release"
REPORT_FILE = "report.html"
LOCK_FILE = ".lock"
# In the checkpoint folder of a deployment: what nodes reported of their data, and the rounds that
# were sent; who was drawn is as secret as checkpoints are.
REGISTERED_FILE, JOURNAL_FILE = "registered.json", "sent.jsonl"
# A reader that asks whether a folder is in use holds its lock for a moment.
_PATIENCE = 0.2
_RUNS = pathlib.Path("runs")


def locked(folder: pathlib.Path) -> BaseFileLock:
    """Locks a run folder for this process and makes it if it is missing."""
    # The system releases the lock when the process ends, however it ends.
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / LOCK_FILE, timeout=_PATIENCE)
    try:
        lock.acquire()
    except Timeout:
        raise ConfigError(
            f"the run folder {str(folder)!r} is already in use by another process"
        ) from None
    return lock


@contextlib.contextmanager
def locked_if_started(folder: pathlib.Path) -> Iterator[BaseFileLock]:
    """Locks a run folder, and unlocks it if no run is started or resumed in it."""
    lock = locked(folder)
    try:
        yield lock
    except BaseException:
        # The exception, which may be kept, holds the lock alive.
        lock.release()
        raise


@contextlib.contextmanager
def emptied_unless_started(folder: pathlib.Path) -> Iterator[None]:
    """Requires a folder that is new or empty, and empties it again if no run starts in it."""
    require_free(folder)
    try:
        yield
    except BaseException:
        for path in folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name != LOCK_FILE:
                path.unlink()
        raise


def is_run(folder: pathlib.Path) -> bool:
    """Whether a folder has a run; other programs have files named `config.toml` too."""
    # The first is written when a run starts; a folder for publication may lack it.
    beside = any((folder / name).is_file() for name in (ENVIRONMENT_FILE, SUMMARY_FILE))
    return beside and (folder / CONFIG_FILE).is_file()


def require_run(folder: pathlib.Path) -> None:
    """Requires a run folder; for a folder of several, the error names some."""
    files.require_folder(folder, "folder")
    rule = f"be a run folder with a {CONFIG_FILE}, and {ENVIRONMENT_FILE} or {SUMMARY_FILE}"
    runs = sorted(place.name for place in folder.glob("*") if is_run(place))
    if runs:
        rule += f"; {runs[0]!r} in it is one, of {len(runs)}"
    checks.require(is_run(folder), "folder", rule, str(folder))


def is_in_use(folder: pathlib.Path) -> bool:
    """Whether a process has locked a run folder, which a run does until its end."""
    if not (folder / LOCK_FILE).is_file():
        return False
    try:
        with FileLock(folder / LOCK_FILE, timeout=0):
            return False
    except Timeout:
        return True
    except OSError:
        # A folder that can only be read, such as a copy.
        return False


def ended_summary(folder: pathlib.Path, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Reads the summary of a run; empty if it has not ended since it was started or resumed."""
    summary = read_sealed_object(folder, SUMMARY_FILE)
    # Figures and ε of an earlier end are too small.
    return {} if rows and summary.get("rounds") != rows[-1]["round"] else summary


def is_deployed(folder: pathlib.Path) -> bool:
    """Whether the rounds of a run ran on nodes."""
    # False for those who may not read checkpoints.
    return os.path.exists(folder / CHECKPOINT_FOLDER / JOURNAL_FILE)


def require_free(output: pathlib.Path) -> None:
    """Requires a folder that is new or empty."""
    kind = files.kind_of(output, "--output")
    is_taken = kind in ("file", "other")
    if not is_taken:
        files.require_folder(output, "--output", writable=True)
    if kind == "folder":
        is_taken = any(path.name != LOCK_FILE for path in output.iterdir())
    if is_taken:
        raise ConfigError(
            f"--output {str(output)!r} must be a new or an empty folder; "
            "use --resume to resume a run"
        )
    require_usable(output, "--output")


def require_place(output: pathlib.Path | None, name: str) -> None:
    """Requires that a run folder can be made, before any work."""
    if output is not None:
        require_free(output)
        return
    files.require_folder(_RUNS, "the folder of runs", writable=True)
    # Below a folder that is missing, no name is too long.
    files.kind_of(f"{name}-001", "run.name")
    require_usable(_RUNS / f"{name}-001", "run.name")


def next_folder(name: str) -> pathlib.Path:
    """Makes the next free folder under `runs/`; runs that start together get one each."""
    number = 1
    while True:
        folder = _RUNS / f"{name}-{number:03d}"
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            number += 1
        else:
            return folder


# Of larger arrays, and of those on disk, so many rows are read, spread evenly.
_WHOLE_BYTES, _SAMPLED_ROWS = 1 << 28, 256
_DIGEST = "SHA-256 "
# What decides how a program rounds, beside `[execution]`.
_ROUNDING = ("libraries", "processor", "backend", "device kinds", "compiler")
# Keys of `[execution]` that change no bit.
_WITHOUT_BITS = (
    *("placement", "compilation_cache", "measured"),
    *("coordinator", "num_processes", "process_id"),
)


def config_of(
    folder: pathlib.Path, warn: Callable[[str], None], words: Sequence[str] = ()
) -> Config:
    """Reads the configuration of a run folder; warns if it is not as the run wrote it."""
    if wrong := damage_of(folder, CONFIG_FILE):
        warn(f"{folder / CONFIG_FILE} {wrong}")
    return config_files.load_config(folder / CONFIG_FILE, words)


class Saved(NamedTuple):
    """A checkpoint of a run: its state, its hyperparameters, and what was saved with them."""

    state: SimulationState
    hyper: Hyper
    extra: dict[str, Any]
    kept: Kept | None = None


def read_newest(
    experiment: Experiment,
    folder: pathlib.Path,
    checkpoints: Checkpoints,
    like: SimulationState,
    warn: Callable[[str], None],
) -> tuple[Saved | None, dict[int, str]]:
    """Reads the newest intact checkpoint of the same run, or None, and names damaged newer ones."""
    like = with_kept(experiment, like)
    step, damaged = checkpoints.newest_intact(like)
    for rounds, wrong in damaged.items():
        warn(f"the checkpoint of round {rounds} is damaged ({wrong}) and is skipped")
    if not damaged:
        for name in sealed_names(folder):
            if name.startswith(f"{CHECKPOINT_FOLDER}/") and (lost := damage_of(folder, name)):
                warn(f"{folder / name} {lost}: the newest checkpoint was lost")
    saved = None
    if step is not None:
        # Before arrays, which another configuration cannot read.
        extra = checkpoints.extra(step)
        require_same_config(experiment.written, extra["config"])
        _require_same_base(experiment, extra)
        whole, hyper, extra = checkpoints.restore(like, experiment.simulation.hyper, step)
        state, kept = parted(experiment, whole, extra.get("kept"))
        saved = Saved(state, hyper, extra, kept)
        place = checkpoints.directory / str(step)
        fits = int(saved.state.round) == step
        checks.require(fits, str(place), f"be of round {step}", "another round")
    file = folder / DATA_FILE
    if not file.is_file() and damage_of(folder, DATA_FILE):
        warn(f"{file} is missing: whether the data are those of the run is unknown")
    require_same_data(experiment.population, file)
    return saved, damaged


def require_same_config(config: Config, saved: str) -> Config:
    """Returns the saved configuration, which may differ in how a run executes and is published."""
    # Keys that the saved file lacks have their defaults.
    started = config_files.from_toml(saved, CONFIG_FILE)
    now, then = (tomllib.loads(config_files.to_toml(each)) for each in (config, started))
    before, after = (tables["execution"].get("placement") for tables in (then, now))
    same = (before == "disk") == (after == "disk")
    rule = f"not change between memory and disk when a run resumes; it was {before!r}"
    checks.require(same, "execution.placement", rule, after)
    besides = ["execution", "run.release", "run.plots"]
    if config.run.rounds > started.run.rounds:
        _require_extensible(config, started.run.rounds)
        besides.append("run.rounds")
    lines = differences(then, now, besides)
    if lines:
        raise ValueError(
            f"{CONFIG_FILE} must be as it was when the run started; only [execution], run.release "
            "and run.plots may change, and run.rounds may grow. Then and now:\n" + "\n".join(lines)
        )
    return started


def _require_same_base(experiment: Experiment, extra: Mapping[str, Any]) -> None:
    """Requires the frozen parameters of a checkpoint; older checkpoints do not name them."""
    now = kinds.digest(experiment.model.frozen)
    then, source = extra.get("frozen", now), experiment.config.model.pretrained
    rule = f"be those of the checkpoint, of SHA-256 {then[:12] or 'none'}; use the same base file"
    checks.require(now == then, f"frozen parameters of {source or 'the model'}", rule, now[:12])


def _require_extensible(config: Config, planned: int) -> None:
    """Requires that neither noise nor algorithm depends on the number of rounds."""
    privacy, name = config.privacy, config.algorithm.name
    for unit in privacy.units:
        level = getattr(privacy, unit)
        is_free = level.noise_multiplier is not None
        # The former ties rounds together; the latter spends δ of all rounds on its range.
        is_free &= not isinstance(level, CorrelatedGaussianLevel | BoundedLaplaceLevel)
        rule = f"be {planned}: the noise was calibrated for that many rounds"
        checks.require(is_free, "run.rounds", rule, config.run.rounds)
    rule = f"be {planned}, the number of rounds that {name} was built for"
    is_planned = "num_rounds" in ALGORITHMS[name].given
    checks.require(not is_planned, "run.rounds", rule, config.run.rounds)


def write_fingerprint(population: Population, file: pathlib.Path) -> None:
    """Writes the fingerprint of data that are on this machine; their digests are not private."""
    if not population.is_elsewhere:
        write_json(file, fingerprint(population))


def require_same_data(population: Population, file: pathlib.Path) -> None:
    """Requires data of the same fingerprint, if there is one; an error names the difference."""
    if population.is_elsewhere or not file.is_file():
        return
    saved = files.parse_json(files.read_text(file), file)
    is_known = isinstance(saved, dict) and all(isinstance(each, dict) for each in saved.values())
    checks.require(is_known, str(file), "hold an object of objects", saved)
    found = fingerprint(population)
    for part in dict.fromkeys((*saved, *found)):
        before, now = saved.get(part, {}), found.get(part, {})
        for fact in dict.fromkeys((*before, *now)):
            then = before.get(fact, "none")
            rule = f"be as when the run started, {then}, or {file} be removed if they are the same"
            value = now.get(fact, "none")
            checks.require(then == value, f"{fact} of the {part} data", rule, value)


def fingerprint(population: Population) -> dict[str, dict[str, Any]]:
    """Describes each part of the data: sizes, names and types, and digests of the values."""
    parts = {
        "training": population.train,
        "validation": population.validation,
        "clients' test": population.client_test,
        "test": population.test,
        "unseen clients'": population.unseen,
    }
    found = {name: _facts(part) for name, part in parts.items() if part is not None}
    if population.public_x is not None:
        found["public"] = _arrays({"x": population.public_x})
    return found


def _facts(data: FederatedData) -> dict[str, Any]:
    """Describes one part."""
    names = [name.encode() + b"\0" for name in data.client_names]
    return {
        "the number of clients": data.num_clients,
        "the number of examples": data.num_examples,
        "the examples by client": _DIGEST + files.digest_of([data.offsets]).hex(),
        "the names of clients": _DIGEST + files.digest_of(names).hex(),
        **_arrays(data.examples),
    }


def _arrays(examples: Any) -> dict[str, str]:
    """Describes types and values of arrays `[examples, ...]`, which may be on disk."""
    facts = {}
    for name, array in sorted(flat(examples).items()):
        facts[f"the type of {name}"] = f"{array.dtype} {list(array.shape[1:])}"
        if is_on_disk(array) or array.nbytes > _WHOLE_BYTES:
            count = min(len(array), _SAMPLED_ROWS)
            array = array[np.linspace(0, len(array) - 1, count).astype(np.int64)]
        values = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        facts[f"the values of {name}"] = _DIGEST + files.digest_of([values]).hex()
    return facts


def require_same_numbers(folder: pathlib.Path) -> None:
    """Refuses settings of JAX that would change cohorts, batches and noise."""
    require_settings(read_sealed_object(folder, ENVIRONMENT_FILE).get(RANDOM, {}))


def require_same_rounding(
    experiment: Experiment, folder: pathlib.Path, num_rounds: int, warn: Callable[[str], None]
) -> None:
    """Refuses to repeat the noise of a secret run with other rounding; else warns of it.

    Rounds that were logged after the newest checkpoint, of `num_rounds`, run again: with the same
    noise and other rounding, the difference of two releases has no noise.
    """
    then, now = read_sealed_object(folder, ENVIRONMENT_FILE), environment()
    known = [name for name in _ROUNDING if name in then]
    rounded = _differences({k: then[k] for k in known}, {k: now[k] for k in known})
    rounded += _differences(*map(_execution, _configs(experiment, folder)))
    last = max((int(row["round"]) for row in read_metrics(folder)), default=0)
    if last and not then:
        rounded.append(f"{ENVIRONMENT_FILE} is missing")
    if not rounded:
        return
    repeats = last > num_rounds and experiment.config.run.secret and not is_deployed(folder)
    is_private = bool(experiment.simulation.federation.claims.units)
    rule = (
        f"be as they were: rounds {num_rounds + 1} to {last}, which run again from the newest "
        "checkpoint, would have the same noise and other rounding, so that the difference of two "
        "releases has no noise; nearest valid choice: a new run"
    )
    found = "; ".join(rounded)
    checks.require(not (repeats and is_private), "versions, devices and [execution]", rule, found)
    warn(
        "this run is not bit for bit the one that was never interrupted, since rounding differs: "
        f"{found}"
    )


def differing_machines(folders: Sequence[pathlib.Path]) -> list[str]:
    """Names what differs between the machines of runs and decides how their programs round."""
    found = [read_sealed_object(folder, ENVIRONMENT_FILE) for folder in folders]
    known = [{name: each[name] for name in _ROUNDING if name in each} for each in found if each]
    return list(dict.fromkeys(t for each in known for t in _differences(known[0], each)))


def _configs(experiment: Experiment, folder: pathlib.Path) -> tuple[Any, Any]:
    """Returns the configurations of the run: that of its last start, and that of now."""
    saved = (folder / CONFIG_FILE).read_text(encoding="utf-8")
    return config_files.from_toml(saved, CONFIG_FILE), experiment.written


def _execution(config: Any) -> dict[str, Any]:
    """Returns the keys of `[execution]` that decide bits."""
    section = config.execution.model_dump()
    return {f"execution.{k}": v for k, v in section.items() if k not in _WITHOUT_BITS}


def _differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Names the facts that differ, with both values; those of tables one by one."""
    texts = []
    for name in dict.fromkeys((*then, *now)):
        before, after = then.get(name), now.get(name)
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            texts += _differences(before, after)
        elif before != after:
            texts.append(f"{name} was {before} and is {after}")
    return texts
