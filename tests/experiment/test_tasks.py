"""Tasks from configurations: ordered classes, counts, several outputs, weights, and metrics."""

import json

import numpy as np
import pytest
from marks import telling
from run_folders import execute, read_json
from sklearn.metrics import confusion_matrix, r2_score, recall_score, roc_auc_score

from fedjax_dp.experiment.assembly.assemble import assemble, checked_config, parts_of
from fedjax_dp.experiment.reading.config_files import load_config
from fedjax_dp.experiment.running.loading import evaluate_run, load_run, predict

COLUMNS = "site,a,b,kind,degree,yes,no,size,visits,trust"


def rows():
    rng = np.random.default_rng(0)
    for i in range(120):
        a, b = rng.normal(size=2).round(3)
        degree = int(np.clip(np.round(a + rng.normal() / 3 + 1), 0, 2))
        kind, size, visits = "ill" if b > 0.7 else "well", 2 * a - b, rng.poisson(np.exp(a / 2))
        yes, no = ("y" if x > 0 else "n" for x in (a, b))
        yield f"s{i % 3},{a},{b},{kind},{degree},{yes},{no},{size:.3f},{visits},{1 + i % 4}"


TABLE = ("--data.name=table", "--data.options.path=t.csv", "--data.options.client=site")
TABLE += ("--data.options.features=['a', 'b']", "--run.rounds=2", "--run.evaluate_every=2")
PLAIN = (*TABLE, "--privacy.unit=none", "--algorithm.name=fedavg")
NUMBERS = ("--data.options.task=regression",)


@pytest.fixture(autouse=True)
def table(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.csv").write_text("\n".join([COLUMNS, *rows()]) + "\n")


def built(*words):
    return parts_of(checked_config(load_config(None, words)))


def test_outputs_follow_the_data_and_weights_the_configuration():
    several = built(
        *PLAIN,
        *NUMBERS,
        "--data.options.label=['size', 'a']",
        "--data.options.features=['b']",
        "--model.name=linear_regression",
    )
    assert several.population.train.examples["y"].shape[1:] == (2,)
    labels = built(
        *PLAIN, "--data.options.label=['yes', 'no']", "--model.options.loss=binary_cross_entropy"
    )
    assert set(np.unique(labels.population.train.examples["y"])) == {0, 1}
    assert labels.population.class_names == ("yes", "no")
    names = "--model.class_weights={ill = 3, well = 0.5}"
    found = built(*PLAIN, "--data.options.label=kind", "--data.options.weight=trust", names)
    assert found.model.loss_fn.class_weights == (3, 0.5)
    assert found.model.loss_fn.example_weights == "example_weight"
    assert set(found.population.train.examples["example_weight"]) == {1, 2, 3, 4}
    assert found.population.feature_names == ("a", "b")
    balanced = built(*PLAIN, "--data.options.label=kind", "--model.class_weights=balanced")
    counts = np.bincount(balanced.population.train.examples["y"])
    np.testing.assert_allclose(balanced.model.loss_fn.class_weights, counts.sum() / (2 * counts))


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (("--data.options.label=kind", "--model.class_weights=[1, 2, 3]"), "hold 2 weights"),
        (
            ("--data.options.label=kind", "--model.class_weights={ill = 3}"),
            "each of ill, well, and",
        ),
        (("--data.options.label=kind", "--model.class_weights=[1, -2]"), "class_weights"),
        (
            (
                *NUMBERS,
                "--data.options.label=size",
                "--model.name=linear_regression",
                "--model.class_weights=[1, 2]",
            ),
            "class_weights must be left out .* got 'numbers'",
        ),
        (
            (
                *NUMBERS,
                "--data.options.label=size",
                "--model.name=linear_regression",
                "--model.class_weights=balanced",
            ),
            r"model\.class_weights must be numbers where there is not one class",
        ),
        (
            (*NUMBERS, "--data.options.label=size", "--model.name=poisson_regression"),
            r"\['y'\] must hold counts, which are whole numbers of at least 0, got 0.38",
        ),
        (
            (
                *NUMBERS,
                "--data.options.label=size",
                "--model.name=linear_regression",
                "--run.metrics=['auc']",
            ),
            "metric auc must be used with a loss of classes",
        ),
        (
            ("--data.options.label=kind", "--model.name=poisson_regression"),
            r"model\.name must be a model of classes, .* got 'poisson_regression'",
        ),
        (
            ("--data.options.label=kind", "--model.name=least_squares"),
            r"model\.name must be a model of classes, .* got 'least_squares'",
        ),
        (
            ("--data.options.label=kind", "--model.name=linear_regression"),
            r"model\.name must be a model of classes, .* got 'linear_regression'",
        ),
        (
            ("--data.options.label=kind", "--model.options.loss=binary_cross_entropy"),
            r"model\.options\.loss must be a loss of one class for each example",
        ),
        (
            ("--data.options.label=kind", "--run.metrics=['r2']"),
            "metric r2 must be used with a loss",
        ),
        (
            ("--data.options.label=kind", "--model.name=ordinal_regression"),
            "at least 3 for loss 'ord",
        ),
        (
            ("--data.options.label=['degree', 'yes']",),
            "label 'degree' must have two classes, as one",
        ),
        (
            ("--data.options.label=kind", "--data.options.weight=size"),
            "finite weight of at least 0",
        ),
        (
            ("--data.options.label=kind", "--data.options.weight=yes"),
            "must hold numbers, the weights",
        ),
        (
            ("--data.options.label=kind", "--data.options.weight=none_such"),
            "weight, a column of t.csv, must be .* 'none_such'",
        ),
        (("--data.options.label=kind", "--data.options.weight=kind"), "be different columns"),
        (("--data.options.label=[]",), "label must name at least one column"),
    ],
)
def test_what_does_not_fit_is_refused(words, match):
    with pytest.raises(ValueError, match=match):
        assemble(load_config(None, (*PLAIN, *words)))


def test_balanced_weights_are_refused_under_privacy_before_data_are_read():
    words = (*TABLE, "--data.options.path=missing.csv", "--data.options.label=kind")
    with pytest.raises(ValueError, match="numbers under privacy: balanced weights count labels"):
        checked_config(load_config(None, (*words, "--model.class_weights=balanced")))


@telling
@pytest.mark.usefixtures("shared_programs", "no_pictures")
def test_a_private_run_of_ordered_classes_writes_tables_and_figures_by_client(tmp_path):
    words = (
        *TABLE, "--data.options.label=degree", "--data.options.weight=trust",
        *("--data.options.scaling=range", "--data.options.ranges={a = [-3, 3], b = [-3, 3]}"),
        "--data.options.categories={degree = ['0', '1', '2']}", "--privacy.record.epsilon=8",
        *("--model.name=ordinal_regression", "--model.class_weights=[1, 1, 2]"),
        "--run.metrics=['auc', 'confusion', 'per_class']",
    )  # fmt: skip
    execute(tmp_path / "run", *words)
    summary, loaded = read_json(tmp_path / "run", "summary.json"), load_run(tmp_path / "run")
    held_out = loaded.experiment.population.client_test
    outputs = predict(loaded.model, loaded.params, held_out)
    above = 1 / (1 + np.exp(-np.float64(outputs)))
    edges = np.concatenate([np.ones((len(above), 1)), above, np.zeros((len(above), 1))], axis=1)
    chances, y = -np.diff(edges, axis=1), held_out.examples["y"]
    table = confusion_matrix(y, chances.argmax(1), labels=range(3))
    assert summary["test_confusion"] == {"classes": ["0", "1", "2"], "counts": table.tolist()}
    expected = roc_auc_score(y, chances, multi_class="ovr")
    assert summary["test_auc"] == pytest.approx(expected, abs=1e-6)
    assert summary["test_per_class"]["2"]["examples"] == int(np.sum(y == 2))
    by_client = [
        roc_auc_score(own, each, multi_class="ovr")
        for own, each in zip(
            *(np.split(v, held_out.offsets[1:-1]) for v in (y, chances)), strict=True
        )
        if len(np.unique(own)) == 3
    ]
    if len(by_client) == held_out.num_clients:
        assert summary["mean_client_auc"] == pytest.approx(np.mean(by_client), abs=1e-6)
    assert {"test_auc", "test_confusion", "test_per_class"} <= set(summary["not_private"])
    again = evaluate_run(loaded)
    assert again["test_auc"] == pytest.approx(summary["test_auc"])
    assert again["test_confusion"] == summary["test_confusion"]
    lines = (tmp_path / "run" / "by_client.jsonl").read_text("utf-8").splitlines()
    names, said = held_out.client_names, chances.argmax(1)
    for name, true, own, line in zip(
        names, *(np.split(v, held_out.offsets[1:-1]) for v in (y, said)), lines, strict=True
    ):
        row = json.loads(line)
        assert (row["part"], row["client"], row["examples"]) == ("client_test", name, len(true))
        assert row["accuracy"] == pytest.approx(np.mean(own == true))
        counts = confusion_matrix(true, own, labels=range(3))
        assert row["confusion"] == {"classes": ["0", "1", "2"], "counts": counts.tolist()}
        recall = recall_score(true, own, labels=range(3), average=None, zero_division=np.nan)
        found = [row["per_class"][str(k)]["recall"] for k in range(3)]
        np.testing.assert_allclose(np.array(found, float), recall)
    marks = read_json(tmp_path / "run", "privacy.json")["files"]
    assert marks["by_client.jsonl"] == "exact"
    evaluate_run(loaded, by_client=tmp_path / "new" / "again.jsonl")
    assert (tmp_path / "new" / "again.jsonl").read_text("utf-8").splitlines() == lines
    for path, kind in (("again.csv", "a new file that ends in .jsonl"), ("t.csv", "a new file")):
        with pytest.raises(ValueError, match=f"by_client must be {kind}"):
            evaluate_run(loaded, by_client=path)


@telling
@pytest.mark.usefixtures("shared_programs", "no_pictures")
def test_a_run_of_several_numbers_has_their_r2(tmp_path):
    words = (*PLAIN, *NUMBERS, "--data.options.label=['size', 'visits']")
    words += ("--model.name=linear_regression", "--run.metrics=['r2', 'mae']")
    execute(tmp_path / "run", *words)
    summary, loaded = read_json(tmp_path / "run", "summary.json"), load_run(tmp_path / "run")
    held_out = loaded.experiment.population.client_test
    said = np.float64(predict(loaded.model, loaded.params, held_out))
    true = np.float64(held_out.examples["y"])
    assert summary["test_r2"] == pytest.approx(r2_score(true, said), rel=1e-5)
    assert summary["test_mae"] == pytest.approx(np.mean(np.abs(true - said)), rel=1e-5)
    errors = [
        np.mean(np.abs(t - s))
        for t, s in zip(*(np.split(v, held_out.offsets[1:-1]) for v in (true, said)), strict=True)
    ]
    assert summary["worst_tenth_mae"] == pytest.approx(max(errors), rel=1e-5)


@pytest.mark.slow
@pytest.mark.usefixtures("shared_programs", "no_pictures")
def test_weights_raise_the_recall_of_the_rare_class_of_adult_and_hardly_change_its_auc(
    tmp_path, data_dir
):
    if not (data_dir / "adult").is_dir():
        pytest.skip("no published file of adult is here")
    words = ("--data.name=adult", f"--data.data_dir={data_dir}", "--data.partition=iid")
    words += ("--data.num_clients=10", "--run.rounds=3", "--run.evaluate_every=3")
    words += (
        "--privacy.unit=none",
        "--algorithm.name=fedavg",
        "--run.metrics=['auc', 'per_class']",
    )
    found = {}
    for weights in ("[1, 1]", "balanced"):
        execute(tmp_path / weights, *words, f"--model.class_weights={weights}")
        found[weights] = read_json(tmp_path / weights, "summary.json")
    recall = {w: s["test_per_class"][">50K"]["recall"] for w, s in found.items()}
    assert recall["balanced"] > recall["[1, 1]"] + 0.15
    assert all(s["test_auc"] > 0.88 for s in found.values())
    assert abs(found["balanced"]["test_auc"] - found["[1, 1]"]["test_auc"]) < 0.02


@pytest.mark.slow
@pytest.mark.usefixtures("shared_programs", "no_pictures")
def test_the_degrees_of_heart_disease_are_learned_in_their_order(tmp_path, data_dir):
    if not (data_dir / "heart_disease").is_dir():
        pytest.skip("no published file of heart_disease is here")
    words = ("--data.name=heart_disease", f"--data.data_dir={data_dir}")
    words += ("--data.options.target=degree", "--model.name=ordinal_regression")
    words += ("--run.rounds=20", "--run.evaluate_every=20", "--privacy.unit=none")
    words += ("--algorithm.name=fedavg", "--run.metrics=['auc', 'confusion']")
    execute(tmp_path / "run", *words)
    summary = read_json(tmp_path / "run", "summary.json")
    counts = np.array(summary["test_confusion"]["counts"])
    assert counts.shape == (5, 5) and summary["test_auc"] > 0.65
    # Degrees are confused with near ones: closer than those of a guess that ignores the inputs.
    distance = np.abs(np.subtract.outer(np.arange(5), np.arange(5)))
    true, said = (counts.sum(axis=k) / counts.sum() for k in (1, 0))
    assert np.sum(counts * distance) / counts.sum() < 0.8 * (true @ distance @ said)
