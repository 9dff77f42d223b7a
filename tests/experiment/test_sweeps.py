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
    run,
    sweep,
)
from fedjax_dp.experiment.reading import config_files
from fedjax_dp.experiment.studies import together
from fedjax_dp.experiment.studies.sweep import loaded, read_summaries
from fedjax_dp.experiment.studies.tables import as_csv, as_list

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

    class Counting(together.Joint):
        def __init__(self, programs, *rest, **more):
            super().__init__(programs, *rest, **more)
            made.append((self, len(programs)))

    monkeypatch.setattr(together, "Joint", Counting)
    return made


@telling
def test_points_run_together_and_end_where_each_ends_alone(tmp_path, counted):
    """Numbers differ, and so do the clients of each seed, which are of the same sizes."""
    grid = grid_points(STUDY, words=(*WORDS, "--run.rounds=3", "--data.partition=iid"))
    said = []
    sweep(STUDY, grid, tmp_path / "all", said.append)
    assert [(joint.num_traces, count) for joint, count in counted] == [(1, 8)]
    assert len(said) == 8
    for point in (grid[0], grid[-1]):
        run(loaded(STUDY, point), tmp_path / point.name)
        assert lines(tmp_path / "all" / point.name) == lines(tmp_path / point.name)
        alone, there = (
            read_json(folder / point.name, "privacy.json")
            for folder in (tmp_path, tmp_path / "all")
        )
        said = there["claims"][0]["not_private"].pop()
        assert said == "the choice of this run among the 8 of a sweep"
        assert there["claims"][0].pop("sweep") == 8
        assert alone == there
    rows = read_summaries(grid, tmp_path / "all")
    entries = average_over_seeds(STUDY, rows)
    mean = np.mean([r["test_accuracy"] for r in rows if r["rate"] == "0.5" and r["budget"] == "8"])
    text = as_list(STUDY, entries)
    assert "| 0.5 | 8 |" in text and f"| {mean:.4f} ±" in text
    assert len(as_csv(entries).splitlines()) == 1 + 4 * 2


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
    monkeypatch.setattr(module, "run_together", lambda jobs, *rest: asked.extend(jobs) or {})
    sweep(STUDY, grid, tmp_path, lambda line: None)
    assert asked == [0]


@telling
def test_evaluations_are_shared_where_they_read_the_same(tmp_path):
    """Frozen parameters are an argument of a program, and of its evaluations."""
    for words, is_shared in (((), True), (("--model.frozen=['params/Dense_0']",), False)):
        model = ("--model.name=mlp", *words)
        config = load_config(None, (*PLAIN, *NOT_PRIVATE, "--run.rounds=1", *model))
        jobs = {i: together.Job(config, tmp_path / str(i)) for i in range(2)}
        found = together._sharing([e for _, e in together.assembled(jobs, Watcher())])
        assert (found[0].evaluator is found[1].evaluator) == is_shared
        assert found[0].population is found[1].population


def test_experiments_that_differ_in_numbers_alone_are_alike():
    def of(*words):
        return together.alike(load_config(None, [*SMALL, *words]))

    assert of(*CLIENT) == of(*CLIENT, "--training.learning_rate=0.7", "--run.seed=3")
    assert of(*CLIENT) != of(*NOT_PRIVATE)
    noise = ("--privacy.client.epsilon=none", "--privacy.client.noise_multiplier=1")
    assert of(*CLIENT) != of(*CLIENT, *noise)
