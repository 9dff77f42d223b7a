"""The JSON schema of configuration files agrees with how they are read."""

import copy
import pathlib
import tomllib

import pytest

from fedjax_dp.experiment import load_config
from fedjax_dp.experiment.reading import config_files
from fedjax_dp.experiment.reading.json_schema import json_schema

ROOT = pathlib.Path(__file__).parents[2]
FILES = sorted(
    path for path in ROOT.glob("experiments/*/*.toml") if path.stem not in ("claims", "methods")
)
WORDS = (
    (),
    ("--privacy.client.mechanism=discrete_gaussian", "--privacy.client.bits=auto"),
    ("--participation.sampler=poisson", "--participation.cohort_size=3"),
    ("--privacy.record.epsilon=none", "--privacy.record.noise_multiplier=1"),
    ("--training.learning_rate=[1, 2]", "--training.batch_size=heterogeneous"),
    ("--model.adapters.rank=2", "--model.adapters.targets=['params/w']"),
    ("--model.name=mlp", "--model.options.hidden_sizes=[3]", "--data.partition_options.alpha=1"),
    ("--training.optimizer=adam", "--training.optimizer_options.b1=0.8"),
    ("--run.callbacks.early_stopping.patience=3", "--data.augmentation.flip={}"),
)


@pytest.fixture(scope="module")
def validator():
    schema = json_schema()
    return pytest.importorskip("jsonschema").Draft202012Validator(schema)


def tables(*words):
    return tomllib.loads(config_files.to_toml(load_config(None, words)))


def test_every_section_refuses_unknown_keys_and_describes_its_values():
    schema = json_schema()
    for name, part in {"": schema, **schema["$defs"]}.items():
        assert part["additionalProperties"] is False, name
        values = [each for each in part["properties"].values() if "title" in each]
        assert all("description" in each for each in values), name


def test_files_of_the_experiments_are_accepted(validator):
    assert len(FILES) > 10
    for path in FILES:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
        if "run" in found or "data" in found:
            validator.validate(found)


@pytest.mark.parametrize("words", WORDS)
def test_what_a_run_writes_is_accepted(validator, words):
    validator.validate(tables(*words))


def test_sections_that_are_left_out_are_accepted(validator):
    validator.validate({"acceleration": "none", "clock": "none", "participation": {}})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("run.round", 3),
        ("run.rounds", 0),
        ("run.rounds", "none"),
        ("run", "none"),
        ("trainig", {}),
        ("training.learning_rate", -1.0),
        ("training.sampler", "poison"),
        ("training.optimizer", "adm"),
        ("algorithm.name", "fedprix"),
        ("privacy.client.bits", 8),
        ("participation.cohort_size", 3),
        ("secure_aggregation.word_bits", 33),
        ("model.adapters.rnak", 2),
        ("model.options.hidden_sizes", [3]),
        ("algorithm", {"name": "fedprox", "options": {"mu": -1.0}}),
        ("algorithm", {"name": "fedprox", "options": {"strength": 1.0}}),
        ("algorithm", {"name": "ifca", "options": {}}),
        ("data.partition_options.alpha", 0.0),
        ("training", {"optimizer": "adam", "optimizer_options": {"b1": 2.0}}),
        ("run.callbacks", {"early_stoping": {}}),
        ("data.augmentation", {"flip": {"odds": 1}}),
    ],
)
def test_what_reading_refuses_is_marked(validator, key, value):
    """Each is refused by both."""
    wrong = copy.deepcopy(tables())
    section, names = wrong, key.split(".")
    for name in names[:-1]:
        section = section.setdefault(name, {})
    section[names[-1]] = value
    assert not validator.is_valid(wrong)
    with pytest.raises(ValueError):
        config_files.from_tables(wrong, "config.toml")
