"""An exported model says how it is built and how its inputs are encoded, and no more than that."""

import csv
import json
import zipfile

import numpy as np
import pytest
from marks import slow
from run_folders import execute, read_json
from safetensors import safe_open
from safetensors.numpy import load_file

from fedjax_dp import load_run
from fedjax_dp.experiment import load_config
from fedjax_dp.experiment.assembly.assemble import assemble
from fedjax_dp.experiment.running.described import about_model
from fedjax_dp.io.params import read_params, write_params

pytestmark = [pytest.mark.usefixtures("no_pictures"), slow]
JOBS = ("cook", "nurse", "smith")
DECLARED = {
    "missing": "fill",
    "fill": {"age": 44},
    "scaling": "range",
    "ranges": {"age": [20, 90], "pressure": [60, 240]},
    "categories": {"job": list(JOBS), "ill": ["no", "yes"]},
}


@pytest.fixture
def table(tmp_path, monkeypatch):
    """Writes a table, and gives a function from options to words of a configuration."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    lines = ["id,hospital,age,pressure,job,ill"]
    for row in range(120):
        age, pressure, job = rng.integers(20, 90), rng.integers(80, 200), rng.choice(JOBS)
        known = "" if row % 13 == 0 else age
        ill = "yes" if age / 50 + pressure / 100 > 2.5 else "no"
        lines.append(f"p{row:03},{'ab'[row % 2]},{known},{pressure},{job},{ill}")
    (tmp_path / "patients.csv").write_text("\n".join(lines) + "\n")

    def words(*more, **options):
        given = {"path": "patients.csv", "client": "hospital", "label": "ill"} | options
        given = {"features": ["age", "pressure", "job"]} | given
        found = ["--data.name=table", "--run.rounds=2", "--model.name=mlp"]
        found += [f"--data.options.{k}={in_toml(v)}" for k, v in given.items()]
        return [*found, "--model.options.hidden_sizes=[5]", "--execution.devices=1", *more]

    return words


def in_toml(value):
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k} = {in_toml(v)}" for k, v in value.items()) + "}"
    return json.dumps(value)


def header_of(file):
    with safe_open(file, "np") as opened:
        return json.loads(opened.metadata()["fedjax_dp"])


NONE = ("--privacy.unit=none", "--algorithm.name=fedavg")
RECORD = ("--privacy.unit=record", "--privacy.record.epsilon=8")


def test_the_file_alone_gives_the_predictions_of_the_run(table, tmp_path, fedjax_dp):
    folder = tmp_path / "run"
    secret = ("--run.secret=true", "--run.release=private")
    status, text = execute(folder, *table(*RECORD, *secret, **DECLARED))
    assert status == 0, text
    for name in ("model.safetensors", "model.npz"):
        assert fedjax_dp("export", "params", folder, "--output", name)[0] == 0
    about, params = header_of("model.safetensors"), load_file("model.safetensors")
    assert header_of(folder / "release" / "model.safetensors") == about
    # An .npz file has its digest as a comment.
    del about["sha256"]
    with np.load("model.npz") as archive:
        assert json.loads(str(archive["fedjax_dp"])) == about
    assert about["model"]["name"] == "mlp" and about["model"]["options"]["hidden_sizes"] == [5]
    assert about["classes"] == ["no", "yes"] and about["targets"] == "classes"
    assert about["columns"] == [
        {"name": "age", "fill": 44.0, "range": [20.0, 90.0]},
        {"name": "pressure", "range": [60.0, 240.0]},
        {"name": "job", "categories": list(JOBS)},
    ]
    assert about["left_out"] == [] and about["coding"] == "one_hot"
    words = ("--data.options.test_path=patients.csv", "--output", "outputs.npz")
    assert fedjax_dp("predict", folder, *words, "--probabilities")[0] == 0
    with open("patients.csv") as file:
        rows = list(csv.DictReader(file))
    x = [
        [
            (np.clip(float(row["age"] or 44), 20, 90) - 20) / 70,
            (float(row["pressure"]) - 60) / 180,
            *(row["job"] == job for job in JOBS),
        ]
        for row in rows
    ]
    layers = [
        np.float64(params[f"params/Dense_{i}/{k}"]) for i in (0, 1) for k in ("kernel", "bias")
    ]
    hidden = np.maximum(np.array(x, float) @ layers[0] + layers[1], 0)
    logits = hidden @ layers[2] + layers[3]
    with np.load("outputs.npz") as found:
        np.testing.assert_allclose(found["outputs"], logits, rtol=1e-4, atol=1e-5)
        chances = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
        np.testing.assert_allclose(found["probabilities"], chances, rtol=1e-4)
    # Another run starts from the file.
    status, text = execute(
        tmp_path / "second", *table(*RECORD, "--model.pretrained=model.npz", **DECLARED)
    )
    assert status == 0, text


def test_exact_figures_are_in_the_file_only_of_a_run_without_privacy(table):
    options = {"missing": "mean", "scaling": "standard"}
    plain = about_model(assemble(load_config(None, table(*NONE, **options))))
    with open("patients.csv") as file:
        ages = [float(row["age"] or "nan") for row in csv.DictReader(file)]
    (age, _, job), (label,) = plain["columns"], plain["labels"]
    assert age["fill"] == pytest.approx(np.nanmean(ages)) and "mean" in age["exact"]
    assert job["categories"] == list(JOBS) and label["categories"] == ["no", "yes"]
    assert plain["left_out"] == ()
    private = about_model(assemble(load_config(None, table(*RECORD, **options))))
    assert private["columns"][0] == {"name": "age", "exact": ["fill", "mean", "deviation"]}
    assert private["columns"][2] == {"name": "job", "exact": ["fill", "categories"]}
    assert "classes" not in private and "features" not in private
    assert len(private["left_out"]) == 3 and "exact means" in private["left_out"][0]
    text = json.dumps(private)
    for secret in (*JOBS, "yes", str(age["fill"])[:6], str(age["mean"])[:6]):
        assert f'"{secret}' not in text and f" {secret}" not in text


def test_a_file_whose_description_was_changed_is_refused(tmp_path):
    for form in ("safetensors", "npz"):
        path = tmp_path / f"p.{form}"
        write_params(path, {"a": np.arange(3.0)}, about={"classes": ["no", "yes"]})
        content = path.read_bytes()
        found = read_params(path)
        assert found.keys() == {"a"}
        if form == "safetensors":
            changed = content.replace(b"yes", b"yet")
        else:
            # Archives have digests of their own: one that was written again has another text.
            text = np.array(json.dumps({"classes": ["no", "yet"]}))
            with np.load(path) as archive:
                np.savez(tmp_path / "other.npz", a=archive["a"], fedjax_dp=text)
            with zipfile.ZipFile(path) as whole, zipfile.ZipFile(tmp_path / "other.npz", "a") as to:
                to.comment = whole.comment
            changed = (tmp_path / "other.npz").read_bytes()
        assert changed != content
        path.write_bytes(changed)
        with pytest.raises(ValueError, match=f"{form} must be an intact.*damaged after it was"):
            read_params(path)
    with pytest.raises(ValueError, match="params must not be named 'fedjax_dp'"):
        write_params(tmp_path / "q.npz", {"fedjax_dp": np.zeros(1)})


def test_predictions_have_the_columns_that_are_asked_for(table, tmp_path, fedjax_dp):
    folder = tmp_path / "run"
    words = table(*NONE, **DECLARED)
    status, text = execute(folder, *words)
    assert status == 0, text
    new = ("--data.options.test_path=patients.csv", "--output", "said.csv")
    asked = ("--copy", "id", "--copy=age", "--probabilities")
    status, output, _ = fedjax_dp("predict", folder, *new, *asked, "--json")
    assert status == 0
    names = ["id", "age", "prediction", "label", "probability_no", "probability_yes"]
    assert json.loads(output)["arrays"] == names
    with open("said.csv") as file, open("patients.csv") as source:
        said, rows = list(csv.DictReader(file)), list(csv.DictReader(source))
    assert list(said[0]) == names and len(said) == len(rows)
    for mine, row in zip(said, rows, strict=True):
        # As the file has them: a missing age is not filled.
        assert (mine["id"], mine["age"], mine["label"]) == (row["id"], row["age"], row["ill"])
        chances = [float(mine[f"probability_{name}"]) for name in ("no", "yes")]
        assert sum(chances) == pytest.approx(1)
        assert mine["prediction"] == ("no", "yes")[int(np.argmax(chances))]
    for more, message in (
        (("--copy", "ege"), "--copy, a column of patients.csv, must be one of"),
        (("--copy", "age", "--copy", "age"), "--copy must name each column once"),
        (("--copy", "age", "--part", "train"), "--copy must be row or client unless --part is"),
        (("--copy", "client"), "--copy must be row or a column of a table for --part test"),
    ):
        status, _, errors = fedjax_dp("predict", folder, *new[:1], "--output=b.csv", *more)
        assert status == 2 and message in errors, errors
    assert not (tmp_path / "b.csv").exists()
    assert all(len(row["probability_no"].lstrip("0.")) <= 12 for row in said)
    # Arrays have them too, and each part the numbers and clients of its examples.
    words = (*new[:1], "--output=b.npz", "--copy=row", "--copy=id", "--copy=age")
    assert fedjax_dp("predict", folder, *words)[0] == 0
    with np.load("b.npz") as found:
        assert found["row"].tolist() == list(range(len(rows)))
        assert found["id"].tolist() == [row["id"] for row in rows]
        assert found["age"].tolist() == [row["age"] for row in rows]
    population = load_run(folder).experiment.population
    for part, ending in (("train", "npz"), ("client_test", "csv")):
        words = ("--part", part, f"--output={part}.{ending}", "--copy=client", "--copy=row")
        assert fedjax_dp("predict", folder, *words)[0] == 0
        data = getattr(population, part)
        expected = np.repeat(data.client_names or range(data.num_clients), data.sizes)
        if ending == "npz":
            with np.load(f"{part}.npz") as found:
                assert found["client"].tolist() == expected.tolist()
        else:
            with open(f"{part}.csv") as file:
                found = list(csv.DictReader(file))
            assert [row["client"] for row in found] == [str(each) for each in expected]
            assert [int(row["row"]) for row in found] == list(range(data.num_examples))
    assert read_json(folder, "summary.json")["rounds"] == 2


@pytest.mark.parametrize(
    ("model", "task", "label", "names"),
    [
        ("ordinal_regression", "classification", "degree", ["_0", "_1", "_2"]),
        ("logistic_regression", "classification", "ill", ["_no", "_yes"]),
        ("logistic_regression", "classification", ["ill", "old"], ["_ill", "_old"]),
        ("linear_regression", "regression", "pressure", None),
    ],
)
def test_probabilities_are_those_of_the_loss(
    tmp_path, monkeypatch, fedjax_dp, model, task, label, names
):
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(1)
    lines = ["a,b,ill,old,degree,pressure"]
    for a, b in rng.normal(size=(90, 2)):
        ill, old = ("no", "yes")[int(a > 0)], ("no", "yes")[int(b > 0)]
        lines.append(f"{a:.3f},{b:.3f},{ill},{old},{int(a > 0) + int(a + b > 1)},{a - b:.3f}")
    (tmp_path / "t.csv").write_text("\n".join(lines) + "\n")
    words = ["--data.name=table", "--data.options.path=t.csv", "--data.options.features=['a', 'b']"]
    words += [f"--data.options.label={in_toml(label)}", f"--data.options.task={task}"]
    words += [f"--model.name={model}", "--data.num_clients=3", "--data.partition=iid"]
    if label == "ill":
        words.append("--model.options.single_logit=true")
    if isinstance(label, list):
        words.append("--model.options.loss=binary_cross_entropy")
    words += [*NONE, "--run.rounds=2", "--execution.devices=1"]
    status, text = execute(tmp_path / "run", *words)
    assert status == 0, text
    new = ("--data.options.test_path=t.csv", "--probabilities", "--output")
    status, _, errors = fedjax_dp("predict", tmp_path / "run", *new, "said.csv")
    if names is None:
        assert status == 2 and "--probabilities must be left out for a model whose" in errors
        return
    assert status == 0, errors
    assert fedjax_dp("predict", tmp_path / "run", *new, "said.npz")[0] == 0
    with open("said.csv") as file:
        said = list(csv.DictReader(file))
    found = np.array([[float(row[f"probability{name}"]) for name in names] for row in said])
    with np.load("said.npz") as archive:
        outputs = np.float64(archive["outputs"])
        np.testing.assert_allclose(archive["probabilities"], found)
    above = 1 / (1 + np.exp(-outputs))
    if model == "ordinal_regression":
        edges = np.concatenate([np.ones((90, 1)), above, np.zeros((90, 1))], axis=1)
        expected = -np.diff(edges, axis=1)
    else:
        expected = above if isinstance(label, list) else np.concatenate([1 - above, above], 1)
    np.testing.assert_allclose(found, expected, atol=1e-6)
