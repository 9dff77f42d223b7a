"""Where a run begins: at its seed, or at the newest checkpoint of one that was interrupted."""

import pathlib
import tomllib
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from chex import PRNGKey
from filelock import BaseFileLock

from fedjax_dp.algorithms.base import Hyper
from fedjax_dp.algorithms.registry import ALGORITHMS
from fedjax_dp.core import checks
from fedjax_dp.core.keys import secret_key
from fedjax_dp.engine.accounts.privacy_accounting import PrivacyAccounting
from fedjax_dp.engine.execution.client_store import Rows, kept_in
from fedjax_dp.engine.round import SimulationState
from fedjax_dp.experiment.components.experiment import Experiment
from fedjax_dp.experiment.reading import config_files
from fedjax_dp.experiment.running.byte_totals import Traffic
from fedjax_dp.experiment.running.release import withdraw_release
from fedjax_dp.experiment.running.run_folder import (
    CHECKPOINT_FOLDER,
    CLIENTS_FOLDER,
    CONFIG_FILE,
    locked,
    next_folder,
    require_free,
)
from fedjax_dp.experiment.schema.config import (
    BoundedLaplaceLevel,
    Config,
    CorrelatedGaussianLevel,
    RunSection,
)
from fedjax_dp.io.checkpoint import KEPT, ROOT_FILE, Checkpoints
from fedjax_dp.io.logbook import write_text


class Start(NamedTuple):
    """A run about to go on.

    Attributes:
      folder: the run folder.
      lock: keeps other processes out of it until it is released.
      key: the root of cohorts, batches and noise.
      hyper: the numbers that rounds run with.
      accounting: the ledgers of the rounds so far.
      checkpoints: where states are kept.
      seconds: time that was spent before.
      traffic: the bytes of the rounds so far.
    """

    folder: pathlib.Path
    lock: BaseFileLock
    key: PRNGKey
    hyper: Hyper
    accounting: PrivacyAccounting
    checkpoints: Checkpoints
    seconds: float
    traffic: Traffic


def new_root(section: RunSection) -> PRNGKey:
    """Gives the root of cohorts, batches and noise of a run that starts.

    The seed alone decides over data and initial model, so that secret runs compare.

    Args:
      section: the seed, and whether the root is secret.

    Returns:
      The key of the seed, or a fresh one of the operating system.
    """
    return secret_key() if section.secret else jax.random.key(section.seed)


def first_state(experiment: Experiment) -> SimulationState:
    """Gives the state before the first round, which depends on the seed alone.

    Args:
      experiment: the experiment.

    Returns:
      The state.
    """
    return experiment.simulation.init(jax.random.key(experiment.config.run.seed))


def accounting_of(experiment: Experiment, hyper: Hyper) -> PrivacyAccounting:
    """Makes the ledgers of an experiment.

    Args:
      experiment: the experiment.
      hyper: the numbers that rounds run with, which hold the noise that is accounted.

    Returns:
      The ledgers, nothing charged.

    Raises:
      ValueError: for a privacy that cannot be accounted.
    """
    privacy = experiment.config.privacy
    return PrivacyAccounting(experiment.simulation, privacy.relation, privacy.accountant, hyper)


def traffic_of(experiment: Experiment) -> Traffic:
    """Makes the count of an experiment's bytes.

    Args:
      experiment: the experiment.

    Returns:
      The count, at nothing.
    """
    return Traffic(experiment.simulation.federation, experiment.config.communication.encoding)


def fresh(experiment: Experiment, folder: pathlib.Path | None) -> tuple[SimulationState, Start]:
    """Begins a run.

    Args:
      experiment: what runs.
      folder: the run folder; the next free one under `runs/` where it is None.

    Returns:
      The first state, and the start: its configuration is written, its root is on the disk where
      that is secret.

    Raises:
      ValueError: for a privacy that cannot be accounted, a budget that has no room for one round,
        a folder where another run is, or one on a disk that is too small for what clients keep.
    """
    section = experiment.config.run
    state, hyper = first_state(experiment), experiment.simulation.hyper
    accounting = accounting_of(experiment, hyper)
    key = new_root(section)
    _require_one_round(experiment, state, key, accounting)
    folder = next_folder(experiment.config.title) if folder is None else folder
    lock = locked(folder)
    require_free(folder)
    state = kept_in(state, folder / CLIENTS_FOLDER)
    _require_room(experiment, state)
    checkpoints = Checkpoints(folder / CHECKPOINT_FOLDER, is_secret=section.secret)
    if section.secret:
        # On the disk before the first round, so that no round is released with two noises.
        checkpoints.keep_root(jax.random.key_data(key))
    write_text(folder / CONFIG_FILE, config_files.to_toml(experiment.written))
    traffic = traffic_of(experiment)
    return state, Start(folder, lock, key, hyper, accounting, checkpoints, 0.0, traffic)


def restored(
    experiment: Experiment, folder: pathlib.Path, warn: Callable[[str], None]
) -> tuple[SimulationState, Start]:
    """Goes on with a run that was interrupted.

    Args:
      experiment: what runs.
      folder: the run folder.
      warn: is told of checkpoints that were damaged.

    Returns:
      State and start of the newest intact checkpoint, or of the seed where there is none. A folder
      for publication is removed until the run is over again.

    Raises:
      ValueError: for a run that was started with another configuration, that has lost its root,
        that another process goes on with, or whose disk is too small for what clients keep.
    """
    config, seconds, ledgers, sent = experiment.config, 0.0, None, None
    lock = locked(folder)
    _require_same(experiment.written, (folder / CONFIG_FILE).read_text(encoding="utf-8"))
    checkpoints = Checkpoints(folder / CHECKPOINT_FOLDER, is_secret=config.run.secret)
    key = _kept_root(config.run, checkpoints)
    state = kept_in(first_state(experiment), folder / CLIENTS_FOLDER)
    hyper, like = experiment.simulation.hyper, experiment.simulation.portable(state)
    step, damaged = checkpoints.newest_intact(like)
    for rounds, wrong in damaged.items():
        warn(f"the checkpoint of round {rounds} is damaged ({wrong}), and is not used")
    checkpoints.set_aside(damaged)
    if step is not None:
        state, hyper, extra = checkpoints.restore(like, hyper, step)
        _require_same(experiment.written, extra["config"])
        ledgers, seconds = extra["ledgers"], extra["seconds"]
        # Runs of earlier versions have counted nothing.
        sent = extra.get("traffic")
    # What runs is the noise that is accounted: after a restart, the saved one.
    accounting, traffic = accounting_of(experiment, hyper), traffic_of(experiment)
    if ledgers is not None:
        accounting.restore(ledgers)
    if sent is not None:
        traffic.restore(sent)
    _require_room(experiment, state)
    withdraw_release(folder)
    write_text(folder / CONFIG_FILE, config_files.to_toml(experiment.written))
    return state, Start(folder, lock, key, hyper, accounting, checkpoints, seconds, traffic)


def _require_one_round(
    experiment: Experiment, state: SimulationState, key: PRNGKey, accounting: PrivacyAccounting
) -> None:
    """Requires a budget that has room for the first round."""
    budget, deltas = experiment.budget, experiment.dp_delta
    accountant, hyper = experiment.config.privacy.accountant, experiment.simulation.hyper
    for unit, epsilon in budget.items():
        only = {unit: epsilon}
        fits = accounting.affordable_rounds(state, key, 1, only, deltas, accountant, hyper)
        rule = (
            "have room for one round with this noise; nearest valid choice: a larger "
            f"privacy.{unit}.noise_multiplier, or none, so that it is calibrated"
        )
        checks.require(fits == 1, f"privacy.{unit}.epsilon", rule, epsilon)


def _require_room(experiment: Experiment, state: SimulationState) -> None:
    """Requires room on the disk for all rows that clients may come to write."""
    if not isinstance(state.clients, Rows):
        return
    section, simulation = experiment.config.run, experiment.simulation
    most_drawn, file = simulation.participation.most_drawn, state.clients.file
    again = most_drawn(min(section.rounds, section.checkpoint_every))
    # The newest rows, those of checkpoints that have been written again since, and a cohort's.
    num_rows = most_drawn(section.rounds) + KEPT * again + most_drawn(1)
    file.require_room(num_rows - file.num_lying(), name="--output")


def _kept_root(section: RunSection, checkpoints: Checkpoints) -> PRNGKey:
    """Gives the root of a run that goes on; refuses one that has lost it."""
    root = checkpoints.root()
    if not section.secret:
        rule = "be true as when the run started"
        checks.require(root is None, "run.secret", rule, section.secret)
        return jax.random.key(section.seed)
    if root is None:
        raise ValueError(
            f"{checkpoints.directory / ROOT_FILE} must be there for a secret run to go on: without "
            "it, rounds that were released would get fresh noise; nearest valid choice: a new run "
            "in another folder"
        )
    return jax.random.wrap_key_data(jnp.asarray(root))


def _require_same(config: Config, saved: str) -> None:
    """Requires the configuration that a checkpoint was written under, but for how it executes.

    What may be published is no part of what ran. More rounds are possible where nothing was made
    for their number.
    """
    # Keys that came after the run was saved have their defaults there.
    started = config_files.from_toml(saved, CONFIG_FILE)
    now, then = (tomllib.loads(config_files.to_toml(each)) for each in (config, started))
    before, after = (tables.pop("execution").get("placement") for tables in (then, now))
    same = (before == "disk") == (after == "disk")
    rule = f"be {before!r}, or of its kind: what clients keep is not moved to or from the disk"
    checks.require(same, "execution.placement", rule, after)
    # What may be published of a run can be decided when it is over.
    for tables in (then, now):
        tables["run"].pop("release", None)
    if now["run"]["rounds"] > then["run"]["rounds"]:
        _require_extensible(config, then["run"]["rounds"])
        then["run"]["rounds"] = now["run"]["rounds"]
    checks.require(
        now == then,
        CONFIG_FILE,
        "be as it was when the run started; only [execution] and run.release may change, and "
        "run.rounds grow",
        {name: table for name, table in now.items() if table != then.get(name)},
    )


def _require_extensible(config: Config, planned: int) -> None:
    """Requires that neither noise nor algorithm was made for a number of rounds."""
    privacy, name = config.privacy, config.algorithm.name
    for unit in privacy.units:
        level = getattr(privacy, unit)
        is_free = level.noise_multiplier is not None
        # The former ties rounds together; the latter spends δ of all rounds on its range.
        is_free &= not isinstance(level, CorrelatedGaussianLevel | BoundedLaplaceLevel)
        rule = f"be {planned}: the noise was made for so many, and spends privacy.{unit}.epsilon"
        checks.require(is_free, "run.rounds", rule, config.run.rounds)
    rule = f"be {planned}, which {name} was planned for"
    is_planned = "num_rounds" in ALGORITHMS[name].given
    checks.require(not is_planned, "run.rounds", rule, config.run.rounds)
