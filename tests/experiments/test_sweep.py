"""A sweep resumes in a folder of the same setting only, and with secret runs only as they were."""

import pathlib
import shutil

import pytest
from run_folders import SMALL, dying_after, read_json

from fedjax_dp.experiment import load_config
from fedjax_dp.experiment.assembly.assemble import checked_config
from fedjax_dp.experiment.reading import config_files
from fedjax_dp.experiment.running.run import Outcome
from fedjax_dp.experiment.schema.constraints import ConfigError
from fedjax_dp.experiment.studies import batched_runs, sweep
from fedjax_dp.io import plots

FILE = pathlib.Path(__file__).parents[2] / "experiments" / "fedavg" / "mnist.toml"
STUDY = sweep.Study(
    name="study",
    file=FILE,
    axes={
        "rate": {"0.1": ("--training.learning_rate=0.1",)},
        "seed": {"0": ("--run.seed=0",), "1": ("--run.seed=1",)},
    },
    rows="rate",
    columns="seed",
    metrics={"accuracy": 100.0},
)


def _finish(output, words=(), study=STUDY):
    grid = sweep.grid_points(study, {}, ())
    for point in grid:
        folder = output / point.name
        folder.mkdir()
        config = checked_config(load_config(study.file, ("--run.name=study", *point.words, *words)))
        (folder / "config.toml").write_text(config_files.to_toml(config), encoding="utf-8")
        (folder / "summary.json").write_text("{}", encoding="utf-8")
    return grid


@pytest.mark.parametrize("words", [(), ("--execution.devices=1",), ("--data.data_dir=elsewhere",)])
def test_finished_runs_of_the_same_setting_are_left_out(tmp_path, words):
    grid = _finish(tmp_path, words)
    shown = []
    sweep.sweep(STUDY, grid, tmp_path, shown.append)
    assert sum("done before" in line for line in shown) == 2


def test_finished_runs_of_published_budgets_are_left_out(tmp_path):
    """Their folders hold the numbers that the names stand for."""
    study = STUDY._replace(file=FILE.parents[1] / "heterogeneous_dp" / "mnist.toml")
    grid, shown = _finish(tmp_path, study=study), []
    sweep.sweep(study, grid, tmp_path, shown.append)
    assert sum("done before" in line for line in shown) == 2


def test_a_folder_of_another_setting_is_refused_before_anything_runs(tmp_path):
    grid = _finish(tmp_path)
    (tmp_path / grid[0].name / "summary.json").unlink()
    other = load_config(FILE, ("--run.name=study", *grid[1].words, "--run.rounds=7"))
    config = tmp_path / grid[1].name / "config.toml"
    config.write_text(config_files.to_toml(other), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"(?s)seed=1.*holds results of other.*run.rounds: 7 and"):
        sweep.sweep(STUDY, grid, tmp_path, lambda line: None)


@pytest.mark.parametrize(
    "word", ["evaluation.training=true", "communication.encoding=dense", "run.metrics=['mcc']"]
)
def test_a_finished_run_of_other_results_is_refused(tmp_path, word):
    """Its summary holds other figures than those that are asked for now."""
    grid = _finish(tmp_path, (f"--{word}",))
    with pytest.raises(ConfigError, match=rf"holds results of other.*\n{word.partition('=')[0]}: "):
        sweep.sweep(STUDY, grid, tmp_path, lambda line: None)


@pytest.fixture
def calls(monkeypatch):
    """What a sweep asks for, by folder, in place of runs."""
    asked = {}

    def run_together(jobs, watcher, ended, stated):
        for place, job in jobs.items():
            asked[job.folder.name] = (job.folder / "config.toml").is_file()
            summary = {"accuracy": 0.5, "seconds": 1.0}
            ended(place, Outcome(job.folder, summary, "finished", False))
        return {}, False

    monkeypatch.setattr(sweep, "run_together", run_together)
    return asked


@pytest.mark.parametrize("is_secret", [False, True])
def test_a_started_run_is_resumed_and_never_restarted(tmp_path, calls, is_secret):
    """The first run has written its configuration, and perhaps no checkpoint yet."""
    words = (f"--run.secret={str(is_secret).lower()}",)
    grid = sweep.grid_points(STUDY, {}, words)
    config = load_config(FILE, ("--run.name=study", *grid[0].words))
    (tmp_path / grid[0].name).mkdir()
    file = tmp_path / grid[0].name / "config.toml"
    file.write_text(config_files.to_toml(config), encoding="utf-8")
    shown = []
    sweep.sweep(STUDY, grid, tmp_path, shown.append)
    assert calls == {grid[0].name: True, grid[1].name: False}
    assert len(shown) == 2 and all(
        "accuracy 0.5000; ran 1 s beside 1 other" in line for line in shown
    )


METHODS = STUDY._replace(
    axes={
        "method": {
            "fedavg": ("--algorithm.name=fedavg",),
            "dp_fedavg": ("--algorithm.name=dp_fedavg",),
            "scaffold": ("--algorithm.name=scaffold",),
        }
    }
)


def test_all_points_are_checked_before_the_first_starts(tmp_path, calls, monkeypatch):
    """FedAvg needs no privacy, and DP-FedAvg cannot be without; no data are read for it."""
    monkeypatch.setattr(batched_runs, "population_of", None)
    grid = sweep.grid_points(METHODS, {}, ("--privacy.unit=none",))
    with pytest.raises(ValueError, match=r"method=dp_fedavg: privacy\.unit must be"):
        sweep.sweep(METHODS, grid, tmp_path, lambda line: None)
    assert not calls


def test_all_points_are_assembled_before_the_first_starts(tmp_path, calls, monkeypatch):
    """What only data can show, such as a model that does not fit them."""
    asked = []

    def assemble(config, population):
        asked.append(config.algorithm.name)
        if config.algorithm.name == "scaffold":
            raise ValueError("model.name must be of images")

    monkeypatch.setattr(batched_runs, "assemble", assemble)
    monkeypatch.setattr(batched_runs, "population_of", lambda config: None)
    grid = sweep.grid_points(METHODS, {"method": ["fedavg", "scaffold"]}, ("--privacy.unit=none",))
    with pytest.raises(ValueError, match=r"method=scaffold: model\.name must be of images"):
        sweep.sweep(METHODS, grid, tmp_path, lambda line: None)
    assert asked == ["fedavg", "scaffold"] and not calls


@pytest.mark.parametrize(
    "values",
    [
        {"run.name": "../../x"},
        {"data.options.path": "/tmp/x.csv"},
        {"data.options.path": "a/b"},
        {"..": ".."},
        {"": ""},
        {},
        {"": "."},
        {"a": "x" * 400},
        {"a": "日本" * 200},
        {"model.options.widths": "[16, 8]"},
        {"a": "b\nc\0"},
        {"a": "b "},
        {"a": "1,b=2"},
    ],
)
def test_a_point_has_a_folder_of_its_own_that_no_value_leads_out_of(tmp_path, values):
    folder = sweep.Point(values, ()).folder
    made = tmp_path / folder
    made.mkdir()
    assert made.resolve().parent == tmp_path.resolve() and made.resolve() != tmp_path.resolve()
    assert not set("[]*?/\\\n") & set(folder)
    others = [{**values, "a": "other"}, {"a": "1", "b": "2"}, {"run.name": ".._.._x"}]
    assert folder not in [sweep.Point(other, ()).folder for other in others]
    assert sweep.Point({"lr": "1e-3", "seed": "0"}, ()).folder == "lr=1e-3,seed=0"


def test_a_folder_that_cannot_be_made_is_refused_before_any_work(tmp_path, calls, monkeypatch):
    monkeypatch.setattr(sweep, "loaded", None)
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"--output must be a folder, .*file' \(a file\)"):
        sweep.sweep(STUDY, sweep.grid_points(STUDY, {}, ()), tmp_path / "file", print)


def test_nothing_is_started_after_its_time(tmp_path, calls):
    shown = []
    sweep.sweep(STUDY, sweep.grid_points(STUDY, {}, ()), tmp_path, shown.append, seconds=-1)
    assert not calls and all("skipped: time limit reached" in line for line in shown)


@pytest.mark.slow
def test_secret_runs_go_on_and_never_start_over(tmp_path, monkeypatch):
    monkeypatch.setattr(plots, "save", lambda figure, path: None)
    file = tmp_path / "study.toml"
    words = (*SMALL, "--run.rounds=3", "--run.secret=true")
    file.write_text(config_files.to_toml(load_config(None, words)), encoding="utf-8")
    study = STUDY._replace(file=file, metrics={"test_accuracy": 100.0})
    grid = sweep.grid_points(study, {"seed": ["0"]}, ())
    output, shown = tmp_path / "out", []
    with dying_after(2):
        sweep.sweep(study, grid, output, shown.append)
    folder = output / grid[0].name
    root = (folder / "checkpoint" / "root.key").read_bytes()
    lost = shutil.copytree(output, tmp_path / "lost")
    sweep.sweep(study, grid, output, shown.append)
    assert read_json(folder, "summary.json")["rounds"] == 3
    assert (folder / "checkpoint" / "root.key").read_bytes() == root
    shutil.rmtree(lost / grid[0].name / "checkpoint")
    with pytest.raises(ValueError, match=r"root\.key must exist"):
        sweep.sweep(study, grid, lost, shown.append)
