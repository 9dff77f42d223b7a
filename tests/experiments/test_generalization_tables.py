"""Tables of what has run: means over the seeds that both aggregations have."""

import json

import jax
import numpy as np
import pytest
from drawn import flaws

from experiments.generalization import figures, masking, membership, paper, small_resnet, tables
from fedjax_dp.experiment import grid_points
from fedjax_dp.experiment.assembly.assemble import population_of
from fedjax_dp.experiment.reading.config_files import load_config
from fedjax_dp.experiment.running.run import run
from fedjax_dp.io import plots


def finished(folder, study, name, **summary):
    """Leaves what a run leaves of its figures."""
    path = folder / study / name
    path.mkdir(parents=True)
    (path / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
    config = (
        "[data]\nclient_validation_share = 0.9\n[training]\noptimizer_options.weight_decay = 1e-5\n"
    )
    (path / "config.toml").write_text(config, encoding="utf-8")


@pytest.fixture
def runs(tmp_path):
    for kind, values in {"AVG": (0.5, 0.6, 0.9), "GMA": (0.55, 0.56)}.items():
        for seed, value in enumerate(values):
            name = f"algorithm=FedAvg,aggregation={kind},seed={seed}"
            finished(tmp_path, "mnist_non_iid", name, test_accuracy_last_ten=value, seconds=1)
    finished(
        tmp_path, "mnist_iid", "algorithm=FedAvg,aggregation=AVG,seed=0", test_accuracy_last_ten=0.7
    )
    return tmp_path


def test_aggregations_are_compared_over_the_seeds_that_both_have(runs):
    """The third seed of one is left out; the differences of the others are 5 and -4 points."""
    (pair,) = tables.pairs(tables.runs_in(runs))
    assert (pair["study"], pair["algorithm"], pair["share"]) == ("mnist_non_iid", "FedAvg", "0.1")
    expected = {"avg": 55, "gma": 55.5, "avg_spread": 50**0.5, "gma_spread": 0.5**0.5}
    expected |= {"gain": 0.5, "error": 4.5}
    found = {name: float(pair[name]) for name in expected}
    assert found == pytest.approx(expected, abs=1e-4)
    assert (pair["seeds"], pair["change"], pair["newest"]) == (2, "", 1)


def test_one_seed_has_no_error():
    cell = {"study": "a", "algorithm": "b", "setting": "", "seed": "0", "rounds": "9"}
    both = [cell | {"aggregation": kind, tables.METRIC: "0.5"} for kind in tables.PAIR]
    (pair,) = tables.pairs(both)
    assert "error" not in pair and pair["seeds"] == 1


def test_the_papers_settings_and_more_rounds_are_the_newest():
    settings = (("40", "0.0"), ("20", "1e-05"), ("15", "1e-05"), ("200", "0.0"))
    runs = [
        {"study": "a", "algorithm": "b", "setting": "", "seed": "0", "aggregation": kind}
        | {"rounds": rounds, "l2": l2, "share": "0.1", tables.METRIC: "0.5"}
        for rounds, l2 in settings
        for kind in tables.PAIR
    ]
    found = tables.pairs(runs)
    assert len(found) == 4
    assert [(p["rounds"], p["l2"]) for p in found if p["newest"]] == [("20", "1e-05")]


def test_a_run_that_has_not_converged_is_known_by_its_last_quarter():
    """Of 40 evaluations the last ten are compared with those from 20 to 29."""
    assert tables.change_of([r / 100 for r in range(40)]) == pytest.approx(0.1)
    assert tables.change_of([r / 100 for r in range(30)] + [0.245] * 10) == pytest.approx(0)
    assert tables.change_of([0.5] * 36) is None, "the last ten begin before three quarters"
    assert tables.change_of([0.5] * 37) == 0
    cell = {"study": "a", "algorithm": "b", "setting": "", "rounds": "9", tables.METRIC: "0.5"}
    changes = {("AVG", 0): 0.01, ("AVG", 1): -0.02, ("GMA", 0): -0.03, ("GMA", 1): -0.01}
    runs = [
        cell | {"aggregation": kind, "seed": seed, "change": str(value)}
        for (kind, seed), value in changes.items()
    ]
    # Means of -0.5 and -2 points.
    assert float(tables.pairs(runs)[0]["change"]) == pytest.approx(2)
    assert tables.pairs([*runs[:-1], runs[-1] | {"change": ""}])[0]["change"] == ""


def test_a_run_that_was_interrupted_is_left_out(tmp_path):
    """Its summary is of the rounds before the interruption."""
    for seed, ended in enumerate(("finished", "interrupted")):
        name = f"algorithm=FedAvg,aggregation=AVG,seed={seed}"
        finished(tmp_path, "mnist_lenet", name, test_accuracy_last_ten=0.8, ended=ended)
    assert [run["seed"] for run in tables.runs_in(tmp_path)] == ["0"]


def test_long_runs_are_read_off_on_their_way(tmp_path):
    """Accuracy of round r is r / 100 for one, and falls behind by r / 200 for the other."""
    for kind, slope in (("AVG", 1.0), ("GMA", 0.5)):
        for seed, start in enumerate((0.0, 0.1)):
            name = f"algorithm=FedAvg,aggregation={kind},seed={seed}"
            finished(tmp_path, "mnist_long", name, test_accuracy_last_ten=0.1)
            rows = [{"test_accuracy": start + slope * r / 100} for r in range(1, 41)]
            text = "\n".join(map(json.dumps, rows))
            (tmp_path / "mnist_long" / name / "metrics.jsonl").write_text(text, encoding="utf-8")
    lines = tables.of_length(tmp_path, ["mnist_long"], (20, 40, 80)).splitlines()
    assert lines[2:] == [
        "| mnist_long | 20 | 20.50 ± 7.07 | 12.75 ± 7.07 | -7.75 ± 0.00 | 2 |",
        "| mnist_long | 40 | 40.50 ± 7.07 | 22.75 ± 7.07 | -17.75 ± 0.00 | 2 |",
    ]


def test_objectives_are_averaged_over_seeds(tmp_path):
    for seed, value in enumerate((0.8, 0.9)):
        figures = dict.fromkeys(tables.FAIRNESS.values(), value)
        finished(tmp_path, "fairness", f"objective=AFL 0.1,data=skewed,seed={seed}", **figures)
    text = tables.of_fairness(tables.runs_in(tmp_path))
    assert "| AFL 0.1 | 85.00 | 85.00 | 85.00 | 85.00 | 85.00 | 2 |" in text


def test_what_has_run_is_written(runs, tmp_path):
    """Tables of studies that have not run are left as they are."""
    output = tmp_path / "results"
    tables.write(runs, output)
    assert {f.name for f in output.iterdir()} == {"pairs.csv", "runs.csv"}
    assert len((output / "runs.csv").read_text(encoding="utf-8").splitlines()) == 1 + 6


def test_runs_that_are_recorded_are_kept(runs, tmp_path):
    output, nothing = tmp_path / "results", tmp_path / "nothing"
    tables.write(runs, output)
    before = {f.name: f.read_text(encoding="utf-8") for f in output.iterdir()}
    tables.write(nothing, output)
    assert {f.name: f.read_text(encoding="utf-8") for f in output.iterdir()} == before


def test_the_paper_has_every_cell():
    for data, distribution in paper.CELLS:
        for algorithm in paper.ALGORITHMS:
            assert paper.rates(data, distribution, algorithm).server > 0
            printed = [paper.accuracy(data, distribution, algorithm, k) for k in tables.PAIR]
            assert np.all(np.array(printed, float) > 0)
    assert ("femnist", "by_writer") in paper.CELLS and len(paper.CELLS) == 13


def write_leaf(folder, writers, seed):
    """Digits and letters of some writers, as LEAF keeps them."""
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True)
    data = {}
    for writer in writers:
        # Of each class a few, so that classes can be shared out.
        labels = np.repeat(np.arange(12), 2)
        pixels = rng.integers(0, 256, (len(labels), 784)) / 255
        data[writer] = {"x": pixels.round(4).tolist(), "y": labels.tolist()}
    whole = {"users": writers, "num_samples": [24] * len(writers), "user_data": data}
    (folder / "all_data_0.json").write_text(json.dumps(whole), encoding="utf-8")


@pytest.mark.parametrize("distribution", ["non_iid", "iid", "by_writer"])
def test_cells_of_femnist_read_files_of_its_format(distribution, tmp_path):
    """Generated files: the real ones have not been at hand."""
    writers, unseen = [f"f{i:04}" for i in range(12)], ["g0001", "g0002"]
    write_leaf(tmp_path / "femnist" / "train", writers, 0)
    write_leaf(tmp_path / "femnist" / "test", unseen, 1)
    study = masking.STUDIES[f"femnist_{distribution}"]
    (point, *_) = grid_points(study, {}, [f"--data.data_dir={tmp_path}"])
    config = load_config(study.file, point.words)
    population = population_of(config)
    train, test = population.train, population.test
    # Digits alone, and ten clients but for the writers, ten of whom join a round.
    assert test.num_examples == 2 * 20 and set(test.examples["y"]) == set(range(10))
    assert train.num_clients == (12 if distribution == "by_writer" else 10)
    assert train.num_examples == 12 * 20 or distribution == "non_iid"
    if distribution == "by_writer":
        assert sorted(train.client_names) == writers and config.participation.cohort_size == 10
        assert set(train.sizes) == {20}


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["FedAvg", "SCAFFOLD"])
def test_a_round_of_femnist_by_writer_runs(algorithm, tmp_path):
    write_leaf(tmp_path / "femnist" / "train", [f"f{i:04}" for i in range(12)], 0)
    write_leaf(tmp_path / "femnist" / "test", ["g0001"], 1)
    study, words = masking.STUDIES["femnist_by_writer"], ["--run.rounds=1"]
    grid = grid_points(study, {"seed": ["0"]}, [f"--data.data_dir={tmp_path}", *words])
    for point in grid:
        if point.values["algorithm"] == algorithm:
            summary = run(load_config(study.file, point.words), tmp_path / point.name).summary
            assert summary["rounds"] == 1 and np.isfinite(summary["test_loss"])


def test_a_shifted_test_part_is_not_attacked(monkeypatch):
    class Run:
        class config:
            class data:
                name = "fedcmnist"

    monkeypatch.setattr(membership, "load_run", lambda folder: Run)
    with pytest.raises(ValueError, match=r"data\.name must have a test part like its training"):
        membership.attacked("anywhere")


def test_a_cell_is_drawn_as_the_mean_of_its_seeds(tmp_path, monkeypatch):
    runs = {("AVG", 0): (0.1, 0.3), ("AVG", 1): (0.3, 0.7), ("GMA", 0): (0.2, 0.4)}
    for (kind, seed), values in runs.items():
        folder = tmp_path / "study" / f"algorithm=FedAvg,aggregation={kind},seed={seed}"
        folder.mkdir(parents=True)
        rows = [json.dumps({"round": i + 1, "test_accuracy": v}) for i, v in enumerate(values)]
        (folder / "metrics.jsonl").write_text("\n".join(rows), encoding="utf-8")
    shown = []
    monkeypatch.setattr(plots, "save", lambda figure, path: shown.append(figure))
    tables.draw(tmp_path, "study", "FedAvg", tmp_path / "picture.png")
    lines = {line.get_label(): line.get_xydata() for line in shown[0].axes[0].get_lines()}
    np.testing.assert_allclose(lines["AVG (n = 2)"], [[1, 20], [2, 50]])
    np.testing.assert_allclose(lines["GMA (n = 1)"], [[1, 20], [2, 40]])
    assert flaws(shown[0]) == []


def test_runs_of_a_study_differ_by_their_setting(tmp_path):
    """Two settings of one seed are two lines, and figures read the number of each."""
    for number, value in (("10", 0.8), ("50", 0.6)):
        name = f"clients={number},aggregation=AVG,seed=0"
        finished(tmp_path, "clients", name, test_accuracy_last_ten=value, algorithm="fedavg")
    output = tmp_path / "results"
    tables.write(tmp_path, output)
    rows = figures.read_rows(output / "runs.csv")
    assert [row["setting"] for row in rows] == ["clients=10", "clients=50"]
    assert figures.by_setting(rows, "clients", "AVG") == {10: [80], 50: [60]}


def line_of(**values):
    return {name: str(value) for name, value in values.items()}


def test_figures_of_the_thesis_can_be_read():
    runs = [
        line_of(study=study, setting=f"{study}={n}", aggregation=kind, seed=seed)
        | line_of(test_accuracy_last_ten=0.8 + seed / 100)
        for study, numbers in (("clients", (10, 50, 100, 250)), ("epochs", (3, 5, 10, 20)))
        for n in numbers
        for kind in tables.PAIR
        for seed in range(2)
    ]
    runs += [
        line_of(study="threshold", setting="mask=soft", aggregation=tau, seed=seed)
        | line_of(test_accuracy_last_ten=0.8 + seed / 100, test_loss=0.4)
        for tau in (0.0, 0.4, 1.0)
        for seed in range(2)
    ]
    curves = [
        line_of(algorithm=algorithm, aggregation=kind, seed=seed, round=r)
        | line_of(training_set_accuracy=0.9 + seed / 100, test_accuracy=0.01 * r)
        for algorithm in paper.ALGORITHMS
        for kind in tables.PAIR
        for seed in range(2)
        for r in range(1, 41)
    ]
    by_clients = figures.accuracy_by_number(runs, "clients", "B.8", "clients")
    by_round = figures.accuracies_by_round(curves)
    drawn = [by_clients, figures.accuracy_by_number(runs, "epochs", "B.9", "epochs"), by_round]
    for figure in [*drawn, figures.by_threshold(runs)]:
        assert flaws(figure) == []
    lines = {line.get_label(): line.get_xydata() for line in by_clients.axes[0].get_lines()}
    np.testing.assert_allclose(lines["GMA, ours"], [[n, 80.5] for n in (10, 50, 100, 250)])
    np.testing.assert_allclose(lines["GMA, the thesis"][-1], [250, 72.87])
    lines = {line.get_label(): line.get_xydata() for line in by_round.axes[3].get_lines()}
    np.testing.assert_allclose(lines["training, AVG"][-1], [40, 90.5])


@pytest.mark.parametrize("norm", ["group", "batch"])
def test_the_small_residual_network_has_either_norm(norm):
    """Kernels, two numbers by normalised channel (four with statistics), and the head."""
    image = jax.ShapeDtypeStruct((32, 32, 3), np.uint8)
    model = small_resnet.small_resnet(image, 10, norm=norm)
    params = jax.eval_shape(model.init, jax.random.key(0))
    widths = (8, 16, 32)
    kernels = 9 * 3 * 8 + 9 * (2 * 8 * 8 + 8 * 16 + 16 * 16 + 16 * 32 + 32 * 32) + 8 * 16 + 16 * 32
    normed = 8 + 2 * sum(widths) + 16 + 32
    counted = kernels + (4 if norm == "batch" else 2) * normed + 33 * 10
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == counted
