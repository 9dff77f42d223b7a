"""The clustered study: its grid, what a folder may hold, and the numbers beside ours."""

import argparse
import csv
import json
import pathlib

import numpy as np
import pytest

from experiments.clustered_dp import grid, study, tables
from fedjax_dp.experiment.reading import config_diff
from fedjax_dp.experiment.schema.constraints import ConfigError
from fedjax_dp.experiment.studies import sweep
from fedjax_dp.io import plots

HERE = pathlib.Path(study.__file__).parent
MNIST = HERE / "mnist.toml"
SMALL = """
[run]
name = "small"
rounds = 2
[data]
name = "digits"
partition = "shifted_clusters"
[data.partition_options]
cluster_sizes = [1, 2]
samples_per_client = 40
test_samples_per_client = 20
[training]
batch_size = 20
[privacy]
unit = "record"
[privacy.record]
dp_delta = 1e-4
epsilon = 8.0
"""


def test_the_grid_is_methods_by_budgets_by_seeds():
    points = grid.points(MNIST, list(grid.METHODS), grid.PAPER_EPSILONS, [0, 1])
    assert len(points) == len(grid.METHODS) * 5 * 2 == len({p.name for p in points})
    by_name = {p.name: p for p in points}
    point = by_name["method=R-DPCFL,epsilon=2,seed=1"]
    assert (point.config.privacy.record.epsilon, point.config.run.seed) == (2.0, 1)
    # A private choice costs 0.03 of the point's own budget, not of the file's.
    assert point.config.algorithm.options["selection_epsilon"] == pytest.approx(0.06)
    assert by_name["method=Local,epsilon=3,seed=0"].config.training.learning_rate == 0.01
    plain = grid.points(MNIST, ["Global"], [], [0])
    assert [p.name for p in plain] == ["method=Global,epsilon=5,seed=0"]


def run(folder, *words):
    file = folder.parent / "small.toml"
    file.write_text(SMALL)
    grid = ("--methods", "Global", "--seeds", "0", "--reference-epochs", "1")
    study.main(["run", str(file), "--output", str(folder), *grid, *words])


@pytest.fixture
def folder(tmp_path):
    """A method at two budgets, as if it had run."""
    path = tmp_path / "results"
    path.mkdir()
    file = tmp_path / "small.toml"
    file.write_text(SMALL)
    points = grid.points(file, ["Global"], [4, 2], [0])
    written(path, *(result_of(point, 70.0) for point in points))
    tables = config_diff.tables_of(points[0].setting)
    training = {"epochs": 1, "learning_rate": 0.1}
    setting = {"data": tables["data"], "model": tables["model"], "training": training}
    written(path, ("reference,seed=0", {"setting": setting, "accuracy": [], "loss": []}))
    return path


@pytest.mark.slow
def test_results_hold_their_setting_and_are_not_run_again(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(plots, "save", lambda figure, path: None)
    folder = tmp_path / "results"
    run(folder, "--epsilons", "4", "2")
    names = sorted(p.name for p in folder.glob("*.json"))
    stems = ["method=Global,epsilon=2,seed=0", "method=Global,epsilon=4,seed=0"]
    assert names == [*(f"{s}.json" for s in stems), "reference,seed=0.json"]
    for stem, epsilon in zip(stems, (2.0, 4.0), strict=True):
        result = json.loads((folder / f"{stem}.json").read_text())
        assert result["epsilon"] == result["setting"]["privacy"]["record"]["epsilon"] == epsilon
        assert max(result["epsilon_by_client"]) == pytest.approx(epsilon, rel=1e-4)
    run(folder, "--epsilons", "4", "2")
    assert capsys.readouterr().out.count("is there already") == 2
    assert not list((folder / "unfinished").iterdir())


@pytest.mark.slow
def test_workers_find_what_one_process_finds(tmp_path):
    """The points of two seeds on two workers, as one after another."""
    pytest.importorskip("submitit")
    words = ("--methods", "Global", "Local", "--seeds", "0", "1")
    for name, more in (("one", ()), ("two", ("--on", "local", "--workers", "2"))):
        run(tmp_path / name, *words, *more)
    one, two = (
        {p.name: json.loads(p.read_text()) for p in (tmp_path / name).glob("*.json")}
        for name in ("one", "two")
    )
    assert len(one) == 6 and one.keys() == two.keys()
    assert not list((tmp_path / "two" / "unfinished").iterdir())
    for name, result in one.items():
        for key in result.keys() - {"seconds", "seconds_compiling"}:
            assert two[name][key] == result[key], (name, key)


@pytest.mark.slow
def test_a_run_that_died_before_its_result_is_not_run_again(tmp_path, monkeypatch):
    whole, folder, name = tmp_path / "whole", tmp_path / "results", "method=Global,epsilon=4,seed=0"
    run(whole, "--epsilons", "4")

    def die(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(study, "load_run", die)
        run(folder, "--epsilons", "4")
    assert (folder / "unfinished" / name / "summary.json").is_file()
    monkeypatch.setattr(sweep, "run_together", die)
    run(folder, "--epsilons", "4")
    ours, theirs = (json.loads((path / f"{name}.json").read_text()) for path in (folder, whole))
    for key in ("client_accuracy", "metrics", "epsilon_by_client", "train_loss_by_round"):
        assert ours[key] == theirs[key]


@pytest.mark.parametrize(
    "words, message",
    [
        (("--set=--training.learning_rate=0.25",), "training.learning_rate: 2.0 and 0.25"),
        (("--set=--privacy.record.clip_norm=3",), "privacy.record.clip_norm: 1.0 and 3.0"),
        (("--set=--data.partition_options.shift=label",), "data.partition_options.shift: "),
    ],
)
def test_results_of_another_setting_are_not_taken_for_these(folder, words, message):
    with pytest.raises(SystemExit, match="holds results of other settings") as refused:
        run(folder, "--epsilons", "4", *words)
    assert message in str(refused.value)


def test_results_saved_before_a_key_existed_are_extended(folder, capsys):
    """They ran at its default."""
    for path in folder.glob("*.json"):
        result = json.loads(path.read_text())
        del result["setting"]["data"]["check_finite"], result["setting"]["model"]["frozen"]
        result["setting"].pop("evaluation", None)
        path.write_text(json.dumps(result))
    run(folder, "--epsilons", "4")
    assert "is there already" in capsys.readouterr().out
    [point] = grid.points(folder.parent / "small.toml", ["Global"], [4], [0])
    arguments = argparse.Namespace(output=folder, reference_epochs=1, reference_learning_rate=0.1)
    assert study.reference_of(point, arguments).accuracy.size == 0
    with pytest.raises(SystemExit, match=r"data\.check_finite: True and False"):
        run(folder, "--epsilons", "4", "--set=--data.check_finite=false")


def test_how_a_run_executes_is_no_other_setting(folder, capsys):
    words = ("--set=--execution.clients_per_chunk=1", "--set=--training.micro_batch_size=4")
    run(folder, "--epsilons", "4", *words)
    assert "is there already" in capsys.readouterr().out


def test_references_of_other_data_are_refused(folder):
    arguments = argparse.Namespace(output=folder, reference_epochs=1, reference_learning_rate=0.1)
    [point] = grid.points(
        folder.parent / "small.toml", ["Global"], [4], [0], ["--data.partition_options.shift=label"]
    )
    with pytest.raises(ConfigError, match=r"reference,seed=0\.json holds results of other"):
        study.reference_of(point, arguments)
    arguments.reference_epochs = 2
    [point] = grid.points(folder.parent / "small.toml", ["Global"], [4], [0])
    with pytest.raises(ConfigError, match=r"training\.epochs: 1 and 2"):
        study.reference_of(point, arguments)


def made_up(method, epsilon, seed, accuracy, **changes):
    words = [f"--{key}={value}" for key, value in changes.items()]
    [point] = grid.points(MNIST, [method], [epsilon], [seed], words)
    return result_of(point, accuracy)


def result_of(point, accuracy):
    method, epsilon = point.method, point.config.privacy.record.epsilon
    seed = point.config.run.seed
    metrics = dict.fromkeys(tables.METRICS, accuracy)
    return point.name, {
        "method": method, "seed": seed, "epsilon": epsilon, "metrics": metrics,
        "setting": config_diff.tables_of(point.setting), "changes": list(point.words),
        "epsilon_by_client": [epsilon], "not_covered": None, "noise_multiplier": [1.5],
        "client_accuracy": [accuracy / 100] * 21,
    }  # fmt: skip


def written(folder, *results):
    for name, result in results:
        (folder / f"{name}.json").write_text(json.dumps(result))
    return folder


def test_the_paper_numbers_beside_ours_are_those_of_the_budget_that_ran(tmp_path):
    """Table 3 of RC-DPFL: DPFedAvg 80.92 at ε = 10, 79.37 at 5; nothing is printed for 7."""
    results = [made_up("Global", e, s, 70.0 + s) for e in (10.0, 5.0, 7.0) for s in (0, 1)]
    study.main(["table", str(written(tmp_path, *results))])
    parts = (tmp_path / "table.md").read_text().split("Ours at ")[1:]
    assert [p.split(" over")[0] for p in parts] == ["ε = 10", "ε = 7", "ε = 5"]
    assert "70.50 ± 0.71 (80.92 ± 0.83)" in parts[0] and "(79.37" not in parts[0]
    assert "70.50 ± 0.71 (79.37 ± 0.76)" in parts[2]
    study.main(["table", str(written(tmp_path, made_up("Global", 3.0, 0, 60.0)))])
    assert "| Global | 1 | 60.00 (72.88 ± 0.79) |" in (tmp_path / "table.md").read_text()
    assert "the paper prints no numbers" in parts[1] and "70.50 ± 0.71 |" in parts[1]


def test_figures_are_drawn_of_what_ran(tmp_path, monkeypatch):
    results = [made_up("Global", e, 0, 60.0 + e) for e in (10.0, 5.0)]
    results += [made_up("Global", e, 1, 62.0 + e) for e in (10.0, 5.0)]
    results += [made_up("Global", 10.0, 2, 0.0), made_up("Local", 10.0, 0, 1.0)]
    name, found = made_up("R-DPCFL", 5.0, 0, 80.0)
    features = [[0.0, 0.1], [1.0, 0.9], [0.9, 1.0]]
    fitted = {"true_clusters": [0, 1, 1], "means": [[0, 0.1], [0.95, 0.95]], "radii": [0.1, 0.05]}
    found |= {"separation": 5.25, "mixture": fitted | {"features": features}}
    drawn = {}
    monkeypatch.setattr(plots, "save", lambda figure, path: drawn.__setitem__(path.name, figure))
    study.main(["draw", str(written(tmp_path, *results, (name, found)))])
    curves = {f"{metric}_by_epsilon.png" for metric in ("acc_all", "acc_maj", "acc_min")}
    assert drawn.keys() == {f"mixture,{name}.png"} | curves
    (axes,) = drawn["acc_min_by_epsilon.png"].axes
    # Curves are of methods with several budgets, over the seeds that all budgets have.
    named = {line.get_label(): line.get_xydata() for line in axes.get_lines()}
    (shown,) = (points for label, points in named.items() if not label.startswith("_"))
    np.testing.assert_allclose(shown, [[5, 66], [10, 71]])
    assert "2 seeds" in axes.get_xlabel() and axes.get_title() == "MNIST, minority"
    (axes,) = drawn[f"mixture,{name}.png"].axes
    points = np.concatenate([part.get_offsets() for part in axes.collections])
    np.testing.assert_allclose(points, features)
    assert axes.get_title() == "First round, ε = 5, smallest separation 5.2"


def test_a_table_of_mixed_settings_is_refused(tmp_path):
    changes = {"training.batch_size": 64}
    folder = written(tmp_path, made_up("Global", 5.0, 0, 1), made_up("Local", 5.0, 0, 1, **changes))
    with pytest.raises(SystemExit, match="mixes settings") as refused:
        study.main(["table", str(folder)])
    assert "training.batch_size: 32.0 and 64.0" in str(refused.value)
    with pytest.raises(SystemExit, match="holds no result"):
        study.main(["table", str(tmp_path / "nothing")])


def test_summaries_over_seeds():
    seeds = [{"a": 1.0, "b": 5.0}, {"a": 3.0, "b": 5.0, "c": 0.0}, {"a": 5.0, "b": 5.0}]
    assert tables.over_seeds(seeds) == {"a": (3.0, pytest.approx(2.0)), "b": (5.0, 0.0)}
    mean, spread = tables.over_seeds(seeds[:1])["a"]
    assert mean == 1.0 and np.isnan(spread)
    with pytest.raises(ValueError, match="results must hold at least one seed"):
        tables.over_seeds([])


def test_the_committed_table_is_that_of_the_committed_results():
    folder = HERE / "results" / "mnist_two_cores"
    text = tables.as_markdown(tables.read_results(folder))
    assert text == (folder / "table.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("folder", ["mnist_two_cores", "fashion_mnist_two_cores"])
def test_the_committed_rows_are_those_of_the_committed_results(folder):
    folder = HERE / "results" / folder
    text = tables.as_csv(tables.read_results(folder))
    assert text == (folder / "runs.csv").read_text(encoding="utf-8")


def test_a_row_of_a_run_has_its_accuracies_by_cluster(tmp_path):
    """Clusters of 3, 6, 6 and 6 clients, in their order."""
    _, result = made_up("Global", 5.0, 0, 70.0)
    result |= {"client_accuracy": (np.arange(21) / 100).tolist()}
    result |= {"seconds": 60.0, "separation": 2.5}
    # Of 14 rounds three quarters are ten, and of 200 that were scored in every tenth one 150.
    [row] = csv.DictReader(tables.as_csv([result]).splitlines())
    assert (row["dataset"], row["earlier"]) == ("mnist", "")
    for count, place in ((14, 10), (20, 15)):
        curve = {"accuracy_by_round": [x / 100 for x in range(1, count + 1)]}
        [scored] = csv.DictReader(tables.as_csv([result | curve]).splitlines())
        assert float(scored["earlier"]) == pytest.approx(place)
    means = [float(row[f"cluster_{c}"]) for c in range(4)]
    np.testing.assert_allclose(means, [1.0, 5.5, 11.5, 17.5])
    assert (row["method"], row["noise_multiplier"], row["num_models"]) == ("Global", "1.5", "")


def test_every_printed_number_is_found_by_the_names_of_its_configuration():
    """One look-up for each data set, shift and ε of the paper covers its file of numbers."""
    with (HERE / "paper_tables.csv").open(encoding="utf-8") as file:
        printed = len(list(csv.DictReader(file)))
    found = 0
    for name in ("mnist", "fashion_mnist", "cifar10_rotation", "cifar10_labels"):
        for epsilon in grid.PAPER_EPSILONS:
            [point] = grid.points(HERE / f"{name}.toml", ["Global"], [epsilon], [0])
            data = point.config.data
            shift = tables.SHIFTS[data.partition_options["shift"]]
            found += len(tables.published(tables.DATASETS[data.name], shift, epsilon))
    assert found == printed == 700
