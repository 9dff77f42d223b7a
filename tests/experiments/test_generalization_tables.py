"""Tables of what has run: means over the seeds that both aggregations have."""

import json

import numpy as np
import pytest
from drawn import flaws

from experiments.generalization import membership, paper, tables
from fedjax_dp.io import plots


def finished(folder, study, name, **summary):
    """Leaves what a run leaves of its figures."""
    path = folder / study / name
    path.mkdir(parents=True)
    (path / "summary.json").write_text(json.dumps(summary), encoding="utf-8")


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
    """The third seed of one is left out: 55.00 against 55.50, and not 66.67."""
    text = tables.of_masking(tables.runs_in(runs), "non_iid")
    assert "| MNIST | FedAvg | 55.00 ± 7.07 | 55.50 ± 0.71 | +0.50 | 2 | 98.9 | 98.87 |" in text
    assert "in 1 of 1 cells" in text
    assert "in 0 of 0 cells" in tables.of_masking(tables.runs_in(runs), "iid")


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
    assert {f.name for f in output.iterdir()} == {"non_iid.md", "iid.md", "runs.csv"}
    assert len((output / "runs.csv").read_text(encoding="utf-8").splitlines()) == 1 + 6


def test_runs_that_are_recorded_are_kept(runs, tmp_path):
    output, nothing = tmp_path / "results", tmp_path / "nothing"
    tables.write(runs, output)
    before = {f.name: f.read_text(encoding="utf-8") for f in output.iterdir()}
    tables.write(nothing, output)
    assert {f.name: f.read_text(encoding="utf-8") for f in output.iterdir()} == before


def test_the_paper_has_every_cell():
    for data in paper.DATA:
        for distribution in paper.DISTRIBUTIONS:
            for algorithm in paper.ALGORITHMS:
                assert paper.rates(data, distribution, algorithm).server > 0
                printed = [paper.accuracy(data, distribution, algorithm, k) for k in tables.PAIR]
                assert np.all(np.array(printed, float) > 0)


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
    np.testing.assert_allclose(lines["AVG, mean of seeds"], [[1, 20], [2, 50]])
    np.testing.assert_allclose(lines["GMA, mean of seeds"], [[1, 20], [2, 40]])
    assert flaws(shown[0]) == []
