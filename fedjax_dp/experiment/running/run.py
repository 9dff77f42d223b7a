"""Runs an experiment, from its seed or from its newest checkpoint; what people read of it."""

import contextlib
import math
import pathlib
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from fedjax_dp.core import checks, files
from fedjax_dp.core.decimals import shown
from fedjax_dp.core.devices import is_distributed, of_first_process
from fedjax_dp.core.packages import MissingPackageError
from fedjax_dp.engine.client_store import ClientStore
from fedjax_dp.engine.execution.compile import Simulation
from fedjax_dp.engine.execution.joint import Finished, Request
from fedjax_dp.engine.record import RoundInfo, RoundRecord
from fedjax_dp.engine.round import SimulationState
from fedjax_dp.engine.wrappers.budgets import is_spent
from fedjax_dp.experiment.assembly.assemble import assemble
from fedjax_dp.experiment.assembly.devices import more_than_cores
from fedjax_dp.experiment.components.callbacks import callbacks_of
from fedjax_dp.experiment.components.experiment import Callback, Deployment, Experiment, Progress
from fedjax_dp.experiment.components.keeping import KEY, kept_metric
from fedjax_dp.experiment.components.noised import noised_accuracy_of
from fedjax_dp.experiment.components.schedules import after_plateaus, plateaus_of
from fedjax_dp.experiment.running.environment import environment, use_compilation_cache
from fedjax_dp.experiment.running.keeping import (
    Kept,
    better,
    copied,
    facts_of_kept,
    with_kept,
)
from fedjax_dp.experiment.running.metric_names import (
    followed_metrics,
    require_metrics,
    shown_rows,
)
from fedjax_dp.experiment.running.processes import (
    agreed,
    chosen_by_first,
    place_of_process,
    require_one_process,
    require_same,
    start_processes,
)
from fedjax_dp.experiment.running.release import require_publishable, without_model
from fedjax_dp.experiment.running.results import (
    Ended,
    evaluate,
    import_plots,
    released,
    write_results,
)
from fedjax_dp.experiment.running.run_folder import (
    AT_START,
    CHECKPOINT_FOLDER,
    ENVIRONMENT_FILE,
    config_of,
    is_deployed,
    require_place,
)
from fedjax_dp.experiment.running.starting import (
    Start,
    accounting_of,
    affordable_rounds,
    first_state,
    fresh,
    restored,
    with_sweep,
)
from fedjax_dp.experiment.running.watcher import (
    Health,
    Watcher,
    interruptions,
    large_deltas,
    never_reached,
    without_learning,
)
from fedjax_dp.experiment.schema.config import Config
from fedjax_dp.io.checkpoint import record_of
from fedjax_dp.io.digests import reporting_full_disk, resumed_by, seal
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
    if section.plots:
        try:
            import_plots()
        except MissingPackageError as missing:
            health.warn(f"no plots are drawn: {missing}")
    compiling = time.perf_counter()
    state = jax.block_until_ready((yield Request(state, start.key, start.hyper, 0)).state)
    timing = {"seconds_compiling": time.perf_counter() - compiling}
    base, first = kinds.digest(experiment.model.frozen), time.perf_counter()

    def seconds() -> dict[str, float]:
        now, before = time.perf_counter(), start.seconds
        whole, rounds = before.whole + now - started, before.rounds + now - first
        return {"seconds": whole, "seconds_rounds": rounds}

    def save(state: SimulationState, kept: Kept | None, left_out: int = 0) -> None:
        ledgers = start.accounting.to_json()
        require_same("the ledgers", ledgers)
        extra = {
            "ledgers": ledgers,
            "traffic": start.traffic.to_json(),
            "config": start.text,
            "frozen": base,
            "kept": facts_of_kept(kept),
            "planned_rounds": int(state.round) + left_out,
        } | seconds()
        # Saved before the next round overwrites client state.
        whole = with_kept(experiment, experiment.simulation.for_checkpoint(state), kept)
        start.checkpoints.save(whole, start.hyper, extra)
        known = {METRICS_FILE: logbook.check()}
        seal(start.folder, [f"{CHECKPOINT_FOLDER}/{record_of(int(state.round))}"], known)

    if section.secret:
        # From round 0 on, so that no two configurations ever share a root.
        save(state, start.kept)
    state, start, ended, stopped_by = yield from _rounds(
        experiment, state, start, logbook, callbacks, health, watcher, save, is_interrupted
    )
    left_out = 0
    if stopped_by is not None and callbacks[stopped_by].is_private:
        left_out = _affordable(experiment, state, start)
    save(state, start.kept, left_out)
    logbook.close()
    start.checkpoints.close()
    watcher.phase("evaluating and drawing")
    timing |= seconds()
    if left_out:
        experiment = _charged_as_planned(experiment, state, start, left_out)
    summary = write_results(
        experiment,
        _models_at_hand(experiment, state),
        start,
        timing,
        health.warnings,
        ended,
        stopped_by,
        _ends_not_covered(ended, stopped_by, experiment.stated.get("pruner"), callbacks),
        None if start.kept is None else start.kept.state,
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
    save: Callable[[SimulationState, Kept | None], None],
    is_interrupted: Callable[[], bool],
) -> Generator[Request, Finished, tuple[SimulationState, Start, Ended, str | None]]:
    """Asks for blocks of rounds; returns the state, how they ended, and by which callback.

    The start that is returned has the numbers of the next round, and the best one so far.
    """
    section, plateaus = experiment.config.run, plateaus_of(experiment.config)
    history = list(logbook.rows) if callbacks or plateaus else []
    done, total = int(state.round), section.rounds

    def affordable() -> int:
        spent = is_spent(experiment.simulation.federation, state)
        return 0 if spent else _affordable(experiment, state, start)

    def adapted() -> Start:
        hyper = after_plateaus(start.hyper, plateaus, history, section.evaluate_every)
        # In all processes by the metrics of the first.
        return start._replace(hyper=of_first_process(hyper))

    def stopping(state: SimulationState) -> str | None:
        if not callbacks:
            return None
        at_hand = _at_hand(experiment, state)

        def choose() -> str | None:
            progress = Progress(list(history), at_hand, experiment, start.folder, health.warn)
            return next((name for name, each in callbacks.items() if each.call(progress)), None)

        return chosen_by_first(choose, list(callbacks))

    if plateaus:
        start = adapted()
    # Computed again once used up: if fewer clients were drawn than allowed for, there is more.
    allowed = affordable()
    watcher.done(done, {})
    # A callback that ended the run before ends it again.
    if history and done % section.evaluate_every == 0 and (name := stopping(state)):
        return state, start, "callback", name
    while done < total and not is_interrupted():
        if allowed == 0:
            return state, start, "budget", None
        stops = (section.evaluate_every, section.checkpoint_every)
        block = min(allowed, *(every - done % every for every in stops))
        state, record, info = yield Request(state, start.key, start.hyper, block)
        rows = _rows(experiment, start, record, info, done)
        # Fewer where others, which run together with this one, wanted fewer.
        done, allowed = done + len(rows), allowed - len(rows)
        if allowed == 0 or is_spent(experiment.simulation.federation, state):
            allowed = affordable()
        if allowed == 0 or done % section.evaluate_every == 0:
            held = _models_at_hand(experiment, state)
            evaluated = evaluate(experiment.evaluator, held, start.hyper, section.seed)
            found = evaluated.figures | released(experiment, done, evaluated.parts, start.key)
            rows[-1] |= found
            start = start._replace(kept=better(experiment, start.kept, found, held))
        health.note(rows)
        for row in rows:
            logbook.write(row)
        watcher.done(done, rows[-1])
        history += [to_json(row) for row in rows] if callbacks or plateaus else []
        if plateaus and done % section.evaluate_every == 0:
            start = adapted()
            allowed = affordable()
        if done % section.checkpoint_every == 0:
            save(state, start.kept)
        if done % section.evaluate_every == 0 and (name := stopping(state)):
            return state, start, "callback", name
    return state, start, "interrupted" if done < total else "finished", None


def _affordable(experiment: Experiment, state: SimulationState, start: Start) -> int:
    """Counts the planned rounds that may still run before a budget is exceeded."""
    at_hand = _at_hand(experiment, state._replace(clients=None))
    return affordable_rounds(experiment, at_hand, start.accounting, start.hyper, start.key)


def _charged_as_planned(
    experiment: Experiment, state: SimulationState, start: Start, count: int
) -> Experiment:
    """Charges the rounds that a run left out because of what it had released, and states them.

    Any round could have been the last: ε of the rounds that ran covers no such choice, and ε of all
    planned rounds covers each, as post-processing of the longest run.
    """
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
    noised = noised_accuracy_of(experiment.config)
    shown, sent = shown_rows(experiment, record, info), start.traffic.count(record, info)
    for i, row in enumerate(shown):
        # Read once for each change of numbers that a metric decides.
        one = jax.tree.map(lambda x, i=i: x[i : i + 1], record)
        start.accounting.charge(one, start.hyper if start.hyper.factors else None)
        # The evaluation that follows, so that the row has the ε of all that it shows.
        if noised is not None and (done + i + 1) % noised.every == 0:
            start.accounting.charge_evaluation()
        # Privacy loss distributions are slow to compose: computed once per checkpoint.
        is_asked = accountant != "pld" or (
            (done + i + 1) % experiment.config.run.checkpoint_every == 0
        )
        spent = start.accounting.epsilon(experiment.claimed_delta, accountant) if is_asked else {}
        row |= sent[i]
        for unit, each in spent.items():
            row[f"epsilon_{unit}"] = float(np.max(each))
            if np.min(each) < np.max(each):
                row[f"epsilon_{unit}_smallest"] = float(np.min(each))
        rows.append({"round": done + i + 1} | row)
    return rows


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
      callbacks: called after each evaluation, by name, besides those of the configuration; where
        several processes share the run, by the first, and the others receive its decision.
      deployment: where rounds run, such as on the nodes of a Flower federation; None for this
        process.

    Returns:
      The folder, the summary, and why the run ended.

    Raises:
      ValueError: if `assemble` refuses the configuration, the privacy cannot be accounted, or the
        folder is in use.
    """
    _connect(config, deployment)
    asked = None if folder is None else files.expanded(folder)
    with place_of_process(asked) as place:
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
    config: Config | None = None,
) -> Outcome:
    """Resumes a run from its newest intact checkpoint, with the bits of an uninterrupted run.

    Args:
      folder: the run folder.
      watcher: receives the progress; None for none.
      callbacks: the callbacks that the run was started with.
      words: overrides as on a command line: of `[execution]`, `run.release`, and a larger
        `run.rounds`.
      deployment: as for `run`; rounds that were sent and whose outcome was lost are charged.
      config: the configuration, which may differ from that of the run as `words` may; None for that
        in the folder.

    Returns:
      The same as `run`.

    Raises:
      ValueError: as for `run`, if the configuration differs from that of the run, or if the run was
        deployed and `deployment` is None.
    """
    place = files.expanded(folder)
    rule = "be resumed where its rounds run, by `flwr run` with this folder as `output`"
    can_resume = deployment is not None or not is_deployed(place)
    checks.require(can_resume, "the deployed run", rule, str(place))
    checks.require(
        config is None or not words, "words", "be none if a config is given", list(words)
    )
    if config is None:
        config = config_of(place, (watcher or Watcher()).warn, words)
    _connect(config, deployment)
    with place_of_process(place) as own:
        return _run(
            config,
            lambda experiment, warn: restored(experiment, place, warn, own),
            watcher or Watcher(),
            callbacks,
            deployment,
            place,
        )


def _connect(config: Config, deployment: Deployment | None) -> None:
    """Connects the processes of a run, of which there is one where others would not work."""
    if deployment is not None:
        require_one_process(config.execution, "a deployment")
    start_processes(config)


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
    if resumed is not None:
        experiment = with_sweep(experiment, resumed)
    callbacks = {**callbacks_of(config.run.callbacks), **callbacks}
    health = checked_health(experiment, callbacks, watcher)
    with reporting_full_disk():
        state, start = begin(experiment, health.warn)
    try:
        kept = resumed_by(start.folder)
        with reporting_full_disk(kept), interruptions(watcher) as is_asked:
            is_interrupted = agreed(is_asked)
            if deployment is not None:
                sent = deployment.open(start.folder, int(state.round))
                start = start._replace(accounting=accounting_of(experiment, start.hyper, sent))
            course = steps(
                experiment, state, start, callbacks, health, watcher, started, is_interrupted
            )
            return _run_alone(course, experiment.simulation)
    finally:
        start.lock.release()


def checked_health(
    experiment: Experiment, callbacks: Mapping[str, Callback], watcher: Watcher
) -> Health:
    """Requires that an experiment can be published as it asks; warns of what may be unintended."""
    config = experiment.config
    require_publishable(experiment, callbacks)
    _require_keepable(experiment)
    if any(followed_metrics(experiment)):
        require_metrics(experiment, _models_at_hand(experiment, first_state(experiment)))
    health = Health(watcher.warn, experiment.simulation.layout.chunk)
    notes = *experiment.population.notes, *without_learning(config.training)
    for note in (*notes, *large_deltas(experiment)):
        health.warn(note)
    for epsilon in experiment.budget.values():
        health.note_epsilon(epsilon)
    texts = (
        more_than_cores(config.execution.devices),
        without_model(experiment),
        never_reached(experiment.simulation.algorithm, config.run.rounds),
    )
    for text in filter(None, texts):
        health.warn(text)
    return health


def _require_keepable(experiment: Experiment) -> None:
    """Requires a state to copy of a run that keeps its best round."""
    section = experiment.config.run
    if kept_metric(section) is None:
        return
    require_one_process(experiment.config.execution, f"{KEY} = {section.keep!r}")
    held = copied(experiment, first_state(experiment))
    is_here = not isinstance(held.clients, ClientStore)
    rule = "be 'last' for client states on disk, from which the clients' models are read"
    checks.require(is_here, KEY, rule, section.keep)


def run_by(simulation: Simulation, wanted: Request) -> Finished:
    """Runs the rounds that a run asks for."""
    state, key, hyper, num_rounds = wanted
    if num_rounds == 0:
        return Finished(simulation.compile(state, key), None, None)
    return Finished(*simulation.run(state, key, num_rounds, hyper))


def _run_alone(course: Steps, simulation: Simulation) -> Outcome:
    """Runs rounds until a run ends."""
    with contextlib.closing(course):
        wanted = next(course)
        while True:
            try:
                wanted = course.send(run_by(simulation, wanted))
            except StopIteration as end:
                return end.value


# Share of padding in a round above which it is shown.
_MUCH_PADDING = 0.5


def round_in_words(rounds: int, total: int, row: Mapping[str, Any]) -> str:
    """Describes the progress of a run: completed rounds and the newest metrics."""
    text = f"round {rounds} of {total}"
    if math.isfinite(row.get("test_accuracy", math.nan)):
        text += f", accuracy {row['test_accuracy']:.3f}"
    if math.isfinite(row.get("shared_test_accuracy", math.nan)):
        text += f" (shared model {row['shared_test_accuracy']:.3f})"
    for name in ("epsilon_record", "epsilon_client"):
        if row.get(name) is not None:
            text += f", ε {shown(name, row[name])} ({name.removeprefix('epsilon_')})"
    if row.get("padding_share") is not None and row["padding_share"] > _MUCH_PADDING:
        text += f", padding {row['padding_share']:.2f}"
    return text


def describe_early_end(outcome: Outcome) -> str:
    """Describes why a run ended before its last round; empty if it did not."""
    rounds, stopped_by = outcome.summary["rounds"], outcome.summary.get("stopped_by")
    return {
        "finished": "",
        "interrupted": f"interrupted after round {rounds}",
        "budget": f"stopped after round {rounds}: one more would exceed the budget",
        "callback": f"stopped after round {rounds} by {stopped_by}",
    }[outcome.ended]


def summary_in_words(summary: Mapping[str, Any]) -> str:
    """Describes the result of a run in one line: rounds, accuracy, and ε with what it covers."""
    count, seconds, whole = (summary[name] for name in ("rounds", "seconds_rounds", "seconds"))
    parts = [f"{count} {'round' if count == 1 else 'rounds'} in {seconds:.1f} s"]
    parts[0] += f" ({whole:.1f} s with reading and compiling)"
    if "simulated_seconds" in summary:
        parts.append(f"{summary['simulated_seconds']:.6g} simulated seconds")
    of_all, shared = (summary.get(f"{of}test_accuracy", np.nan) for of in ("", "shared_"))
    if np.isfinite(of_all):
        parts.append(f"test accuracy of {summary['test_accuracy_of']} {of_all:.4f}")
    if np.isfinite(shared):
        parts.append(f"of the shared model {shared:.4f}")
    if "kept_round" in summary:
        parts.append(f"the model is that of round {summary['kept_round']}")
    if np.isfinite(summary.get("unseen_accuracy", np.nan)):
        parts.append(f"of clients that never took part {summary['unseen_accuracy']:.4f}")
    if summary.get("worst_client_accuracy") is not None:
        parts.append(f"worst client {summary['worst_client_accuracy']:.4f}")
    if summary["epsilon"] is not None:
        low, high = (shown("dp_delta", summary[f"dp_delta{of}"], 6) for of in ("_smallest", ""))
        delta = high if low == high else f"{low} to {high}"
        parts.append(f"ε = {shown('epsilon', summary['epsilon'])} at δ = {delta}")
        parts[-1] += f", which covers {summary['covered_models']}"
        if "epsilon_of_shared_record" in summary:
            parts.append(_of_shared_record(summary))
        if "not_covered" in summary:
            parts.append(f"NOT covered: {summary['not_covered']}")
    else:
        parts.append("no privacy is claimed")
    return ", ".join(parts)


def _of_shared_record(summary: Mapping[str, Any]) -> str:
    """Reports ε of a record that several clients hold."""
    epsilon = summary["epsilon_of_shared_record"]
    if epsilon is None:
        return "no ε can be stated for a record that one client holds several times"
    delta = shown("dp_delta", summary["dp_delta_of_shared_record"], 6)
    return f"for a record that several clients hold: ε = {shown('epsilon', epsilon)} at δ = {delta}"
