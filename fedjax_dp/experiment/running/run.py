"""Runs an experiment: blocks of rounds, evaluations, checkpoints, results."""

import _thread
import pathlib
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
import numpy as np

from fedjax_dp.engine.record import RoundInfo, RoundRecord, as_metrics
from fedjax_dp.engine.round import SimulationState
from fedjax_dp.experiment.assembly.assemble import assemble
from fedjax_dp.experiment.assembly.devices import more_than_cores
from fedjax_dp.experiment.components.callbacks import Callback, Progress, callbacks_of
from fedjax_dp.experiment.components.deployment import Deployment
from fedjax_dp.experiment.components.experiment import Experiment
from fedjax_dp.experiment.reading import config_files
from fedjax_dp.experiment.running.environment import environment, use_compilation_cache
from fedjax_dp.experiment.running.health import Health, never_reached, without_learning
from fedjax_dp.experiment.running.release import require_publishable, without_model
from fedjax_dp.experiment.running.results import Ended, evaluate, write_results
from fedjax_dp.experiment.running.run_folder import CONFIG_FILE, ENVIRONMENT_FILE, require_place
from fedjax_dp.experiment.running.starting import Start, charged_for, fresh, restored
from fedjax_dp.experiment.schema.config import Config
from fedjax_dp.io.disk import full_disk_named
from fedjax_dp.io.logbook import Logbook, read_metrics, to_json, write_json

# Sent by a terminal and by a scheduler to end a run.
_STOPS = (signal.SIGINT, signal.SIGTERM)
# Signals within this many seconds count once: some senders signal a process and its group.
_TOGETHER = 1.0
# Seconds until a run that was interrupted twice is ended from outside.
_PATIENCE = 2.0


class Watcher:
    """Receives the progress of a run; this one ignores it.

    Subclasses override methods to show it.
    """

    def phase(self, name: str) -> None:
        """Receives the current phase.

        Args:
          name: a few words, such as "compiling".
        """

    def done(self, rounds: int, row: Mapping[str, Any]) -> None:
        """Receives the number of completed rounds.

        Args:
          rounds: completed rounds.
          row: the newest metrics; empty before the first round.
        """

    def warn(self, text: str) -> None:
        """Receives a warning, which the summary has too.

        Args:
          text: the warning.
        """

    def end(self) -> None:
        """Ends the process; called from a thread when an interrupted run cannot end by itself."""


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


def run(
    config: Config,
    folder: str | pathlib.Path | None = None,
    watcher: Watcher | None = None,
    callbacks: Mapping[str, Callback] = {},
    deployment: Deployment | None = None,
) -> Outcome:
    """Runs an experiment until its last round, its budget or an interruption.

    Args:
      config: the experiment.
      folder: the run folder to write; None for the next free one under `runs/`.
      watcher: receives the progress; None for none.
      callbacks: called after each evaluation, by name, besides those of the configuration.
      deployment: where rounds run, such as on the nodes of a Flower federation; None for this
        process.

    Returns:
      The folder, the summary, and why the run ended.

    Raises:
      ValueError: if `assemble` refuses the configuration, the privacy cannot be accounted, or the
        folder is in use.
    """
    place = None if folder is None else pathlib.Path(folder)
    require_place(place, config.title)
    return _run(
        config,
        lambda experiment, warn: fresh(experiment, place),
        watcher or Watcher(),
        callbacks,
        deployment,
        None,
    )


def resume(
    folder: str | pathlib.Path,
    watcher: Watcher | None = None,
    callbacks: Mapping[str, Callback] = {},
    words: Sequence[str] = (),
    deployment: Deployment | None = None,
) -> Outcome:
    """Resumes a run from its newest intact checkpoint, with the bits of an uninterrupted run.

    Args:
      folder: the run folder.
      watcher: receives the progress; None for none.
      callbacks: the callbacks that the run was started with.
      words: overrides as on a command line: of `[execution]`, `run.release`, and a larger
        `run.rounds`.
      deployment: as for `run`; rounds that were sent and whose outcome was lost are charged.

    Returns:
      The same as `run`.

    Raises:
      ValueError: as for `run`, or if the configuration differs from that of the run.
    """
    place = pathlib.Path(folder)
    config = config_files.load_config(place / CONFIG_FILE, words)
    return _run(
        config,
        lambda experiment, warn: restored(experiment, place, warn),
        watcher or Watcher(),
        callbacks,
        deployment,
        place,
    )


def _run(
    config: Config,
    begin: Callable[[Experiment, Callable[[str], None]], tuple[SimulationState, Start]],
    watcher: Watcher,
    callbacks: Mapping[str, Callback],
    deployment: Deployment | None,
    resumed: pathlib.Path | None,
) -> Outcome:
    started = time.perf_counter()
    use_compilation_cache(config.execution.compilation_cache)
    watcher.phase("reading data and calibrating noise")
    if deployment is None:
        experiment = assemble(config)
    else:
        experiment = deployment.deploy(assemble(config, deployment.population(config, resumed)))
    callbacks = {**callbacks_of(config.run.callbacks), **callbacks}
    require_publishable(experiment, callbacks)
    health = Health(watcher.warn, experiment.simulation.layout.chunk)
    for note in (*experiment.population.notes, *without_learning(config.training)):
        health.warn(note)
    for epsilon in experiment.budget.values():
        health.note_epsilon(epsilon)
    if text := more_than_cores(config.execution.devices):
        health.warn(text)
    if text := without_model(experiment):
        health.warn(text)
    if text := never_reached(experiment.simulation.algorithm, config.run.rounds):
        health.warn(text)
    with full_disk_named():
        state, start = begin(experiment, health.warn)
        if deployment is not None:
            start = charged_for(experiment, start, deployment.open(start.folder))
    try:
        with full_disk_named(start.folder), _interruptions(watcher) as is_interrupted:
            return _from(
                experiment, state, start, callbacks, health, watcher, started, is_interrupted
            )
    finally:
        start.lock.release()


def _from(
    experiment: Experiment,
    state: SimulationState,
    start: Start,
    callbacks: Mapping[str, Callback],
    health: Health,
    watcher: Watcher,
    started: float,
    is_interrupted: Callable[[], bool],
) -> Outcome:
    section = experiment.config.run
    logbook = Logbook(start.folder, from_round=int(state.round))
    write_json(start.folder / ENVIRONMENT_FILE, environment())
    health.note(read_metrics(start.folder))

    watcher.phase("compiling")
    compiling = time.perf_counter()
    state = jax.block_until_ready(experiment.simulation.compile(state, start.key))
    timing = {"seconds_compiling": time.perf_counter() - compiling}
    text = config_files.to_toml(experiment.written)

    def seconds() -> float:
        return start.seconds + time.perf_counter() - started

    def save(state: SimulationState) -> None:
        extra = {
            "ledgers": start.accounting.to_json(),
            "traffic": start.traffic.to_json(),
            "seconds": seconds(),
            "config": text,
        }
        # Saved before the next round overwrites client state.
        at_hand = experiment.simulation.portable(state, copies=False)
        start.checkpoints.save(at_hand, start.hyper, extra)

    if section.secret:
        # From round 0 on, so that no two configurations ever share a root.
        save(state)
    state, ended, stopped_by = _rounds(
        experiment, state, start, logbook, callbacks, health, watcher, save, is_interrupted
    )
    save(state)
    logbook.close()
    start.checkpoints.close()
    watcher.phase("evaluating and drawing")
    timing = {"seconds": seconds(), **timing}
    not_covered = []
    if ended == "interrupted":
        not_covered = ["after how many rounds the run was interrupted"]
    if stopped_by is not None and not callbacks[stopped_by].is_private:
        not_covered = [f"after how many rounds the run ended, which {stopped_by} decided"]
    summary = write_results(
        experiment,
        state,
        start,
        timing,
        health.warnings,
        ended,
        stopped_by,
        not_covered,
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
) -> tuple[SimulationState, Ended, str | None]:
    """Runs blocks of rounds; returns the state, how they ended, and by which callback."""
    section = experiment.config.run
    history = read_metrics(start.folder) if callbacks else []
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

    def stopping(state: SimulationState) -> str | None:
        progress = Progress(list(history), state, experiment, start.folder)
        return next((name for name, each in callbacks.items() if each.call(progress)), None)

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
        state, record, info = experiment.simulation.run(state, start.key, block, start.hyper)
        rows = _rows(experiment, start, record, info, done)
        done, allowed = done + block, allowed - block
        if allowed == 0:
            allowed = affordable()
        if allowed == 0 or done % section.evaluate_every == 0:
            rows[-1] |= evaluate(experiment.evaluator, state, start.hyper, section.seed)
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


@contextmanager
def _interruptions(watcher: Watcher) -> Iterator[Callable[[], bool]]:
    """Yields whether the run should stop, which the first Ctrl-C or SIGTERM asks for."""
    # The second raises KeyboardInterrupt. A compiled round may hold that up, so a thread listens
    # for signals too and has the watcher end the process.
    is_asked = is_urgent = False
    left = threading.Event()

    def note(signum: int, frame: Any) -> None:
        nonlocal is_asked
        is_asked = True
        if is_urgent:
            raise KeyboardInterrupt

    def listen(signals: socket.socket) -> None:
        nonlocal is_urgent
        first = None
        for byte in iter(lambda: signals.recv(1), b""):
            if byte[0] not in _STOPS:
                continue
            if first is None:
                first = time.monotonic()
                watcher.phase("stopping after the rounds under way; once more stops at once")
            elif time.monotonic() > first + _TOGETHER:
                break
        if left.is_set():
            return
        is_urgent = True
        _thread.interrupt_main()
        if not left.wait(_PATIENCE):
            watcher.end()

    try:
        before = {number: signal.signal(number, note) for number in _STOPS}
    except ValueError:  # Not the main thread, which alone receives signals.
        yield lambda: False
        return
    receiver, sender = socket.socketpair()
    sender.setblocking(False)
    woken = signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
    listener = threading.Thread(target=listen, args=(receiver,), daemon=True)
    listener.start()
    try:
        yield lambda: is_asked
    finally:
        left.set()
        signal.set_wakeup_fd(woken)
        sender.close()
        listener.join()
        receiver.close()
        for number, handler in before.items():
            signal.signal(number, handler)
