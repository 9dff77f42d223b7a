"""A run that went wrong says so: before work where that can be known, else loudly and by status."""

import warnings

import jax
import numpy as np
import pytest
from marks import telling
from run_folders import NOT_PRIVATE, SMALL, execute, read_json

from fedjax_dp.algorithms import dp_fedavg
from fedjax_dp.clients import LocalConfig, local_trainer
from fedjax_dp.data import FederatedData, participation, poisson
from fedjax_dp.data.datasets import Dataset
from fedjax_dp.engine import simulation
from fedjax_dp.experiment import load_config
from fedjax_dp.experiment.assembly.assemble import assemble
from fedjax_dp.experiment.assembly.devices import more_than_cores
from fedjax_dp.experiment.assembly.population import _check_labels
from fedjax_dp.experiment.reading import config_files
from fedjax_dp.experiment.running.watcher import Health, never_reached, without_learning
from fedjax_dp.experiment.schema.config import TrainingSection
from fedjax_dp.models import Model
from fedjax_dp.server import gaussian_mean

pytestmark = [pytest.mark.xdist_group("health"), pytest.mark.usefixtures("no_pictures")]


@telling
def test_a_run_without_a_finite_update_ends_with_a_status_of_its_own(tmp_path):
    words = (*SMALL, *NOT_PRIVATE, "--training.learning_rate=1e38", "--training.num_steps=50")
    status, text = execute(tmp_path / "run", *words)
    assert status == 3
    said = " ".join(text.split())
    assert "warning: round 1: the updates of all 3 clients are not finite" in said
    assert "the run failed: no client's work entered the model in any round" in said
    warned = read_json(tmp_path / "run", "summary.json")["warnings"]
    assert len(warned) == 1 and "not finite" in warned[0]


@telling
def test_norms_that_overflow_leave_a_summary(tmp_path):
    """Updates may be finite though their norms are not."""
    words = (*SMALL, *NOT_PRIVATE, "--training.learning_rate=1e25")
    status, text = execute(tmp_path / "run", *words)
    assert status == 0 and "updates are so large that their norms exceed" in " ".join(text.split())
    summary = read_json(tmp_path / "run", "summary.json")
    assert len(summary["warnings"]) == 1 and "update_norm_median" not in summary


def test_more_devices_than_cores_are_reported():
    assert more_than_cores("auto") is None and more_than_cores(1) is None
    assert "execution.devices = 99999 is more than the " in more_than_cores(99999)


def row(number, drawn=3, lost=0, loss=1.0, read=10.0, norms=(0.0, 0.1, 0.5, 0.9, 1.0)):
    return {
        "update_norm_quantiles": norms,
        "round": number,
        "num_participants": drawn,
        "num_non_finite": lost,
        "train_loss": loss,
        "num_examples": read,
    }


@pytest.mark.parametrize(
    ("rows", "warned", "is_futile"),
    [
        ([row(1), row(2)], [], False),
        ([row(1), row(2, lost=3), row(3, lost=3)], ["round 2: the updates of all 3"], False),
        ([row(1, lost=3), row(2, lost=3)], ["round 1: the updates of all 3"], True),
        ([row(1, lost=2)], [], False),
        ([row(1, loss=np.nan)] * 2, ["round 1: the loss of at least one example is NaN"], False),
        ([row(1, loss=np.nan, lost=3)], ["round 1: the updates of all 3 clients"], True),
        ([row(1, loss=np.nan, read=0.0)], [], False),
        ([row(1, loss=0.0), row(2, loss=0.0)], ["round 1: the loss of all examples is exa"], True),
        ([row(1, loss=0.0, read=0.0)], [], False),
        ([row(1, drawn=0, loss=0.0, read=0.0)], [], False),
        ([row(1, loss=None)], [], False),
        ([row(1, norms=(0.5, None, None, None, None))], ["round 1: updates are so large"], False),
        ([row(1, norms=(0.5, 1.0, 1.0, 2.0, np.inf))], ["round 1: updates are so large"], False),
    ],
)
def test_each_kind_of_fault_is_reported_once(rows, warned, is_futile):
    reported = []
    health = Health(reported.append)
    for each in rows:
        health.note([each])
    assert reported == health.warnings and len(reported) == len(warned)
    assert all(found.startswith(text) for found, text in zip(reported, warned, strict=True))
    assert health.is_futile == is_futile


@telling
@pytest.mark.parametrize("unit", ["record", "client"])
def test_a_budget_without_room_for_a_round_is_refused_before_any_work(tmp_path, unit):
    words = [f"--privacy.{unit}.noise_multiplier=0.3", f"--privacy.{unit}.epsilon=0.5"]
    if unit == "client":
        words += ["--privacy.unit=client", "--algorithm.name=dp_fedavg"]
    with pytest.raises(
        ValueError, match=rf"privacy\.{unit}\.epsilon must allow at least one round"
    ):
        execute(tmp_path / "run", *SMALL, *words)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--privacy.client.epsilon=1",), r"privacy\.client\.epsilon must be left out"),
        (("--privacy.client.clip_norm=2",), r"privacy\.client\.clip_norm must be left out"),
        (
            ("--privacy.unit=client", "--algorithm.name=dp_fedavg", "--privacy.record.epsilon=1"),
            r"privacy\.record\.epsilon must be left out, since privacy\.unit = 'client'",
        ),
        (("--run.name=.hidden",), "run.name must be a plain name"),
    ],
)
def test_what_cannot_be_meant_is_refused_before_any_work(tmp_path, words, message):
    with pytest.raises(ValueError, match=message):
        execute(tmp_path / "run", *SMALL, *words)
    assert not (tmp_path / "run").exists()


def test_with_no_privacy_at_all_its_settings_may_stay():
    """A baseline is one override away."""
    words = ("--privacy.record.epsilon=2", *NOT_PRIVATE, *SMALL)
    config = load_config(None, words)
    assert assemble(config).budget == {}
    text = config_files.to_toml(config)
    assert "[privacy.record]" in text and "[privacy.client]" not in text


def test_the_other_unit_is_one_override_away_too(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text("[privacy.record]\nepsilon = 2\n")
    words = ("--privacy.unit=client", "--algorithm.name=dp_fedavg", *SMALL)
    with pytest.raises(ValueError, match=r"--privacy.record=none leaves .* out\), got 2"):
        assemble(load_config(file, words))
    config = load_config(file, [*words, "--privacy.record.epsilon=none"])
    assert set(assemble(config).budget) == {"client"}


def dataset(train, test=(0, 1), task="classification"):
    return Dataset(
        "mine",
        {"x": np.zeros((len(train), 2)), "y": np.asarray(train)},
        {"x": np.zeros((len(test), 2)), "y": np.asarray(test, int)},
        3,
        task,
    )


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (dataset([0, 1, 3]), "the labels of mine, train part, must be integers from 0 to 2.*"),
        (dataset([0, 1, -2]), "got '-2 in row 2, 1 in all'"),
        (dataset([0, 1], [7, 8]), "test part, .*got '7 in row 0, 2 in all'"),
        (dataset([-1, -1]), "include at least one class"),
        (dataset([0.0, 1.0]), "got dtype"),
        (dataset([[0, 1], [2, 9]], [[0, 1]], "next_token"), "got '9 in row 1, 1 in all'"),
    ],
)
def test_labels_that_no_class_has_are_named(data, message):
    with pytest.raises(ValueError, match=message):
        _check_labels(data)


def test_labels_that_are_classes_or_no_targets_pass():
    _check_labels(dataset([0, 2, -1]))
    _check_labels(dataset([0, 1], []))
    _check_labels(dataset([0.5, 9.0], [1, 2], "regression"))


@pytest.mark.parametrize(("divisor", "is_reported"), [(4.0, False), (1.0, True), (40.0, True)])
def test_a_public_divisor_far_from_the_cohort_is_pointed_out(divisor, is_reported):
    model = Model.from_functions(
        lambda key: {"w": jax.numpy.zeros((2, 2))},
        lambda p, x: x @ p["w"],
        loss="softmax_cross_entropy",
    )
    data = FederatedData.from_clients(
        [{"x": np.ones((2, 2), np.float32), "y": np.zeros(2, np.int32)} for _ in range(8)]
    )
    trainer = local_trainer(model, LocalConfig(learning_rate=0.1, batch_size=2))
    algorithm = dp_fedavg(model, trainer, aggregator=gaussian_mean(1.0, 1.0, divisor))
    with warnings.catch_warnings(record=True) as reported:
        warnings.simplefilter("always")
        simulation(algorithm, data, participation(poisson(), 8, 4))
    found = [str(w.message) for w in reported if "public divisor" in str(w.message)]
    assert bool(found) == is_reported
    assert (
        not is_reported
        or f"should be near 4, the clients that a round draws, and is {divisor:g}" in found[0]
    )


def test_a_run_that_ends_within_its_first_stage_is_reported():
    words = (
        *(*SMALL, *NOT_PRIVATE, "--algorithm.name=jump_start"),
        *("--algorithm.options.jump_rounds=5", "--data.client_validation_share=0.2"),
    )
    algorithm = assemble(load_config(None, words)).simulation.algorithm
    assert "run.rounds is 4, and the next stage of jump_start begins after round 5" in (
        never_reached(algorithm, 4)
    )
    assert never_reached(algorithm, 5) == ""


def test_a_large_epsilon_is_warned_of_once():
    reported = []
    health = Health(reported.append)
    for epsilon in (49.0, np.inf, 0.0):
        health.note_epsilon(epsilon)
    assert not reported
    health.note_epsilon([1.0, 1e9])
    health.note([row(1) | {"epsilon_record": 2e9, "epsilon_client": None}])
    assert len(reported) == 1 and reported[0].startswith("ε = 1e+09 protects almost nothing")


@pytest.mark.parametrize(
    ("chunk", "advice"),
    [(4, "execution.clients_per_chunk is 4"), (1, "a smaller training.micro_batch_size")],
)
def test_much_padding_names_the_option_to_change(chunk, advice):
    reported = []
    health = Health(reported.append, chunk)
    health.note([row(1) | {"padding_share": 0.7}])
    assert not reported
    health.note([row(2) | {"padding_share": 0.95}, row(3) | {"padding_share": 0.95}])
    assert (
        len(reported) == 1
        and "round 2: 95% of the computed examples" in reported[0]
        and advice in reported[0]
    )


@pytest.mark.parametrize(
    ("rate", "whose"), [(0.0, "all clients"), ([0.0, 1.0, 0.0], "2 clients"), ([1.0], None)]
)
def test_steps_of_length_zero_are_reported(rate, whose):
    found = without_learning(TrainingSection(learning_rate=rate))
    assert [whose in text for text in found] == ([] if whose is None else [True])
