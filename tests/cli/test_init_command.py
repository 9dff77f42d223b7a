"""`fedjax-dp init`: a configuration that is accepted, and runs."""

import io
import json
import pathlib
import re
import tomllib

import pytest
from marks import slow

from fedjax_dp.algorithms.registry import ALGORITHMS
from fedjax_dp.cli.init import _METHODS
from fedjax_dp.experiment import load_config
from fedjax_dp.experiment.assembly.assemble import checked_config
from fedjax_dp.experiment.reading.json_schema import json_schema

pytestmark = slow
UNITS = ("record", "client", "both", "none")
TABLE = ("--data", "ill.csv", "--label", "ill", "--client", "town")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [f"{'ab'[i % 2]},{i % 7 if i else ''},{'yes' if i % 3 else 'no'}" for i in range(90)]
    pathlib.Path("ill.csv").write_text("\n".join(["town,age,ill", *rows]) + "\n")
    return tmp_path


@pytest.mark.parametrize("unit", UNITS)
def test_what_is_written_is_what_was_answered_and_runs(fedjax_dp, unit):
    budget = () if unit == "none" else ("--epsilon", "3")
    words = ("init", "--unit", unit, *budget, "--run.rounds", "1", "--run.plots=false")
    status, output, said = fedjax_dp(*words, "--json")
    assert status == 0, said
    found = json.loads(output)
    assert found["file"] == "experiment.toml" and found["notes"] == []
    config = load_config("experiment.toml")
    assert (config.privacy.unit, config.run.rounds, config.run.plots) == (unit, 1, False)
    for each in config.privacy.units:
        assert getattr(config.privacy, each).epsilon == 3
    lines = pathlib.Path("experiment.toml").read_text().splitlines()
    keys = [i for i, line in enumerate(lines) if " = " in line and line[0] != "#"]
    assert len(keys) > 10 and all(lines[i - 1].startswith("# ") for i in keys)
    # Choices are named, and whole numbers are written whole.
    text = "\n".join(lines)
    assert "# an Optax optimiser that takes a learning rate: 'sgd', 'adam'" in text
    assert f"# method of training: {_METHODS[unit][0]}" in text
    assert not [lines[i] for i in keys if re.search(r"\d\.0\b", lines[i])]
    _, command, *rest = found["run"].split()
    status, _, said = fedjax_dp(command, *rest, "--output", "out", "--quiet")
    assert status == 0, said


@pytest.mark.parametrize("unit", UNITS)
def test_every_method_that_it_offers_is_accepted(fedjax_dp, unit):
    refused = set()
    for name, entry in ALGORITHMS.items():
        status, _, said = fedjax_dp("init", "--unit", unit, "--method", name, "--force", "-q")
        assert unit in entry.units or status == 2
        if status == 0:
            assert checked_config(load_config("experiment.toml")).algorithm.name == name
        elif unit in entry.units:
            assert "algorithm.options" in said
            refused.add(name)
    # They have options that only the user can choose.
    assert refused == ({"ifca"} if unit == "client" else {"blur_lus"})
    plain = {name for name, entry in ALGORITHMS.items() if unit in entry.units} - refused
    assert {*_METHODS[unit]} <= plain


def test_options_of_a_method_may_be_given(fedjax_dp):
    words = ("--unit", "client", "--method", "ifca", "--algorithm.options.is_weighted=false")
    assert fedjax_dp("init", *words)[0] == 0
    assert load_config("experiment.toml").algorithm.options["is_weighted"] is False


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--unit", "user"), "--unit must be one of .* did you mean 'client'"),
        (("--data", "MNIST"), "--data must be one of .* did you mean 'mnist'"),
        (("--method", "afl"), "--method with --unit record must be one of"),
        (("--unit", "none", "--epsilon", "1"), "--epsilon must be left out with --unit none"),
        (("--epsilon", "-1"), "--epsilon must be a number above 0"),
        (("--data.name=mnist",), "data.name must be given as --data"),
        (("--label", "x"), "--label must be left out unless --data is a table"),
        (("--data", "ill.csv"), "--label, a column of ill.csv, must be one of age, ill, town"),
        (("--data", "no.csv"), "--data must be a file that can be read"),
        ((*TABLE[:2], "--label", "sick"), "--label, a column of ill.csv, must be one of .*, got"),
        ((*TABLE, "--data.options.missing=refuse"), "column 'age', must have a value in every row"),
        (("--training.lr=1",), "did you mean 'training.learning_rate'"),
    ],
)
def test_what_would_not_run_is_not_written(fedjax_dp, words, message):
    status, _, said = fedjax_dp("init", *words)
    assert status == 2 and not pathlib.Path("experiment.toml").exists()
    assert re.search(message, " ".join(said.split())), said


def test_a_table_is_read_before_its_configuration_is_written(fedjax_dp):
    words = ("init", "ill.toml", *TABLE, "--run.rounds=1")
    status, _, said = fedjax_dp(*words)
    assert status == 0, said
    found = tomllib.loads(pathlib.Path("ill.toml").read_text())["data"]
    assert found["name"] == "table" and found["partition"] == "natural"
    options = {"path": "ill.csv", "label": "ill", "client": "town", "missing": "drop"}
    assert found["options"] == options
    assert fedjax_dp("run", "ill.toml", "--run.plots=false", "--quiet")[0] == 0


_ROWS = range(60)
_DATES = [f"{1 + i % 28}.{1 + i % 12}.202{i % 3}" for i in _ROWS]


@pytest.mark.parametrize(
    ("columns", "label", "answers", "options"),
    [
        ({"age": [i % 7 if i else "" for i in _ROWS]}, "", ["mean"], {"missing": "mean"}),
        (
            {"age": [i % 7 or "" for i in _ROWS], "job": ["", "ox"] * 30},
            "",
            ["age=x job=ox", "age=3 job=ox"],
            {"missing": "fill", "fill": {"age": 3, "job": "ox"}},
        ),
        ({"age": [i % 7 if i % 5 else "?" for i in _ROWS]}, "", [""], {"missing": "drop"}),
        ({"pay": [900 + i % 7 for i in _ROWS]}, "", [""], {"scaling": "standard"}),
        (
            {"pay": [900 + i % 7 for i in _ROWS]},
            "",
            ["pay=9", "pay=2:1", "pay=0:2000"],
            {"scaling": "range", "ranges": {"pay": [0, 2000]}},
        ),
        (
            {"day": _DATES},
            "",
            ["day=0:9000"],
            {"dates": {"day": {"format": "%d.%m.%Y", "since": "2000-01-01"}}},
        ),
        (
            {"day": ["1/2/2020", "3/4/2021"] * 30},
            "",
            ["%m/%d/%Y", "day=0:9000"],
            {"dates": {"day": {"format": "%m/%d/%Y", "since": "2000-01-01"}}},
        ),
        (
            {"age": [i % 7 for i in _ROWS], "row": _ROWS, "name": [f"P{i}" for i in _ROWS]}
            | {"cabin": ["", "", "C"] * 20, "": _ROWS},
            "",
            [],
            {"features": ["age"]},
        ),
        (
            {"age;size": [f"{i % 7},5;{i % 3}" for i in _ROWS]},
            "",
            [],
            {"separator": ";", "decimal": ","},
        ),
        ({"age": [i % 7 for i in _ROWS]}, "regression", [], {"task": "regression"}),
    ],
)
def test_a_table_gets_the_options_that_it_needs(
    fedjax_dp, monkeypatch, columns, label, answers, options
):
    mark = ";" if ";" in next(iter(columns)) else ","
    last = [i * 1.5 if label else "yn"[i % 2] for i in _ROWS]
    rows = zip(*columns.values(), last, strict=True)
    lines = [[*columns, "end"], *rows]
    pathlib.Path("t.csv").write_text("".join(mark.join(map(str, x)) + "\n" for x in lines))
    typed = io.StringIO("\n".join(["t.csv", "end", "", *answers, "none", ""]) + "\n")
    typed.isatty = lambda: True
    monkeypatch.setattr("sys.stdin", typed)
    words = ("--run.rounds=1", "--run.plots=false", "--data.num_clients=2", "--data.partition=iid")
    status, _, said = fedjax_dp("init", "t.toml", *words)
    assert status == 0 and not typed.read(), said
    found = tomllib.loads(pathlib.Path("t.toml").read_text())["data"]["options"]
    assert found | options == found, found
    status, _, said = fedjax_dp("run", "t.toml")
    assert status == 0 and "scaling" not in said, said


def test_a_file_is_overwritten_only_by_force(fedjax_dp):
    pathlib.Path("mine.toml").write_text("mine")
    status, _, said = fedjax_dp("init", "mine.toml")
    assert status == 2 and "--force" in said
    assert pathlib.Path("mine.toml").read_text() == "mine"
    assert fedjax_dp("init", "mine.toml", "--force", "-q")[:2] == (0, "mine.toml\n")


def test_a_terminal_is_asked_again_until_the_answer_fits(fedjax_dp, monkeypatch):
    answers = io.StringIO("digit\ndigits\nuser\nclient\nten\n10\ndp_sgd\n\n")
    answers.isatty = lambda: True
    monkeypatch.setattr("sys.stdin", answers)
    status, _, said = fedjax_dp("init")
    assert status == 0 and not answers.read()
    assert "did you mean 'digits'" in said and "did you mean 'client'" in said
    config = load_config("experiment.toml")
    assert (config.privacy.client.epsilon, config.algorithm.name) == (10, "dp_fedavg")


def test_the_schema_is_beside_the_file_that_names_it(fedjax_dp):
    assert fedjax_dp("init", "--schema", "-q")[0] == 0
    text = pathlib.Path("experiment.toml").read_text()
    name = text.splitlines()[0].removeprefix("#:schema ")
    schema = json.loads(pathlib.Path(name).read_text())
    assert schema == json_schema()
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.Draft202012Validator(schema).validate(tomllib.loads(text))
    assert fedjax_dp("init", "other.toml", "--schema")[0] == 2
