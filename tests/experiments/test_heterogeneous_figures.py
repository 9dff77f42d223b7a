"""Figures of unequal clients are computed at the setting of what they show."""

import json

import numpy as np
import pytest
from marks import telling
from run_folders import execute

from experiments.heterogeneous_dp import figures, first_round, sweep
from fedjax_dp.experiment import load_config
from fedjax_dp.experiment.components.numbers_by_client import with_named_lists
from fedjax_dp.experiment.reading import config_files
from fedjax_dp.io import plots
from fedjax_dp.privacy.accounting import budgets
from fedjax_dp.privacy.accounting.calibration import calibrate_poisson

# Computed by the accountant of the authors of Robust-HDP at N = 2400, E = 200, δ = 1e-4.
AUTHORS = {
    0.5: (10.08, 14.24, 20.13, 28.45),
    1.0: (5.15, 7.25, 10.22, 14.44),
    2.0: (2.71, 3.77, 5.28, 7.43),
    5.0: (1.31, 1.73, 2.35, 3.25),
}
BATCHES = [8.0, 16.0] * 10
DIGITS = (
    *("--data.partition=iid", "--data.num_clients=20", "--run.rounds=2"),
    *(f"--training.batch_size={BATCHES}", "--training.learning_rate=0.05"),
    *("--privacy.record.epsilon=Dist6", "--privacy.record.dp_delta=1e-4"),
)


@pytest.fixture(autouse=True)
def shown(monkeypatch):
    """Pictures by file name, in place of files."""
    kept = {}
    monkeypatch.setattr(plots, "save", lambda figure, path: kept.__setitem__(path.name, figure))
    return kept


@pytest.mark.parametrize("epsilon", AUTHORS)
def test_multipliers_of_figure_32_are_those_of_the_authors(epsilon):
    np.testing.assert_allclose(figures.multipliers(epsilon)[:4], AUTHORS[epsilon], atol=0.006)


def test_variances_of_figure_33_follow_the_authors_multipliers():
    """(3.5) by hand: p c² z² η² ⌈N/b⌉/b²; N/b is whole but for b = 128 and 256."""
    table = figures.variances()
    for i, epsilon in enumerate(figures.EPSILONS):
        for j, b in enumerate((16, 32, 64, 128)):
            if epsilon in AUTHORS:
                z = AUTHORS[epsilon][j]
                expected = 28_938 * 9 * z**2 * 1e-4 * np.ceil(2400 / b) / b**2
                assert table[i, j] == pytest.approx(expected, rel=0.01)


@pytest.fixture(scope="module")
def run_folders(tmp_path_factory):
    """Runs of Robust-HDP under each accountant."""
    found = {}
    for accountant in ("rdp", "rdp-classic-64"):
        found[accountant] = tmp_path_factory.mktemp("runs") / accountant
        words = ("--algorithm.name=robust_hdp", f"--privacy.accountant={accountant}")
        written(found[accountant], *DIGITS, *words)
    return found


def written(folder, *words):
    """What of a run's folder is read: its configuration, and weights of its first round."""
    folder.mkdir()
    text = config_files.to_toml(with_named_lists(load_config(None, words)))
    (folder / "config.toml").write_text(text, encoding="utf-8")
    row = {"round": 1, "weights": [0.05] * 20}
    (folder / "metrics.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")


@telling
@pytest.mark.xdist_group("heterogeneous figures")
@pytest.mark.parametrize("accountant", ["rdp", "rdp-classic-64"])
def test_the_oracle_of_figure_37_is_that_of_the_run(run_folders, accountant):
    title, weights = figures.weights_of_run(run_folders[accountant])
    # 1,437 digits over 20 clients, of which a fifth is held out.
    sizes = np.array([1437 // 20 + (i < 1437 % 20) for i in range(20)])
    sizes = sizes - np.round(0.2 * sizes)
    epsilon = budgets.published_budgets("Dist6", 20)
    np.testing.assert_allclose(weights["DPFedAvg"], sizes / sizes.sum(), rtol=0.02)
    np.testing.assert_allclose(weights["WeiAvg"], epsilon / epsilon.sum(), rtol=1e-6)
    for name in ("rdp", "rdp-classic-64"):
        steps = np.ceil(sizes / BATCHES)
        z = calibrate_poisson(epsilon, 1e-4, BATCHES / sizes, 2 * steps, accountant=name)
        inverse = np.square(BATCHES) / steps / z**2
        off = np.abs(weights["oracle"] / (inverse / inverse.sum()) - 1).max()
        assert off < 1e-3 if name == accountant else off > 0.1, (name, off)
    assert title == "digits, logistic_regression, p = 650, Dist6"
    np.testing.assert_array_equal(weights["Robust-HDP"], 0.05)
    assert figures.precision(weights["oracle"], weights["oracle"]) == pytest.approx(1)
    assert figures.precision(np.array([1.0, 0.0]), np.array([0.25, 0.75])) == 0.25


def test_a_run_of_another_method_is_refused(tmp_path):
    written(tmp_path / "run", *DIGITS, "--algorithm.name=weiavg")
    with pytest.raises(SystemExit, match="must be a run of robust_hdp, got weiavg"):
        figures.weights_of_run(tmp_path / "run")


@pytest.mark.slow
def test_what_a_run_weighed_is_read(tmp_path):
    execute(tmp_path / "run", *DIGITS, "--algorithm.name=robust_hdp")
    _, weights = figures.weights_of_run(tmp_path / "run")
    assert weights["Robust-HDP"].shape == (20,)
    assert weights["Robust-HDP"].sum() == pytest.approx(1, rel=1e-5)
    assert figures.precision(weights["Robust-HDP"], weights["oracle"]) > 0.5


def folder_of_sweep(path, **runs):
    """A sweep's folder with made-up accuracies by round."""
    for name, rows in runs.items():
        folder = path / name
        folder.mkdir(parents=True)
        (folder / "summary.json").write_text("{}")
        lines = [json.dumps({"round": r, "test_accuracy": a}) for r, a in rows]
        (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    (path / "runs.json").write_text(json.dumps([{}] * len(runs)))
    return path


def test_figure_35_shows_means_and_deviations_over_seeds(tmp_path, shown):
    runs = {
        "distribution=Dist6,algorithm=A,seed=0": [(1, 0.1), (2, None), (3, 0.5)],
        "distribution=Dist6,algorithm=A,seed=1": [(1, 0.3), (2, None), (3, 0.5)],
        "distribution=Dist2,algorithm=A,seed=0": [(1, 0.9)],
        "distribution=Dist6,algorithm=B,seed=0": [(1, 0.2)],
    }
    path = folder_of_sweep(tmp_path / "study", **runs)
    figures.main(["--output", str(tmp_path), "--convergence", str(path)])
    rows = [row for row in first_round.read(path / "accuracy_by_round.csv") if row["seed"] == 1]
    setting = {"distribution": "Dist6", "algorithm": "A", "seed": 1}
    assert rows == [setting | {"round": r, "test_accuracy": a} for r, a in ((1, 30), (3, 50))]
    axes = shown["accuracy_by_round.png"].axes[0]
    assert [line.get_label() for line in axes.get_lines()] == ["A", "B"]
    np.testing.assert_allclose(axes.get_lines()[0].get_xydata(), [[1, 20], [3, 50]])
    band = axes.collections[0].get_paths()[0].get_extents()
    np.testing.assert_allclose([band.y0, band.y1], [20 - np.sqrt(200), 50])
    assert {"multipliers_by_batch_size.png", "variance_by_setting.png"} < set(shown)
    with pytest.raises(SystemExit, match="no run of Dist9"):
        figures.main(["--convergence", str(path), "--distribution", "Dist9"])


def test_a_folder_that_has_the_file_alone_is_drawn_from_it(tmp_path, shown):
    ran = [(1, 0.1), (2, 0.5)]
    path = folder_of_sweep(tmp_path / "study", **{"distribution=Dist6,algorithm=A,seed=0": ran})
    words = ["--output", str(tmp_path), "--convergence"]
    figures.main([*words, str(path)])
    before = shown["accuracy_by_round.png"].axes[0].get_lines()[0].get_xydata()
    (tmp_path / "kept").mkdir()
    (path / "accuracy_by_round.csv").rename(tmp_path / "kept" / "accuracy_by_round.csv")
    shown.clear()
    figures.main([*words, str(tmp_path / "kept")])
    after = shown["accuracy_by_round.png"].axes[0].get_lines()[0].get_xydata()
    np.testing.assert_allclose(after, before)
    np.testing.assert_allclose(after, [[1, 10], [2, 50]])


TABLE = "distribution,{axes},metric,mean,std,seeds,published\n"


def test_figure_36_shows_accuracy_by_number_of_clients(tmp_path, shown):
    lines = [f"Dist6,{n},{m},test_accuracy,{a},,1," for n, m, a in ((40, "PFA", 7), (20, "PFA", 5))]
    lines += [
        "Dist6,20,Robust-HDP,test_accuracy,9,2,3,",
        "Dist6,20,PFA,worst_client_accuracy,1,,1,",
    ]
    text = TABLE.format(axes="clients,algorithm") + "\n".join(lines)
    (tmp_path / "table.csv").write_text(text)
    figures.main(["--output", str(tmp_path), "--robustness", str(tmp_path)])
    axes = shown["accuracy_by_clients.png"].axes[0]
    drawn = {line.get_label(): line.get_xydata().tolist() for line in axes.get_lines()}
    assert drawn.items() >= {"Robust-HDP": [[20, 9]], "PFA": [[20, 5], [40, 7]]}.items()
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["20", "40"]


def test_figure_36_shows_accuracy_by_claim(tmp_path, shown):
    lines = [f"Dist5,{m},test_accuracy,{a},,1," for m, a in (("WeiAvg x10", 4), ("WeiAvg x1", 8))]
    text = TABLE.format(axes="algorithm") + "\n".join(
        [*lines, "Dist5,DPFedAvg,test_accuracy,6,,1,"]
    )
    (tmp_path / "table.csv").write_text(text)
    figures.main(["--output", str(tmp_path), "--robustness", str(tmp_path)])
    axes = shown["accuracy_by_claim.png"].axes[0]
    drawn = {line.get_label(): line.get_xydata().tolist() for line in axes.get_lines()}
    flat = [[1, 6], [2, 6], [5, 6], [10, 6]]
    assert drawn.items() >= {"WeiAvg": [[1, 8], [10, 4]], "DPFedAvg": flat}.items()


def test_figures_of_own_rates_show_tested_seeds_alone(tmp_path, shown):
    """Accuracies on held-out examples, by which rates were chosen, are in no figure.

    Earlier rounds, which some seeds have, are in that by round alone.
    """

    def written(study, *rows):
        columns = "distribution,clients,method,rate,seed,round,data,accuracy"
        (tmp_path / f"{study}.csv").write_text("\n".join([columns, *rows]) + "\n")

    of_mnist = [f"Dist6,20,PFA,0.1,{s},{r},test,{10 * r + s}" for s in (1, 2) for r in (1, 2)]
    written("mnist", "Dist6,20,PFA,0.1,0,20,held out,99", *of_mnist, "Dist2,20,PFA,0.1,1,2,test,3")
    early = "Dist6,40,PFA,0.2,2,1,test,2"
    written("num_clients", "Dist6,40,PFA,0.2,1,2,test,30", early, "Dist6,40,PFA,0.2,2,2,test,34")
    early, x1 = "Dist5,20,PFA x1,0.1,1,1,test,1", "Dist5,20,PFA x1,0.1,1,2,test,9"
    written("falsified", early, x1, "Dist5,20,PFA x10,0.1,1,2,test,4")
    figures.main(["--output", str(tmp_path), "--rates", str(tmp_path)])
    [line] = shown["accuracy_by_round.png"].axes[0].get_lines()
    np.testing.assert_allclose(line.get_xydata(), [[1, 11.5], [2, 21.5]])
    curves = {
        name: shown[f"accuracy_by_{name}.png"].axes[0].get_lines()[0].get_xydata().tolist()
        for name in ("clients", "claim")
    }
    assert curves == {"clients": [[20, 21.5], [40, 32]], "claim": [[1, 9], [10, 4]]}


def test_figure_37_shows_the_precision_of_each_block_size(tmp_path, monkeypatch, shown):
    runs = {f"distribution=Dist2,block_size={p},seed={s}": [] for p in (30, 200) for s in (0, 1)}
    path = folder_of_sweep(tmp_path / "study", **runs)

    def weights_of_run(folder):
        size, seed = (int(x.split("=")[1]) for x in folder.name.split(",")[1:])
        ours = np.array([0.5 + size / 1000 + seed / 10, 0.5 - size / 1000 - seed / 10])
        return "", {"Robust-HDP": ours, "oracle": np.array([1.0, 0.0])}

    monkeypatch.setattr(figures, "weights_of_run", weights_of_run)
    figures.main(["--output", str(tmp_path), "--precision", str(path)])
    found = [tuple(row.values()) for row in first_round.read(path / "precision.csv")]
    np.testing.assert_allclose(found, [(30, 0.53), (30, 0.63), (200, 0.7), (200, 0.8)])
    drawn = shown["precision_by_block_size.png"].axes[0].get_lines()[0].get_xydata()
    np.testing.assert_allclose(drawn, [[30, 0.58], [200, 0.75]])


def test_the_falsifying_client_of_figure_36_has_its_published_budget():
    study = sweep.STUDIES["falsified"]
    true = budgets.published_budgets("Dist5", 20)
    assert true[sweep.LIAR] == 0.95 == sweep.TRUE_BUDGET
    for times in sweep.LIES:
        [word] = [w for w in study.axes["algorithm"][f"WeiAvg x{times}"] if "declared" in w]
        claims = np.array(json.loads(word.split("=", 1)[1]))
        np.testing.assert_array_equal(np.flatnonzero(claims != true), [10] if times > 1 else [])
        assert claims[10] == pytest.approx(0.95 * times)
