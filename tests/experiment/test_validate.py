"""What is refused, and when: before data are read, or at least before anything is trained."""

import dataclasses

import numpy as np
import pytest
from run_folders import NOT_PRIVATE, SMALL, TouchedError, execute

from fedjax_dp.data import datasets
from fedjax_dp.engine.execution import compile as engine
from fedjax_dp.experiment import load_config
from fedjax_dp.experiment.assembly import assemble, population
from fedjax_dp.experiment.components.catalogue import CHOICES
from fedjax_dp.experiment.reading import config_files
from fedjax_dp.experiment.reading import validate as validation
from fedjax_dp.experiment.running.run_folder import next_folder

FEDAVG = ("--privacy.unit=none", "--algorithm.name=fedavg")
OF_CLIENTS = "--privacy.unit=client"
DP_FEDAVG = (OF_CLIENTS, "--algorithm.name=dp_fedavg")
SCAFFOLD = (OF_CLIENTS, "--algorithm.name=scaffold")
SHARED = (*SCAFFOLD, "--privacy.client.part_shares={params=0.8, control=0.6}")


@pytest.fixture
def no_training(monkeypatch):
    """Lets a simulation be declared, and fails if it is compiled or run."""
    build = engine.simulation

    def touched(*_args, **_kwargs):
        raise TouchedError("rounds were compiled")

    def declared(*args, **kwargs):
        return build(*args, **kwargs)._replace(compile=touched, run=touched)

    monkeypatch.setattr(assemble, "simulation", declared)


def test_the_traps_do_spring(tmp_path, no_data):
    with pytest.raises(TouchedError, match="data"):
        execute(tmp_path / "run", *SMALL)


def test_the_trap_of_training_does_spring(tmp_path, no_training):
    with pytest.raises(TouchedError, match="compiled"):
        execute(tmp_path / "run", *SMALL, *NOT_PRIVATE)


@pytest.mark.parametrize("key", CHOICES)
def test_names_that_do_not_exist_are_refused_before_data_are_read(tmp_path, no_data, key):
    name = next(iter(CHOICES[key].names))
    with pytest.raises(ValueError) as error:
        execute(tmp_path / "run", *SMALL, f"--{key}={name}x")
    message = str(error.value)
    assert message.startswith(f"command line: {key} must be one of ") and f"'{name}x'" in message
    assert message.endswith(f"did you mean {name!r}?")
    assert not (tmp_path / "run").exists()


LUS = ("--algorithm.name=blur_lus", "--algorithm.options.radius=1")


@pytest.mark.parametrize("unit", ["record", "both"])
@pytest.mark.parametrize("options", [(), ("--algorithm.options.score=cost",)])
def test_a_score_that_reads_records_behind_their_noise_is_refused_before_data_are_read(
    tmp_path, no_data, unit, options
):
    message = "algorithm.options must read no records, .*'magnitude' read none, got .*'cost'"
    words = (*LUS, f"--privacy.unit={unit}", *options)
    with pytest.raises(ValueError, match=message):
        execute(tmp_path / "run", *SMALL, *words)


@pytest.mark.parametrize(
    "words",
    [
        ("--privacy.unit=none",),
        ("--privacy.unit=client", "--privacy.client.epsilon=2"),
        ("--privacy.unit=record", "--algorithm.options.score=magnitude"),
        ("--privacy.unit=record", "--algorithm.options.score=cost_of_last_step"),
        ("--privacy.unit=record", "--algorithm.options.sparsity=0"),
    ],
)
def test_a_score_without_reads_or_claims_passes_until_data_are_read(tmp_path, no_data, words):
    with pytest.raises(TouchedError, match="data"):
        execute(tmp_path / "run", *SMALL, *LUS, *words)


PRIVATE = ("--privacy.unit=client", "--algorithm.name=dp_fedavg")
EXACT = ("--privacy.unit=none", "--algorithm.name=fedpi", "--algorithm.options.solver=exact")


def validated(*words):
    validation.validate(load_config(None, words))


def test_a_learning_rate_that_exact_steps_do_not_use_is_refused(tmp_path):
    validated(*EXACT)
    with pytest.raises(ValueError, match=r"learning_rate must be left out for fedpi .*got 0\.5"):
        validated(*EXACT, "--training.learning_rate=0.5")
    file = tmp_path / "config.toml"
    file.write_text(config_files.to_toml(load_config(None, EXACT)))
    validation.validate(load_config(file))


PLAIN = ("--privacy.unit=none", "--algorithm.name=fedavg", "--data.num_clients=4")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("exchange_every=2",), "communication.exchange_every must be left out without"),
        (("servers=[0, 2]",), "communication.servers must be 0, 1 and so on, each with a client"),
        (("servers=[0, 0]",), "communication.servers must be 0, 1 and so on, each with a client"),
        (("servers=[0, 1, 0, 1, 0]",), "servers must have at most one entry for each of the 4"),
        (
            ("servers=[0, 1]", "serverless=true"),
            "servers must be left out with communication.serverless",
        ),
        (("servers=[0, 1]", *PRIVATE), "servers must be left out under privacy of clients"),
        (
            ("serverless=true", *PRIVATE),
            "its aggregator must add no noise for clients without a server",
        ),
    ],
)
def test_servers_that_make_no_sense_are_refused(words, message):
    words = [word if word[0] == "-" else f"--communication.{word}" for word in words]
    with pytest.raises(ValueError) as error:
        validated(*PLAIN, *words)
    assert message in str(error.value)


def test_several_servers_are_read_back():
    words = (*PLAIN, "--communication.servers=[0, 1]", "--communication.exchange_every=2")
    for given in (PLAIN, words):
        config = load_config(None, given)
        again = config_files.from_toml(config_files.to_toml(config), "config.toml")
        validation.validate(again)
        assert again.communication == config.communication


REALISED = ("denominator=realised", "epsilon=none", "noise_multiplier=1")


@pytest.mark.parametrize(
    ("words", "is_bounded"),
    [
        (("--privacy.unit=none",), False),
        (("--privacy.unit=none", "--algorithm.options.strength=0"), True),
        (("--privacy.unit=none", *LUS[1:]), True),
        (("--privacy.unit=client",), True),
        (("--privacy.unit=client", *(f"--privacy.client.{key}" for key in REALISED)), False),
    ],
)
def test_blur_needs_a_radius_where_no_aggregator_bounds_an_update(words, is_bounded):
    if is_bounded:
        validated(*LUS[:1], *words)
    else:
        with pytest.raises(ValueError, match=r"algorithm\.options\.radius must be given if"):
            validated(*LUS[:1], *words)


@pytest.mark.parametrize(
    ("words", "option", "nearest"),
    [
        (("--model.name=mlp", "--model.options.hiden=[8]"), "hiden", "hidden"),
        ((*FEDAVG[:1], "--algorithm.name=fedprox", "--algorithm.options.nu=1"), "nu", "mu"),
        (("--training.optimizer=adam", "--training.optimizer_options.b3=1"), "b3", "b"),
    ],
)
def test_options_of_other_choices_are_checked_too(tmp_path, no_data, words, option, nearest):
    with pytest.raises(ValueError, match=rf"options\.{option} of .* did you mean '{nearest}"):
        execute(tmp_path / "run", *SMALL, *words)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("--algorithm.options.mu=1",),
            "there is no option algorithm.options.mu of dp_sgd, got 1; dp_sgd has no options",
        ),
        (
            ("--privacy.unit=none", "--algorithm.name=ifca"),
            "algorithm.options must hold 'num_models', an integer",
        ),
        (
            (*DP_FEDAVG, "--algorithm.aggregator=trimmed_mean"),
            "algorithm.aggregator must be none if clients are protected",
        ),
        (
            (*FEDAVG[:1], "--algorithm.name=feddyn", "--algorithm.aggregator=weighted_mean"),
            "algorithm.aggregator must be none for feddyn, which has its own aggregation",
        ),
        (
            (*FEDAVG, "--algorithm.aggregator_options.trimmed_share=0.1"),
            "algorithm.aggregator_options must be empty if no algorithm.aggregator is given",
        ),
        (("--execution.devices=4096",), "execution.devices must be at most"),
        (
            (
                *("--data.name=table", "--data.options.path=a.csv", "--data.options.label=y"),
                *("--data.options.split=s", "--data.options.test_path=b.csv"),
            ),
            "data.options.test_path must be left out with split, except to evaluate or predict",
        ),
        # Of privacy.
        (
            ("--privacy.record.noise_multiplier=0",),
            "privacy.record.noise_multiplier must be above 0 to keep the budget "
            "privacy.record.epsilon; without noise set that to none, got 0.0",
        ),
        (
            ("--privacy.record.noise_multiplier=[1, 0, 1]",),
            "privacy.record.noise_multiplier must be above 0 to keep the budget",
        ),
        (
            ("--privacy.record.epsilon=none",),
            "privacy.record must give an epsilon to calibrate to, or a noise_multiplier",
        ),
        (
            (*DP_FEDAVG, "--privacy.client.noise_multiplier=0"),
            "privacy.client.noise_multiplier must be above 0 to keep the budget",
        ),
        (
            ("--privacy.unit=client",),
            "privacy.unit must be record or both for the algorithm dp_sgd; to protect clients take "
            "another algorithm.name, such as dp_fedavg, got 'client'",
        ),
        (("--privacy.unit=none",), "dp_sgd; without privacy take another algorithm.name, such as"),
        (
            (OF_CLIENTS, "--algorithm.name=km_cdpfl", "--algorithm.options.num_models=2"),
            "privacy.unit must be none or record for the algorithm km_cdpfl, whose server computes "
            "on the updates of single clients; to protect clients take another algorithm.name",
        ),
        # Of updates of several parts.
        (
            (*DP_FEDAVG, "--privacy.client.part_scales={control=2}"),
            "privacy.client.part_scales must be left out for an update of dp_fedavg of one part",
        ),
        (
            (*SCAFFOLD, "--privacy.client.part_scales={controls=2}"),
            "privacy.client.part_scales must name parts of an update of scaffold: params, control, "
            "got ['controls']",
        ),
        (
            (*SCAFFOLD, "--privacy.client.part_scales={control=0}"),
            "privacy.client.part_scales",
        ),
        (
            (*SCAFFOLD, "--privacy.client.part_shares={control=1}"),
            "privacy.client.part_shares must name every part of an update of scaffold: params",
        ),
        (
            (*SCAFFOLD, "--privacy.client.part_shares={params=0.5, control=0.5}"),
            "privacy.client.part_shares must have squares that add up to 1, got {'params': 0.5",
        ),
        (
            (*SHARED, "--privacy.client.part_scales={control=2}"),
            "privacy.client.part_shares must be left out with privacy.client.part_scales: shares",
        ),
        (
            (*SHARED, "--privacy.client.per_layer=true"),
            "privacy.client.per_layer must be false with privacy.client.part_shares, which bound",
        ),
        (
            (*SHARED, "--privacy.client.adaptive_clipping=true"),
            "privacy.client.adaptive_clipping must be false with privacy.client.part_shares",
        ),
        (
            (*SCAFFOLD, "--algorithm.aggregator=gradient_mask"),
            "algorithm.aggregator must be none for scaffold, whose update has several parts",
        ),
        (
            (
                *(*SCAFFOLD, "--privacy.client.denominator=realised"),
                *("--privacy.client.epsilon=none", "--privacy.client.noise_multiplier=1"),
            ),
            "privacy.client.denominator must be expected for scaffold, whose server computes with",
        ),
        (
            (*SCAFFOLD, "--algorithm.options.is_weighted=true"),
            "algorithm.options.is_weighted must be False with an aggregator, which has its own",
        ),
        (
            (OF_CLIENTS, "--algorithm.name=fedpi", "--algorithm.options.form=centralised"),
            "algorithm.options.form must be 'decentralised' if clients are protected",
        ),
        (
            (OF_CLIENTS, "--algorithm.name=feddyn", "--algorithm.aggregator=uniform_mean"),
            "algorithm.aggregator must be none if clients are protected, since their mechanism",
        ),
        # Of cohorts.
        (
            (*FEDAVG, "--participation.sampler=poisson", "--participation.cohort_size=4"),
            "participation.cohort_size must be at most the population of 3 clients, got 4.0",
        ),
        (
            (*FEDAVG, "--participation.cohort_size=2"),
            "participation.cohort_size must be left out under the sampler full_participation",
        ),
        (
            (*FEDAVG, "--participation.sampler=cyclic", "--participation.capacity=2"),
            "participation.capacity must be left out under the sampler cyclic, got 2",
        ),
    ],
)
def test_values_out_of_range_are_refused_before_data_are_read(tmp_path, no_data, words, message):
    with pytest.raises(ValueError) as error:
        execute(tmp_path / "run", *SMALL, *words)
    assert message in str(error.value)


PER_CLIENT = (
    *(f"training.{key}" for key in ("learning_rate", "batch_size", "num_epochs", "num_steps")),
    *(f"privacy.record.{key}" for key in ("clip_norm", "noise_multiplier", "epsilon", "dp_delta")),
)


def two_numbers(key):
    return [0.1, 0.2] if key.endswith("dp_delta") else [1.0, 2.0]


def test_lists_of_another_length_than_the_clients_are_refused_before_data_are_read(
    tmp_path, no_data
):
    for key in PER_CLIENT:
        with pytest.raises(ValueError) as error:
            execute(tmp_path / "run", *SMALL, f"--{key}={two_numbers(key)}")
        rule = "be one number or have one for each of the 3 clients"
        assert str(error.value) == f"{key} must {rule}, got {two_numbers(key)}"


def test_lists_are_checked_before_training_where_only_the_data_know_the_clients(
    tmp_path, no_training, monkeypatch
):
    real = datasets.load("digits")
    clients = np.arange(len(real.train["y"])) % 3
    data = dataclasses.replace(real, train_clients=clients)
    monkeypatch.setattr(population.datasets, "load", lambda *_args, **_options: data)
    for key in PER_CLIENT:
        with pytest.raises(ValueError) as error:
            execute(tmp_path / "run", "--data.partition=natural", f"--{key}={two_numbers(key)}")
        assert key.rpartition(".")[2] in str(error.value) and "3 clients" in str(error.value)


TRUNCATED = (
    *(*DP_FEDAVG, "--participation.sampler=poisson"),
    *("--participation.cohort_size=1", "--participation.capacity=2"),
)
NOISE = ("--privacy.record.noise_multiplier=3.0", "--privacy.record.epsilon=none")


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (("--training.sampler=shuffled", *NOISE), ("shuffled", "sampler 'poisson'")),
        (
            ("--training.sampler=fixed_size", *NOISE),
            ("SampledWithoutReplacement", "zero_out", "replace_one"),
        ),
        (("--privacy.relation=add_remove",), ("privacy.relation", "public", "'zero_out'")),
        (
            ("--privacy.relation=replace_one", *NOISE),
            ("PoissonSampled", "'rdp'", "accountant 'pld'"),
        ),
        (
            (*DP_FEDAVG, "--participation.sampler=fixed_size", "--participation.cohort_size=2"),
            ("SampledWithoutReplacement", "zero_out", "replace_one"),
        ),
        (TRUNCATED, ("Truncated", "'rdp'", "accountant 'pld'")),
        (
            (*TRUNCATED, "--privacy.client.noise_multiplier=1.0", "--privacy.client.epsilon=none"),
            ("Truncated", "'rdp'", "accountant 'pld'"),
        ),
    ],
)
def test_a_privacy_without_an_analysis_is_refused_before_training(
    tmp_path, no_training, words, parts
):
    with pytest.raises(ValueError) as error:
        execute(tmp_path / "run", *SMALL, *words)
    assert all(part in str(error.value) for part in parts), error.value
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("part", ["train", "test"])
def test_data_that_are_not_finite_are_refused_before_training(
    tmp_path, monkeypatch, no_training, part
):
    real = datasets.load("digits")
    broken = {name: np.array(array) for name, array in getattr(real, part).items()}
    broken["x"][7, 0] = np.nan
    data = dataclasses.replace(real, **{part: broken})
    monkeypatch.setattr(population.datasets, "load", lambda *_args, **_options: data)
    with pytest.raises(ValueError, match=r"examples\['x'\] must be finite, got NaN or infinity"):
        execute(tmp_path / "run", *SMALL, *NOT_PRIVATE)
    with pytest.raises(TouchedError, match="compiled"):
        execute(tmp_path / "run", *SMALL, *NOT_PRIVATE, "--data.check_finite=false")


def test_every_held_out_example_of_a_client_is_checked(tmp_path, monkeypatch, no_training):
    """Wherever in the training part the NaN is, the split may have set it aside."""
    real = datasets.load("digits")
    config = load_config(None, [*SMALL, *NOT_PRIVATE])
    held_out = assemble.population_of(config).client_test
    x = np.array(real.train["x"])
    row = int(np.flatnonzero((x == held_out.examples["x"][0]).all(axis=tuple(range(1, x.ndim))))[0])
    x[row, 0] = np.inf
    data = dataclasses.replace(real, train={**real.train, "x": x})
    monkeypatch.setattr(population.datasets, "load", lambda *_args, **_options: data)
    with pytest.raises(ValueError, match=r"examples\['x'\] must be finite"):
        execute(tmp_path / "run", *SMALL, *NOT_PRIVATE)


def test_a_natural_partition_needs_clients_in_the_data(tmp_path, no_training):
    with pytest.raises(ValueError, match=r"data\.partition must not be natural, since"):
        execute(tmp_path / "run", "--data.partition=natural")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run", "--run.round", "3"], "did you mean 'run.rounds'?"),
        (["run", "--model.name=mpl"], "did you mean 'mlp'?"),
        (["run", "--resume", "nowhere"], "--resume must name a run folder with a config.toml"),
    ],
)
def test_a_mistake_ends_in_one_line_and_status_2(
    monkeypatch, fedjax_dp, tmp_path, no_data, words, message
):
    monkeypatch.chdir(tmp_path)
    status, _, error = fedjax_dp(*words)
    assert (
        status == 2
        and error.startswith("error: ")
        and message in error
        and "Traceback" not in error
    )
    assert not any(tmp_path.iterdir())


def test_resuming_takes_no_other_options(fedjax_dp, tmp_path, no_data):
    (tmp_path / "config.toml").write_text(config_files.to_toml(load_config(None)))
    for other in (["--output", "elsewhere"], ["other.toml"]):
        status, _, error = fedjax_dp("run", *other, "--resume", tmp_path)
        assert status == 2 and other[-1] in error
        assert "--resume must not be combined with a config file or --output" in error


def test_output_must_be_free(fedjax_dp, tmp_path, no_data):
    (tmp_path / "notes.txt").write_text("mine")
    for taken in (tmp_path, tmp_path / "notes.txt"):
        status, _, error = fedjax_dp("run", "--output", taken)
        assert status == 2
        assert "must be a new or an empty folder" in error and "--resume" in error
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_runs_that_start_together_get_a_folder_each(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    folders = {next_folder("digits") for _ in range(3)}
    assert sorted(str(folder) for folder in folders) == [
        f"runs/digits-{number:03d}" for number in (1, 2, 3)
    ]


MLP = ("--model.name=mlp", "--model.options.hidden_sizes=[8]")


@pytest.mark.parametrize(
    ("frozen", "message"),
    [
        (
            "['params/Dense_9']",
            "name parameters of the model, got 'params/Dense_9'.*'params/Dense_",
        ),
        ("['params']", "leave one of .* to be trained"),
    ],
)
def test_patterns_that_freeze_nothing_or_everything_are_refused_before_training(
    tmp_path, no_training, frozen, message
):
    with pytest.raises(ValueError, match=message):
        execute(tmp_path / "run", *SMALL, *NOT_PRIVATE, *MLP, f"--model.frozen={frozen}")


def test_batch_norm_under_noise_on_updates_is_refused_before_training(tmp_path, no_training):
    words = ("--model.name=resnet18", "--model.options.norm=batch", "--algorithm.name=dp_fedavg")
    with pytest.raises(ValueError, match=r"no buffers.*group norm"):
        execute(tmp_path / "run", *SMALL, *words, "--privacy.unit=client")


MASKED = ("--algorithm.name=dp_fedavg", "--algorithm.aggregator=gradient_mask")


@pytest.mark.parametrize(
    "words",
    [
        ("--privacy.client.mechanism=laplace",),
        ("--privacy.client.mechanism=discrete_gaussian",),
        ("--privacy.client.per_layer=true",),
        (
            "--privacy.client.denominator=realised",
            "--privacy.client.epsilon=none",
            "--privacy.client.noise_multiplier=1",
        ),
    ],
)
def test_masks_behind_noise_that_votes_cannot_share_are_refused(words):
    config = load_config(None, ("--privacy.unit=client", *MASKED, *words))
    key = words[0].removeprefix("--").partition("=")[0]
    with pytest.raises(ValueError, match=rf"{key} must (give a claim for|leave updates whole)"):
        validation.validate(config)


@pytest.mark.parametrize("name", ["fedavg", "fedprox", "fedadam", "fedyogi", "blur_lus"])
@pytest.mark.parametrize("unit", ["none", "record", "client", "both"])
def test_masks_are_an_option_of_every_algorithm_that_averages(name, unit):
    validation.validate(
        load_config(
            None,
            (
                f"--privacy.unit={unit}",
                *MASKED,
                f"--algorithm.name={name}",
                *((*LUS[1:], "--algorithm.options.score=magnitude") if name == "blur_lus" else ()),
            ),
        )
    )


def test_masks_of_what_combines_updates_in_its_own_way_are_refused():
    with pytest.raises(ValueError, match=r"algorithm\.aggregator must be none for ifca"):
        words = ("--privacy.unit=none", *MASKED, "--algorithm.name=ifca")
        validation.validate(load_config(None, (*words, "--algorithm.options.num_models=2")))
