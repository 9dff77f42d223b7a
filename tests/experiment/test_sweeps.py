"""Points of a sweep run together and end where each ends alone."""

import json

import numpy as np
import pytest
from marks import telling
from run_folders import NOT_PRIVATE, SMALL, dying_after, read_json

from fedjax_dp.experiment import (
    Study,
    Watcher,
    average_over_seeds,
    grid_points,
    load_config,
    resume,
    run,
    sweep,
)
from fedjax_dp.experiment.components.experiment import Callback, Experiment
from fedjax_dp.experiment.reading import config_files
from fedjax_dp.experiment.running import results, starting
from fedjax_dp.experiment.running import run as running
from fedjax_dp.experiment.running import run as steps
from fedjax_dp.experiment.running.release import require_publishable
from fedjax_dp.experiment.studies import batched_runs
from fedjax_dp.experiment.studies.sweep import as_csv, as_list, loaded, read_summaries

PLAIN = (SMALL[0], "--execution.devices=1", "--participation.sampler=poisson")
CLIENT = ("--privacy.unit=client", "--algorithm.name=dp_fedavg")
WORDS = (*PLAIN, *CLIENT, "--run.checkpoint_every=2")
STUDY = Study(
    name="digits",
    file=None,
    axes={
        "rate": {rate: (f"--training.learning_rate={rate}",) for rate in ("0.1", "0.5")},
        "budget": {e: (f"--privacy.client.epsilon={e}",) for e in ("2", "8")},
        "seed": {seed: (f"--run.seed={seed}",) for seed in ("0", "1")},
    },
    rows="rate",
    columns="budget",
    metrics={"test_accuracy": 1.0, "epsilon": 1.0},
)


def lines(folder, name="metrics.jsonl"):
    rows = [json.loads(line) for line in (folder / name).read_text().splitlines() if line]
    return [{k: v for k, v in row.items() if not k.startswith("seconds")} for row in rows]


@pytest.fixture
def counted(monkeypatch):
    """The programs that run points together, each with the number of its points."""
    made = []

    class Counting(batched_runs.Joint):
        def __init__(self, programs, *rest, **more):
            super().__init__(programs, *rest, **more)
            made.append((self, len(programs)))

    monkeypatch.setattr(batched_runs, "Joint", Counting)
    return made


@telling
def test_points_run_together_and_end_where_each_ends_alone(tmp_path, counted):
    """Numbers differ, and so do the clients of each seed, which are of the same sizes."""
    grid = grid_points(STUDY, words=(*WORDS, "--run.rounds=3", "--data.partition=iid"))
    said = []
    sweep(STUDY, grid, tmp_path / "all", said.append)
    assert [(joint.num_traces, count) for joint, count in counted] == [(1, 8)]
    # One line for each point, and one hint of a kind.
    hints = [line.partition("hint: ")[2].partition(": ")[0] for line in said if "hint: " in line]
    assert len(said) == 8 + len(hints) and len(hints) == len(set(hints)) > 0
    for point in (grid[0], grid[-1]):
        run(loaded(STUDY, point), tmp_path / point.name)
        assert lines(tmp_path / "all" / point.name) == lines(tmp_path / point.name)
        alone, there = (
            read_json(folder / point.name, "privacy.json")
            for folder in (tmp_path, tmp_path / "all")
        )
        choice = "the choice of this run among the 8 or more of a sweep"
        there["claims"][0]["not_private"].remove(choice)
        assert there["claims"][0].pop("sweep") == 8
        assert there["files"].pop("sweep.json") == "public"
        assert alone == there
    rows = read_summaries(grid, tmp_path / "all")
    entries = average_over_seeds(STUDY, rows)
    mean = np.mean([r["test_accuracy"] for r in rows if r["rate"] == "0.5" and r["budget"] == "8"])
    text = as_list(STUDY, entries)
    assert "| 0.5 | 8 |" in text and f"| {mean:.4f} ±" in text
    assert len(as_csv(entries).splitlines()) == 1 + 4 * 2


@telling
@pytest.mark.parametrize("partition", ["dirichlet", "shifted_clusters"])
def test_seeds_on_one_split_share_data_and_program(tmp_path, counted, monkeypatch, partition):
    """Models that evaluations compare with are trained by each seed."""
    options = {"dirichlet": "{alpha = 0.3}", "shifted_clusters": "{cluster_sizes = [2, 1]}"}
    words = [*PLAIN, *NOT_PRIVATE, "--run.rounds=2", f"--data.partition={partition}"]
    words += [f"--data.partition_options={options[partition]}", "--data.seed=5"]
    if partition == "shifted_clusters":
        words += ["--evaluation.clusters=true", "--evaluation.references.epochs=1"]
    read, population_of = [], batched_runs.population_of
    monkeypatch.setattr(
        batched_runs, "population_of", lambda config: read.append(1) or population_of(config)
    )
    study = STUDY._replace(axes={"seed": STUDY.axes["seed"]}, rows="seed", columns="seed")
    grid = grid_points(study, words=words)
    sweep(study, grid, tmp_path / "all", lambda line: None)
    assert [(joint.num_traces, count) for joint, count in counted] == [(1, 2)] and read == [1]
    found = [lines(tmp_path / "all" / point.name) for point in grid]
    assert found[0] != found[1]
    for point, there in zip(grid, found, strict=True):
        run(loaded(study, point), tmp_path / point.name)
        assert lines(tmp_path / point.name) == there
    assert partition == "dirichlet" or all("accuracy_cost_disparity" in row for row in found[0])


@telling
def test_points_of_other_programs_run_apart(tmp_path, counted):
    """Batches of another size are of another shape, and clients of one seed of other sizes."""
    axes = {
        "batch": {size: (f"--training.batch_size={size}",) for size in ("8", "16")},
        "rate": STUDY.axes["rate"],
    }
    study = STUDY._replace(axes=axes, rows="batch", columns="rate")
    grid = grid_points(study, words=(*PLAIN, *NOT_PRIVATE, "--run.rounds=1"))
    sweep(study, grid, tmp_path, lambda line: None)
    assert [count for _, count in counted] == [2, 2]
    assert all(read_json(tmp_path / p.name, "summary.json")["rounds"] == 1 for p in grid)


@telling
def test_a_sweep_that_died_resumes_every_point_to_the_same_bits(tmp_path):
    words = (*WORDS, "--run.rounds=4")
    grid = grid_points(STUDY, {"seed": ["0"], "rate": ["0.1"]}, words)
    sweep(STUDY, grid, tmp_path / "whole", lambda line: None)
    with dying_after(3):
        sweep(STUDY, grid, tmp_path / "died", lambda line: None)
    assert not any((tmp_path / "died" / p.name / "summary.json").exists() for p in grid)
    sweep(STUDY, grid, tmp_path / "died", lambda line: None)
    for point in grid:
        assert lines(tmp_path / "died" / point.name) == lines(tmp_path / "whole" / point.name)


def test_an_interrupted_point_is_not_done(tmp_path, monkeypatch):
    from fedjax_dp.experiment.studies import sweep as module

    grid = grid_points(STUDY, {"seed": ["0"], "rate": ["0.1"]}, WORDS)
    for point, ended in zip(grid, ("interrupted", "budget"), strict=True):
        folder = tmp_path / point.name
        folder.mkdir()
        config = config_files.to_toml(loaded(STUDY, point))
        (folder / "config.toml").write_text(config, encoding="utf-8")
        (folder / "summary.json").write_text(f'{{"ended": "{ended}"}}', encoding="utf-8")
    asked = []
    monkeypatch.setattr(module, "run_together", lambda jobs, *rest: (asked.extend(jobs), False))
    sweep(STUDY, grid, tmp_path, lambda line: None)
    assert asked == [0]


@telling
def test_an_interruption_after_the_last_round_of_a_batch_ends_the_sweep(tmp_path):
    said = []

    class Stopping(Watcher):
        def should_stop(self):
            return bool(said)

    sizes = {size: (f"--training.batch_size={size}",) for size in ("8", "9")}
    words = (*PLAIN, *CLIENT, "--privacy.client.epsilon=8", "--run.rounds=1")
    grid = grid_points(STUDY._replace(axes={"size": sizes}), {}, words)
    with pytest.raises(KeyboardInterrupt):
        sweep(STUDY, grid, tmp_path, said.append, watcher=Stopping())
    assert [len(read_summaries([point], tmp_path)) for point in grid] == [1, 0]
    assert read_summaries(grid, tmp_path)[0]["ended"] == "finished"
    sweep(STUDY, grid, tmp_path, lambda line: None)
    assert len(read_summaries(grid, tmp_path)) == 2


@telling
def test_a_point_that_is_resumed_alone_states_what_its_sweep_does(tmp_path):
    noise = ("--privacy.client.epsilon=none", "--privacy.client.noise_multiplier=5")
    config = load_config(None, (*PLAIN, *CLIENT, *noise, "--run.rounds=1", "--run.plots=false"))
    facts = {"sweep": 2, "search": "Optuna", "pruner": "halving"}
    jobs = {0: batched_runs.Job(config, tmp_path)}
    batched_runs.run_together(jobs, Watcher(), stated=facts)
    before = [read_json(tmp_path, name) for name in ("privacy.json", "summary.json")]
    [claim] = before[0]["claims"]
    assert {*claim["not_private"]} >= {
        "the choice of this run among the 2 or more of a sweep",
        "the setting of this run, which Optuna chose by the results of other runs",
        # Also that it was not ended early.
        "after how many rounds the run ended, which halving decided",
    }
    resume(tmp_path)
    after = [read_json(tmp_path, name) for name in ("privacy.json", "summary.json")]
    for old, new in zip(before, after, strict=True):
        assert not [k for k in old if old[k] != new.get(k) and not k.startswith("seconds")]
    assert "rounds" in after[1]["not_private"]


class Reached(Exception):
    """Stands for the work that follows."""


def test_a_run_that_is_resumed_reads_the_facts_of_its_sweep(tmp_path, monkeypatch):
    config = load_config(None, (*PLAIN, *CLIENT, "--run.secret=true", "--run.release=private"))
    blank = Experiment(*[None] * len(Experiment._fields))._replace(config=config, stated={"a": 1})
    facts = {"sweep": 2, "search": "Optuna", "pruner": "halving"}
    starting._write_sweep(starting.with_sweep(blank, tmp_path, facts | {"sweep": 1}), tmp_path)
    # A larger search rewrites them when it resumes the run.
    starting._write_sweep(starting.with_sweep(blank, tmp_path, {"sweep": 2}), tmp_path)
    (tmp_path / "config.toml").write_text(config_files.to_toml(config), encoding="utf-8")
    found = []

    def checked_health(experiment, *rest):
        found.append(experiment)
        # What is published would show what other runs had as results.
        with pytest.raises(ValueError, match="the results of other runs could end this one early"):
            require_publishable(experiment, {})
        raise Reached

    monkeypatch.setattr(Experiment, "written", property(lambda self: self.config))
    monkeypatch.setattr(running, "assemble", lambda config: blank)
    monkeypatch.setattr(running, "checked_health", checked_health)
    with pytest.raises(Reached):
        resume(tmp_path)
    assert found[0].stated == {"a": 1} | facts
    assert results._choice_in_sweep(found[0]) == [
        "the choice of this run among the 2 or more of a sweep",
        "the setting of this run, which Optuna chose by the results of other runs",
    ]


def test_the_length_of_a_run_that_a_pruner_did_not_end_is_not_covered():
    said = "after how many rounds the run ended, which {} decided"
    callbacks = {"private": Callback(lambda p: True, is_private=True)}
    callbacks |= {name: Callback(lambda p: True) for name in ("halving", "own")}
    for stopped_by, pruner, names in (
        (None, None, []),
        (None, "halving", ["halving"]),
        ("halving", "halving", ["halving"]),
        ("own", None, ["own"]),
        ("own", "halving", ["own", "halving"]),
        ("private", "halving", ["halving"]),
    ):
        found = steps._ends_not_covered("finished", stopped_by, pruner, callbacks)
        assert found == [said.format(name) for name in names]
        # Resumed without the search, a run has no callback of it.
        assert steps._ends_not_covered("finished", None, pruner, {}) == [
            said.format(name) for name in names if name == pruner
        ]


@telling
def test_evaluations_are_shared_where_they_read_the_same(tmp_path):
    """Frozen parameters are an argument of a program, and of its evaluations."""
    for words, is_shared in (((), True), (("--model.frozen=['params/Dense_0']",), False)):
        model = ("--model.name=mlp", *words)
        config = load_config(None, (*PLAIN, *NOT_PRIVATE, "--run.rounds=1", *model))
        jobs = {i: batched_runs.Job(config, tmp_path / str(i)) for i in range(2)}
        found = batched_runs._sharing([e for _, e in batched_runs.assembled(jobs, Watcher())])
        assert (found[0].evaluator is found[1].evaluator) == is_shared
        assert found[0].population is found[1].population


@telling
@pytest.mark.parametrize("word", ["--evaluation.training=true", "--run.metrics=['f1']"])
def test_evaluations_that_ask_for_other_figures_are_not_shared(tmp_path, word):
    plain = (*PLAIN, *NOT_PRIVATE, "--run.rounds=1")
    configs = load_config(None, plain), load_config(None, (*plain, word))
    jobs = {i: batched_runs.Job(c, tmp_path / str(i)) for i, c in enumerate(configs)}
    found = batched_runs._sharing([e for _, e in batched_runs.assembled(jobs, Watcher())])
    assert found[0].evaluator is not found[1].evaluator
    assert found[0].population is found[1].population


def test_experiments_that_differ_in_numbers_alone_are_alike():
    def of(*words):
        return batched_runs.alike(load_config(None, [*SMALL, *words]))

    assert of(*CLIENT) == of(*CLIENT, "--training.learning_rate=0.7", "--run.seed=3")
    assert of(*CLIENT) != of(*NOT_PRIVATE)
    noise = ("--privacy.client.epsilon=none", "--privacy.client.noise_multiplier=1")
    assert of(*CLIENT) != of(*CLIENT, *noise)
