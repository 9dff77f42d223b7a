"""The configuration: defaults, files, overrides, and errors that name the mistake."""

from collections.abc import Callable
from typing import Annotated

import pytest
from pydantic import TypeAdapter, ValidationError
from test_fuzz import BESIDE

from fedjax_dp.core.ranges import PathText, ZeroOrAtLeast
from fedjax_dp.experiment import load_config
from fedjax_dp.experiment.components.catalogue import CHOICES
from fedjax_dp.experiment.reading import config_files
from fedjax_dp.experiment.reading.keys import describe, describe_choice
from fedjax_dp.experiment.schema.config import ROOT, Config
from fedjax_dp.experiment.schema.constraints import ConfigError, annotation_of, rule_of
from fedjax_dp.experiment.schema.options import fields_of
from fedjax_dp.experiment.schema.sections import Section, sections_of


def keys_of(section, prefix=""):
    for name, value in section:
        if isinstance(value, Section):
            yield from keys_of(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def value_at(config, key):
    for part in key.split("."):
        config = config[part] if isinstance(config, dict) else getattr(config, part)
    return config


def written(tmp_path, text):
    path = tmp_path / "experiment.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_defaults_survive_a_file(tmp_path):
    path = written(tmp_path, config_files.to_toml(Config()))
    assert load_config(path) == Config() == load_config(None)


# What has to be chosen for some keys to exist, or for some values to have a meaning.
CHOSEN = {
    "data.options": ("--data.name=kddcup99",),
    "model.options": ("--model.name=mlp",),
    "algorithm.options": ("--algorithm.name=fedprox",),
    "algorithm.aggregator_options": ("--algorithm.aggregator=trimmed_mean",),
    "training.optimizer_options": ("--training.optimizer=adam",),
    **{key: (word,) for key, word in BESIDE.items()},
}
# Values of keys for which no value fits by its kind alone.
NAMED = {
    "run.metrics": ["f1"],
    "run.keep": "best:test_accuracy",
    "run.callbacks": {"early_stopping": {"patience": 2}},
    "schedules": {"training": {"learning_rate": {"curve": "exponential", "decay": 0.9}}},
    "data.augmentation": {"crop": {"padding": 2}, "flip": {"probability": 0.25}},
    "data.name": "mnist",
    "data.options": {"seed": 3, "distinct": True, "target": "kind"},
    "data.partition": "dirichlet",
    "data.partition_options": {"alpha": 0.1},
    "model.name": "mlp",
    "model.options": {"hidden_sizes": [8, 4]},
    "algorithm.name": "fedprox",
    "algorithm.options": {"mu": 0.5},
    "algorithm.aggregator": "trimmed_mean",
    "algorithm.aggregator_options": {"trimmed_share": 0.25},
    "training.optimizer": "adam",
    "training.optimizer_options": {"b1": 0.5},
    "participation.sampler": "poisson",
    "privacy.client.mechanism": "laplace",
    "run.name": "2024-05-01",
    "execution.model_rules": {"kernel": 1},
    "secure_aggregation.word_bits": 64,
    "training.learning_rate": [0.5, 0.25],
    "privacy.record.epsilon": None,
    "privacy.client.part_scales": {"control": 0.5},
    "privacy.client.part_shares": {"params": 0.8, "control": 0.6},
}
VALUES = (0.25, 7.0, 3, True, False, "elsewhere", ["a", "b"], [3], [[0.0, 0.5], [0.25, 0.0]])


def fields(field=ROOT, prefix=""):
    """The field of every key, of whatever section has it."""
    for section in sections_of(field):
        for name, inner in section.model_fields.items():
            if sections_of(inner):
                yield from fields(inner, f"{prefix}{name}.")
            else:
                yield f"{prefix}{name}", inner


def another(key, field):
    """A value of a key that is not its default."""
    if key in NAMED:
        return NAMED[key]
    rule, before = rule_of(annotation_of(field)), value_at(loaded(*CHOSEN.get(key, ())), key)
    fits = (v for v in (*VALUES, *rule.choices) if rule.holds(v) and (v, type(v)) != (before, bool))
    return next(value for value in fits if value != before)


def loaded(*words):
    return load_config(None, words)


def as_word(value):
    """A value as a user would type it."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k} = {as_toml(v)}" for k, v in value.items()) + "}"
    return str(value)


def as_toml(value):
    return f'"{value}"' if isinstance(value, str) else as_word(value)


def test_every_key_can_be_overridden_in_both_forms_and_survives_a_file(tmp_path):
    for key, field in dict(fields()).items():
        value = another(key, field)
        word, chosen = as_word(value), CHOSEN.get(key, ())
        apart = loaded(*chosen, f"--{key}", word)
        assert apart == loaded(f"--{key}={word}", *chosen), key
        assert value_at(apart, key) == value and type(value_at(apart, key)) is type(value), key
        # A sampler or a mechanism brings keys of its own, at their defaults.
        before, tag = dict(keys_of(loaded(*chosen))), key.rpartition(".")[0]
        for other, found in keys_of(apart):
            if other != key and (other in before or not other.startswith(tag)):
                assert found == before[other], (key, other)
        assert load_config(written(tmp_path, config_files.to_toml(apart))) == apart, key
        if isinstance(value, dict):
            # An override of a part drops the options of a file.
            continue
        section, _, last = key.rpartition(".")
        text = as_toml("none" if value is None else value)
        path = written(tmp_path, f"[{section}]\n{last} = {text}\n")
        assert load_config(path, chosen) == apart, key


def test_overrides_win_over_the_file_and_merge_into_its_option_tables(tmp_path):
    path = written(
        tmp_path,
        "[run]\nrounds = 3\nseed = 4\n[model]\nname = 'mlp'\n"
        "[model.options]\ndropout = 0.1\nhidden_sizes = [2]\n",
    )
    words = ["--run.rounds", "9", "--model.options.hidden_sizes", "[5]"]
    config = load_config(path, words)
    assert (config.run.rounds, config.run.seed, config.model.name) == (9, 4, "mlp")
    assert config.model.options == {"dropout": 0.1, "hidden_sizes": [5]}


_WITH_PARTS = """
[model]
name = 'mlp'
options = { dropout = 0.1, hidden_sizes = [2] }
[algorithm]
name = 'fedprox'
options = { mu = 0.5 }
aggregator = 'trimmed_mean'
aggregator_options = { trimmed_share = 0.2 }
[training]
optimizer = 'adam'
optimizer_options = { b1 = 0.5 }
"""


@pytest.mark.parametrize(
    ("words", "key", "options"),
    [
        (["--model.options={}"], "model.options", {}),
        (["--model.options={dropout = 0.2}"], "model.options", {"dropout": 0.2}),
        (["--model.name=lenet5"], "model.options", {}),
        (["--model.name=lenet5", "--model.options={}"], "model.options", {}),
        (["--model.name=mlp"], "model.options", {"dropout": 0.1, "hidden_sizes": [2]}),
        (["--algorithm.name=term", "--algorithm.options.tilt=2"], "algorithm.options", {"tilt": 2}),
        (["--algorithm.name=term"], "algorithm.aggregator_options", {"trimmed_share": 0.2}),
        (["--algorithm.aggregator=none"], "algorithm.aggregator_options", {}),
        (["--training.optimizer=sgd"], "training.optimizer_options", {}),
    ],
)
def test_an_override_of_a_part_or_of_its_table_drops_the_options_of_the_file(
    tmp_path, words, key, options
):
    config = load_config(written(tmp_path, _WITH_PARTS), words)
    chosen = {name: value for name, value in value_at(config, key).items() if value is not None}
    assert chosen == options
    others = {"model.options", "algorithm.options", "training.optimizer_options"} - {key}
    before = load_config(written(tmp_path, _WITH_PARTS))
    named = {word[2:].partition("=")[0].partition(".")[0] for word in words}
    for other in (each for each in others if each.partition(".")[0] not in named):
        assert value_at(config, other) == value_at(before, other) != {}


@pytest.mark.parametrize("whole", ["{}", "{dropout = 0.2}"])
def test_a_table_as_a_whole_and_in_parts_is_refused_in_either_order(whole):
    words = [f"--model.options={whole}", "--model.options.hidden_sizes=[2]", "--model.name=mlp"]
    for given in (words, words[::-1]):
        with pytest.raises(ConfigError) as error:
            load_config(None, given)
        assert "model.options must be given as a whole or in parts, got " in str(error.value)
        assert "--model.options.hidden_sizes" in str(error.value)


@pytest.mark.parametrize("text", ["self = 1", "[run]\nself = 1", "[privacy.record]\nself = 1"])
def test_a_key_may_have_the_name_of_an_argument_of_python(tmp_path, text):
    path = tmp_path / "a.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"there is no key '[a-z.]*self'"):
        load_config(path, [])


def test_a_whole_number_is_a_number_and_a_fraction_no_whole_number():
    assert load_config(None, ["--training.learning_rate=2"]).training.learning_rate == 2.0
    with pytest.raises(ConfigError, match=r"run\.rounds must be an integer .* got 2\.5"):
        load_config(None, ["--run.rounds=2.5"])


def test_none_takes_away_a_text_too():
    assert load_config(None, ["--data.data_dir", "none"]).data.data_dir is None


def test_negative_numbers_and_signs_are_values_and_not_keys():
    for words in (["--training.learning_rate", "-0.5"], ["--training.learning_rate=-0.5"]):
        with pytest.raises(ConfigError, match=r"learning_rate must be at least 0, got -0\.5"):
            load_config(None, words)
    config = load_config(None, ["--training.learning_rate", "+0.5"])
    assert config.training.learning_rate == 0.5


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
        load_config(path)
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
        load_config(None, [word, "3"])
    message = str(error.value)
    assert "command line" in message and repr(word[2:]) in message
    assert message.endswith(f"did you mean {nearest!r}?")


def test_a_text_key_takes_any_word_but_no_other_kind_from_a_file(tmp_path):
    assert load_config(None, ["--run.name=12"]).run.name == "12"
    assert load_config(None, ['--run.name="12"']).run.name == "12"
    with pytest.raises(ConfigError, match=r"run\.name must be a plain name .* or none, got 12"):
        load_config(written(tmp_path, "[run]\nname = 12"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run.rounds", "3"], "expected --section.key, got 'run.rounds'"),
        (["--run.rounds"], "--run.rounds needs a value"),
        (["--run", "3"], "run is a section, not a key; its keys are run.name, run.seed, "),
        (["--privacy.record", "3"], "its keys are privacy.record.clip_norm, "),
        (["--privacy", "none"], "its keys are privacy.unit, "),
        (["--run={rounds = 3}"], "run is a section, not a key"),
        (
            ["--data.options=3", "--data.options.a=1"],
            "data.options must be given as a whole or in parts",
        ),
        (
            ["--data.options.a=1", "--data.options.a.b=1"],
            "data.options.a must be given as a whole or in parts",
        ),
    ],
)
def test_words_that_are_no_override_are_refused(words, message):
    with pytest.raises(ConfigError) as error:
        load_config(None, words)
    assert message in str(error.value)


def test_a_section_cannot_be_a_number(tmp_path):
    with pytest.raises(ConfigError, match="run must be a section, got 3"):
        load_config(written(tmp_path, "run = 3"))


def test_configurations_of_studies_are_found_in_every_folder(tmp_path, monkeypatch):
    name, own = "experiments/fedavg/mnist.toml", tmp_path / "experiments" / "fedavg"
    monkeypatch.chdir(tmp_path)
    assert load_config(name).algorithm.name == "fedavg"
    with pytest.raises(ConfigError, match=r"'mnist\.toml'; .* experiments/fedavg/mnist\.toml"):
        load_config("mnist.toml")
    with pytest.raises(ConfigError, match=r"no configuration file 'fedavg/mnist\.toml'"):
        load_config("fedavg/mnist.toml")
    own.mkdir(parents=True)
    (own / "mnist.toml").write_text('algorithm.name = "scaffold"')
    assert load_config(name).algorithm.name == "scaffold"


def test_files_that_are_missing_or_broken_are_named(tmp_path):
    missing = tmp_path / "nowhere.toml"
    with pytest.raises(ConfigError) as error:
        load_config(missing)
    assert str(error.value) == f"there is no configuration file {str(missing)!r}"
    broken = written(tmp_path, "[run\n")
    with pytest.raises(ConfigError) as error:
        load_config(broken)
    assert f"{broken} is not valid TOML" in str(error.value)
    with pytest.raises(ConfigError, match=r"a table is read by --data.name=table .*got 'my.csv'"):
        load_config("my.csv")


@pytest.mark.parametrize(
    ("path", "title"),
    [
        ("data/ill people.csv.gz", "ill people"),
        ("wards.parquet", "wards"),
        ("hospitals/*.csv", "hospitals"),
        ("a?/*.csv", "table"),
        ("Grün & blau.csv", "Grün - blau"),
    ],
)
def test_a_run_on_a_file_is_named_after_it(path, title):
    words = ["--data.name=table", f"--data.options.path={path}", "--data.options.label=y"]
    assert load_config(None, words).title == title
    assert load_config(None, [*words, "--run.name=mine"]).title == "mine"


def test_every_key_is_described():
    rows = describe()
    rules = {row[0]: row[1] for row in rows}
    assert all(repr(name) in rules[key] for key, part in CHOICES.items() for name in part.names)
    assert [row[0] for row in rows] == config_files.all_keys()
    assert all(rule and about for _, rule, _, about in rows)


def test_a_key_of_some_choices_only_names_them():
    about = {row[0]: row[3] for row in describe()}
    assert about["privacy.client.bits"].endswith("; if discrete_gaussian")
    assert about["participation.capacity"].endswith("; if poisson")
    assert "; if" not in about["privacy.client.clip_norm"]


def test_what_belongs_to_another_choice_is_refused_and_can_be_taken_away():
    with pytest.raises(ConfigError, match=r"bits must be left out under the mechanism laplace"):
        load_config(None, ["--privacy.client.mechanism=laplace", "--privacy.client.bits=8"])
    words = ["--participation.sampler=full_participation", "--participation.cohort_size=none"]
    assert load_config(None, words) == Config()


def test_an_error_names_where_the_value_came_from(tmp_path):
    path = written(tmp_path, "[algorithm]\nname = 'fedprox'\n[algorithm.options]\nmu = 'x'\n")
    for words, origin in (((), str(path)), (("--algorithm.options.mu=y",), "command line")):
        with pytest.raises(ConfigError) as error:
            load_config(path, words)
        assert str(error.value).startswith(f"{origin}: algorithm.options.mu must be ")


def test_every_part_has_typed_and_described_options():
    """A parameter without annotation, or one that no file can hold, ends here."""
    for key, choice in CHOICES.items():
        for name in choice.names:
            for option, rule, _, about in describe_choice(f"{key}={name}"):
                assert option.startswith(choice.options) and rule and about


def test_an_option_that_a_file_cannot_hold_is_found():
    def bare(model, *, strength=1.0):
        """Does nothing.

        Args:
          strength: how much.
        """

    def called(model, *, weigh: Callable[[], float] = lambda: 1.0):
        """Does nothing.

        Args:
          weigh: how.
        """

    def silent(model, *, strength: float = 1.0):
        """Does nothing."""

    for factory, fault in (
        (bare, "be annotated with a kind"),
        (called, "be annotated with a kind"),
        (silent, "have a line in the docstr"),
    ):
        with pytest.raises(TypeError, match=f"must {fault}"):
            fields_of("a part", factory, given=("model",))
    assert not fields_of("a part", called, given=("model", "weigh"))


def test_meanings_are_read_however_a_docstring_is_indented():
    def own(*, rate: float = 1.0, depth: int = 2):
        """Does nothing.

        Args:
            rate (float): how fast,
                in steps: few.
            depth:
                how deep.

        Returns:
            rate: nothing.
        """

    found = {name: field.description for name, field in fields_of("mine.py:own", own).items()}
    assert found == {"rate": "how fast, in steps: few.", "depth": "how deep."}


def test_an_option_can_be_left_out_by_the_word_none(tmp_path):
    words = ("--training.optimizer_options.momentum=none", "--algorithm.name=robust_hdp")
    config = load_config(None, [*words, "--algorithm.options.num_blocks=none"])
    assert config.training.optimizer_options == {"momentum": None}
    assert config.algorithm.options == {"num_blocks": None}
    assert load_config(written(tmp_path, config_files.to_toml(config))) == config
    with pytest.raises(ConfigError, match=r"nesterov must be true or false, got 'none'"):
        load_config(None, ["--training.optimizer_options.nesterov=none"])


def test_keys_of_no_part_are_named_with_the_nearest():
    with pytest.raises(ConfigError, match=r"did you mean 'algorithm\.name'"):
        describe_choice("algoritm.name=fedprox")
    with pytest.raises(ValueError, match="did you mean 'fedprox'"):
        describe_choice("algorithm.name=fedprx")


@pytest.mark.parametrize(
    ("kind", "within", "outside"),
    [(PathText, "a", ""), (Annotated[float, ZeroOrAtLeast(0.5)], 0.0, 0.25)],
)
def test_pydantic_checks_rules_that_it_does_not_have(kind, within, outside):
    check = TypeAdapter(kind).validate_python
    assert check(within) == within
    with pytest.raises(ValidationError):
        check(outside)


def test_the_first_of_several_values_is_named():
    table = {"rounds": 0, "seed": -1}
    for values in (table, dict(reversed(table.items()))):
        with pytest.raises(ConfigError, match=rf"^run\.{next(iter(values))} must"):
            Config(run=values)
