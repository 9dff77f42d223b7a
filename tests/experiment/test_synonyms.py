"""Words of other packages lead to the keys, values, commands and options that mean the same."""

import re

import pytest

from fedjax_dp.cli import main
from fedjax_dp.core.synonyms import WORDS, names_of
from fedjax_dp.evaluation.metrics import METRICS
from fedjax_dp.experiment.components.catalogue import CHOICES, DESCRIBED
from fedjax_dp.experiment.reading.config_files import all_keys, load_config
from fedjax_dp.experiment.reading.keys import describe


def test_every_name_is_one_of_the_package():
    options = [
        f"{choice.options}.{option}"
        for key, choice in CHOICES.items()
        for name in choice.names
        for option in choice.fields(name)
    ]
    keys = {*all_keys(), *options, "schedules.training.learning_rate"}
    parts = {name for choice in DESCRIBED.values() for name in choice.names} | set(METRICS)
    values = {word for _, rule, _, _ in describe() for word in re.findall(r"'(\w+)'", rule)}
    options = {name for name in ("delta", "output")}
    known = {*parts, *values, *options, *main.COMMANDS}
    wrong = [
        n for n in WORDS if n not in known and not any(f".{k}".endswith(f".{n}") for k in keys)
    ]
    assert not wrong


def test_no_word_is_listed_twice_for_a_name():
    for name, words in WORDS.items():
        assert len(set(words.split())) == len(words.split()), name
        assert name in names_of(words.split()[0].upper().replace("_", "-"))


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("--training.lr=1", "'training.learning_rate'"),
        ("--model.lr=1", "'training.learning_rate'"),
        ("--lr=1", "'training.learning_rate'"),
        ("--epsilon=1", "'privacy.record.epsilon' or 'privacy.client.epsilon'"),
        ("--privacy.epsilon=1", "'privacy.record.epsilon' or 'privacy.client.epsilon'"),
        ("--privacy.clients.epsilon=1", "'privacy.client.epsilon'"),
        ("--noise=1", "'privacy.record.noise_multiplier' or 'privacy.client.noise_multiplier'"),
        ("--max-grad-norm=1", "'privacy.record.clip_norm' or 'privacy.client.clip_norm'"),
        ("--rounds=1", "'run.rounds'"),
        ("--Training.LearningRate=1", "'training.learning_rate'"),
        ("--momentum=0.9", "'training.optimizer_options.momentum'"),
        ("--training.momentum=0.9", "'training.optimizer_options.momentum'"),
        ("--dataset=mnist", "'data.name'"),
        ("--out=x", "'output'"),
        ("--data.name=MNIST", "'mnist'"),
        ("--data.name=CIFAR-10", "'cifar10'"),
        ("--data.name=csv", "'table'"),
        ("--algorithm.name=FedAvg", "'fedavg'"),
        ("--training.optimizer=SGD", "'sgd'"),
        ("--privacy.unit=User", "'client'"),
        ("--privacy.accountant=PRV", "'pld'"),
        ("--participation.sampler=uniform", "'fixed_size'"),
        ("--training.sampler=Poisson", "'poisson'"),
        ("--privacy.client.mechanism=DP-FTRL", "'correlated_gaussian'"),
        ("--algorithm.options.proximal_mu=1", "'mu'"),
        ("--data.partition=non-iid", "'dirichlet'"),
        ("--data.partition=pathological", "'shards'"),
        ("--participation.fraction=1", "'participation.cohort_size'"),
        ("--participation.rate=1", "'participation.cohort_size'"),
        ("--sampling_rate=1", "'participation.cohort_size'"),
        ("--sample-rate=1", "'training.batch_size' or 'participation.cohort_size'"),
        ("--data.alpha=1", "'data.partition_options.alpha'"),
        ("--gpu=1", "'execution.devices'"),
        ("--csv=x", "'data.options.path'"),
        ("--label=x", "'data.options.label'"),
        ("--z=1", "'privacy.record.noise_multiplier' or 'privacy.client.noise_multiplier'"),
        ("--tensorboard=1", "'run.callbacks'"),
        ("--secagg=1", "'secure_aggregation.form'"),
        ("--algorithm.name=FedAvg-DP", "'dp_fedavg'"),
        ("--algorithm.name=FedOpt", "'fedadam'"),
        ("--algorithm.name=agnostic_fed_avg", "'afl'"),
        ("--algorithm.name=HypCluster", "'ifca'"),
        ("--algorithm.aggregator=FedTrimmedAvg", "'trimmed_mean'"),
        ("--privacy.unit=off", "'none'"),
        ("--privacy.unit=local", "'record'"),
        ("--central_privacy_mechanism=gaussian", "'privacy.client.mechanism'"),
        ("--fraction-evaluate=1", "'data.client_test_share'"),
        ("--local_num_epochs=1", "'training.num_epochs'"),
        ("--expected_batch_size=1", "'training.batch_size'"),
        ("--server_optimizer=adam", "'algorithm.name'"),
        ("--training.sampler=poisson_sampling", "'poisson'"),
        ("--epsilom=1", "'privacy.record.epsilon'"),
    ],
)
def test_a_word_of_another_package_is_answered_by_ours(word, hint):
    method = ["--algorithm.name=fedprox"] * ("proximal" in word)
    with pytest.raises(ValueError, match="did you mean") as error:
        load_config(None, [*method, word])
    assert str(error.value).endswith(f"did you mean {hint}?")


@pytest.mark.parametrize(
    "word", ["--workers=4", "--data.name=iris", "--model.options.zzz=1", "--privacy.unit=x"]
)
def test_what_is_like_nothing_gets_no_suggestion(word):
    with pytest.raises(ValueError, match=r"must be|there is no") as error:
        load_config(None, [word])
    assert "did you mean" not in str(error.value)


@pytest.mark.parametrize("key", ["algorithm.name", "algorithm.aggregator"])
@pytest.mark.parametrize("name", ["secagg", "SecAgg"])
def test_what_is_another_section_here_is_named(key, name):
    with pytest.raises(ValueError, match=r"; use secure_aggregation.form"):
        load_config(None, [f"--{key}={name}"])


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (("plot",), "no such command 'plot'"),
        (("train",), "'run'"),
        (("Run",), "'run'"),
        (("privacy", "epsilon", "--sigma", "1"), "--noise-multiplier"),
        (("privacy", "epsilon", "--dp-delta", "1"), "--delta"),
    ],
)
def test_so_are_commands_and_their_options(fedjax_dp, words, hint):
    status, _, said = fedjax_dp(*words)
    assert (
        status == 2 and hint in said and said.lower().count("did you mean") == (words != ("plot",))
    )
