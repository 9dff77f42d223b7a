"""Runs experiments that share a program together, each in a run folder of its own."""

import contextlib
import itertools
import json
import pathlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from fedjax_dp.algorithms.registry import ALGORITHMS
from fedjax_dp.engine.execution.joint import Finished, Joint, Request
from fedjax_dp.experiment.assembly.assemble import assemble, checked_config, population_of
from fedjax_dp.experiment.assembly.devices import offer_devices
from fedjax_dp.experiment.components.callbacks import callbacks_of
from fedjax_dp.experiment.components.experiment import Callback, Experiment, Population
from fedjax_dp.experiment.components.schedules import entries_of
from fedjax_dp.experiment.reading import config_files
from fedjax_dp.experiment.running.environment import use_compilation_cache
from fedjax_dp.experiment.running.run import Outcome, Steps, checked_health, run_by, steps
from fedjax_dp.experiment.running.run_folder import CONFIG_FILE
from fedjax_dp.experiment.running.starting import fresh, restored, with_sweep
from fedjax_dp.experiment.running.watcher import Watcher, interruptions
from fedjax_dp.experiment.schema.config import Config

# Experiments whose states are in memory at the same time.
AT_ONCE = 64


class Job(NamedTuple):
    """An experiment to run."""

    config: Config  # The experiment.
    folder: pathlib.Path  # Its run folder, where an earlier run of it is resumed.
    callbacks: Mapping[str, Callback] = {}  # Besides those of the configuration.
    made: Experiment | None = None  # The assembled experiment, or None.


def alike(config: Config) -> str:
    """Describes a configuration without its numbers: those of one text may share a program."""

    def plain(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {name: plain(each) for name, each in value.items()}
        if isinstance(value, list | tuple):
            return [plain(each) for each in value]
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return 0 if is_number else value

    # Curves are numbers of a program too.
    scheduled = {"schedules": sorted(entries_of(config.schedules))}
    return json.dumps(plain(config.model_dump(mode="json")) | scheduled, sort_keys=True)


def batches(configs: Mapping[int, Config]) -> list[list[int]]:
    """Divides experiments by place: those of a batch differ in numbers, and may share a program."""
    classes: dict[str, list[int]] = {}
    for place, config in configs.items():
        classes.setdefault(alike(config), []).append(place)
    return [
        places[first : first + AT_ONCE]
        for places in classes.values()
        for first in range(0, len(places), AT_ONCE)
    ]


def run_together(
    jobs: Mapping[int, Job],
    watcher: Watcher,
    ended: Callable[[int, Outcome], None] = lambda place, outcome: None,
    stated: Mapping[str, Any] = {},
) -> tuple[dict[int, Outcome], bool]:
    """Runs experiments; those that share a program take their rounds from one compiled program.

    Each has its own noise, cohorts, ledger, statement, checkpoints and run folder, and the results
    that it has alone. An interruption ends all of them with a checkpoint; whether there was one is
    returned too, since those that were in their last rounds have ended as usual.
    """
    experiments = {
        place: with_sweep(experiment, jobs[place].folder, stated)
        for place, experiment in assembled(jobs, watcher)
    }
    groups: dict[str, list[int]] = {}
    for place, experiment in experiments.items():
        groups.setdefault(program_of(place, experiment), []).append(place)
    outcomes: dict[int, Outcome] = {}
    is_interrupted = False

    def note(place: int, outcome: Outcome) -> None:
        outcomes[place] = outcome
        ended(place, outcome)

    for some in groups.values():
        if not is_interrupted:
            of_group = {place: (jobs[place], experiments[place]) for place in some}
            is_interrupted = _run_group(of_group, watcher, note)
    # These programs are useless to the next batch, and there may be hundreds.
    jax.clear_caches()
    return outcomes, is_interrupted


def program_of(place: int, experiment: Experiment) -> str:
    """Names the program of an experiment, which others may share; its place, if it has none."""
    program = experiment.simulation.program
    return str(place) if program is None else program.digest


def assembled_before(
    jobs: Mapping[int, Job], groups: Sequence[Sequence[int]], watcher: Watcher
) -> dict[int, Job]:
    """Assembles experiments before any runs; many, which would not fit, for their errors alone."""
    for place in itertools.chain(*groups):
        # First what needs no data, which may be large.
        with naming(jobs[place]):
            checked_config(jobs[place].config)
    found, populations = dict(jobs), dict[Any, Population]()
    is_few = sum(map(len, groups)) <= AT_ONCE
    for places in groups if len(groups) > 1 else ():
        some = {place: jobs[place] for place in places}
        for place, experiment in assembled(some, watcher, populations if is_few else {}):
            if is_few:
                found[place] = jobs[place]._replace(made=experiment)
    return found


@contextlib.contextmanager
def naming(job: Job) -> Iterator[None]:
    """Names the experiment in the error that refuses it."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{job.folder.name}: {error}") from error


def assembled(
    jobs: Mapping[int, Job], watcher: Watcher, populations: dict[Any, Population] | None = None
) -> Iterator[tuple[int, Experiment]]:
    """Assembles experiments by place, of which those with the same data share them."""
    populations = {} if populations is None else populations
    for number, (place, job) in enumerate(jobs.items(), 1):
        if job.made is not None:
            yield place, job.made
            continue
        watcher.phase(f"reading data and calibrating noise, {number} of {len(jobs)}")
        config = job.config
        if (job.folder / CONFIG_FILE).is_file():
            config = config_files.load_config(job.folder / CONFIG_FILE)
        elif len(jobs) > 1 and config.execution.devices == "auto":
            offer_devices(config.execution.devices)
            config = on_one_device(config)
        use_compilation_cache(config.execution.compilation_cache)
        is_pooled = ALGORITHMS[config.algorithm.name].pools_clients
        name = config.data.model_dump_json(), config.data_seed, is_pooled
        with naming(job):
            if name not in populations:
                checked_config(config)
                populations[name] = population_of(config)
            experiment = assemble(config, populations[name])
        yield place, experiment


def on_one_device(config: Config) -> Config:
    """Replaces "auto" where several run: devices are for experiments, not for clients of one."""
    if config.execution.devices != "auto":
        return config
    section = config.execution.model_copy(update={"devices": 1})
    return config.model_copy(update={"execution": section})


def _run_group(
    jobs: Mapping[int, tuple[Job, Experiment]],
    watcher: Watcher,
    ended: Callable[[int, Outcome], None],
) -> bool:
    """Runs experiments of one program; returns whether there was an interruption."""
    experiments = _sharing([experiment for _, experiment in jobs.values()])
    progress = _Progress(watcher, [e.config.run.rounds for e in experiments])
    with contextlib.ExitStack() as stack:
        is_interrupted = stack.enter_context(interruptions(watcher))
        courses: dict[int, Steps] = {}
        for place, (job, _), experiment in zip(jobs, jobs.values(), experiments, strict=True):
            courses[place] = _begun(job, experiment, progress.of(place), is_interrupted, stack)
        watcher.phase("compiling")
        wanted = {place: next(course) for place, course in courses.items()}
        run = _runner(experiments, dict(zip(jobs, range(len(jobs)), strict=True)))
        while wanted:
            for place, finished in run(wanted).items():
                try:
                    wanted[place] = courses[place].send(finished)
                except StopIteration as end:
                    del wanted[place]
                    ended(place, end.value)
        return is_interrupted()


def _begun(
    job: Job,
    experiment: Experiment,
    watcher: Watcher,
    is_interrupted: Callable[[], bool],
    stack: contextlib.ExitStack,
) -> Steps:
    """Starts or resumes a run, whose folder stays locked until the stack is closed."""
    callbacks = {**callbacks_of(experiment.config.run.callbacks), **job.callbacks}
    health = checked_health(experiment, callbacks, watcher)
    if (job.folder / CONFIG_FILE).is_file():
        state, start = restored(experiment, job.folder, health.warn)
    else:
        state, start = fresh(experiment, job.folder)
    stack.callback(start.lock.release)
    begun = time.perf_counter()
    course = steps(experiment, state, start, callbacks, health, watcher, begun, is_interrupted)
    stack.enter_context(contextlib.closing(course))
    return course


def _sharing(experiments: Sequence[Experiment]) -> list[Experiment]:
    """Shares compiled functions: the first state of all, and equal evaluations of the same data."""
    init, evaluators = experiments[0].simulation.init, dict[Any, Any]()
    linked = []
    for each in experiments:
        # Evaluations read frozen parameters too.
        frozen = jax.tree.leaves((each.simulation.federation.facts.frozen, each.model.frozen))
        section = each.config.evaluation
        # Models to compare with are trained from the seed of the run.
        start = None if section.references.epochs is None else each.config.run.seed
        asked = section.model_dump_json(), *each.config.run.metrics, start
        inputs = id(each.population), asked, *map(id, frozen)
        evaluator = evaluators.setdefault(inputs, each.evaluator)
        linked.append(
            each._replace(simulation=each.simulation._replace(init=init), evaluator=evaluator)
        )
    return linked


Run = Callable[[Mapping[int, Request]], Mapping[int, Finished]]


def _runner(experiments: Sequence[Experiment], index: Mapping[int, int]) -> Run:
    """Returns what runs rounds: one program for all, or the simulation of the only one."""
    programs = [e.simulation.program for e in experiments if e.simulation.program is not None]
    if len(programs) < 2:
        simulation = experiments[0].simulation
        return lambda wanted: {place: run_by(simulation, each) for place, each in wanted.items()}
    devices = jax.devices() if experiments[0].simulation.layout.mesh is None else None
    joint = Joint(programs, devices=devices)

    def run(wanted: Mapping[int, Request]) -> Mapping[int, Finished]:
        places = {index[place]: place for place in wanted}
        finished = joint.run({index[place]: each for place, each in wanted.items()})
        return {places[i]: each for i, each in finished.items()}

    return run


class _Progress:
    """Adds up the rounds of several runs for one watcher."""

    def __init__(self, watcher: Watcher, rounds: Sequence[int]) -> None:
        self._watcher, self._total = watcher, sum(rounds)
        self._done: dict[int, int] = {}

    def of(self, place: int) -> Watcher:
        """Returns the watcher of one run."""
        outer, done = self._watcher, self._done

        class OfOne(Watcher):
            def done(self, rounds: int, row: Mapping[str, Any]) -> None:
                done[place] = rounds
                outer.done(sum(done.values()), row)

        return OfOne()


class Continued(Watcher):
    """Adds the rounds of experiments that ran before, for which the count begins again at 0."""

    def __init__(self, watcher: Watcher) -> None:
        """Continues the count of a watcher."""
        self._watcher, self._before, self._now = watcher, 0, 0

    def phase(self, name: str) -> None:
        """Receives the current phase."""
        self._watcher.phase(name)

    def done(self, rounds: int, row: Mapping[str, Any]) -> None:
        """Receives the rounds of the experiments that run now."""
        if rounds < self._now:
            self._before += self._now
        self._now = rounds
        self._watcher.done(self._before + rounds, row)

    def warn(self, text: str) -> None:
        """Receives a warning."""
        self._watcher.warn(text)

    def should_stop(self) -> bool:
        """Returns whether the experiments should end."""
        return self._watcher.should_stop()

    def end(self) -> None:
        """Ends the process."""
        self._watcher.end()
