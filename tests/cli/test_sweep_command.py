"""`fedjax-dp sweep`: the points of a grid, and the tables of their results."""

import json
import sys
import tomllib

import pytest

from fedjax_dp.cli import progress
from fedjax_dp.cli import sweep as command
from fedjax_dp.experiment import load_config
from fedjax_dp.experiment.studies import sweep as module


@pytest.fixture
def played(monkeypatch):
    """The points that a sweep would run, which end with figures made of their numbers."""
    names = []

    def sweep(study, grid, output, report, watcher, cluster):
        for point in grid:
            names.append(point.name)
            config = module.loaded(study, point)
            (output / point.name).mkdir(parents=True)
            accuracy = config.training.learning_rate / (1 + config.run.seed)
            summary = {"test_accuracy": accuracy, "epsilon": config.privacy.record.epsilon}
            (output / point.name / "summary.json").write_text(json.dumps(summary))

    monkeypatch.setattr(command, "sweep", sweep)
    return names


def test_a_grid_has_a_run_for_each_point_and_a_table_over_seeds(fedjax_dp, played, tmp_path):
    axes = ("training.learning_rate=0.1,0.5", "privacy.record.epsilon=2,8", "run.seed=0,1")
    words = [word for axis in axes for word in ("--over", axis)]
    folder = tmp_path / "grid"
    status, out, _ = fedjax_dp("sweep", *words, "--run.rounds=2", "--output", str(folder), "--json")
    assert (
        len(played) == 8 and "training.learning_rate=0.1,privacy.record.epsilon=2,seed=0" in played
    )
    document = json.loads(out)
    assert status == 0 and document["points"] == 8 and document["folder"] == str(folder)
    rows = (folder / "table.csv").read_text().splitlines()
    # The mean of 0.5 and 0.25, and their deviation by the formula for samples.
    deviation = 0.125 * 2**0.5
    assert f"0.5,8,test_accuracy,0.375,{deviation:.6g},2," in rows
    assert f"| 0.5 | 8 | 0.3750 ± {deviation:.4f} |" in (folder / "table.md").read_text()
    assert (folder / "accuracy.png").read_bytes()[:4] == b"\x89PNG"


def test_an_interrupted_sweep_has_the_table_of_the_points_that_ended(
    fedjax_dp, monkeypatch, tmp_path
):
    def sweep(study, grid, output, report, watcher, cluster):
        for point, ended in zip(grid, ("rounds", "interrupted"), strict=True):
            (output / point.name).mkdir(parents=True)
            summary = {"test_accuracy": 0.25, "ended": ended}
            (output / point.name / "summary.json").write_text(json.dumps(summary))
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "sweep", sweep)
    monkeypatch.setattr(progress, "end_process", lambda out, name, text, status: sys.exit(status))
    words = ("--over", "training.learning_rate=0.1,0.5", "--output", str(tmp_path / "grid"))
    assert fedjax_dp("sweep", *words)[0] == 130
    heads, _, *rows = (tmp_path / "grid" / "table.md").read_text().splitlines()[2:]
    assert heads == "| training.learning_rate | test_accuracy | seeds |"
    assert rows == ["| 0.1 | 0.2500 | 1 |"]


def test_the_users_folder_is_known_where_the_shell_leaves_it(
    fedjax_dp, played, tmp_path, monkeypatch
):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    words = ("sweep", "--over", "run.seed=0,1", "--output=~/grid", "--json")
    assert fedjax_dp(*words)[0] == 0 and (tmp_path / "grid" / "table.csv").is_file()


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        ((), "--over must name one key or more, each once"),
        (("--over", "training.learning_rates=1"), "training.learning_rate"),
        (("--over", "training.learning_rate"), "--over must be KEY=V1,V2"),
        (("--over", "run.seed=0,0"), "--over run.seed must hold each value once"),
        (("--over", "run.seed=0", "--over", "run.seed=1"), "each once"),
        (("--over", "training.learning_rate=0.1,-1"), "training.learning_rate must"),
        (("--over", "training.learning_rate=0.1,0.10"), "hold each value once"),
        (("--over", "training.learning_rate=0.1,,1"), "have a value between any two commas"),
        (
            ("--over", "run.rounds=2,3", "--run.rounds=4"),
            "--over must name no key that is also given one value, got ['run.rounds']",
        ),
        (("--over", "run.seed=0,1", "--trials", "0"), "to have trials, got ['--trials']"),
        (("--over", "run.seed=0,1", "--settings=none.csv"), "--settings must be a file that can"),
        (("--search=optuna", "--settings=none.csv"), "be left out with --search"),
        (("--over", "run.seed=0,1", "--trials-shape", "0"), "to have trials"),
        (
            ("--over", "training.learning_rate=1,2", "--select=private", "--trials", "0"),
            "--trials must be at least 1 and below 10^9, got 0",
        ),
    ],
)
def test_a_grid_that_cannot_be_is_refused_before_any_work(fedjax_dp, played, tmp_path, words, rule):
    status, _, errors = fedjax_dp("sweep", *words, "--output", str(tmp_path / "grid"))
    assert status == 2 and rule in " ".join(errors.split())
    assert not played and not (tmp_path / "grid").exists()


def test_points_have_settings_of_their_own(fedjax_dp, played, tmp_path):
    """Accuracies are made of learning rates, so that the table shows whose rate was whose."""
    file, folder = tmp_path / "rates.csv", tmp_path / "grid"
    words = ("sweep", "--over", "privacy.record.epsilon=2,8", "--settings", str(file), "--json")
    lines = ("privacy.record.epsilon,training.learning_rate", "2,0.25", "8,0.5")
    file.write_text("\n".join(lines), encoding="utf-8")
    assert fedjax_dp(*words, "--output", str(folder))[0] == 0
    rows = (folder / "table.csv").read_text("utf-8").splitlines()
    assert "2,test_accuracy,0.25,,1," in rows and "8,test_accuracy,0.5,,1," in rows
    again = (*words, "--output", str(tmp_path / "again"))
    status, _, errors = fedjax_dp(*again, "--training.learning_rate=1")
    assert status == 2 and "--settings must name no key that is also given" in errors
    file.write_text("privacy.record.epsilon,run.seed\n2,0\n8,1\n", encoding="utf-8")
    status, _, errors = fedjax_dp(*again, "--over", "run.seed=0,1")
    assert status == 2 and "set no key of an axis, of which run.seed is named seed" in errors


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ('"a, b","c"', ["a, b", "c"]),
        ("'a, b', c", ["a, b", "c"]),
        ("2024-05-01,x", ["2024-05-01", "x"]),
    ],
)
def test_strings_in_quotes_may_have_commas(text, read):
    _, found = command._axis(f"run.name={text}")
    assert list(found) == read
    configs = [load_config(None, [word]) for (word,) in found.values()]
    assert [config.run.name for config in configs] == read


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("0.1, 1e-3", ["0.1", "1e-3"]),
        ("dp_fedavg,fedprox", ["dp_fedavg", "fedprox"]),
        ("[16],[32, 16]", ["[16]", "[32, 16]"]),
        ("none,2", ["none", "2"]),
        ("{ a = 1, b = 2 },{}", ["{ a = 1, b = 2 }", "{}"]),
        ("[['a,b']],[\"c\"]", ["[['a,b']]", '["c"]']),
    ],
)
def test_values_are_written_as_in_toml(text, values):
    _, found = command._axis(f"training.learning_rate={text}")
    assert list(found) == values
    for value, (word,) in found.items():
        assert word == f"--training.learning_rate={value}"
        if "[" in value:
            assert tomllib.loads(f"x = {value}")
