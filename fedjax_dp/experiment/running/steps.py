"""The steps of a run: blocks of rounds, evaluations, checkpoints, results.

They ask for rounds and receive them, wherever these are run.
"""

import pathlib
import time
from collections.abc import Callable, Generator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from fedjax_dp.core.devices import is_distributed
from fedjax_dp.engine.execution.joint import Finished, Request
from fedjax_dp.engine.record import RoundInfo, RoundRecord, as_metrics
from fedjax_dp.engine.round import SimulationState
from fedjax_dp.experiment.components.experiment import Callback, Experiment, Progress
from fedjax_dp.experiment.running.environment import environment
from fedjax_dp.experiment.running.processes import (
    chosen_by_first,
    require_same,
)
from fedjax_dp.experiment.running.results import Ended, evaluate, write_results
from fedjax_dp.experiment.running.run_folder import (
    AT_START,
    CHECKPOINT_FOLDER,
    ENVIRONMENT_FILE,
)
from fedjax_dp.experiment.running.starting import Start
from fedjax_dp.experiment.running.watcher import Health, Watcher
from fedjax_dp.io.checkpoint import record_of
from fedjax_dp.io.digests import seal
from fedjax_dp.io.logbook import METRICS_FILE, Logbook, to_json, write_json
from fedjax_dp.models import kinds


class Outcome(NamedTuple):
    """The result of a run.

    Attributes:
      folder: the run folder.
      summary: what `summary.json` holds.
      ended: "finished" after the last round; before it "interrupted" by a signal, "budget" if one
        more round would have exceeded it, or "callback", which `summary["stopped_by"]` names.
      is_futile: whether no client's work entered the model in any round.
    """

    folder: pathlib.Path
    summary: dict[str, Any]
    ended: Ended
    is_futile: bool


# A run asks for rounds, receives their results, and returns its outcome.
Steps = Generator[Request, Finished, Outcome]


def steps(
    experiment: Experiment,
    state: SimulationState,
    start: Start,
    callbacks: Mapping[str, Callback],
    health: Health,
    watcher: Watcher,
    started: float,
    is_interrupted: Callable[[], bool],
) -> Steps:
    """Runs an experiment from a state; first asks for no round, so that the program is compiled."""
    section = experiment.config.run
    logbook = Logbook(start.folder, from_round=int(state.round), warn=health.warn)
    write_json(start.folder / ENVIRONMENT_FILE, environment())
    seal(start.folder, AT_START)
    health.note(logbook.rows)

    watcher.phase("compiling")
    compiling = time.perf_counter()
    state = jax.block_until_ready((yield Request(state, start.key, start.hyper, 0)).state)
    timing = {"seconds_compiling": time.perf_counter() - compiling}
    base = kinds.digest(experiment.model.frozen)

    def seconds() -> float:
        return start.seconds + time.perf_counter() - started

    def save(state: SimulationState) -> None:
        ledgers = start.accounting.to_json()
        require_same("the ledgers", ledgers)
        extra = {
            "ledgers": ledgers,
            "traffic": start.traffic.to_json(),
            "seconds": seconds(),
            "config": start.text,
            "frozen": base,
        }
        # Saved before the next round overwrites client state.
        start.checkpoints.save(experiment.simulation.for_checkpoint(state), start.hyper, extra)
        known = {METRICS_FILE: logbook.check()}
        seal(start.folder, [f"{CHECKPOINT_FOLDER}/{record_of(int(state.round))}"], known)

    if section.secret:
        # From round 0 on, so that no two configurations ever share a root.
        save(state)
    state, ended, stopped_by = yield from _rounds(
        experiment, state, start, logbook, callbacks, health, watcher, save, is_interrupted
    )
    save(state)
    logbook.close()
    start.checkpoints.close()
    watcher.phase("evaluating and drawing")
    timing = {"seconds": seconds(), **timing}
    if stopped_by is not None and callbacks[stopped_by].is_private:
        experiment = _charged_as_planned(experiment, state, start)
    summary = write_results(
        experiment,
        _models_at_hand(experiment, state),
        start,
        timing,
        health.warnings,
        ended,
        stopped_by,
        _ends_not_covered(ended, stopped_by, experiment.stated.get("pruner"), callbacks),
    )
    return Outcome(start.folder, summary, ended, health.is_futile)


def _rounds(
    experiment: Experiment,
    state: SimulationState,
    start: Start,
    logbook: Logbook,
    callbacks: Mapping[str, Callback],
    health: Health,
    watcher: Watcher,
    save: Callable[[SimulationState], None],
    is_interrupted: Callable[[], bool],
) -> Generator[Request, Finished, tuple[SimulationState, Ended, str | None]]:
    """Asks for blocks of rounds; returns the state, how they ended, and by which callback."""
    section = experiment.config.run
    history = list(logbook.rows) if callbacks else []
    done, total = int(state.round), section.rounds

    def affordable() -> int:
        return _affordable(experiment, state, start)

    def stopping(state: SimulationState) -> str | None:
        if not callbacks:
            return None
        at_hand = _at_hand(experiment, state)

        def choose() -> str | None:
            progress = Progress(list(history), at_hand, experiment, start.folder, health.warn)
            return next((name for name, each in callbacks.items() if each.call(progress)), None)

        return chosen_by_first(choose, list(callbacks))

    # Computed again once used up: if fewer clients were drawn than allowed for, there is more.
    allowed = affordable()
    watcher.done(done, {})
    # A callback that ended the run before ends it again.
    if history and done % section.evaluate_every == 0 and (name := stopping(state)):
        return state, "callback", name
    while done < total and not is_interrupted():
        if allowed == 0:
            return state, "budget", None
        stops = (section.evaluate_every, section.checkpoint_every)
        block = min(allowed, *(every - done % every for every in stops))
        state, record, info = yield Request(state, start.key, start.hyper, block)
        rows = _rows(experiment, start, record, info, done)
        # Fewer where others, which run together with this one, wanted fewer.
        done, allowed = done + len(rows), allowed - len(rows)
        if allowed == 0:
            allowed = affordable()
        if allowed == 0 or done % section.evaluate_every == 0:
            held = _models_at_hand(experiment, state)
            rows[-1] |= evaluate(experiment.evaluator, held, start.hyper, section.seed)
        health.note(rows)
        for row in rows:
            logbook.write(row)
        watcher.done(done, rows[-1])
        history += [to_json(row) for row in rows] if callbacks else []
        if done % section.checkpoint_every == 0:
            save(state)
        if done % section.evaluate_every == 0 and (name := stopping(state)):
            return state, "callback", name
    return state, "interrupted" if done < total else "finished", None


def _affordable(experiment: Experiment, state: SimulationState, start: Start) -> int:
    """Counts the planned rounds that may still run before a budget is exceeded."""
    return start.accounting.affordable_rounds(
        _at_hand(experiment, state._replace(clients=None)),
        start.key,
        experiment.config.run.rounds - int(state.round),
        experiment.budget,
        experiment.dp_delta,
        experiment.config.privacy.accountant,
        start.hyper,
    )


def _charged_as_planned(experiment: Experiment, state: SimulationState, start: Start) -> Experiment:
    """Charges the rounds that a run left out because of what it had released, and states them.

    Any round could have been the last: ε of the rounds that ran covers no such choice, and ε of all
    planned rounds covers each, as post-processing of the longest run.
    """
    count = _affordable(experiment, state, start)
    if count == 0:
        return experiment
    at_hand = _at_hand(experiment, state._replace(clients=None))
    start.accounting.ledgers = start.accounting.planned(at_hand, start.key, count)
    facts = {"planned_rounds": int(state.round) + count}
    return experiment._replace(stated={**experiment.stated, **facts})


def _ends_not_covered(
    ended: Ended, stopped_by: str | None, pruner: str | None, callbacks: Mapping[str, Callback]
) -> list[str]:
    """Names what no ε covers of when a run ended; a pruner also decides that a run continues."""
    found = ["after how many rounds the run was interrupted"] * (ended == "interrupted")
    for name in dict.fromkeys((stopped_by, pruner)):
        if name is not None and not (name in callbacks and callbacks[name].is_private):
            found.append(f"after how many rounds the run ended, which {name} decided")
    return found


def _at_hand(experiment: Experiment, state: SimulationState) -> SimulationState:
    """Returns a state that this process holds whole, for work that it does alone."""
    return experiment.simulation.portable(state) if is_distributed() else state


def _models_at_hand(experiment: Experiment, state: SimulationState) -> SimulationState:
    """Returns the same for evaluations, which read client state for personal models alone."""
    if is_distributed() and experiment.simulation.federation.personal is None:
        state = state._replace(clients=None)
    return _at_hand(experiment, state)


def _rows(
    experiment: Experiment,
    start: Start,
    record: RoundRecord,
    info: RoundInfo,
    done: int,
) -> list[dict[str, Any]]:
    """Charges each round to the ledgers and returns its row of metrics."""
    rows, accountant = [], experiment.config.privacy.accountant
    shown, sent = as_metrics(record, info), start.traffic.count(record, info)
    for i in range(len(record.stage)):
        start.accounting.charge(jax.tree.map(lambda x, i=i: x[i : i + 1], record))
        # Privacy loss distributions are slow to compose: computed once per checkpoint.
        is_asked = accountant != "pld" or (
            (done + i + 1) % experiment.config.run.checkpoint_every == 0
        )
        spent = start.accounting.epsilon(experiment.dp_delta, accountant) if is_asked else {}
        row = {name: value[i] for name, value in shown.items()}
        if "record" not in experiment.config.privacy.units:
            # Gradients of examples have no bound to exceed.
            row.pop("clipped_example_share", None)
        if "num_clipped" in row:
            joined = max(int(row["num_participants"]), 1)
            row["clipped_client_share"] = float(row["num_clipped"]) / joined
        row |= sent[i]
        for unit, each in spent.items():
            row[f"epsilon_{unit}"] = float(np.max(each))
            if np.min(each) < np.max(each):
                row[f"epsilon_{unit}_smallest"] = float(np.min(each))
        rows.append({"round": done + i + 1} | row)
    return rows
