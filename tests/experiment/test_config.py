"""The configuration: defaults, files, overrides, and errors that name the mistake."""

import dataclasses
import tomllib

import pytest

from fedjax_dp.experiment import config as configuration
from fedjax_dp.experiment.config import Config
from fedjax_dp.experiment.values import ConfigError


def keys_of(section, prefix=""):
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        if dataclasses.is_dataclass(value):
            yield from keys_of(value, f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}", value


def value_at(config, key):
    for part in key.split("."):
        config = config[part] if isinstance(config, dict) else getattr(config, part)
    return config


def written(tmp_path, text):
    path = tmp_path / "experiment.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_defaults_survive_a_file(tmp_path):
    path = written(tmp_path, configuration.to_toml(Config()))
    assert configuration.load(path) == Config() == configuration.load(None)


# Another value of the same kind for every key there is.
CHANGED = {
    "run.name": "2024-05-01",
    "run.seed": 5,
    "run.secret": True,
    "run.rounds": 7,
    "run.evaluate_every": 2,
    "run.checkpoint_every": 3,
    "data.name": "mnist",
    "data.data_dir": "some/where",
    "data.options": {"seed": 3, "shape": [1, 2], "name": "x"},
    "data.partition": "dirichlet",
    "data.num_clients": 4,
    "data.partition_options": {"alpha": 0.1},
    "data.client_test_share": 0.5,
    "data.public_examples": 5,
    "data.check_finite": False,
    "model.name": "mlp",
    "model.options": {"hidden": [8, 4]},
    "model.frozen": ["params/Conv_0/*", "params/Dense_0"],
    "algorithm.name": "fedprox",
    "algorithm.options": {"mu": 0.5},
    "training.optimizer": "adam",
    "training.optimizer_options": {"b1": 0.5},
    "training.learning_rate": [0.5, 0.25],
    "training.batch_size": 7.0,
    "training.num_epochs": 2.5,
    "training.num_steps": 3.0,
    "training.sampler": "shuffled",
    "training.micro_batch_size": 4,
    "participation.sampler": "poisson",
    "participation.cohort_size": 2.5,
    "participation.capacity": 3,
    "participation.separation": 2,
    "privacy.unit": "none",
    "privacy.relation": "replace_one",
    "privacy.accountant": "pld",
    "privacy.record.clip_norm": [0.5, 2.0],
    "privacy.record.noise_multiplier": 1.5,
    "privacy.record.epsilon": None,
    "privacy.record.dp_delta": 1e-7,
    "privacy.record.per_layer": True,
    "privacy.client.clip_norm": 0.125,
    "privacy.client.noise_multiplier": [1.0, 2.0],
    "privacy.client.epsilon": 0.5,
    "privacy.client.dp_delta": 0.01,
    "privacy.client.per_layer": True,
    "privacy.client.mechanism": "laplace",
    "privacy.client.denominator": "realised",
    "privacy.client.adaptive_clipping": True,
    "privacy.client.target_quantile": 0.75,
    "privacy.client.bits": 12,
    "privacy.client.bands": 3,
    "execution.clients_per_chunk": 3,
    "execution.devices": 2,
    "execution.placement": "host",
    "execution.compilation_cache": "cache",
}


def as_word(value):
    """A value as somebody would type it."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k} = {as_toml(v)}" for k, v in value.items()) + "}"
    return str(value)


def as_toml(value):
    return f'"{value}"' if isinstance(value, str) else as_word(value)


def test_the_table_of_changes_is_complete():
    assert set(CHANGED) == {key for key, _ in keys_of(Config())}
    assert all(value_at(Config(), key) != value for key, value in CHANGED.items())


@pytest.mark.parametrize("key", CHANGED)
def test_every_key_can_be_overridden_in_both_forms_and_survives_a_file(tmp_path, key):
    word = as_word(CHANGED[key])
    apart = configuration.load(None, [f"--{key}", word])
    joined = configuration.load(None, [f"--{key}={word}"])
    assert apart == joined
    assert value_at(apart, key) == CHANGED[key]
    assert type(value_at(apart, key)) is type(CHANGED[key])
    others = [(k, v) for k, v in keys_of(apart) if k != key]
    assert others == [(k, v) for k, v in keys_of(Config()) if k != key]
    assert configuration.load(written(tmp_path, configuration.to_toml(apart))) == apart


def test_all_changes_at_once_come_from_a_file(tmp_path):
    tables = {}
    for key, value in CHANGED.items():
        *path, last = key.split(".")
        table = tables
        for part in path:
            table = table.setdefault(part, {})
        table[last] = "none" if value is None else value
    words = [f"--{key}={as_word(value)}" for key, value in CHANGED.items()]
    import tomli_w

    assert configuration.load(written(tmp_path, tomli_w.dumps(tables))) == configuration.load(
        None, words
    )


def test_overrides_win_over_the_file_and_merge_into_its_option_tables(tmp_path):
    path = written(
        tmp_path,
        "[run]\nrounds = 3\nseed = 4\n[model]\nname = 'mlp'\n[model.options]\na = 1\nb = 2\n",
    )
    config = configuration.load(path, ["--run.rounds", "9", "--model.options.b", "5"])
    assert (config.run.rounds, config.run.seed, config.model.name) == (9, 4, "mlp")
    assert config.model.options == {"a": 1, "b": 5}


def test_a_whole_number_is_a_number_but_not_the_other_way_round():
    assert configuration.load(None, ["--training.learning_rate=2"]).training.learning_rate == 2.0
    with pytest.raises(ConfigError, match=r"run\.rounds must be a whole number, got 2\.0"):
        configuration.load(None, ["--run.rounds=2.0"])


def test_none_takes_away_a_text_too():
    assert configuration.load(None, ["--data.data_dir", "none"]).data.data_dir is None


def test_negative_numbers_and_signs_are_values():
    config = configuration.load(None, ["--training.learning_rate", "-0.5", "--run.seed=-1"])
    assert (config.training.learning_rate, config.run.seed) == (-0.5, -1)


@pytest.mark.parametrize(
    ("text", "wrong", "nearest"),
    [
        ("[run]\nround = 3", "key 'run.round'", "run.rounds"),
        ("rounds = 3", "key 'rounds'", "run.rounds"),
        ("[trainig]\nlearning_rate = 3.0", "section 'trainig'", "training"),
        ("[privacy.recrod]\nepsilon = 3.0", "section 'privacy.recrod'", "privacy.record"),
        ("[data.option]\nseed = 3", "section 'data.option'", "data.options"),
        ("[privacy.record]\nepsilom = 3.0", "key 'privacy.record.epsilom'", "record.epsilon"),
    ],
)
def test_unknown_names_in_a_file_are_named_with_the_nearest(tmp_path, text, wrong, nearest):
    path = written(tmp_path, text)
    with pytest.raises(ConfigError) as error:
        configuration.load(path)
    message = str(error.value)
    assert str(path) in message and wrong in message
    assert message.endswith(f"{nearest}'?")


@pytest.mark.parametrize(
    ("word", "nearest"),
    [
        ("--run.round", "run.rounds"),
        ("--trainig.learning_rate", "training.learning_rate"),
        ("--privacy.client.epsilom", "privacy.client.epsilon"),
        ("--resum", "resume"),
        ("--outptu", "output"),
        ("--run.rounds.more", "run.rounds"),
    ],
)
def test_unknown_names_on_the_command_line_are_named_with_the_nearest(word, nearest):
    with pytest.raises(ConfigError) as error:
        configuration.load(None, [word, "3"])
    message = str(error.value)
    assert "command line" in message and repr(word[2:]) in message
    assert message.endswith(f"did you mean {nearest!r}?")


WRONG_VALUES = [
    ("run.rounds", '"three"', "a whole number"),
    ("run.rounds", "true", "a whole number"),
    ("data.check_finite", "1", "true or false"),
    ("data.options", "3", "a table"),
    ("model.frozen", '"params/Dense_0"', "a list of texts"),
    ("model.frozen", "[1]", "a list of texts"),
    ("data.client_test_share", "true", "a finite number"),
    ("training.learning_rate", '"fast"', "a finite number or a list of finite numbers"),
    ("training.learning_rate", "nan", "a finite number"),
    ("training.learning_rate", "[]", "a list of finite numbers, one for each client"),
    ("training.learning_rate", "[0.1, inf]", "a list of finite numbers"),
    ("training.learning_rate", "[0.1, true]", "a list of finite numbers"),
    ("privacy.record.epsilon", "inf", "a finite number"),
    ("privacy.unit", '"recrod"', "did you mean 'record'?"),
    ("privacy.unit", "3", "one of 'none', 'record', 'client', 'both'"),
    ("training.sampler", '"posson"', "did you mean 'poisson'?"),
    ("execution.clients_per_chunk", '"atuo"', "a whole number or one of 'auto'"),
]


@pytest.mark.parametrize(("key", "text", "rule"), WRONG_VALUES)
def test_wrong_values_name_key_rule_and_value(tmp_path, key, text, rule):
    section, _, last = key.rpartition(".")
    path = written(tmp_path, f"[{section}]\n{last} = {text}\n")
    got = repr(tomllib.loads(f"v = {text}")["v"])
    for arguments, origin in (((path,), str(path)), ((None, [f"--{key}={text}"]), "command line")):
        with pytest.raises(ConfigError) as error:
            configuration.load(*arguments)
        message = str(error.value)
        assert message.startswith(f"{origin}: {key} must be ")
        assert rule in message and got in message


def test_a_text_key_takes_any_word_but_no_other_kind_from_a_file(tmp_path):
    assert configuration.load(None, ["--run.name=12"]).run.name == "12"
    assert configuration.load(None, ['--run.name="12"']).run.name == "12"
    with pytest.raises(ConfigError, match=r"run\.name must be a text, got 12"):
        configuration.load(written(tmp_path, "[run]\nname = 12"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run.rounds", "3"], "expected --section.key, got 'run.rounds'"),
        (["--run.rounds"], "--run.rounds needs a value"),
        (["--run", "3"], "run is a section, not a key"),
        (["--run={rounds = 3}"], "run is a section, not a key"),
        (["--data.options=3", "--data.options.a=1"], "--data.options.a enters a value"),
        (["--data.options.a=1", "--data.options.a.b=1"], "--data.options.a.b enters a value"),
    ],
)
def test_words_that_are_no_override_are_refused(words, message):
    with pytest.raises(ConfigError) as error:
        configuration.load(None, words)
    assert message in str(error.value)


def test_a_section_cannot_be_a_number(tmp_path):
    with pytest.raises(ConfigError, match="run must be a section, got 3"):
        configuration.load(written(tmp_path, "run = 3"))


def test_files_that_are_missing_or_broken_are_named(tmp_path):
    missing = tmp_path / "nowhere.toml"
    with pytest.raises(ConfigError) as error:
        configuration.load(missing)
    assert str(error.value) == f"there is no configuration file {str(missing)!r}"
    broken = written(tmp_path, "[run\n")
    with pytest.raises(ConfigError) as error:
        configuration.load(broken)
    assert f"{broken} is not valid TOML" in str(error.value)


def test_every_key_is_described():
    rows = configuration.describe()
    assert [name for name, _, _ in rows] == [key for key, _ in keys_of(Config())]
    assert all(about for _, _, about in rows)
