"""A sweep goes on in a folder of the same setting only; nothing is run."""

import io
import pathlib

import pytest
from rich.console import Console

from experiments import sweep
from fedjax_dp.cli import config as configuration

FILE = pathlib.Path(sweep.__file__).parent / "fedavg" / "mnist.toml"
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


def _finish(output, words=()):
    grid = sweep.points(STUDY, {}, ())
    for point in grid:
        folder = output / point.name
        folder.mkdir()
        config = configuration.load(FILE, ("--run.name=study", *point.words, *words))
        (folder / "config.toml").write_text(configuration.to_toml(config), encoding="utf-8")
        (folder / "summary.json").write_text("{}", encoding="utf-8")
    return grid


@pytest.mark.parametrize("words", [(), ("--execution.devices=1",), ("--data.data_dir=elsewhere",)])
def test_finished_runs_of_the_same_setting_are_left_out(tmp_path, words):
    grid = _finish(tmp_path, words)
    shown = Console(file=io.StringIO(), width=200)
    sweep.run_points(STUDY, grid, tmp_path, shown)
    assert shown.file.getvalue().count("done before") == 2


def test_a_folder_of_another_setting_is_refused_before_anything_runs(tmp_path):
    grid = _finish(tmp_path)
    (tmp_path / grid[0].name / "summary.json").unlink()
    other = configuration.load(FILE, ("--run.name=study", *grid[1].words, "--run.rounds=7"))
    config = tmp_path / grid[1].name / "config.toml"
    config.write_text(configuration.to_toml(other), encoding="utf-8")
    with pytest.raises(SystemExit, match=r"(?s)seed=1.*holds another setting.*run.rounds: 7 and"):
        sweep.run_points(STUDY, grid, tmp_path, Console(file=io.StringIO()))
