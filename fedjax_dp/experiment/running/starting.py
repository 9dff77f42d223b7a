"""Starts a run from its seed, or resumes it from its newest checkpoint."""

import json
import pathlib
import shutil
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from chex import PRNGKey
from filelock import BaseFileLock

from fedjax_dp.algorithms.base import Hyper
from fedjax_dp.core import checks, trees
from fedjax_dp.core.devices import of_all_processes
from fedjax_dp.core.files import write_text
from fedjax_dp.core.keys import require_stated, secret_key
from fedjax_dp.engine.accounts.communication import ByteTotals
from fedjax_dp.engine.accounts.privacy_accounting import PrivacyAccounting
from fedjax_dp.engine.client_store import ClientStore, stored_in
from fedjax_dp.engine.record import RoundRecord
from fedjax_dp.engine.round import SimulationState
from fedjax_dp.experiment.components.experiment import Experiment
from fedjax_dp.experiment.components.noised import noised_accuracy_of
from fedjax_dp.experiment.components.schedules import ended_curves
from fedjax_dp.experiment.reading import config_files
from fedjax_dp.experiment.running.keeping import Kept
from fedjax_dp.experiment.running.processes import folder_of_first, is_first_process, require_same
from fedjax_dp.experiment.running.release import withdraw_release
from fedjax_dp.experiment.running.run_folder import (
    CHECKPOINT_FOLDER,
    CLIENTS_FOLDER,
    CONFIG_FILE,
    DATA_FILE,
    SWEEP_FILE,
    emptied_unless_started,
    locked_if_started,
    next_folder,
    read_newest,
    require_same_config,
    require_same_numbers,
    require_same_rounding,
    write_fingerprint,
)
from fedjax_dp.experiment.schema.config import ObliviousLevel, RunSection
from fedjax_dp.io.checkpoint import KEPT, ROOT_FILE, Checkpoints
from fedjax_dp.io.digests import read_sealed_object, unseal
from fedjax_dp.io.logbook import METRICS_FILE, write_json
from fedjax_dp.server.oblivious import noise_messages
from fedjax_dp.server.secure import mask_messages
from fedjax_dp.server.secure.aggregator import masks_of

# The number of its runs, what chose their settings, by which metric, and what ends some early.
_SWEEP_FACTS = ("sweep", "search", "objective", "pruner")


class Seconds(NamedTuple):
    """The time that a run took before."""

    whole: float = 0.0  # With reading, compiling and results.
    rounds: float = 0.0  # From the first round to the last, with evaluations and checkpoints.


class Start(NamedTuple):
    """A started or resumed run."""

    folder: pathlib.Path  # The run folder.
    lock: BaseFileLock  # The lock of the folder.
    text: str  # Its configuration, as written to its folder.
    key: PRNGKey  # The root of cohorts, batches and noise.
    hyper: Hyper  # The hyperparameters of its rounds.
    accounting: PrivacyAccounting  # The ledgers of the rounds so far.
    checkpoints: Checkpoints  # Its saved states.
    seconds: Seconds
    traffic: ByteTotals  # The bytes of the rounds so far.
    kept: Kept | None = None  # The best of the rounds so far, if that one is kept.


def new_root(section: RunSection) -> PRNGKey:
    """Returns the root key of cohorts, batches and noise; data and model use seeds alone."""
    if not section.secret:
        return jax.random.key(section.seed)
    root = secret_key()
    # That of the first process.
    words = of_all_processes(np.asarray(jax.random.key_data(root)))[0]
    return jax.random.wrap_key_data(jnp.asarray(words), impl=jax.random.key_impl(root))


def first_state(experiment: Experiment) -> SimulationState:
    """Returns the state before the first round, which depends on the seed alone."""
    return experiment.simulation.init(jax.random.key(experiment.config.run.seed))


def accounting_of(
    experiment: Experiment, hyper: Hyper, sent: Sequence[RoundRecord] = ()
) -> PrivacyAccounting:
    """Makes ledgers for the noise in `hyper`: empty, or of rounds that a deployment has sent."""
    privacy = experiment.config.privacy
    noised, promise = noised_accuracy_of(experiment.config), privacy.promise
    made = PrivacyAccounting(experiment.simulation, hyper=hyper, evaluations=noised, **promise)
    for record in sent:
        made.charge(record)
    return made


def with_sweep(
    experiment: Experiment, folder: pathlib.Path, facts: Mapping[str, Any] = {}
) -> Experiment:
    """Adds the facts of the sweep that a run is part of: those in its folder, and newer ones."""
    saved = read_sealed_object(folder, SWEEP_FILE)
    return experiment._replace(stated={**experiment.stated, **saved, **facts})


def _write_sweep(experiment: Experiment, folder: pathlib.Path) -> None:
    """Writes the facts of the sweep, for a run that is resumed without it."""
    facts = {k: experiment.stated[k] for k in _SWEEP_FACTS if k in experiment.stated}
    if facts:
        write_json(folder / SWEEP_FILE, facts)


def _byte_totals(experiment: Experiment) -> ByteTotals:
    """Makes byte totals that start at zero; without a server keys and shares are not counted."""
    federation, section = experiment.simulation.federation, experiment.config.communication
    masks = masks_of(federation.algorithm.aggregator) if federation.has_server else None
    exchange = None if masks is None else mask_messages(masks.graph)
    level = experiment.config.privacy.client
    if "client" in experiment.config.privacy.units and isinstance(level, ObliviousLevel):
        # Keys are agreed before the first round, unless a clock says when.
        rounds = experiment.config.clock.key_rounds or [0]
        parties = experiment.simulation.participation.min_drawn
        size = trees.num_parameters(federation.facts.update)
        exchange = noise_messages(parties, size, form=level.form, key_rounds=rounds)
    return ByteTotals(federation, section.encoding, exchange)


def fresh(experiment: Experiment, folder: pathlib.Path | None) -> tuple[SimulationState, Start]:
    """Starts a run and writes its configuration, and its root if that is secret."""
    section, text = experiment.config.run, _same_text(experiment)
    state, hyper = first_state(experiment), experiment.simulation.hyper
    accounting = accounting_of(experiment, hyper)
    key = new_root(section)
    _require_stated(experiment, key)
    _require_one_round(experiment, state, key, accounting)
    _require_cover(experiment, state, key, accounting, hyper)
    folder = next_folder(experiment.config.title) if folder is None else folder
    # Callbacks and data sets may change the working directory.
    folder = folder.absolute()
    with locked_if_started(folder) as lock, emptied_unless_started(folder):
        state = stored_in(state, folder / CLIENTS_FOLDER)
        _require_space(experiment, state)
        shared = folder_of_first(folder) / CHECKPOINT_FOLDER
        checkpoints = Checkpoints(shared, is_secret=section.secret)
        if section.secret and is_first_process():
            # Saved before the first round, so that no round is released with two draws of noise.
            checkpoints.write_root(jax.random.key_data(key))
        _write_sweep(experiment, folder)
        write_text(folder / CONFIG_FILE, text)
        write_fingerprint(experiment.population, folder / DATA_FILE)
        own = checkpoints, Seconds(), _byte_totals(experiment)
        return state, Start(folder, lock, text, key, hyper, accounting, *own)


def restored(
    experiment: Experiment,
    folder: pathlib.Path,
    warn: Callable[[str], None],
    place: pathlib.Path | None = None,
) -> tuple[SimulationState, Start]:
    """Resumes a run from its newest intact checkpoint, or from its seed; `place` is a process's."""
    folder = folder.absolute()
    place = folder if place is None else place.absolute()
    with locked_if_started(place) as lock:
        return _restored(experiment, folder, warn, place, lock)


def _restored(
    experiment: Experiment,
    folder: pathlib.Path,
    warn: Callable[[str], None],
    place: pathlib.Path,
    lock: BaseFileLock,
) -> tuple[SimulationState, Start]:
    """Resumes a run whose folder is locked."""
    config, seconds, ledgers, sent, kept = experiment.config, Seconds(), None, None, None
    text = _same_text(experiment)
    saved_text = (folder / CONFIG_FILE).read_text(encoding="utf-8")
    started = require_same_config(experiment.written, saved_text)
    for note in ended_curves(config, started.run.rounds):
        warn(note)
    checkpoints = Checkpoints(folder / CHECKPOINT_FOLDER, is_secret=config.run.secret)
    require_same_numbers(folder)
    key = saved_root(config.run, checkpoints)
    _require_stated(experiment, key)
    state = stored_in(first_state(experiment), folder / CLIENTS_FOLDER)
    hyper, like = experiment.simulation.hyper, experiment.simulation.for_checkpoint(state)
    saved, damaged = read_newest(experiment, folder, checkpoints, like, warn)
    if saved is not None:
        state, hyper, extra, kept = saved
        ledgers, sent = extra["ledgers"], extra["traffic"]
        # Saved without them, all time is that of rounds.
        seconds = Seconds(extra["seconds"], extra.get("seconds_rounds", extra["seconds"]))
    require_same_rounding(experiment, folder, int(state.round), warn)
    if place != folder and (folder / METRICS_FILE).exists():
        shutil.copy(folder / METRICS_FILE, place)
    # All have read the folder before one of them changes it.
    root = np.asarray(jax.random.key_data(key)).tolist()
    require_same("the checkpoint", json.dumps([int(state.round), ledgers, root]))
    checkpoints.set_aside(damaged)
    # The noise that is accounted is the noise that runs: after a restart, the saved one.
    accounting, traffic = accounting_of(experiment, hyper), _byte_totals(experiment)
    if ledgers is not None:
        accounting.restore(ledgers)
    if sent is not None:
        traffic.restore(sent)
    _require_cover(experiment, state, key, accounting, hyper)
    _require_space(experiment, state)
    withdraw_release(place)
    # The logbook, which reads the metrics next, compares them with their record.
    unseal(place, but=(METRICS_FILE,))
    _write_sweep(experiment, place)
    write_text(place / CONFIG_FILE, text)
    if saved is None or not (place / DATA_FILE).exists():
        write_fingerprint(experiment.population, place / DATA_FILE)
    return state, Start(
        place, lock, text, key, hyper, accounting, checkpoints, seconds, traffic, kept
    )


def _same_text(experiment: Experiment) -> str:
    """Writes the configuration; processes whose programs differ would wait for ever."""
    text = config_files.to_toml(experiment.written)
    require_same("the configuration", text)
    return text


def _require_stated(experiment: Experiment, key: PRNGKey) -> None:
    """Requires keys of a stated quality where privacy is claimed."""
    if experiment.simulation.federation.claims.units:
        require_stated(key)


def _require_one_round(
    experiment: Experiment, state: SimulationState, key: PRNGKey, accounting: PrivacyAccounting
) -> None:
    """Requires a budget that suffices for the first round."""
    budget, deltas = experiment.budget, experiment.dp_delta
    accountant, hyper = experiment.config.privacy.accountant, experiment.simulation.hyper
    for unit, epsilon in budget.items():
        only = {unit: epsilon}
        fits = accounting.affordable_rounds(state, key, 1, only, deltas, accountant, hyper)
        rule = (
            f"allow at least one round with this noise: raise privacy.{unit}.noise_multiplier, or "
            "leave it out to have it calibrated"
        )
        checks.require(fits == 1, f"privacy.{unit}.epsilon", rule, epsilon)


def affordable_rounds(
    experiment: Experiment,
    state: SimulationState,
    accounting: PrivacyAccounting,
    hyper: Hyper,
    key: PRNGKey,
) -> int:
    """Counts the planned rounds that may still run before a budget is exceeded."""
    config = experiment.config
    return accounting.affordable_rounds(
        state,
        key,
        config.run.rounds - int(state.round),
        experiment.budget,
        experiment.dp_delta,
        config.privacy.accountant,
        hyper,
    )


def _require_cover(
    experiment: Experiment,
    state: SimulationState,
    key: PRNGKey,
    accounting: PrivacyAccounting,
    hyper: Hyper,
) -> None:
    """Requires of a run whose folder is to be released that the noise of each round has an ε."""
    config = experiment.config
    if config.run.release is None:
        return
    count = affordable_rounds(experiment, state, accounting, hyper, key)
    ledgers = accounting.planned(state, key, count) if count else accounting.ledgers
    for unit, ledger in ledgers.items():
        spent = ledger.epsilon(experiment.dp_delta[unit], config.privacy.accountant)
        rule = f"be left out: no ε of a {unit} follows from the noise of this run"
        checks.require(bool(np.all(np.isfinite(spent))), "run.release", rule, config.run.release)


def _require_space(experiment: Experiment, state: SimulationState) -> None:
    """Requires disk space for all client states that the run may write."""
    if not isinstance(state.clients, ClientStore):
        return
    section, simulation = experiment.config.run, experiment.simulation
    most_drawn, file = simulation.participation.most_drawn, state.clients.file
    again = most_drawn(min(section.rounds, section.checkpoint_every))
    # The newest states, those that only checkpoints refer to, and those of one cohort.
    num_rows = most_drawn(section.rounds) + KEPT * again + most_drawn(1)
    file.require_space(num_rows - file.num_allocated(), name="--output")


def saved_root(section: RunSection, checkpoints: Checkpoints) -> PRNGKey:
    """Returns the root of a resumed run; refuses a secret run that has lost its root."""
    root = checkpoints.root()
    if not section.secret:
        rule = "be true as when the run started"
        checks.require(root is None, "run.secret", rule, section.secret)
        return jax.random.key(section.seed)
    if root is None:
        raise ValueError(
            f"{checkpoints.directory / ROOT_FILE} must exist to resume a secret run: without it, "
            "released rounds would get fresh noise; nearest valid choice: a new run in another "
            "folder"
        )
    return jax.random.wrap_key_data(jnp.asarray(root))
