"""Where a run begins: at its seed, or at the newest checkpoint of one that was interrupted."""

import pathlib
import tomllib
from typing import NamedTuple

import jax
import jax.numpy as jnp
from chex import PRNGKey

from fedjax_dp.algorithms.base import Hyper
from fedjax_dp.core import checks
from fedjax_dp.core.keys import secret_key
from fedjax_dp.engine.accounting import PrivacyAccounting
from fedjax_dp.engine.round import SimulationState
from fedjax_dp.experiment import reading as configuration
from fedjax_dp.experiment.assemble import Experiment
from fedjax_dp.experiment.config import Config, RunSection
from fedjax_dp.experiment.folder import CHECKPOINT_FOLDER, CONFIG_FILE, next_folder
from fedjax_dp.io.checkpoint import ROOT_FILE, Checkpoints
from fedjax_dp.io.logbook import write_text


class Start(NamedTuple):
    """A run about to go on.

    Attributes:
      folder: the run folder.
      key: the root of cohorts, batches and noise.
      hyper: the numbers that rounds run with.
      accounting: the ledgers of the rounds so far.
      checkpoints: where states are kept.
      seconds: time that was spent before.
    """

    folder: pathlib.Path
    key: PRNGKey
    hyper: Hyper
    accounting: PrivacyAccounting
    checkpoints: Checkpoints
    seconds: float


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


def fresh(experiment: Experiment, folder: pathlib.Path | None) -> tuple[SimulationState, Start]:
    """Begins a run.

    Args:
      experiment: what runs.
      folder: the run folder; the next free one under `runs/` where it is None.

    Returns:
      The first state, and the start: its configuration is written, its root is on the disk where
      that is secret.

    Raises:
      ValueError: for a privacy that cannot be accounted, or a root that is there already.
    """
    section = experiment.config.run
    state, hyper = first_state(experiment), experiment.simulation.hyper
    accounting = accounting_of(experiment, hyper)
    folder = next_folder(section.name) if folder is None else folder
    checkpoints = Checkpoints(folder / CHECKPOINT_FOLDER, is_secret=section.secret)
    key = new_root(section)
    if section.secret:
        # On the disk before the first round, so that no round is released with two noises.
        checkpoints.keep_root(jax.random.key_data(key))
    write_text(folder / CONFIG_FILE, configuration.to_toml(experiment.config))
    return state, Start(folder, key, hyper, accounting, checkpoints, 0.0)


def restored(experiment: Experiment, folder: pathlib.Path) -> tuple[SimulationState, Start]:
    """Goes on with a run that was interrupted.

    Args:
      experiment: what runs.
      folder: the run folder.

    Returns:
      State and start of the newest checkpoint, or of the seed where there is none yet.

    Raises:
      ValueError: for a run that was started with another configuration, or that has lost its root.
    """
    config, seconds, ledgers = experiment.config, 0.0, None
    checkpoints = Checkpoints(folder / CHECKPOINT_FOLDER, is_secret=config.run.secret)
    key = _kept_root(config.run, checkpoints)
    state, hyper = first_state(experiment), experiment.simulation.hyper
    if checkpoints.latest_round() is not None:
        state, hyper, extra = checkpoints.restore(experiment.simulation.portable(state), hyper)
        _require_same(config, extra["config"])
        ledgers, seconds = extra["ledgers"], extra["seconds"]
    # What runs is the noise that is accounted: after a restart, the saved one.
    accounting = accounting_of(experiment, hyper)
    if ledgers is not None:
        accounting.restore(ledgers)
    return state, Start(folder, key, hyper, accounting, checkpoints, seconds)


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
    """Requires the configuration that a checkpoint was written under, but for how it executes."""
    now, then = (tomllib.loads(text) for text in (configuration.to_toml(config), saved))
    for tables in (now, then):
        tables.pop("execution")
    checks.require(
        now == then,
        CONFIG_FILE,
        "be as it was when the run started; only [execution] may change",
        {name: table for name, table in now.items() if table != then.get(name)},
    )
