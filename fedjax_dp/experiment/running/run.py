"""Runs an experiment, from its seed or from its newest checkpoint; what people read of it."""

import contextlib
import math
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from fedjax_dp.core import checks
from fedjax_dp.core.decimals import shown
from fedjax_dp.engine.execution.compile import Simulation
from fedjax_dp.engine.execution.joint import Finished, Request
from fedjax_dp.engine.round import SimulationState
from fedjax_dp.experiment.assembly.assemble import assemble
from fedjax_dp.experiment.assembly.devices import more_than_cores
from fedjax_dp.experiment.components.callbacks import callbacks_of
from fedjax_dp.experiment.components.experiment import Callback, Deployment, Experiment
from fedjax_dp.experiment.running.environment import use_compilation_cache
from fedjax_dp.experiment.running.processes import (
    agreed,
    place_of_process,
    require_one_process,
    start_processes,
)
from fedjax_dp.experiment.running.release import require_publishable, without_model
from fedjax_dp.experiment.running.run_folder import config_of, is_deployed, require_place
from fedjax_dp.experiment.running.starting import Start, accounting_of, fresh, restored, with_sweep
from fedjax_dp.experiment.running.steps import Outcome, Steps, steps
from fedjax_dp.experiment.running.watcher import (
    Health,
    Watcher,
    interruptions,
    large_deltas,
    never_reached,
    without_learning,
)
from fedjax_dp.experiment.schema.config import Config
from fedjax_dp.io.digests import reporting_full_disk, resumed_by


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
    with place_of_process(None if folder is None else pathlib.Path(folder).expanduser()) as place:
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
    place = pathlib.Path(folder).expanduser()
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
    count = summary["rounds"]
    parts = [f"{count} {'round' if count == 1 else 'rounds'} in {summary['seconds']:.1f} s"]
    if "simulated_seconds" in summary:
        parts.append(f"{summary['simulated_seconds']:.6g} simulated seconds")
    of_all, shared = (summary.get(f"{of}test_accuracy", np.nan) for of in ("", "shared_"))
    if np.isfinite(of_all):
        parts.append(f"test accuracy of {summary['test_accuracy_of']} {of_all:.4f}")
    if np.isfinite(shared):
        parts.append(f"of the shared model {shared:.4f}")
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
