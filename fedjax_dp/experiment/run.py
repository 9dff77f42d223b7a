"""Runs an experiment: blocks of rounds, evaluations, checkpoints, a folder that can be resumed."""

import pathlib
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from fedjax_dp.engine.record import RoundInfo, RoundRecord, told
from fedjax_dp.engine.round import SimulationState
from fedjax_dp.experiment import reading as configuration
from fedjax_dp.experiment.assemble import Experiment, assemble
from fedjax_dp.experiment.config import Config
from fedjax_dp.experiment.folder import CONFIG_FILE
from fedjax_dp.experiment.results import evaluate, write_results
from fedjax_dp.experiment.start import Start, fresh, restored
from fedjax_dp.io.logbook import Logbook


class Watcher(Protocol):
    """Whoever wants to see how far a run is."""

    def phase(self, name: str) -> None:
        """Is told what is being done now, in a few words."""

    def done(self, rounds: int, row: Mapping[str, Any]) -> None:
        """Is told how many rounds are done, and the newest metrics."""


class Nobody:
    """Watches nothing."""

    def phase(self, name: str) -> None:
        """Ignores a phase."""

    def done(self, rounds: int, row: Mapping[str, Any]) -> None:
        """Ignores rounds."""


class Outcome(NamedTuple):
    """What became of a run.

    Attributes:
      folder: the run folder.
      summary: what `summary.json` holds.
      is_interrupted: whether it was asked to stop before its last round.
      is_over_budget: whether one more round would have exceeded the budget.
    """

    folder: pathlib.Path
    summary: dict[str, Any]
    is_interrupted: bool
    is_over_budget: bool


def run(
    config: Config, folder: pathlib.Path | None = None, watcher: Watcher | None = None
) -> Outcome:
    """Runs an experiment to its end, its budget or an interruption, and writes its folder.

    Args:
      config: the experiment.
      folder: the run folder; the next free one under `runs/` where it is None.
      watcher: is told how far the run is.

    Returns:
      What became of it.

    Raises:
      ValueError: for what `assemble` refuses, or a privacy that cannot be accounted.
    """
    return _run(config, lambda experiment: fresh(experiment, folder), watcher or Nobody())


def resume(folder: pathlib.Path, watcher: Watcher | None = None) -> Outcome:
    """Goes on with an interrupted run from its newest checkpoint, to the bits of one that was not.

    Args:
      folder: the run folder.
      watcher: is told how far the run is.

    Returns:
      What became of it.

    Raises:
      ValueError: as `run`, or for a folder whose configuration is another than when it started.
    """
    config = configuration.load(folder / CONFIG_FILE)
    return _run(config, lambda experiment: restored(experiment, folder), watcher or Nobody())


def _run(
    config: Config,
    begin: Callable[[Experiment], tuple[SimulationState, Start]],
    watcher: Watcher,
) -> Outcome:
    started = time.perf_counter()
    if config.execution.compilation_cache:
        jax.config.update("jax_compilation_cache_dir", config.execution.compilation_cache)
    watcher.phase("reading data and calibrating noise")
    experiment = assemble(config)
    state, start = begin(experiment)
    logbook = Logbook(start.folder, from_round=int(state.round))

    watcher.phase("compiling")
    compiling = time.perf_counter()
    state = jax.block_until_ready(experiment.simulation.compile(state, start.key))
    timing = {"seconds_compiling": time.perf_counter() - compiling}
    text = configuration.to_toml(experiment.config)

    def seconds() -> float:
        return start.seconds + time.perf_counter() - started

    def save(state: SimulationState) -> None:
        extra = {"ledgers": start.accounting.to_json(), "seconds": seconds(), "config": text}
        start.checkpoints.save(experiment.simulation.portable(state), start.hyper, extra)

    if config.run.secret:
        # From round 0 on, so that no two configurations ever share a root.
        save(state)
    with _interruptions() as is_interrupted:
        state, is_over_budget = _rounds(
            experiment, state, start, logbook, watcher, save, is_interrupted
        )
        interrupted = is_interrupted() and int(state.round) < config.run.rounds
    save(state)
    logbook.close()
    start.checkpoints.close()
    watcher.phase("evaluating and drawing")
    timing = {"seconds": seconds(), **timing}
    summary = write_results(experiment, state, start, timing)
    return Outcome(start.folder, summary, interrupted, is_over_budget)


def _rounds(
    experiment: Experiment,
    state: SimulationState,
    start: Start,
    logbook: Logbook,
    watcher: Watcher,
    save: Callable[[SimulationState], None],
    is_interrupted: Callable[[], bool],
) -> tuple[SimulationState, bool]:
    """Runs blocks of rounds up to the next callback, until the end or the budget."""
    section = experiment.config.run
    done, total = int(state.round), section.rounds

    def affordable() -> int:
        return start.accounting.affordable_rounds(
            state,
            start.key,
            total - done,
            experiment.budget,
            experiment.dp_delta,
            experiment.config.privacy.accountant,
            start.hyper,
        )

    # Asked again only where it is used up: if not everybody was drawn, there is more.
    allowed = affordable()
    watcher.done(done, {})
    while done < total and not is_interrupted():
        if allowed == 0:
            return state, True
        stops = (section.evaluate_every, section.checkpoint_every)
        block = min(allowed, *(every - done % every for every in stops))
        state, record, info = experiment.simulation.run(state, start.key, block, start.hyper)
        rows = _rows(experiment, start, record, info, done)
        done, allowed = done + block, allowed - block
        if allowed == 0:
            allowed = affordable()
        if allowed == 0 or done % section.evaluate_every == 0:
            rows[-1] |= evaluate(experiment.evaluator, state)
        for row in rows:
            logbook.write(row)
        watcher.done(done, rows[-1])
        if done % section.checkpoint_every == 0:
            save(state)
    return state, False


def _rows(
    experiment: Experiment,
    start: Start,
    record: RoundRecord,
    info: RoundInfo,
    done: int,
) -> list[dict[str, Any]]:
    """Charges each round to the ledgers and turns its info into a row of metrics."""
    rows, accountant = [], experiment.config.privacy.accountant
    shown = told(record, info)
    for i in range(len(record.stage)):
        start.accounting.charge(jax.tree.map(lambda x, i=i: x[i : i + 1], record))
        # PLD takes seconds for each distinct history: it is asked once a checkpoint.
        is_asked = accountant != "pld" or (
            (done + i + 1) % experiment.config.run.checkpoint_every == 0
        )
        spent = start.accounting.epsilon(experiment.dp_delta, accountant) if is_asked else {}
        row = {name: value[i] for name, value in shown.items()}
        if "num_clipped" in row:
            joined = max(int(row["num_participants"]), 1)
            row["clipped_client_share"] = float(row["num_clipped"]) / joined
        row |= {f"epsilon_{unit}": float(np.max(each)) for unit, each in spent.items()}
        rows.append({"round": done + i + 1} | row)
    return rows


@contextmanager
def _interruptions() -> Iterator[Callable[[], bool]]:
    """Turns the first Ctrl-C into a wish to stop after the rounds under way."""
    seen = 0

    def note(signum: int, frame: Any) -> None:
        nonlocal seen
        seen += 1
        if seen > 1:
            raise KeyboardInterrupt

    try:
        before = signal.signal(signal.SIGINT, note)
    except ValueError:  # Not the main thread: nobody presses Ctrl-C here.
        yield lambda: False
        return
    try:
        yield lambda: seen > 0
    finally:
        signal.signal(signal.SIGINT, before)
