"""Points of a study on the workers of an executor end as in one process, whatever workers do."""

import contextlib
import json
import os
import pathlib
import pickle
import signal
import sys
import threading
import time
from concurrent.futures import BrokenExecutor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from types import SimpleNamespace

import dp_accounting as dpa
import numpy as np
import pytest
from dp_accounting.dp_event import RepeatAndSelectDpEvent
from dp_accounting.rdp import RdpAccountant
from run_folders import NOT_PRIVATE, SMALL, read_json

from fedjax_dp.core.packages import MissingPackageError
from fedjax_dp.experiment import Cluster, Study, Watcher, WorkerError, grid_points, sweep
from fedjax_dp.experiment.components.experiment import Callback
from fedjax_dp.experiment.reading import config_files
from fedjax_dp.experiment.running.run import Outcome
from fedjax_dp.experiment.schema.constraints import ConfigError
from fedjax_dp.experiment.studies import cluster as module
from fedjax_dp.experiment.studies import executors, worker
from fedjax_dp.experiment.studies.batched_runs import Job, batches
from fedjax_dp.experiment.studies.selection import TRIALS_FILE, select_privately
from fedjax_dp.experiment.studies.sweep import (
    as_csv,
    average_over_seeds,
    loaded,
    read_summaries,
    run_all,
)
from fedjax_dp.privacy.accounting.renyi import orders_of
from fedjax_dp.privacy.mechanisms.selection import Repetition

WORDS = (*SMALL, *NOT_PRIVATE, "--execution.devices=1")
STUDY = Study(
    name="digits",
    file=None,
    axes={
        "rate": {rate: (f"--training.learning_rate={rate}",) for rate in ("0.1", "0.3", "0.5")},
        "batch": {size: (f"--training.batch_size={size}",) for size in ("8", "16")},
        "seed": {seed: (f"--run.seed={seed}",) for seed in ("0", "1")},
    },
    rows="rate",
    columns="batch",
    metrics={"test_accuracy": 1.0},
)
GRID = grid_points(STUDY, words=WORDS)


class Here:
    """An executor that works at once in this process, on what another process would get."""

    def __init__(self):
        self.tasks = []

    def submit(self, function, task):
        task = pickle.loads(pickle.dumps(task))
        self.tasks.append(task)
        future = Future()
        try:
            future.set_result(function(task))
        except Exception as death:
            future.set_exception(death)
        return future

    def names(self):
        """The tasks by kind, each with the names of its points."""
        return [
            (each.is_check, sorted(pathlib.Path(part.folder).name for part in each.parts.values()))
            for each in self.tasks
        ]


def finish(job, ended="finished"):
    """Writes what a run that has ended writes; its accuracy is its learning rate."""
    job.folder.mkdir(exist_ok=True)
    (job.folder / "config.toml").write_text(config_files.to_toml(job.config), encoding="utf-8")
    rate, section = job.config.training.learning_rate, job.config.run
    summary = {"test_accuracy": rate, "rounds": section.rounds, "seconds": 1.0, "ended": ended}
    (job.folder / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
    return Outcome(job.folder, summary, ended, False)


@pytest.fixture(autouse=True)
def _without_waiting(monkeypatch):
    monkeypatch.setattr(module, "_PAUSE", 0.001)
    monkeypatch.setattr(worker, "_PAUSE", 0.0)


@pytest.fixture
def played(monkeypatch):
    """Runs without JAX; the points that were assembled, and those that ran, by name."""
    seen = {"checked": [], "ran": []}

    def assembled(jobs, watcher):
        for place, job in jobs.items():
            seen["checked"].append(job.folder.name)
            # Batches of another size are of another shape.
            program = SimpleNamespace(digest=str(job.config.training.batch_size))
            yield place, SimpleNamespace(simulation=SimpleNamespace(program=program))

    def run_together(jobs, watcher, stated):
        seen["ran"] += [job.folder.name for job in jobs.values()]
        watcher.done(sum(job.config.run.rounds for job in jobs.values()), {"test_accuracy": 0.5})
        return {place: finish(job) for place, job in jobs.items()}, False

    monkeypatch.setattr(worker, "assembled", assembled)
    monkeypatch.setattr(worker, "run_together", run_together)
    return seen


class Shown(Watcher):
    """The phases and rounds that a study shows."""

    def __init__(self):
        self.phases, self.rounds = [], []

    def phase(self, name):
        self.phases.append(name)

    def done(self, rounds, row):
        self.rounds.append((rounds, row))


def swept(output, executor, workers=2, grid=GRID, said=None, watcher=None):
    report = (lambda line: None) if said is None else said.append
    sweep(STUDY, grid, output, report, watcher=watcher, cluster=Cluster(executor, workers))


@pytest.mark.parametrize(("workers", "count"), [(1, 2), (2, 2), (3, 4), (4, 4), (100, 12)])
def test_points_of_one_program_and_seed_stay_together(played, tmp_path, workers, count):
    executor, said = Here(), []
    swept(tmp_path, executor, workers, said=said)
    names = {point.name for point in GRID}
    assert {*played["ran"]} == {*played["checked"]} == names and len(said) == len(names)
    tasks = [points for is_check, points in executor.names() if not is_check]
    assert len(tasks) == count and sum(map(len, tasks)) == len(names)
    for points in tasks:
        assert len({name.split(",")[1] for name in points}) == 1, "one batch size"
    if count == 4:
        assert all(len({name.split(",")[2] for name in points}) == 1 for points in tasks)
    # All are checked by as many workers, before the first runs.
    checks = [is_check for is_check, _ in executor.names()]
    assert checks == [True] * min(workers, count) + [False] * count
    assert not [*tmp_path.glob(".workers-*")]
    for point in GRID:
        assert read_json(tmp_path / point.name, "summary.json")["rounds"] == 2


def test_what_crosses_is_data_alone(played, tmp_path):
    executor = Here()
    swept(tmp_path, executor, grid=GRID[:2])
    for task in executor.tasks:
        for place, part in task.parts.items():
            assert config_files.from_toml(part.config, "") == loaded(STUDY, GRID[place])
            assert part.folder == str(tmp_path / GRID[place].name) and part.callbacks == {}
        assert task.stated == {"sweep": 2} and os.path.samefile(task.place.working_folder, ".")


def test_devices_are_for_points_where_one_process_has_several():
    words = tuple(w for w in WORDS if "devices" not in w)
    grid = grid_points(STUDY, words=words)
    for some, devices in ((grid, 1), (grid[:1], "auto")):
        jobs = {i: Job(loaded(STUDY, p), pathlib.Path(p.name)) for i, p in enumerate(some)}
        groups = batches({i: job.config for i, job in jobs.items()})
        assert module._is_sharing(jobs, groups) == (devices == 1)
        for part in module._parts(jobs, groups).values():
            assert config_files.from_toml(part.config, "").execution.devices == devices


def test_nothing_runs_if_a_worker_refuses_a_point(played, tmp_path, monkeypatch):
    def assembled(jobs, watcher):
        raise ValueError("rate=0.3,batch=8,seed=0: model.name must be of images")
        yield

    monkeypatch.setattr(worker, "assembled", assembled)
    with pytest.raises(ValueError, match=r"^rate=0\.3,batch=8,seed=0: model\.name must be of im"):
        swept(tmp_path, Here())
    assert not played["ran"] and not [*tmp_path.iterdir()]


def test_a_configuration_that_cannot_be_is_refused_before_any_worker(played, tmp_path):
    grid = grid_points(STUDY, words=(*WORDS, "--algorithm.name=dp_fedavg"))
    executor = Here()
    with pytest.raises(ValueError, match=r"rate=0\.1,batch=8,seed=0: privacy\.unit must be"):
        swept(tmp_path, executor, grid=grid)
    assert not executor.tasks


class Dying(Here):
    """An executor some of whose workers die, after they have saved what `before` saves."""

    def __init__(self, deaths, before=lambda task, number: None):
        super().__init__()
        self.deaths, self.before = deaths, before

    def submit(self, function, task):
        number = sum(not each.is_check for each in self.tasks)
        if task.is_check or number not in self.deaths:
            return super().submit(function, task)
        self.tasks.append(task)
        self.before(task, number)
        future = Future()
        future.set_exception(RuntimeError("the machine is gone\nmuch more"))
        return future


def test_points_of_a_worker_that_died_go_to_another(played, tmp_path):
    """One of them had ended, and does not run again; the rounds that are shown never fall."""
    done, shown = [], Shown()

    def before(task, number):
        part = next(iter(task.parts.values()))
        done.append(pathlib.Path(part.folder).name)
        finish(Job(config_files.from_toml(part.config, ""), pathlib.Path(part.folder)))
        # More than another worker will report, which begins at the newest checkpoint.
        progress = worker.Progress("host", 1, "running", 2 * len(task.parts) + 1, {})
        worker.file_of(task).write_text(json.dumps(progress._asdict()), encoding="utf-8")

    executor, said = Dying({0}, before), []
    swept(tmp_path, executor, 1, said=said, watcher=shown)
    rounds = [each for each, _ in shown.rounds]
    assert rounds == sorted(rounds) and rounds[-1] == 2 * len(GRID) + 1
    names = {point.name for point in GRID}
    assert {*played["ran"]} == names - {*done} and len(played["ran"]) == len(names) - 1
    [line] = [line for line in said if "died" in line]
    assert done[0] in line and line.endswith(
        "a worker died, and another resumes: RuntimeError: the machine is gone"
    )
    # Each point is reported once.
    assert len(said) == 1 + len(names) and all(any(n in line for line in said) for n in names)


def test_a_task_whose_workers_die_for_nothing_ends_the_study(played, tmp_path):
    executor = Dying(range(100))
    with pytest.raises(WorkerError, match=r"rate=0\.1,.* and \d more: 3 workers in a row died"):
        swept(tmp_path, executor, workers=1)
    assert len(executor.tasks) == 1 + 3 and not played["ran"]
    # What is saved in between shows that a further worker helps.

    def before(task, number):
        folder = pathlib.Path(next(iter(task.parts.values())).folder)
        (folder / "checkpoint" / str(number + 1)).mkdir(parents=True)

    swept(tmp_path / "again", Dying(range(8), before), grid=GRID[:1])
    assert played["ran"] == [GRID[0].name]


def test_a_machine_that_asks_its_worker_to_end_has_its_points_resumed(
    played, tmp_path, monkeypatch
):
    inner, asked = worker.run_together, []

    def run_together(jobs, watcher, stated):
        if not asked:
            asked.append(len(jobs))
            return {place: finish(job, "interrupted") for place, job in jobs.items()}, True
        return inner(jobs, watcher, stated=stated)

    monkeypatch.setattr(worker, "run_together", run_together)
    said = []
    swept(tmp_path, Here(), said=said)
    assert {*played["ran"]} == {point.name for point in GRID}
    assert not any("(interrupted" in line for line in said)
    assert sum("asked it to end" in line for line in said) == 1


@pytest.mark.parametrize(
    ("error", "kind", "rule"),
    [
        (ConfigError("the run folder 'x' is in use"), ConfigError, r"^rate=0\.1,batch=8,.* and 3"),
        (MemoryError("none left"), MemoryError, r"^rate=0\.1,batch=8,.* more: none left"),
        (KeyError("odd"), WorkerError, r"(?s)^a worker on .* failed: rate=0\.1,.*Traceback.*odd"),
    ],
)
def test_an_error_of_a_worker_names_its_points(played, tmp_path, monkeypatch, error, kind, rule):
    def run_together(jobs, watcher, stated):
        raise error

    monkeypatch.setattr(worker, "run_together", run_together)
    executor = Here()
    with pytest.raises(kind, match=rule):
        swept(tmp_path, executor, workers=1)
    assert sum(not each.is_check for each in executor.tasks) == 1, "the others are not begun"


def test_the_progress_of_all_workers_is_one(played, tmp_path):
    shown = Shown()
    swept(tmp_path, Here(), 1, watcher=shown)
    rounds = [each for each, _ in shown.rounds]
    assert rounds == sorted(rounds) and rounds[0] == 0 and rounds[-1] == 2 * len(GRID)
    assert shown.rounds[0][1] == {}
    assert any(row == {"test_accuracy": 0.5} for _, row in shown.rounds)


def test_an_interruption_ends_all_workers_with_checkpoints(played, tmp_path, monkeypatch):
    """Here workers are threads, which receive no signals."""
    begun, waits = threading.Event(), []

    def run_together(jobs, watcher, stated):
        begun.set()
        until = time.monotonic() + 10
        while not watcher.should_stop():
            assert time.monotonic() < until, "the word to end did not come"
            time.sleep(0.001)
        waits.append(len(jobs))
        return {place: finish(job, "interrupted") for place, job in jobs.items()}, True

    @contextlib.contextmanager
    def interruptions(watcher):
        yield begun.is_set

    monkeypatch.setattr(worker, "run_together", run_together)
    monkeypatch.setattr(module, "interruptions", interruptions)
    said = []
    with ThreadPoolExecutor(2) as executor, pytest.raises(KeyboardInterrupt):
        swept(tmp_path, executor, 4, said=said)
    assert 1 <= len(waits) <= 4 and len(said) == sum(waits)
    assert all("(interrupted after round " in line for line in said)
    assert not [*tmp_path.glob(".workers-*")]


def test_nothing_is_begun_after_its_time(played, tmp_path):
    said = []
    cluster = Cluster(Here(), 2)
    sweep(STUDY, GRID, tmp_path, said.append, seconds=-1, cluster=cluster)
    assert not played["ran"] and len(said) == len(GRID)
    assert all("skipped: time limit reached" in line for line in said)


class Elsewhere(Here):
    """Workers of a machine that does not see the folder of the study."""

    def submit(self, function, task):
        place = task.place._replace(folder="/nowhere/.workers-1")
        return super().submit(function, task._replace(place=place))


class Broken:
    """An executor that was shut down."""

    def submit(self, function, task):
        raise BrokenExecutor("a process died")


@pytest.mark.parametrize(
    ("executor", "workers", "rule"),
    [
        (Elsewhere(), 2, "--output must be in a folder that all machines share; .* does not have"),
        (Broken(), 2, "takes no more tasks, and rate=0.1.* with a new executor resumes"),
        (print, 2, "executor must have the method submit"),
        (Here(), 0, "workers must be an integer of at least 1"),
    ],
)
def test_what_cannot_work_is_refused(played, tmp_path, executor, workers, rule):
    with pytest.raises((ValueError, WorkerError), match=rule):
        swept(tmp_path, executor, workers)
    assert not played["ran"]


def test_callbacks_that_no_other_process_can_have_are_refused(played, tmp_path):
    callbacks = {"own": Callback(lambda progress: False)}
    jobs = {0: Job(loaded(STUDY, GRID[0]), tmp_path / "a", callbacks)}
    executor = Here()
    with pytest.raises(ValueError, match="a must be data that can be pickled, and functions"):
        run_all(STUDY, jobs, ["a"], print, cluster=Cluster(executor, 1))
    assert not executor.tasks


def test_a_coordinator_of_several_processes_is_refused(played, tmp_path):
    several = ("--execution.coordinator=auto",)
    grid = grid_points(STUDY, words=(*WORDS[:-1], *several))
    with pytest.raises(ValueError, match=r"execution\.coordinator must be none on a cluster"):
        swept(tmp_path, Here(), grid=grid)


def test_machines_that_round_differently_are_named(played, tmp_path, monkeypatch):
    inner = worker.run_together

    def run_together(jobs, watcher, stated):
        outcomes, is_interrupted = inner(jobs, watcher, stated=stated)
        for outcome in outcomes.values():
            kind = "A" if "batch=8" in outcome.folder.name else "B"
            text = json.dumps({"device kinds": [kind], "cores": 4 if kind == "A" else 8})
            (outcome.folder / "environment.json").write_text(text, encoding="utf-8")
        return outcomes, is_interrupted

    monkeypatch.setattr(worker, "run_together", run_together)
    said = []
    swept(tmp_path, Here(), said=said)
    [line] = [line for line in said if line.startswith("warning")]
    assert line.endswith("device kinds was ['A'] and is ['B']")


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        (("--workers=3",), "--on must be given, for options of workers, got ['--workers']"),
        (("--worker=num_gpus=1",), "--on must be given, for options of workers, got ['--worker']"),
        (("--on=ray", "--workers=0"), "--workers must be an integer of at least 1"),
        (("--on=ray", "--worker=num_gpus"), "--worker must be NAME=VALUE, got 'num_gpus'"),
        (("--on=slurm",), "--worker must give timeout_min for Slurm"),
        (("--on=slurm", "--worker=timeout_min=9"), "--on must be slurm on a machine that has its"),
    ],
)
def test_options_of_workers_that_cannot_be_are_refused(
    fedjax_dp, tmp_path, monkeypatch, words, rule
):
    monkeypatch.setenv("PATH", "")
    over = ("sweep", "--over", "run.seed=0,1", "--output", str(tmp_path / "grid"))
    status, _, errors = fedjax_dp(*over, *words)
    assert status == 2 and rule in " ".join(errors.split())
    assert not (tmp_path / "grid").exists()


@pytest.mark.parametrize(
    ("on", "package", "word"),
    [
        ("ray", "ray", "num_gpu=1"),
        ("ray", "ray", "num_cpus=x"),
        ("local", "submitit", "cpus_per_task=x"),
        ("local", "submitit", "timeout_min=x"),
        ("local", "submitit", "cpu_per_task=1"),
    ],
)
def test_options_that_an_executor_refuses_are_named_at_once(tmp_path, on, package, word):
    pytest.importorskip(package)
    rule = f"--worker must be an option of its workers, got .*{word.partition('=')[0]}"
    opened = executors.opened(on, tmp_path / "grid", 2, [word])
    with pytest.raises(ValueError, match=rule), opened:
        pass
    assert not (tmp_path / "grid").exists()


@pytest.mark.parametrize(("on", "package"), [("ray", "ray"), ("local", "submitit")])
def test_a_cluster_names_its_extra(monkeypatch, tmp_path, on, package):
    monkeypatch.setitem(sys.modules, package, None)
    rule = rf'needs the package {package}, .* "fedjax-dp\[cluster\]"'
    with pytest.raises(MissingPackageError, match=rule), executors.opened(on, tmp_path):
        pass


def lines(folder):
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.startswith("seconds")} for row in rows]


def table(output, grid):
    return as_csv(average_over_seeds(STUDY, read_summaries(grid, output)))


# Of so many rounds that a worker is lost before it has ended.
SHORT = grid_points(STUDY, {"rate": ["0.1", "0.5"], "seed": ["0"]}, (*WORDS, "--run.rounds=100"))


@pytest.fixture(scope="module")
def in_one_process(once):
    """The folder of a grid that one process has run."""
    return once("grid of one process", lambda folder: sweep(STUDY, SHORT, folder, lambda _: None))


def assert_same(output, alone):
    assert table(output, SHORT) == table(alone, SHORT)
    for point in SHORT:
        assert lines(output / point.name) == lines(alone / point.name)


@pytest.mark.slow
def test_processes_have_the_table_of_one(in_one_process, tmp_path):
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as executor:
        swept(tmp_path, executor, grid=SHORT)
    assert_same(tmp_path, in_one_process)


def signalling(output, number, stop):
    """Sends a signal to the first worker that has completed a round of its points."""
    while not stop.is_set():
        for file in output.glob(".workers-*/task-*.json"):
            with contextlib.suppress(OSError, ValueError):
                progress = json.loads(file.read_text("utf-8"))
                if progress["rounds"] >= 1:
                    os.kill(progress["process"], number)
                    return
        time.sleep(0.02)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("on", "package", "number"),
    [
        ("ray", "ray", "SIGKILL"),
        ("local", "submitit", "SIGKILL"),
        # Slurm sends it before a preemption, and submitit has the job run again.
        ("local", "submitit", "SIGUSR2"),
    ],
)
def test_a_worker_that_is_lost_changes_no_table(in_one_process, tmp_path, on, package, number):
    pytest.importorskip(package)
    said, stop = [], threading.Event()
    killer = threading.Thread(target=signalling, args=(tmp_path, getattr(signal, number), stop))
    killer.start()
    with executors.opened(on, tmp_path, 2) as cluster:
        sweep(STUDY, SHORT, tmp_path, said.append, cluster=cluster)
    stop.set()
    killer.join()
    lost = sum("a worker died, and another resumes" in line for line in said)
    assert lost == (number == "SIGKILL")
    assert_same(tmp_path, in_one_process)


@pytest.mark.slow
def test_a_search_on_workers_chooses_what_one_process_chooses(tmp_path):
    pytest.importorskip("optuna")
    from fedjax_dp.experiment.studies.search import Plan, Span, search

    space = {"training.learning_rate": Span(0.01, 1.0, is_log=True)}
    plan = Plan(space, trials=4, at_once=2)
    study = STUDY._replace(axes={})
    alone = search(study, plan, tmp_path / "alone", WORDS, lambda line: None)
    executor = Dying({1})
    there = search(
        study, plan, tmp_path / "there", WORDS, lambda line: None, cluster=Cluster(executor, 2)
    )
    assert there == alone and len(executor.tasks) == 2 * (2 + 2) + 1


@pytest.mark.slow
def test_a_private_selection_on_workers_runs_the_trials_that_it_drew(tmp_path):
    """Also if a worker dies; the best of them is the one release."""

    class Three(Repetition):
        """Three trials, whatever is drawn."""

        def draw(self, uniform=None):
            return 3

    words = (
        *("--data.num_clients=3", "--run.rounds=2", "--execution.devices=1"),
        *("--participation.sampler=poisson", "--participation.cohort_size=2"),
        *("--privacy.unit=client", "--algorithm.name=dp_fedavg", "--privacy.client.epsilon=none"),
        *("--privacy.client.noise_multiplier=1.5", "--data.client_test_share=0"),
        *("--run.secret=true", "--run.release=private"),
    )
    study = STUDY._replace(axes={"rate": STUDY.axes["rate"]})
    grid, drawn = grid_points(study, words=words), []

    def before(task, number):
        drawn.append((tmp_path / TRIALS_FILE).read_text("utf-8"))

    cluster = Cluster(Dying({0}, before), 2)
    choice = select_privately(study, grid, tmp_path, Three(3.0, 1.0), print, cluster=cluster)
    assert drawn == [(tmp_path / TRIALS_FILE).read_text("utf-8")]
    assert len([*tmp_path.glob("trial-*")]) == len(json.loads(drawn[0])["drawn"]) == 3
    scores = [read_json(tmp_path / f"trial-{i:04d}", "summary.json") for i in (1, 2, 3)]
    assert {each["ended"] for each in scores} == {"finished"}
    best = max(range(3), key=lambda i: scores[i]["test_accuracy"])
    assert choice.trial.name == f"trial-{best + 1:04d}"
    # By hand: cohorts of 2 of 3 clients, and a noise multiplier of 1.5.
    one = dpa.PoissonSampledDpEvent(2 / 3, dpa.GaussianDpEvent(1.5))
    account = RdpAccountant(orders_of("rdp"))
    account.compose(RepeatAndSelectDpEvent(dpa.SelfComposedDpEvent(one, 2), 3.0, 1.0))
    (claim,) = read_json(choice.folder, "privacy.json")["claims"]
    np.testing.assert_allclose(claim["epsilon"], account.get_epsilon(claim["dp_delta"]), rtol=1e-9)
