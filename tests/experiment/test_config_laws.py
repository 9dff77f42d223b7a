"""Laws of configurations: what runs is read back equal, and Python has the rules of files."""

import collections
import datetime
import pathlib

import numpy as np
import pytest
import tomli_w
from marks import telling
from test_algorithms import KINDS, words_of
from test_config import written
from test_fuzz import WORDS

from fedjax_dp.algorithms.registry import ALGORITHMS
from fedjax_dp.experiment import Config, load_config
from fedjax_dp.experiment.assembly.assemble import checked_config
from fedjax_dp.experiment.reading.config_files import all_keys, from_toml, to_toml
from fedjax_dp.experiment.schema.config import (
    ROOT,
    ClockSection,
    ExecutionSection,
    LaplaceLevel,
    ModelSection,
    PrivacySection,
    RunSection,
)
from fedjax_dp.experiment.schema.constraints import ConfigError
from fedjax_dp.experiment.schema.sections import can_be_left_out, fields_below, sections_of, tag_of

CLOCK = "[clock]\nplaces = ['a']\nseconds = [[0.5]]\nserver = 'a'\nclients = ['a']\n"
# Tables of a file in which a section is on, and the override of its switch that turns it off.
ON = {
    "acceleration": ("[acceleration]\nmemory = 1\n", "--acceleration.memory=none"),
    "leaving": ("[leaving]\ntolerance = 0.5\n", "--leaving.tolerance=none"),
    "asynchronous": (
        f"{CLOCK}[asynchronous]\nconcurrency = 2\n[participation]\nsampler = 'fixed_size'\n",
        "--asynchronous.concurrency=none",
    ),
    "secure_aggregation": (
        "[secure_aggregation]\nform = 'cancelled'\n",
        "--secure_aggregation.form=none",
    ),
    "model.adapters": (
        "[model.adapters]\nrank = 1\ntargets = ['params/w']\n",
        "--model.adapters.rank=none",
    ),
    "evaluation.references": (
        "[evaluation]\nclusters = true\n[evaluation.references]\nepochs = 1\n",
        "--evaluation.references.epochs=none",
    ),
    "clock": (CLOCK, ""),
    "clock.availability": (
        f"{CLOCK}[clock.availability]\nchance = 0.5\n",
        "--clock.availability.chance=none",
    ),
    "participation": (
        "[participation]\nsampler = 'poisson'\ncohort_size = 2\n",
        "--participation.cohort_size=none",
    ),
    "privacy.record": ("[privacy.record]\nepsilon = 4.0\n", "--privacy.record.epsilon=none"),
    "privacy.client": (
        "[privacy.client]\nmechanism = 'laplace'\nepsilon = 4.0\n",
        "--privacy.client.epsilon=none",
    ),
}


def configurations(path, name, section):
    """Configurations of an algorithm with a section on, off by its switch, and left out."""
    text, off = ON[section]
    path.write_text(text, encoding="utf-8")
    for words in ((), (off,), (f"--{section}=none",)):
        try:
            config = load_config(path, [*words_of(name), *filter(None, words)])
            checked_config(config)
        except ValueError:
            continue
        yield words, config


def read_back(config):
    """Requires that a configuration which runs is read back equal, and runs again."""
    text = to_toml(config)
    again = from_toml(text, "config.toml")
    assert again == config and to_toml(again) == text
    checked_config(again)


def all_read_back(path, cases):
    found = collections.Counter()
    for name, section in cases:
        for words, config in configurations(path, name, section):
            read_back(config)
            found[section, words] += 1
    return found


def test_some_configurations_that_run_are_read_back_equal(tmp_path):
    names, sections = list(ALGORITHMS)[::6], list(ON)
    cases = [(name, sections[i % len(ON)]) for i, name in enumerate(names)]
    # Both units, of which the other one waits with a value that was taken away.
    cases += [("dp_sgd", "privacy.client"), ("dp_fedavg", "privacy.record")]
    found = all_read_back(tmp_path / "experiment.toml", cases)
    assert sum(found.values()) > len(cases), found


@telling
def test_all_configurations_that_run_are_read_back_equal(tmp_path):
    cases = [(name, section) for name in (*KINDS, "warm_start_averaging") for section in ON]
    cases += [(name, list(ON)[i % len(ON)]) for i, name in enumerate(ALGORITHMS)]
    found = all_read_back(tmp_path / "experiment.toml", cases)
    for section in ON:
        assert found[section, ()] and found[section, (f"--{section}=none",)], (section, found)


@pytest.mark.parametrize(
    "sections",
    [
        {"run": RunSection(callbacks={"wandb": {"entity": None}}, name="a b")},
        {"privacy": PrivacySection(unit="none", client=LaplaceLevel())},
        {"training": {"learning_rate": np.float32([0.5, 0.25]), "num_steps": np.int64(3)}},
        {"model": ModelSection(frozen=("params/*",), pretrained=pathlib.Path("m.npz"))},
        {"clock": {"deadline": None, "availability": {"chance": None}}},
        {"clock": ClockSection(), "acceleration": None, "participation": "none"},
        {"data": {"client_numbers": 'a "quoted"\n\t\\ path'}},
        {"execution": ExecutionSection(model_rules={"a.b/*": 1, "": 0})},
    ],
)
def test_what_python_makes_is_read_back_equal(sections):
    config = Config(**sections)
    again = from_toml(to_toml(config), "config.toml")
    assert again == config and to_toml(again) == to_toml(config)


def leaves(field=ROOT, path=()):
    """Every key with each section that has it."""
    for section in sections_of(field):
        for name, inner in section.model_fields.items():
            if sections_of(inner):
                yield from leaves(inner, (*path, name))
            else:
                tag = field.discriminator
                words = {tag: tag_of(section, field)} if tag not in (None, name) else {}
                yield section, (*path, name), words


def in_python(section, path, value):
    made = section(**{path[-1]: value})
    for _ in path[1:]:
        section, name = section.around
        made = section(**{name: made})
    return made


def in_a_file(path, words, value):
    tables = {**words, path[-1]: value}
    for name in reversed(path[:-1]):
        tables = {name: tables}
    return from_toml(tomli_w.dumps(tables), "file")


def outcome(make, *args):
    try:
        return make(*args)
    except ConfigError as error:
        return str(error).removeprefix("file: ")


VALUES = [*WORDS.values(), datetime.date(2024, 5, 1), 2**31, [[]], [{"a": 1}], "no/such", "a:b"]


def same_rules(cases):
    outcomes = collections.Counter()
    for (section, path, words), value in cases:
        of_file = outcome(in_a_file, path, words, value)
        assert outcome(in_python, section, path, value) == of_file, (path, value)
        outcomes[isinstance(of_file, Config)] += 1
    return outcomes


def test_some_values_are_refused_alike_in_python_and_in_a_file():
    some = [
        (leaf, VALUES[(i * step) % len(VALUES)])
        for i, leaf in enumerate(leaves())
        for step in (1, 5, 7)
    ]
    assert min(same_rules(some).values()) > 40


@telling
def test_all_values_are_refused_alike_in_python_and_in_a_file():
    keys = {".".join(path) for _, path, _ in leaves()}
    assert keys == set(all_keys())
    assert min(same_rules((leaf, value) for leaf in leaves() for value in VALUES).values()) > 400


def test_a_changed_copy_is_checked_before_any_work():
    config = Config()
    wrong = config.model_copy(update={"run": config.run.model_copy(update={"name": "../x"})})
    with pytest.raises(ConfigError, match=r"^run\.name must be a plain name .* got '\.\./x'"):
        checked_config(wrong)


@pytest.mark.parametrize("unit", ["record", "client"])
def test_a_level_that_is_off_is_refused_by_what_was_given(unit):
    other = {"record": "client", "client": "record"}[unit]
    algorithm = {"record": "dp_sgd", "client": "dp_fedavg"}[unit]
    words = [f"--algorithm.name={algorithm}", f"--privacy.unit={unit}"]
    for name in ("epsilon", "noise_multiplier", "per_layer"):
        value = "true" if name == "per_layer" else "4"
        with pytest.raises(ValueError, match=rf"^privacy\.{other}\.{name} must be left out"):
            checked_config(load_config(None, [*words, f"--privacy.{other}.{name}={value}"]))
    read_back(load_config(None, [*words, f"--privacy.{other}.epsilon=none"]))


NO_TABLES = [
    ("[[privacy.record]]\nepsilon = 1.0", "privacy.record", "--privacy.record.clip_norm=2"),
    ("privacy = []", "privacy", "--privacy.unit=client"),
    ("run = 3", "run", "--run.rounds=3"),
    ("model.options = 3", "model.options", "--model.options={}"),
    ("model.options = 3", "model.options", "--model.options.hidden_sizes=[4]"),
    ("[[data.options]]\npath = 'x'", "data.options", "--data.name=digits"),
    ("run.callbacks = 3", "run.callbacks", "--run.callbacks.early_stopping.patience=3"),
    ("clock.availability = 'daily'", "clock.availability", "--clock.availability.chance=0.1"),
    ("[[training.optimizer]]\na = 1", "training.optimizer", "--training.optimizer=sgd"),
    ("[run.rounds]\na = 1", "run.rounds", "--run.rounds=3"),
    ("[[participation.sampler]]\na = 1", "participation.sampler", "--participation.sampler=cyclic"),
    ("model.adapters = true", "model.adapters", "--model.adapters.rank=1"),
]


@pytest.mark.parametrize(("text", "key", "word"), NO_TABLES)
def test_what_is_no_table_or_should_be_none_is_refused_whatever_replaces_it(
    tmp_path, text, key, word
):
    for words in ((), (word,)):
        with pytest.raises(ConfigError, match=rf"experiment\.toml: {key} must be "):
            load_config(written(tmp_path, text), words)


def test_an_override_of_a_part_of_what_is_no_table_is_refused(tmp_path):
    path = written(tmp_path, "[run.callbacks]\nearly_stopping = 3\n")
    with pytest.raises(ConfigError, match=r"run\.callbacks\.early_stopping must be a table, got 3"):
        load_config(path, ["--run.callbacks.early_stopping.patience=3"])


def test_a_section_is_left_out_in_a_file_and_in_python_too(tmp_path):
    left_out = [key for key, field in fields_below(ROOT) if can_be_left_out(field)]
    assert set(left_out) == set(ON)
    path = written(tmp_path, "clock = 'none'\n[privacy]\nunit = 'client'\nrecord = 'none'\n")
    privacy = PrivacySection(unit="client")
    in_python = Config(clock=None, privacy={"unit": "client", "record": "none"})
    assert load_config(path) == in_python == Config(privacy=privacy)


@pytest.mark.parametrize(
    ("unit", "section"),
    [("record", "record"), ("client", "client"), ("both", "client"), ("both", "record")],
)
def test_the_mechanism_of_a_unit_is_not_left_out(tmp_path, unit, section):
    path = written(tmp_path, f"[privacy]\nunit = '{unit}'\n[privacy.{section}]\nepsilon = 1.0\n")
    rule = rf"privacy\.{section} must not be none under privacy\.unit={unit}, .*set privacy\.unit"
    with pytest.raises(ConfigError, match=f"^command line: {rule}"):
        load_config(path, [f"--privacy.{section}=none"])
    with pytest.raises(ConfigError, match=f"^file: {rule}"):
        from_toml(f"privacy = {{unit = '{unit}', {section} = 'none'}}", "file")
    with pytest.raises(ConfigError, match=f"^{rule}"):
        PrivacySection(unit=unit, **{section: None})
    off = [f"--privacy.{section}=none", "--privacy.unit=none"]
    assert load_config(path, off).privacy == PrivacySection(unit="none")
